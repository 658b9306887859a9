"""d_iso(f, F_TS) and d_haus(f, F_TS): the distance of a map from the nearest triplet-separated map (Xu et al. 2022).

Both are minima over a set that is not convex. `lower` and `upper` are certain bounds: the upper bound is the cost of a
separated map, the lower bound is that of a separated metric (H/2 or more; half of it for d_haus), or on a line that of
an exact search. Classes or a ladder define which maps are separated; distances are Euclidean, or angles of unit rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_positive, check_seed, check_whole
from nearfar.geometry import exact_line
from nearfar.geometry.constraints import Kind, Program, descend
from nearfar.geometry.ladder import nested_groups, order_rows
from nearfar.geometry.metric_bounds import isometric_bound
from nearfar.geometry.repair import class_means, groups_of, repair
from nearfar.geometry.rigid import isometric_error_between
from nearfar.geometry.separation import check_inputs, hardness
from nearfar.geometry.spaces import Flat, Metric, Space, distances, space_of

__all__ = ["Separation", "hausdorff_distance", "isometric_error"]

SOLVED = 30  # the program is solved by default for at most this many rows
SHRUNK = 5000  # s* is computed for at most this many rows; above, each class is sent to a point
SHARE = {"iso": 1.0, "haus": 0.5}  # the proved lower bound of each distance, as a share of that of d_iso


@dataclass(frozen=True, eq=False)
class Separation:
    """Bounds on the distance from f to the set of separated maps.

    Attributes:
        lower: a lower bound of the distance to every separated map.
        upper: the distance to `map`.
        map: [N, n], separated up to the rounding of adding the mean of f.
        hardness: H of f.
        exact: whether the two bounds agree up to the tolerance of the solver.
        starts: the number of starts; 0 for the cheap bounds.
        spread: (worst - best) / best over the starts; if it is large, more starts may find a nearer map.
    """

    lower: float
    upper: float
    map: Tensor
    hardness: float
    exact: bool = False
    starts: int = 0
    spread: float = 0.0

    def __repr__(self) -> str:
        if self.exact:
            return f"Separation({self.upper:.6g}, exact)"
        how = f"{self.starts} starts, spread {self.spread:.1%}" if self.starts else "cheap bounds"
        return f"Separation({self.lower:.6g} to {self.upper:.6g}, {how})"


def isometric_error(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.0,
    metric: Metric = "euclidean",
    starts: int = 16,
    seed: int = 0,
    solve: bool | None = None,
) -> Separation:
    """The isometric distance d_iso(f, F_TS) = min over separated g of max over pairs |d(f(x), f(z)) - d(g(x), g(z))|.

    Equation 14 of Xu et al. 2022. Proved: H/2 ≤ d_iso (because d_f(x,x⁺) ≤ d_g(x,x⁺) + e ≤ d_g(x,x⁻) + e ≤ d_f(x,x⁻) +
    2e) and d_iso ≤ 2 d_haus, both tight, for ladders and angles too; `isometric_bound` ≤ d_iso, and with N - 1
    dimensions the `lift` bounds d_iso from above. Not proved: d_iso ≤ 2H, theorem 3 of Xu et al. 2022; observed are
    ratios up to 1.5, so d_iso ≤ H is false. The errata are in docs/papers/xu-2022.md.

    Args:
        embeddings: [N, n].
        labels: [N] integers, or a relevance [N, N]; see `hardness`.
        margin: α, by which triplets must be separated.
        metric: "euclidean", or "angle": f and g are unit rows, distances the angles between them.
        starts: how many separated maps SLSQP starts from.
        seed: seed of the random starts.
        solve: whether to run the solver (seconds; N up to about 30) or return the cheap bounds (any N); None: by N.

    >>> isometric_error(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    Separation(1, exact)
    """
    return _distance("iso", embeddings, labels, margin, metric, starts, seed, solve)


def hausdorff_distance(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.0,
    metric: Metric = "euclidean",
    starts: int = 16,
    seed: int = 0,
    solve: bool | None = None,
) -> Separation:
    """The distance d_haus(f, F_TS) = min over separated g of max over rows d(f(x), g(x)).

    Equation 12 of Xu et al. 2022. The Hausdorff distance of class sets (eq. 11) has the same minimum, see
    `hausdorff_between`; with a ladder the distance of rows is meant.

    Proved: H/4 ≤ d_iso/2 ≤ d_haus ≤ the largest radius, over classes (or over groups of a nested ladder's coarsest
    rung), of the smallest ball around a class; so total collapse is never strictly the best answer. Observed:
    d_haus/d_iso up to 2.235.

    Args: as `isometric_error`.

    >>> hausdorff_distance(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    Separation(0.75, exact)
    """
    return _distance("haus", embeddings, labels, margin, metric, starts, seed, solve)


@dataclass(frozen=True, eq=False)
class _Task:
    """The problem: rows x, their classes or relevance y, and the space that defines distances."""

    kind: Kind
    x: Tensor
    y: Tensor
    margin: float
    metric: Metric
    space: Space

    def cost(self, g: Tensor) -> float:
        """The distance of the rows g from x, or for many rows an upper bound of it."""
        moved = self.space.displacement(g, self.x)
        if self.kind == "haus":
            return float(moved.max())
        if len(g) > SHRUNK:  # a distance changes by at most the displacements of its two ends
            return float(torch.topk(moved, min(2, len(moved))).values.sum())
        return isometric_error_between(self.x, g, metric=self.metric)

    def repair(self, g: Tensor) -> Tensor:
        """A separated map near the rows g."""
        return repair(g, self.y, margin=self.margin, metric=self.metric).map


@torch.no_grad()
def _distance(
    kind: Kind,
    embeddings: Tensor,
    labels: Tensor,
    margin: float,
    metric: Metric,
    starts: int,
    seed: int,
    solve: bool | None,
) -> Separation:
    owner = "isometric_error" if kind == "iso" else "hausdorff_distance"
    check_positive(owner, "margin", margin, zero=True)
    check_whole(owner, "starts", starts)
    check_seed(owner, seed)
    space = space_of(owner, metric)
    # before x is allocated, because it allocates a copy of the rows
    hard = hardness(embeddings, labels, margin=margin, metric=metric)
    x, y = check_inputs(owner, embeddings, labels, space)
    flat = isinstance(space, Flat)
    if hard == 0:
        return Separation(0.0, 0.0, embeddings.detach().double() if flat else x, 0.0, exact=True)
    task = _Task(kind, x, y, margin, metric, space)
    cheap = _cheap_bounds(task, hard)
    if solve is None:
        solve = len(x) <= SOLVED
    found = _solve(task, starts, seed, cheap) if solve else cheap
    moved_back = found.map + embeddings.detach().double().mean(dim=0) if flat else found.map
    return Separation(found.lower, found.upper, moved_back, hard, found.exact, found.starts, found.spread)


def _cheap_bounds(task: _Task, hard: float) -> Separation:
    """Bounds for any N: from classes shrunk by s*, and from each class sent to the center of a small ball."""
    x, y = task.x, task.y
    best: tuple[float, Tensor] | None = None
    if len(x) <= SHRUNK or task.margin:
        g = task.repair(x)
        best = task.cost(g), g
    if not task.margin:
        coarse = groups_of(y)[-1]
        g = _ball_centers(x, coarse, task.space)[coarse]
        cost = task.cost(g)
        best = (cost, g) if best is None or cost < best[0] else best
    assert best is not None  # noqa: S101 - one of the two branches ran
    bound = hard / 2
    if len(x) <= (SHRUNK if y.ndim == 1 else SOLVED):
        bound = max(bound, isometric_bound(x, y, margin=task.margin, metric=task.metric))
    return Separation(min(SHARE[task.kind] * bound, best[0]), best[0], best[1], hard)


def _ball_centers(x: Tensor, y: Tensor, space: Space, rounds: int = 200) -> Tensor:
    """Centers [c, d] of nearly the smallest ball of each class, by steps toward its farthest row (Bădoiu, Clarkson)."""
    centers = space.place(class_means(x, y))
    best = torch.full((len(centers),), torch.inf, dtype=x.dtype, device=x.device)
    found = centers.clone()
    for k in range(rounds if len(x) <= SHRUNK else 20):
        apart = _distances_to(x, centers, y)
        radius = torch.zeros_like(best).scatter_reduce_(0, y, apart, "amax")
        better = radius < best
        best, found = torch.where(better, radius, best), torch.where(better[:, None], centers, found)
        farthest = torch.zeros_like(y[: len(best)])
        at_rim = apart >= radius[y]
        farthest[y[at_rim]] = at_rim.nonzero().flatten()
        centers = space.place(centers + (x[farthest] - centers) / (k + 2))
    return found


def _distances_to(x: Tensor, centers: Tensor, y: Tensor) -> Tensor:
    """Distances [n] of rows from the center of their class, in parts to save memory."""
    parts = (slice(first, first + 8192) for first in range(0, len(x), 8192))
    return torch.cat([(x[part] - centers[y[part]]).norm(dim=1) for part in parts])


def _solve(task: _Task, starts: int, seed: int, cheap: Separation) -> Separation:
    """Run SLSQP from separated starts and repair each result; on a line, search exactly as well."""
    flat = isinstance(task.space, Flat)
    rows, basis = _reduce_dimensions(task)
    scale = float(distances(task.x, task.x).max()) if flat else 1.0
    scale = scale if scale > 0 else task.margin
    small = _Task(task.kind, rows / scale, task.y.cpu(), task.margin / scale, task.metric, task.space)
    f, y = small.x.numpy(), small.y.numpy()
    loose = y.ndim == 2 and nested_groups(small.y) is None
    # a relevance that is not nested cannot be repaired afterwards: separate with some slack
    program = Program(task.kind, f, y, small.margin + (1e-7 if loose else 0.0), task.space)
    ends: list[tuple[float, Tensor]] = []

    def offer(g: Any) -> None:
        rows = torch.from_numpy(np.ascontiguousarray(g))
        if loose and hardness(rows, small.y, margin=small.margin, metric=task.metric) > 0:
            return
        separated = small.repair(rows)
        ends.append((small.cost(separated), separated))

    for start in _starts(small, loose, starts, seed):
        offer(descend(program, start, iterations=100 if loose else 300))
    lower, spread = cheap.lower, _spread(ends)
    if flat and f.shape[1] == 1 and len(f) <= exact_line.ROWS:
        g, bound = exact_line.solve(
            task.kind, f, y, small.margin, min([cheap.upper / scale, *(cost for cost, _ in ends)])
        )
        if g is not None:
            offer(g)
        lower = max(lower, bound * scale)
    upper, found = cheap.upper, cheap.map
    cost, best = min(ends, key=lambda end: end[0], default=(np.inf, found))
    if cost * scale <= upper:
        upper, found = cost * scale, (best.to(basis.device) * scale) @ basis
    exact = upper - lower <= 1e-5 * scale
    return Separation(min(lower, upper), upper, found, cheap.hardness, exact, starts, spread)


def _spread(ends: list[tuple[float, Tensor]]) -> float:
    """The spread of the results over the starts, (worst - best) / best."""
    costs = [cost for cost, _ in ends]
    return (max(costs) - min(costs)) / min(costs) if costs else 0.0


def _reduce_dimensions(task: _Task) -> tuple[Tensor, Tensor]:
    """Project to as few dimensions as the minimum needs, N - 1 for iso and 2N - 1 for haus; also return the basis.

    Around its mean f spans N - 1 dimensions (N on the sphere, where rows are not centered), which suffice for g in iso;
    in haus g may leave the span of f, but f and g together span 2N - 1 dimensions (2N).
    """
    x, less = task.x, 1 if isinstance(task.space, Flat) else 0
    most = (len(x) if task.kind == "iso" else 2 * len(x)) - less
    basis = torch.linalg.svd(x, full_matrices=True).Vh[: max(1, most)]
    return (x @ basis.T).cpu(), basis


def _starts(task: _Task, loose: bool, count: int, seed: int) -> Iterator[Any]:
    """Separated starts: f repaired, shrunk further by .3, .6, .9, and f with noise of .2 and .4 diameters, repaired.

    A relevance that is not nested cannot be repaired; its starts come from `order_rows`.
    """
    f, noise = task.x, torch.Generator().manual_seed(seed)
    separate = (lambda g: order_rows(g, task.y, task.space, task.margin)) if loose else task.repair
    base = separate(f)
    coarse = groups_of(task.y)[-1]
    means = class_means(base, coarse)[coarse]
    shrunk = [task.space.place(base + s * (means - base)) for s in (0.0, 0.3, 0.6, 0.9)]
    for k in range(count):
        if k < len(shrunk):
            yield shrunk[k].numpy()
        else:
            size = (0.2, 0.4)[k % 2]  # with less noise the run ends where that of f does
            drawn = f + size * torch.randn(f.shape, generator=noise, dtype=f.dtype)
            yield separate(task.space.place(drawn)).numpy()

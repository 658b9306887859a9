"""d_iso(f, F_TS) and d_haus(f, F_TS): how far a map is from the nearest triplet-separated one (Xu et al. 2022).

Both are minima over a set that is not convex. `lower` and `upper` are certain bounds: the upper bound is the cost of a
map that was repaired to be separated, the lower one is H/2 or H/4 (proved), or on a line the bound of an exact search.
Classes or a ladder define what is separated; distances are Euclidean, or angles of unit rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_positive, check_seed, check_whole
from nearfar.geometry import line
from nearfar.geometry.constraints import Kind, Program, descend
from nearfar.geometry.ladder import nests, ordered
from nearfar.geometry.repair import class_means, groups_of, repair
from nearfar.geometry.rigid import isometric_error_between
from nearfar.geometry.separation import checked, hardness
from nearfar.geometry.spaces import Flat, Metric, Space, distances, space_of

__all__ = ["Separation", "hausdorff_distance", "isometric_error"]

SOLVED = 30
"""The largest number of rows for which the program is solved by default."""
SHRUNK = 5000
"""Rows up to which the shrink s* is sought; above, each class is sent to a point."""
SHARE = {"iso": 0.5, "haus": 0.25}
"""d ≥ this share of H."""


@dataclass(frozen=True, eq=False)
class Separation:
    """Bounds on the distance from f to the set of separated maps.

    Attributes:
        lower: no separated map is nearer.
        upper: the distance of `map`.
        map: [N, n], separated (up to rounding: it was moved back to the position of f).
        hardness: H of f.
        exact: whether the two bounds agree, up to the tolerance of the solver.
        starts: how many starts were tried; 0 for the cheap bounds.
        spread: (worst - best) / best over the starts; a large one suggests that more starts may find a nearer map.
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

    Equation 14 of Xu et al. 2022. Proved: H/2 ≤ d_iso (three lines: d_f(x,x⁺) ≤ d_g(x,x⁺) + e ≤ d_g(x,x⁻) + e ≤
    d_f(x,x⁻) + 2e; tight), and d_iso ≤ 2 d_haus (tight). Both need the triangle inequality alone, so that they hold for
    ladders and for angles too. **Not proved:** d_iso ≤ 2H, theorem 3 of Xu et al. 2022. The proof's case 1 is possible
    (A = {-1, 1}, B = {0}), its f* minimizes another objective, and d_iso ≤ H is false (1.5 H for A = {0, 2}, B = {1}, C
    = {3, 5}, D = {4} on a line, certified). Observed: no ratio above 1.5.

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
    """The Hausdorff distance d_haus(f, F_TS) = min over separated g of max over rows d(f(x), g(x)).

    Equation 12 of Xu et al. 2022. The minimum for the Hausdorff distance of class sets equals this pointwise one (see
    `hausdorff_between`); with a ladder the pointwise one is meant.

    Proved: H/4 ≤ d_iso/2 ≤ d_haus ≤ max over classes (over groups of a nested ladder's coarsest rung) of the radius of
    the smallest ball around the class; so total collapse is never strictly the best answer. **The paper's print:**
    d_haus ≤ c d_iso with c = c_n/θ* is wrong in its dimension, and empty where N ≤ n (θ = 0). Observed: d_haus/d_iso up
    to 2.235; the paper's .53 is of its own five points.

    Args: as `isometric_error`.

    >>> hausdorff_distance(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    Separation(0.75, exact)
    """
    return _distance("haus", embeddings, labels, margin, metric, starts, seed, solve)


@dataclass(frozen=True, eq=False)
class _Task:
    """The problem: rows x, classes or relevance y, and the space that defines distances."""

    kind: Kind
    x: Tensor
    y: Tensor
    margin: float
    metric: Metric
    space: Space

    def cost(self, g: Tensor) -> float:
        """The distance of the rows g from x; an upper bound of it for very many rows."""
        moved = self.space.moved(g, self.x)
        if self.kind == "haus":
            return float(moved.max())
        if len(g) > SHRUNK:  # no distance changes by more than its two ends move
            return float(torch.topk(moved, min(2, len(moved))).values.sum())
        return isometric_error_between(self.x, g, metric=self.metric)

    def repaired(self, g: Tensor) -> Tensor:
        """A separated map near any rows g."""
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
    hard = hardness(embeddings, labels, margin=margin, metric=metric)  # before x is made: it needs a copy of its own
    x, y = checked(owner, embeddings, labels, space)
    flat = isinstance(space, Flat)
    if hard == 0:
        return Separation(0.0, 0.0, embeddings.detach().double() if flat else x, 0.0, exact=True)
    task = _Task(kind, x, y, margin, metric, space)
    cheap = _cheap(task, hard)
    if solve is None:
        solve = len(x) <= SOLVED
    found = _solved(task, starts, seed, cheap) if solve else cheap
    placed = found.map + embeddings.detach().double().mean(dim=0) if flat else found.map
    return Separation(found.lower, found.upper, placed, hard, found.exact, found.starts, found.spread)


def _cheap(task: _Task, hard: float) -> Separation:
    """Cheap bounds for any N: from classes shrunk by s*, and from each class sent to the center of a small ball."""
    x, y = task.x, task.y
    best: tuple[float, Tensor] | None = None
    if len(x) <= SHRUNK or task.margin:
        g = task.repaired(x)
        best = task.cost(g), g
    if not task.margin:
        coarse = groups_of(y)[-1]
        g = _middles(x, coarse, task.space)[coarse]
        cost = task.cost(g)
        best = (cost, g) if best is None or cost < best[0] else best
    assert best is not None  # noqa: S101 - one of the two was done
    return Separation(SHARE[task.kind] * hard, best[0], best[1], hard)


def _middles(x: Tensor, y: Tensor, space: Space, rounds: int = 200) -> Tensor:
    """Centers [c, d] of about the smallest ball of each class: steps toward its farthest row (Bădoiu, Clarkson)."""
    middles = space.placed(class_means(x, y))
    best = torch.full((len(middles),), torch.inf, dtype=x.dtype, device=x.device)
    kept = middles.clone()
    for k in range(rounds if len(x) <= SHRUNK else 20):
        apart = _apart(x, middles, y)
        radius = torch.zeros_like(best).scatter_reduce_(0, y, apart, "amax")
        better = radius < best
        best, kept = torch.where(better, radius, best), torch.where(better[:, None], middles, kept)
        farthest = torch.zeros_like(y[: len(best)])
        at_rim = apart >= radius[y]
        farthest[y[at_rim]] = at_rim.nonzero().flatten()
        middles = space.placed(middles + (x[farthest] - middles) / (k + 2))
    return kept


def _apart(x: Tensor, middles: Tensor, y: Tensor) -> Tensor:
    """Distances [n] of rows from the center of their class, in parts to save memory."""
    parts = (slice(first, first + 8192) for first in range(0, len(x), 8192))
    return torch.cat([(x[part] - middles[y[part]]).norm(dim=1) for part in parts])


def _solved(task: _Task, starts: int, seed: int, cheap: Separation) -> Separation:
    """Run SLSQP from separated starts and repair each result; on a line an exact search follows."""
    flat = isinstance(task.space, Flat)
    rows, basis = _narrow(task)
    scale = float(distances(task.x, task.x).max()) if flat else 1.0
    scale = scale if scale > 0 else task.margin
    small = _Task(task.kind, rows / scale, task.y.cpu(), task.margin / scale, task.metric, task.space)
    f, y = small.x.numpy(), small.y.numpy()
    loose = y.ndim == 2 and nests(small.y) is None
    # what cannot be repaired without losing all must be separated with something to spare
    program = Program(task.kind, f, y, small.margin + (1e-7 if loose else 0.0), task.space)
    ends: list[tuple[float, Tensor]] = []

    def offer(g: Any) -> None:
        rows = torch.from_numpy(np.ascontiguousarray(g))
        if loose and hardness(rows, small.y, margin=small.margin, metric=task.metric) > 0:
            return
        separated = small.repaired(rows)
        ends.append((small.cost(separated), separated))

    for start in _starts(small, loose, starts, seed):
        offer(descend(program, start, iterations=100 if loose else 300))
    lower, spread = cheap.lower, _spread(ends)
    if flat and f.shape[1] == 1 and len(f) <= line.ROWS:
        g, bound = line.solve(task.kind, f, y, small.margin, min([cheap.upper / scale, *(cost for cost, _ in ends)]))
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


def _narrow(task: _Task) -> tuple[Tensor, Tensor]:
    """Project to as few dimensions as the minimum needs, N - 1 for iso and 2N - 1 for haus; also return the basis.

    f spans N - 1 dimensions around its mean (N on the sphere, which has no mean to take off) and so can g for iso; for
    haus g may leave f's span, but f and g together span 2N - 1 (2N).
    """
    x, less = task.x, 1 if isinstance(task.space, Flat) else 0
    most = (len(x) if task.kind == "iso" else 2 * len(x)) - less
    basis = torch.linalg.svd(x, full_matrices=True).Vh[: max(1, most)]
    return (x @ basis.T).cpu(), basis


def _starts(task: _Task, loose: bool, count: int, seed: int) -> Iterator[Any]:
    """Separated starts: f repaired, shrunk further by .3, .6, .9, and f with noise of .2 and .4 diameters, repaired.

    A relevance that is not nested cannot be repaired: rows are then moved until they are in order (`ordered`).
    """
    f, noise = task.x, torch.Generator().manual_seed(seed)
    mend = (lambda g: ordered(g, task.y, task.space, task.margin)) if loose else task.repaired
    base = mend(f)
    coarse = groups_of(task.y)[-1]
    means = class_means(base, coarse)[coarse]
    shrunk = [task.space.placed(base + s * (means - base)) for s in (0.0, 0.3, 0.6, 0.9)]
    for k in range(count):
        if k < len(shrunk):
            yield shrunk[k].numpy()
        else:
            size = (0.2, 0.4)[k % 2]  # less noise ends where f itself does
            drawn = f + size * torch.randn(f.shape, generator=noise, dtype=f.dtype)
            yield mend(task.space.placed(drawn)).numpy()

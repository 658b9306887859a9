"""d_iso(f, F_TS) and d_haus(f, F_TS): how far a map is from the nearest triplet-separated one (000).

Both are minima over a set that is not convex. What is certain stands in `lower` and `upper`: the upper bound is the
cost of a map that was repaired to be separated, the lower one is H/2 or H/4 (proved), or on a line the bound of an
exact search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._checks import check_positive, check_whole
from nearfar.geometry import line
from nearfar.geometry.constraints import Kind, Programme, descend
from nearfar.geometry.repair import class_means, repair
from nearfar.geometry.rigid import isometric_error_between
from nearfar.geometry.separation import checked, distances, hardness

SOLVED = 30
"""Rows up to which the programme is solved where nothing else is asked for."""
SHRUNK = 5000
"""Rows up to which the shrink s* is sought; above, each class is sent to a point."""
SHARE = {"iso": 0.5, "haus": 0.25}
"""d ≥ this share of H."""


@dataclass(frozen=True, eq=False)
class Separation:
    """The distance from f to the separated maps.

    Attributes:
        lower: no separated map is nearer.
        upper: `map` is this near.
        map: [N, n], separated (to rounding: it was moved back to where f lies).
        hardness: H of f.
        exact: the two bounds meet, but for the tolerance of the solver.
        starts: how many starts were tried; 0 where the bounds are the cheap ones.
        spread: (worst - best) / best over the starts; a wide one says that more starts may find a nearer map.
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
    starts: int = 16,
    seed: int = 0,
    solve: bool | None = None,
) -> Separation:
    """d_iso(f, F_TS) = min over separated g of  max over pairs | |f(x)-f(z)| - |g(x)-g(z)| |    (000, eq. 14).

    Proved: H/2 ≤ d_iso (three lines: d_f(x,x⁺) ≤ d_g(x,x⁺) + e ≤ d_g(x,x⁻) + e ≤ d_f(x,x⁻) + 2e; tight), and
    d_iso ≤ 2 d_haus (tight). **Not proved:** d_iso ≤ 2H, theorem 3 of 000. The proof's case 1 is possible (A = {-1, 1},
    B = {0}), its f* minimises another objective, and d_iso ≤ H is false (1.5 H for A = {0, 2}, B = {1}, C = {3, 5},
    D = {4} on a line, certified). Observed: no ratio above 1.5.

    Args:
        embeddings: [N, n].
        labels: [N] integers.
        margin: α; a triplet must be separated by it.
        starts: how many separated maps SLSQP starts from.
        seed: of the starts that are drawn.
        solve: whether to run the solver (seconds; N up to about 30) or to give the cheap bounds (any N); None: by N.

    >>> isometric_error(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    Separation(1, exact)
    """
    return _distance("iso", embeddings, labels, margin, starts, seed, solve)


def hausdorff_distance(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.0,
    starts: int = 16,
    seed: int = 0,
    solve: bool | None = None,
) -> Separation:
    """d_haus(f, F_TS) = min over separated g of  max over rows |f(x) - g(x)|    (000, eq. 12).

    The Hausdorff distance of class sets needs no other minimum than this pointwise one (see `hausdorff_between`).
    Proved: H/4 ≤ d_iso/2 ≤ d_haus ≤ max over classes of the radius of the smallest ball around the class; so that
    total collapse is never strictly the best answer. **The paper's print:** d_haus ≤ c d_iso with c = c_n/θ* is wrong
    in its dimension, and empty where N ≤ n (θ = 0). Observed: d_haus/d_iso up to 2.235; the paper's .53 is of its own
    five points.

    Args: as `isometric_error`.

    >>> hausdorff_distance(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    Separation(0.75, exact)
    """
    return _distance("haus", embeddings, labels, margin, starts, seed, solve)


@torch.no_grad()
def _distance(
    kind: Kind, embeddings: Tensor, labels: Tensor, margin: float, starts: int, seed: int, solve: bool | None
) -> Separation:
    owner = "isometric_error" if kind == "iso" else "hausdorff_distance"
    check_positive(owner, "margin", margin, zero=True)
    check_whole(owner, "starts", starts)
    hard = hardness(embeddings, labels, margin=margin)  # before x is made: it needs a copy of its own
    x, y = checked(owner, embeddings, labels)
    if hard == 0:
        return Separation(0.0, 0.0, embeddings.detach().double(), 0.0, exact=True)
    cheap = _cheap(kind, x, y, margin, hard)
    if solve is None:
        solve = len(x) <= SOLVED
    found = _solved(kind, x, y, margin, starts, seed, cheap) if solve else cheap
    middle = embeddings.detach().double().mean(dim=0)
    return Separation(found.lower, found.upper, found.map + middle, hard, found.exact, found.starts, found.spread)


def _cheap(kind: Kind, x: Tensor, y: Tensor, margin: float, hard: float) -> Separation:
    """Bounds at any N: classes shrunk by s*, and each class sent to the middle of a small ball around it."""
    maps = [repair(x, y, margin=margin).map] if len(x) <= SHRUNK or margin else []
    if not margin:
        maps.append(_middles(x, y)[y])
    costs = [_cost(kind, x, g) for g in maps]
    best = int(np.argmin(costs))
    return Separation(SHARE[kind] * hard, costs[best], maps[best], hard)


def _cost(kind: Kind, x: Tensor, g: Tensor) -> float:
    moved = (g - x).norm(dim=1)
    if kind == "haus":
        return float(moved.max())
    if len(x) > SHRUNK:  # no distance changes by more than its two ends move
        return float(torch.topk(moved, min(2, len(moved))).values.sum())
    return isometric_error_between(x, g)


def _middles(x: Tensor, y: Tensor, rounds: int = 200) -> Tensor:
    """[c, d] near the centre of each class's smallest ball: steps towards its farthest row (Bădoiu, Clarkson)."""
    middles, best = class_means(x, y), torch.full((int(y.max()) + 1,), torch.inf, dtype=x.dtype, device=x.device)
    kept = middles.clone()
    for k in range(rounds if len(x) <= SHRUNK else 20):
        apart = (x - middles[y]).norm(dim=1)
        radius = torch.zeros_like(best).scatter_reduce_(0, y, apart, "amax")
        better = radius < best
        best, kept = torch.where(better, radius, best), torch.where(better[:, None], middles, kept)
        farthest = torch.zeros_like(y[: len(best)])
        at_rim = apart >= radius[y]
        farthest[y[at_rim]] = at_rim.nonzero().flatten()
        middles = middles + (x[farthest] - middles) / (k + 2)
    return kept


def _solved(kind: Kind, x: Tensor, y: Tensor, margin: float, starts: int, seed: int, cheap: Separation) -> Separation:
    """SLSQP from separated starts, each end repaired; on a line an exact search after it."""
    rows, basis = _narrow(kind, x)
    scale = float(distances(x, x).max())
    scale = scale if scale > 0 else margin
    f, labels = rows / scale, y.cpu().numpy()
    programme = Programme(kind, f.numpy(), labels, margin / scale)
    ends: list[tuple[float, Any]] = []

    def offer(g: Any) -> None:
        separated = repair(torch.from_numpy(np.ascontiguousarray(g)), y.cpu(), margin=margin / scale).map.numpy()
        ends.append((programme.value(separated), separated))

    for start in _starts(f, y.cpu(), margin / scale, starts, seed):
        offer(descend(programme, start))
    costs = [cost for cost, _ in ends]
    spread = (max(costs) - min(costs)) / min(costs)
    lower, exact = cheap.lower, False
    if f.shape[1] == 1 and len(f) <= line.ROWS:
        g, bound = line.solve(kind, f.numpy(), labels, margin / scale, min(costs))
        if g is not None:
            offer(g)
        lower = max(lower, bound * scale)
    cost, g = min(ends, key=lambda end: end[0])
    upper, found = cost * scale, torch.from_numpy(g).to(x.device) * scale @ basis
    if cheap.upper < upper:
        upper, found = cheap.upper, cheap.map
    exact = upper - lower <= 1e-5 * scale
    return Separation(min(lower, upper), upper, found, cheap.hardness, exact, starts, spread)


def _narrow(kind: Kind, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in as few dimensions as the minimum needs, and the basis that leads back: N - 1 for iso, 2N - 1 for haus.

    f spans N - 1 dimensions and so can g for iso; for haus g may leave f's span, but f and g together span 2N - 1.
    """
    most = len(x) - 1 if kind == "iso" else 2 * len(x) - 1
    basis = torch.linalg.svd(x, full_matrices=True).Vh[: max(1, most)]
    return (x @ basis.T).cpu(), basis


def _starts(f: Tensor, y: Tensor, margin: float, count: int, seed: int) -> Iterator[Any]:
    """Separated maps: f repaired, shrunk further by .3, .6, .9, and f with noise of .2 and .4 diameters, repaired."""
    base = repair(f, y, margin=margin).map
    means = class_means(base, y)[y]
    shrunk = [base + s * (means - base) for s in (0.0, 0.3, 0.6, 0.9)]
    noise = torch.Generator().manual_seed(seed)
    for k in range(count):
        if k < len(shrunk):
            yield shrunk[k].numpy()
        else:
            size = (0.2, 0.4)[k % 2]  # less noise ends where f itself does
            drawn = f + size * torch.randn(f.shape, generator=noise, dtype=f.dtype)
            yield repair(drawn, y, margin=margin).map.numpy()

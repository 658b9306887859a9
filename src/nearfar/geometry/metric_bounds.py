"""The isometric error of a separated *metric*: theorem 3 of Xu et al. 2022 with constants that can be proved.

The nearest separated map need not lie in a Euclidean space here: any metric d' on the N samples may take its place.

    d_iso(f, metrics) = min over separated d' of max over pairs |d(x, z) - d'(x, z)|

is a linear program, at most the isometric error of every separated map, and for classes a formula. `lift` comes back to
Euclidean space, with more dimensions. Statements and proofs: docs/papers/beyond/theorem.md.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import check_labels
from nearfar.geometry.constraints import splits
from nearfar.geometry.separation import check_inputs, strips
from nearfar.geometry.spaces import Metric, Space, center, space_of
from nearfar.losses.spread import spread, spread_bound

__all__ = ["isometric_bound", "least_spread", "lift", "separated_metric"]

ROWS = 60  # the linear program is solved for at most this many rows
TOLERANCE = 1e-9  # by how much the solution may violate a triangle inequality, as a share of the largest distance


@torch.no_grad()
def isometric_bound(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean", floor: float = 0.0
) -> float:
    """The smallest isometric error of a separated metric, a lower bound of d_iso to all separated maps.

        d_iso(f, metrics) = max( H/2,  max over classes (D - 2μ + 2α)/3,  max over classes (α - μ),  0 )

    with D the diameter of a class, and μ its distance to the nearest row of another class; only classes of two rows or
    more count. Proved, with H/2 ≤ d_iso ≤ 2H/3 for α = 0, both tight. For a ladder the value is that of a linear
    program (up to 60 rows), at most H if labels are nested.

    Args:
        embeddings: [N, n].
        labels: [N] integers, or a relevance [N, N]; see `hardness`.
        margin: α, by which triplets must be separated.
        metric: "euclidean", or "angle": radians between unit rows.
        floor: κ, with metric="angle": only maps whose spread V (`SpreadFloor`) is at least κ count. Proved: their d_iso
            is at least arcsin(κ - V) too, because V, the mean of sin² of the angles, moves by at most sin t.

    >>> round(isometric_bound(torch.tensor([[-1.0], [0.0], [1.0], [0.0]]), torch.tensor([0, 0, 0, 1])), 6)
    0.666667
    """
    if floor and (metric != "angle" or not 0 < floor <= 1):
        raise ValueError(
            f'isometric_bound: floor must be a spread from 0 to 1 of unit rows, with metric="angle", but came as '
            f"{floor!r} with metric={metric!r}."
        )
    space, x, y = _prepare("isometric_bound", embeddings, labels, margin, metric)
    least = math.asin(max(0.0, floor - float(spread(x)))) if floor else 0.0
    if y.ndim == 2:
        return max(least, _program(space.distances(x, x), y, margin)[0])
    return max(least, _formula(*_reaches(x, y, space), y, margin))


@torch.no_grad()
def separated_metric(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean"
) -> Tensor:
    """The distances [N, N] of a separated metric that attains `isometric_bound`; O(N³).

    For classes it is the greatest one: distances to other classes grow by t = `isometric_bound`, those within a class
    too, but only up to the nearest row of another class; then every distance becomes that of the shortest path.

    Args: as `isometric_bound`.

    >>> f, y = torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1])
    >>> separated_metric(f, y)
    tensor([[0.0000, 1.5000, 1.5000],
            [1.5000, 0.0000, 1.5000],
            [1.5000, 1.5000, 0.0000]], dtype=torch.float64)
    """
    space, x, y = _prepare("separated_metric", embeddings, labels, margin, metric)
    apart = space.distances(x, x)
    if y.ndim == 2:
        return _program(apart, y, margin)[1]
    far, near = _reaches(x, y, space)
    t = _formula(far, near, y, margin)
    cap = torch.minimum(near[:, None], near[None, :]) - margin
    found = torch.where(y[:, None] == y[None, :], torch.minimum(apart, cap), apart) + t
    found.fill_diagonal_(0)
    for k in range(len(found)):  # shortest paths (Floyd, Warshall)
        found = torch.minimum(found, found[:, k, None] + found[None, k])
    return found


@torch.no_grad()
def lift(embeddings: Tensor, labels: Tensor) -> Tensor:
    """A separated Euclidean map [N, n + C]: f with (δ/√2)·e appended, e the unit vector of the row's class, of C.

    δ² = max over triplets [d(x,x⁺)² - d(x,x⁻)²]₊ is the least that separates. Distances within a class stay, and those
    between classes grow to √(d² + δ²). Proved: the isometric error √(μ² + δ²) - μ (μ the least distance between
    classes) is at most δ ≤ √(H·(2D - H)), D the largest diameter of a class. As N rows span N - 1 dimensions, this
    bounds d_iso into any n ≥ N - 1.

    Args:
        embeddings: [N, n].
        labels: [N] integers.

    >>> lift(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))[:, 1:]
    tensor([[1.2247, 0.0000],
            [1.2247, 0.0000],
            [0.0000, 1.2247]], dtype=torch.float64)
    """
    x = center("lift", "embeddings", embeddings)
    check_labels("lift", "labels", labels, len(x), x.device)
    known, y = torch.unique(labels, return_inverse=True)
    far, near = _reaches(x, y, space_of("lift", "euclidean"))
    excess = (far.square() - near.square()).masked_fill(far == -math.inf, 0.0)
    delta = math.sqrt(max(0.0, float(excess.max()))) if len(x) else 0.0
    marks = (labels[:, None] == known).to(x) * (delta / math.sqrt(2))
    return torch.cat([embeddings.detach().double(), marks], dim=1)


def least_spread(value: float, *, floor: float = 0.5, weight: float = 1.0) -> float:
    """The least spread V of a run of `SpreadFloor` that never raises its value F: V ≥ κ·exp(-F/w) - 10⁻⁶.

    Proved for any loss L ≥ 0: w·log(κ/(V + 10⁻⁶)) ≤ F, which is at most its first value. It holds for the F that
    descends: that of all rows if they are one batch; for batches see docs/papers/beyond/floor.md.

    Args:
        value: F at the start.
        floor: κ.
        weight: w.

    >>> round(least_spread(0.7), 3)
    0.248
    """
    check_positive("least_spread", "value", value, zero=True)
    check_positive("least_spread", "floor", floor)
    check_positive("least_spread", "weight", weight)
    return float(spread_bound(torch.tensor(value, dtype=torch.float64), floor, weight))


def _prepare(
    owner: str, embeddings: Tensor, labels: Tensor, margin: float, metric: Metric
) -> tuple[Space, Tensor, Tensor]:
    """Check the arguments; return the space, the rows and the classes or the relevance."""
    check_positive(owner, "margin", margin, zero=True)
    space = space_of(owner, metric)
    x, y = check_inputs(owner, embeddings, labels, space)
    if y.ndim == 2 and len(x) > ROWS:
        raise ValueError(
            f"{owner}: with a relevance the linear program takes at most {ROWS} rows, but {len(x)} came; "
            "draw fewer rows, or pass one label a row."
        )
    return space, x, y


def _reaches(x: Tensor, y: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """The farthest positive [N] and the nearest negative [N] of each row; -inf and inf where there is none."""
    found = [(x.new_empty(0), x.new_empty(0))]
    for part in strips(len(x), len(x)):
        apart, same = space.distances(x[part], x), y[part, None] == y[None, :]
        near = apart.masked_fill(same, math.inf).amin(dim=1)
        far = apart.masked_fill(~same, -math.inf).amax(dim=1)  # 0 for the row itself
        found.append((far.masked_fill(same.sum(dim=1) == 1, -math.inf), near))
    far, near = (torch.cat(column) for column in zip(*found, strict=True))
    return far, near


def _formula(far: Tensor, near: Tensor, y: Tensor, margin: float) -> float:
    """`isometric_bound` of classes, from the farthest positives and the nearest negatives."""
    if not len(y):
        return 0.0
    near = near.masked_fill(far == -math.inf, math.inf) - margin  # rows without a positive have no triplet
    ends = torch.full((int(y.max()) + 1,), math.inf, dtype=near.dtype, device=near.device)
    diameter = (-ends).scatter_reduce(0, y, far, "amax")
    gap = ends.scatter_reduce(0, y, near, "amin")
    bounds = [(far - near).max() / 2, ((diameter - 2 * gap) / 3).max(), (-gap).max()]
    return max(0.0, *(float(bound) for bound in bounds))


def _program(apart: Tensor, y: Tensor, margin: float) -> tuple[float, Tensor]:
    """Solve the linear program; return its value and distances [N, N].

    The variables are d' of each pair, a radius for each anchor and two neighboring steps of its ladder, and t. Triangle
    inequalities are added where the solution violates them, at most one for each pair at a time.
    """
    d, rungs = apart.cpu().numpy(), y.cpu().numpy()
    scale = max(float(d.max(initial=0.0)), margin) or 1.0
    parts = splits(rungs)
    i, j, count = parts["i"], parts["j"], len(parts["i"])
    number = np.zeros(d.shape, dtype=int)
    number[i, j] = number[j, i] = each = np.arange(count)
    t, minus = count + parts["radii"], -np.ones(count)
    sign, goal = parts["sign"], d[i, j] / scale
    blocks = [
        (
            np.stack([parts["pairs"], count + parts["radius"]], 1),
            np.stack([-sign, sign], 1),
            -margin / scale * (sign > 0),
        ),
        (np.stack([each, np.full(count, t)], 1), np.stack([-minus, minus], 1), goal),
        (np.stack([each, np.full(count, t)], 1), np.stack([minus, minus], 1), -goal),
    ]
    while True:
        value, solution = _solve(blocks, count + parts["radii"] + 1)
        found = np.where(np.eye(len(d), dtype=bool), 0.0, solution[number])
        through = found[:, :, None] + found[None, :, :]  # [from, over, to]
        over = through.argmin(axis=1)
        broken = found[i, j] - through[i, over[i, j], j] > TOLERANCE
        if not broken.any():
            return value * scale, torch.from_numpy(found * scale).to(apart.device)
        a, c = i[broken], j[broken]
        b = over[a, c]
        columns = np.stack([number[a, c], number[a, b], number[b, c]], 1)
        blocks.append((columns, np.tile([1.0, -1.0, -1.0], (len(a), 1)), np.zeros(len(a))))


def _solve(blocks: list[tuple[Any, Any, Any]], size: int) -> tuple[float, Any]:
    """Minimize the last of `size` nonnegative variables z under rows Σ value·z[column] ≤ high."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    entries = np.concatenate([values.ravel() for _, values, _ in blocks])
    columns = np.concatenate([places.ravel() for places, _, _ in blocks])
    widths = np.concatenate([np.full(len(places), places.shape[1]) for places, _, _ in blocks])
    starts = np.concatenate([[0], np.cumsum(widths)])
    rows = csr_array((entries, columns, starts), shape=(len(widths), size))
    cost = np.zeros(size)
    cost[-1] = 1
    found = linprog(cost, A_ub=rows, b_ub=np.concatenate([high for *_, high in blocks]), method="highs")
    if found.x is None:
        raise ValueError(
            "isometric_bound: no metric keeps this margin for this relevance, whose order of distances has a cycle; "
            f"use a margin of 0. The solver says: {found.message}"
        )
    return float(found.fun), found.x

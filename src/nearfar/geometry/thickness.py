"""The thickness θ of a set (Xu et al. 2022, definition 3), and the constants of theorem 2, which divides by it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_seed
from nearfar.geometry.isometry import Separation, hausdorff_distance, isometric_error
from nearfar.geometry.separation import strips
from nearfar.geometry.spaces import center, distances

__all__ = ["Constants", "Thickness", "constants", "thickness"]

HULL_WIDTH = 5  # the hull of differences is computed up to this dimension; above, it has too many facets
HULL_POINTS = 4096  # the hull of differences is computed for up to this many differences
PROGRAM_ROWS = 2000  # the sequence of linear programs is run for up to this many rows


@dataclass(frozen=True)
class Thickness:
    """Bounds of the thickness θ, which agree if it was computed exactly.

    Attributes:
        lower: a certain lower bound.
        upper: a certain upper bound: the width of the rows in one direction.
        way: how `upper` was found: "rank", "range", "hull", "differences", "programs" or "axes".
    """

    lower: float
    upper: float
    way: str


@torch.no_grad()
def thickness(embeddings: Tensor, *, starts: int = 20, seed: int = 0) -> Thickness:
    """Compute the thickness θ = min over unit e of (max x·e - min x·e) of rows x [N, n].

    Exact in the plane (least width normal to an edge of the hull) and in 3 to 5 dimensions (least distance from 0 to a
    facet of the hull of all xᵢ - xⱼ). In more dimensions 2√λ_min(Cov) ≤ θ ≤ the width that a sequence of linear
    programs reaches from the three least principal axes and `starts` random directions, which equaled θ in every test;
    above 2,000 rows the upper bound is the least range along principal axes.

    Proved: θ = 0 where N ≤ n, so theorem 2 of Xu et al. 2022 says nothing there (docs/papers/xu-2022.md).
    """
    check_seed("thickness", seed)
    x = center("thickness", "embeddings", embeddings).cpu().numpy()
    rows, width = x.shape
    if rows <= width or rows == 0:
        return Thickness(0.0, 0.0, "rank")
    size = float(np.abs(x).max())
    values, axes = np.linalg.eigh(x.T @ x / rows)
    if size == 0 or np.linalg.matrix_rank(x) < width:
        return Thickness(0.0, 0.0, "rank")
    if width == 1:
        return _exact(float(np.ptp(x)), "range")
    if width <= HULL_WIDTH:
        corners = _corners(x)
        if width == 2:
            return _exact(_widths(corners, _edges(corners)), "hull")
        if len(corners) ** 2 <= HULL_POINTS:
            return _exact(_least_facet(corners), "differences")
        x = corners
    lower = 2 * float(np.sqrt(max(0.0, values[0])))
    least = _widths(x, axes.T)
    if len(x) > PROGRAM_ROWS:
        return Thickness(lower, least, "axes")
    random = np.random.default_rng(seed).normal(size=(starts, width))
    reached = min(_reduce_width(x, e / np.linalg.norm(e)) for e in (*axes.T[:3], *random))
    return Thickness(min(lower, reached), min(least, reached), "programs")


@dataclass(frozen=True, eq=False)
class Constants:
    """The ratio of d_haus and d_iso of one map, and the quantities that bound it.

    Attributes:
        diameter: the largest distance between two rows.
        thickness: θ of the rows.
        ratio: diameter over the upper bound of θ; infinite if that is 0.
        iso: d_iso(f, F_TS).
        haus: d_haus(f, F_TS).
        observed: c = d_haus / d_iso, from their upper bounds; NaN if f is separated.
    """

    diameter: float
    thickness: Thickness
    ratio: float
    iso: Separation
    haus: Separation
    observed: float

    def __repr__(self) -> str:
        return f"Constants(ratio={self.ratio:.6g}, observed={self.observed:.6g})"


@torch.no_grad()
def constants(embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, starts: int = 16, seed: int = 0) -> Constants:
    """Compute the ratio diameter/θ and the observed c = d_haus/d_iso of rows f [N, n].

    Proved (theorem 1 of Xu et al. 2022, by Alestalo, Trotsenko and Väisälä): d_haus ≤ c d_iso with c = c_n ·
    diameter/θ, where c_n depends on the dimension alone and is unknown. Observed: c ≤ 2.235, also where θ is small.
    The paper prints c = c_n/θ*, which is wrong in its dimension (docs/papers/xu-2022.md).

    Args:
        embeddings: [N, n], N up to about 30.
        labels: [N] integers, or a relevance [N, N].
        margin: α.
        starts: see `isometric_error`.
        seed: see `isometric_error`.

    >>> constants(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]), starts=2)
    Constants(ratio=1, observed=0.75)
    """
    x = center("constants", "embeddings", embeddings)
    diameter = max((float(distances(x[part], x).max()) for part in strips(len(x), len(x))), default=0.0)
    thin = thickness(embeddings, seed=seed)
    iso = isometric_error(embeddings, labels, margin=margin, starts=starts, seed=seed, solve=True)
    haus = hausdorff_distance(embeddings, labels, margin=margin, starts=starts, seed=seed, solve=True)
    return Constants(
        diameter=diameter,
        thickness=thin,
        ratio=diameter / thin.upper if thin.upper > 0 else math.inf,
        iso=iso,
        haus=haus,
        observed=haus.upper / iso.upper if iso.upper > 0 else math.nan,
    )


def _exact(value: float, way: str) -> Thickness:
    return Thickness(value, value, way)


def _widths(x: Any, directions: Any) -> float:
    """The smallest range of x [N, n] along unit directions [m, n]."""
    return float(np.ptp(x @ directions.T, axis=0).min())


def _corners(x: Any) -> Any:
    """The rows that are vertices of the convex hull."""
    from scipy.spatial import ConvexHull

    return x[ConvexHull(x).vertices]


def _edges(corners: Any) -> Any:
    """Unit normals of the edges of a polygon, its corners in order."""
    along = np.roll(corners, -1, axis=0) - corners
    normal = np.stack([-along[:, 1], along[:, 0]], axis=1)
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)


def _least_facet(corners: Any) -> float:
    """The least width, from the hull of all differences: the distance of its nearest facet from 0."""
    from scipy.spatial import ConvexHull

    differences = (corners[:, None] - corners[None]).reshape(-1, corners.shape[1])
    return float(-ConvexHull(differences).equations[:, -1].max())


def _reduce_width(x: Any, e: Any) -> float:
    """Widths along e₀, e₁, ...:  eₖ₊₁ minimizes the width under eₖ·e = 1, so that no step makes it worse."""
    from scipy.optimize import linprog

    rows, width = x.shape
    ones = np.ones((rows, 1))
    zeros = np.zeros((rows, 1))
    bounds = np.vstack([np.hstack([x, zeros, -ones]), np.hstack([-x, ones, zeros])])  # a ≤ x·e ≤ b
    best = _widths(x, e[None])
    for _ in range(50):
        fixed = np.concatenate([e, [0.0, 0.0]])[None]
        cost = np.concatenate([np.zeros(width), [-1.0, 1.0]])
        found = linprog(cost, bounds, np.zeros(2 * rows), fixed, [1.0], bounds=(None, None), method="highs")
        if found.x is None:
            break
        e = found.x[:width] / np.linalg.norm(found.x[:width])
        now = _widths(x, e[None])
        if now >= best * (1 - 1e-12):
            break
        best = now
    return best

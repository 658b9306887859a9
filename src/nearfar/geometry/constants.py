"""The constants of theorem 2 of Xu et al. 2022: diameter / thickness from its proof, observed d_haus / d_iso."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.geometry.isometry import Separation, hausdorff_distance, isometric_error
from nearfar.geometry.separation import strips
from nearfar.geometry.spaces import centered, distances
from nearfar.geometry.thickness import Thickness, thickness

__all__ = ["Constants", "constants"]


@dataclass(frozen=True, eq=False)
class Constants:
    """The ratio of d_haus and d_iso of one map, and the constants that bound it.

    Attributes:
        diameter: the largest distance between two rows.
        thickness: θ of the rows.
        ratio: diameter / θ (its upper bound); c of the c-IAP is a multiple of it; infinite if θ is 0.
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
    """Compute the c-IAP ratio diameter/θ and the observed c = d_haus/d_iso of rows f [N, n].

    Proved (theorem 1 of Xu et al. 2022, by Alestalo, Trotsenko and Väisälä): d_haus ≤ c d_iso with c = c_n ·
    diameter/θ, c_n of the dimension alone and not known. **The paper's print:** c = c_n/θ*, which is wrong in its
    dimension; (19) is meant of a rigid motion of f*_iso, not of f*_iso itself; and for f that is not injective an ε is
    lost. Where N ≤ n, θ is 0 and nothing is said. Observed: no c above 2.235, and none that grew as θ shrank; Xu et
    al.'s .53 is of its own points.

    Args:
        embeddings: [N, n], N up to about 30.
        labels: [N] integers, or a relevance [N, N].
        margin: α.
        starts: see `isometric_error`.
        seed: see `isometric_error`.

    >>> constants(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]), starts=2)
    Constants(ratio=1, observed=0.75)
    """
    x = centered("constants", "embeddings", embeddings)
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

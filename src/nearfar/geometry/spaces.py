"""The spaces in which distances are measured: Euclidean space, or the unit sphere with angles.

The proofs of Xu et al. 2022 about separation use only the triangle inequality, so they hold in both. Between unit rows
a chord is 2 sin(angle/2): chords order pairs like angles, and in reverse like cosines.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.tensors import check_embeddings
from nearfar.similarity import unit

__all__ = ["SPACES", "Flat", "Metric", "Space", "Sphere", "center", "distances", "space_of"]

Metric = Literal["euclidean", "angle"]
ROUND = 1e-18  # added under the root of a distance, so that coincident rows have a gradient


def center(owner: str, name: str, embeddings: Tensor) -> Tensor:
    """Center rows in double precision; without centering, products of rows far from the origin would cancel."""
    check_embeddings(owner, name, embeddings)
    x = embeddings.detach().double()
    return x - x.mean(dim=0) if len(x) else x


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances |xᵢ - yⱼ| [n, m], from differences so that equal rows are exactly 0 apart."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


class Flat:
    """Euclidean space with distances |x - y|."""

    def rows(self, owner: str, name: str, embeddings: Tensor) -> Tensor:
        """Prepare rows [n, d] for this space, in double precision."""
        return center(owner, name, embeddings)

    def distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances [n, m] between rows of this space."""
        return distances(x, y)

    def of_chord(self, chord: Tensor) -> Tensor:
        """The distance as an increasing function of the chord |x - y|."""
        return chord

    def place(self, x: Tensor) -> Tensor:
        """Project rows [n, d] into this space."""
        return x

    def displacement(self, x: Tensor, y: Tensor) -> Tensor:
        """The distance [n] between corresponding rows of x and y."""
        apart: Tensor = (x - y).norm(dim=1)
        return apart

    def with_gradients(self, g: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        """Distances [p] of the pairs (i, j) of NumPy rows g, and their gradients [p, d] in g_i and in g_j."""
        between = g[i] - g[j]
        apart = np.sqrt((between**2).sum(axis=1) + ROUND)
        slope = between / apart[:, None]
        return apart, slope, -slope


class Sphere:
    """The unit sphere with angles in radians as distances; its methods are those of `Flat`."""

    def rows(self, owner: str, name: str, embeddings: Tensor) -> Tensor:  # noqa: D102
        check_embeddings(owner, name, embeddings)
        x = unit(embeddings.detach().double())
        zero = int((x == 0).all(dim=1).sum()) if x.numel() else 0
        if zero:
            raise ValueError(
                f'{owner}: with metric="angle" each row of {name} needs a direction, but {zero} of {len(x)} are zero; '
                "leave them out."
            )
        return x

    def distances(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        # 2 atan2(|u - v|, |u + v|), because an arccosine loses half of the digits near 0 and π
        return 2 * torch.atan2(distances(x, y), distances(x, -y))

    def of_chord(self, chord: Tensor) -> Tensor:  # noqa: D102
        return 2 * torch.asin((chord / 2).clamp(max=1.0))

    def place(self, x: Tensor) -> Tensor:  # noqa: D102
        return unit(x)

    def displacement(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        return 2 * torch.atan2((x - y).norm(dim=1), (x + y).norm(dim=1))

    def with_gradients(self, g: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:  # noqa: D102
        length = np.linalg.norm(g, axis=1, keepdims=True)
        u = g / length
        a, b = u[i], u[j]
        near, far = (np.sqrt(((a + sign * b) ** 2).sum(axis=1) + ROUND) for sign in (-1, 1))
        cosine = (a * b).sum(axis=1, keepdims=True)
        sine = (near * far / 2)[:, None]
        # the gradient of the angle is a tangent unit vector that points away from the other row
        return 2 * np.arctan2(near, far), (cosine * a - b) / (sine * length[i]), (cosine * b - a) / (sine * length[j])


Space = Flat | Sphere
SPACES: dict[str, Space] = {"euclidean": Flat(), "angle": Sphere()}


def space_of(owner: str, metric: str) -> Space:
    """Look up the space of a metric by name."""
    check_choice(owner, "metric", metric, SPACES)
    return SPACES[metric]

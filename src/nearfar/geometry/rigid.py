"""Distances between two maps of the same samples, with and without the best rigid motion between them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.geometry.separation import strips
from nearfar.geometry.spaces import Metric, space_of

__all__ = ["NearIsometry", "hausdorff_between", "isometric_error_between", "near_isometry"]


@torch.no_grad()
def isometric_error_between(f: Tensor, g: Tensor, *, metric: Metric = "euclidean") -> float:
    """The largest difference of distances, max over pairs |d(f(x), f(z)) - d(g(x), g(z))| (Xu et al. 2022, eq. 13).

    Proved: it is at most twice max |f(x) - g(x)|, and 0 if and only if a rigid motion takes one map to the other.

    Args:
        f: [n, d].
        g: [n, e], the same samples; the dimensions may differ.
        metric: "euclidean", or "angle": radians between unit rows.

    >>> isometric_error_between(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    4.0
    """
    owner = "isometric_error_between"
    space = space_of(owner, metric)
    _check_pair(owner, f, g)
    a, b = space.rows(owner, "f", f), space.rows(owner, "g", g)
    worst = 0.0
    for part in strips(len(a), len(a)):
        gap = (space.distances(a[part], a) - space.distances(b[part], b)).abs_()
        worst = max(worst, float(gap.max()))
    return worst


@torch.no_grad()
def hausdorff_between(f: Tensor, g: Tensor, labels: Tensor, *, metric: Metric = "euclidean") -> float:
    """The largest Hausdorff distance between f(class) and g(class) over all classes (Xu et al. 2022, eq. 11).

    It compares sets: two rows of a class may be exchanged at no cost. The distance to F_TS is the same as for single
    rows (proved: send each x to the point of its class's set nearest to f(x); the image is a subset, hence separated),
    so `hausdorff_distance` moves each row by itself.

    Args:
        f: [n, d].
        g: [n, d], the same samples.
        labels: [n] integers.
        metric: "euclidean", or "angle": radians between unit rows.

    >>> f = torch.tensor([[0.0], [1.0], [5.0]])
    >>> hausdorff_between(f, f[[1, 0, 2]], torch.tensor([0, 0, 1]))
    0.0
    """
    owner = "hausdorff_between"
    space = space_of(owner, metric)
    _check_pair(owner, f, g, same_width=True)
    check_labels(owner, "labels", labels, len(f), f.device)
    # not centered: the position of f relative to g counts
    rows = [space.place(side.detach().double()) for side in (f, g)]
    worst = 0.0
    for label in torch.unique(labels):
        a, b = (side[labels == label] for side in rows)
        for one, other in ((a, b), (b, a)):
            for part in strips(len(one), len(other)):
                worst = max(worst, float(space.distances(one[part], other).amin(dim=1).max()))
    return worst


@dataclass(frozen=True, eq=False)
class NearIsometry:
    """The rigid motion x ↦ x rotationᵀ + shift of f that is nearest to g in least squares.

    Attributes:
        error: ε = d_iso(f, g), the largest difference of distances.
        rotation: [d, d] orthogonal; a reflection is allowed.
        shift: [d].
        rms: root mean square of |U f(x) - g(x)|; no rigid motion has a smaller one.
        largest: max of |U f(x) - g(x)|; another motion may have a smaller one.
    """

    error: float
    rotation: Tensor
    shift: Tensor
    rms: float
    largest: float

    def __repr__(self) -> str:
        return f"NearIsometry(error={self.error:.6g}, rms={self.rms:.6g}, largest={self.largest:.6g})"

    def move(self, f: Tensor) -> Tensor:
        """Apply the motion to rows [m, d]."""
        return f.detach().double() @ self.rotation.T + self.shift


@torch.no_grad()
def near_isometry(f: Tensor, g: Tensor) -> NearIsometry:
    """Find the best rigid motion from f to g in least squares (Procrustes: U = V Wᵀ of the singular vectors of fᵀg).

    By the isometric approximation theorem, if d_iso(f, g) = ε some rigid motion brings f within c·ε of g, with
    c = c_n · diameter/thickness; Xu et al. 2022 prints c_n/θ* (docs/papers/xu-2022.md).
    """
    _check_pair("near_isometry", f, g, same_width=True)
    f, g = f.detach().double(), g.detach().double()
    a, b = f.mean(dim=0), g.mean(dim=0)
    left, _, right = torch.linalg.svd((f - a).T @ (g - b))
    rotation = (left @ right).T
    shift = b - rotation @ a
    off = (f @ rotation.T + shift - g).norm(dim=1)
    return NearIsometry(
        error=isometric_error_between(f, g),
        rotation=rotation,
        shift=shift,
        rms=float((off**2).mean().sqrt()),
        largest=float(off.max()),
    )


def _check_pair(owner: str, f: Tensor, g: Tensor, *, same_width: bool = False) -> None:
    """Require two maps of the same samples, with `same_width` of the same dimension."""
    check_embeddings(owner, "f", f)
    check_embeddings(owner, "g", g)
    if len(f) != len(g) or not len(f):
        raise ValueError(f"{owner}: f and g must hold the same samples, at least one, but have {len(f)} and {len(g)}.")

    if same_width and f.shape[1] != g.shape[1]:
        raise ValueError(f"{owner}: f and g must be equally wide, but are {f.shape[1]} and {g.shape[1]} wide.")

"""Choose triplets for a linear map: near rows of the same class (targets) and of other classes (impostors).

    targets(i)   = the k nearest rows j ≠ i with y_j = y_i       impostors(i) = the l nearest rows with y_j ≠ y_i

Distances are |z_i - z_j|² in the space of the current map. Rows are sorted by class, so that the positive rows of an
anchor are contiguous and no mask is needed. One tile of distances is held at a time, so memory grows with n, not n².
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice

KINDS = ("neighbors", "hard", "all", "dro")
TILE = 2**22  # entries of one tile of distances: 16 MB in float32


@dataclass(frozen=True, eq=False)
class Classes:
    """Rows sorted by class: class c is the sorted rows starts[c] .. starts[c+1] - 1."""

    order: Tensor  # [n] the original position of each sorted row
    labels: Tensor  # [n] the class of each sorted row, 0, 1, ..
    starts: Tensor  # [c + 1] where each class begins

    @property
    def sizes(self) -> Tensor:
        """The number of rows of each class, [c]."""
        return self.starts.diff()

    def anchors(self) -> Tensor:
        """The sorted rows with at least one positive, which can be anchors of a triplet."""
        return torch.nonzero(self.sizes[self.labels] > 1)[:, 0]


def sort_classes(labels: Tensor) -> Classes:
    """Sort rows by class; rows of one class keep their order.

    >>> sort_classes(torch.tensor([1, 0, 1, 0, 0])).order.tolist()
    [1, 3, 4, 0, 2]
    """
    order = torch.argsort(labels, stable=True)
    starts = torch.cat([labels.new_zeros(1), torch.bincount(labels).cumsum(0)])
    return Classes(order, labels[order], starts)


@dataclass(frozen=True, eq=False)
class Triplets:
    """Triplets as a product: each anchor with each of its targets and each of its impostors."""

    anchors: Tensor  # [b] rows
    targets: Tensor  # [b, k] rows of the anchor's class
    impostors: Tensor  # [b, l] rows of other classes
    measure: Tensor  # [b, k, l] 1 where a triplet exists, 0 where a class is too small

    def to_list(self) -> tuple[Tensor, Tensor, Tensor]:
        """The triplets as a list: anchor [n], target [n], impostor [n]."""
        row, near, far = torch.nonzero(self.measure, as_tuple=True)
        return self.anchors[row], self.targets[row, near], self.impostors[row, far]


def choose(
    z: Tensor,
    classes: Classes,
    rows: Tensor,
    *,
    kind: str = "neighbors",
    targets: int = 3,
    impostors: int = 10,
    generator: torch.Generator | None = None,
    tile: int = TILE,
) -> Triplets:
    """Choose the triplets of the anchors `rows` [b], increasing, each with a positive, in the space z [n, d], sorted.

    kind           targets                       impostors
    "neighbors"   the k nearest positive rows      the l nearest negative rows (the same for "dro")
    "hard"         the farthest positive row        the nearest negative row
    "all"          k drawn evenly                l drawn evenly, so that triplets count the same on average

    There must be at least two classes; k is `targets`, l is `impostors`.
    """
    check_choice("choose", "kind", kind, KINDS)
    if kind == "all":
        return _draw(classes, rows, targets, impostors, generator)
    hard = kind == "hard"
    k = 1 if hard else min(targets, int(classes.sizes.max()) - 1)
    l = 1 if hard else min(impostors, len(z) - int(classes.sizes.min()))
    near = torch.empty(len(rows), k, dtype=torch.long)
    far = torch.empty(len(rows), l, dtype=torch.long)
    square = z.square().sum(dim=1)
    tall = max(1, tile // len(z))
    for first in range(0, len(rows), tall):
        strip = slice(first, first + tall)
        _search(z, square, classes, rows[strip], near[strip], far[strip], hard)
    positive = classes.sizes[classes.labels[rows]]
    there = (torch.arange(k) < (positive - 1)[:, None])[:, :, None] & (torch.arange(l) < (len(z) - positive)[:, None])[
        :, None
    ]
    return Triplets(rows, near, far, there.to(z.dtype))


def _search(
    z: Tensor, square: Tensor, classes: Classes, rows: Tensor, near: Tensor, far: Tensor, farthest: bool
) -> None:
    """Fill near [t, k] and far [t, l] for one strip of rows; |z_i|² is constant along a row and left out."""
    distance = torch.addmm(square[None], z[rows], z.T, alpha=-2)
    itself = torch.arange(len(rows))
    distance[itself, rows] = -torch.inf if farthest else torch.inf
    present, counts = torch.unique_consecutive(classes.labels[rows], return_counts=True)
    top = 0
    for label, count in zip(present.tolist(), counts.tolist(), strict=True):
        left, right = int(classes.starts[label]), int(classes.starts[label + 1])
        block = distance[top : top + count, left:right]
        k = min(near.shape[1], right - left - 1)
        near[top : top + count, :k] = block.topk(k, dim=1, largest=farthest).indices + left
        near[top : top + count, k:] = near[top : top + count, :1]  # fill gaps with an existing row, of measure 0
        block.fill_(torch.inf)
        top += count
    far.copy_(distance.topk(far.shape[1], dim=1, largest=False).indices)


def _draw(classes: Classes, rows: Tensor, k: int, l: int, generator: torch.Generator | None) -> Triplets:
    """Draw k positives and l negatives for each row, uniformly and with replacement."""
    label = classes.labels[rows]
    start, size = classes.starts[label][:, None], classes.sizes[label][:, None]
    near = start + (torch.rand(len(rows), k, generator=generator, dtype=torch.float64) * (size - 1)).long()
    near += near >= rows[:, None]  # skip the row itself
    others = len(classes.labels) - size
    far = (torch.rand(len(rows), l, generator=generator, dtype=torch.float64) * others).long()
    far += size * (far >= start)  # skip the class of the row
    return Triplets(rows, near, far, torch.ones(len(rows), k, l))


def differences(
    x: Tensor, chosen: Triplets, most: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The differences u = x_anchor - x_target and v = x_anchor - x_impostor [n, m], and the triplets' indices [n].

    Indices refer to `chosen.to_list()`. If there are more than `most` triplets, `most` are drawn without replacement.
    """
    anchor, target, impostor = chosen.to_list()
    index = torch.arange(len(anchor))
    if len(anchor) > most:
        index = torch.randperm(len(anchor), generator=generator)[:most].sort().values
    head = x[anchor[index]]
    return head - x[target[index]], head - x[impostor[index]], index

"""Pairs of samples that are copies: the same picture, re-encoded, mirrored or cropped; or nearly the same vector.

Candidates are nearest neighbors: of the vectors and, with pictures, of small gray forms and their mirror images. With
pictures the likeness of a pair is the largest correlation of its pixels, over the whole picture, its mirror image, and
parts of one picture against the whole other. The score says how unlikely such a likeness is where the two rows lie.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nearfar.evaluation import Neighbors, neighbors
from nearfar.inspection._samples import SIDE, pixels
from nearfar.similarity import unit

KINDS = ("whole", "mirrored", "cropped", "cropped and mirrored")
FEW = 3  # neighbors of each row that are candidates
MOST = 16.0  # the largest score, that of equal rows
TILE = 2**11  # candidate pairs that are compared at a time
WINDOWS = tuple(  # parts of a picture: side, top and left in pixels of its gray form
    (side, top, left)
    for side in range(SIDE - 2, SIDE * 5 // 8 - 1, -2)
    for top in range(0, SIDE - side + 1, 2)
    for left in range(0, SIDE - side + 1, 2)
)


@dataclass(frozen=True, eq=False)
class Copies:
    """Candidate pairs: rows [p, 2] with the smaller one first, scores [p], and numbers of `KINDS` [p]."""

    rows: Tensor
    score: Tensor
    kind: Tensor


def find_copies(x: Tensor, near: Neighbors, gray: Tensor | None) -> Copies:
    """Score candidate pairs of unit vectors x and their `near` rows, each once; without pictures by vectors alone."""
    lists = [near.places[:, :FEW]]
    if gray is not None:
        small = pixels(gray)
        near = neighbors(small, k=near.places.shape[1])
        mirrored = neighbors(pixels(gray.flip(2)), small, k=min(FEW + 1, len(gray)))
        lists += [near.places[:, :FEW], mirrored.places]
    rows: Tensor = torch.unique(torch.cat([_pairs(places) for places in lists]), dim=0)
    gaps, kinds = [torch.zeros(0)], [torch.zeros(0, dtype=torch.long)]
    for part in torch.split(rows, TILE) if len(rows) else ():
        if gray is None:
            gap, kind = (x[part[:, 0]] - x[part[:, 1]]).norm(dim=1), torch.zeros(len(part), dtype=torch.long)
        else:
            likeness, kind = compare(gray[part[:, 0]], gray[part[:, 1]])
            gap = (2 - 2 * likeness).clamp_min(0).sqrt()
        gaps.append(gap)
        kinds.append(kind)
    return Copies(rows, _surprise(near, rows, torch.cat(gaps)), torch.cat(kinds))


def _pairs(places: Tensor) -> Tensor:
    """Rows with their neighbors as pairs i < j."""
    rows = torch.arange(len(places))[:, None].expand_as(places)
    pairs = torch.stack([torch.minimum(rows, places), torch.maximum(rows, places)], dim=2).reshape(-1, 2)
    return pairs[pairs[:, 0] < pairs[:, 1]]


def _surprise(near: Neighbors, rows: Tensor, gap: Tensor) -> Tensor:
    """How unlikely it is that two rows are so near by chance, as -log10 of a probability, at most `MOST`.

    Where rows lie evenly in m dimensions, the nearest of k neighbors is within a share r of the distance of the last
    one with probability 1 - (1 - r^m)^(k - 1). Here r = gap / √(r_i r_j), where r_i is the distance of row i to its
    last neighbor, and m is the number of dimensions for which this probability is below 1/2 for half of the rows.
    """
    k = near.scores.shape[1]
    if k < 2:
        return torch.zeros(len(rows))
    first, reach = ((2 - 2 * near.scores[:, place].double()).clamp_min(1e-12).sqrt() for place in (0, -1))
    middle = float((first / reach).median())
    m = math.log(1 - 0.5 ** (1 / (k - 1))) / math.log(min(middle, 1 - 1e-6)) if middle > 0 else 1.0
    share = (gap.double() / (reach[rows[:, 0]] * reach[rows[:, 1]]).sqrt()).clamp(0, 1)
    chance = -torch.expm1((k - 1) * torch.log1p(-share.pow(m).clamp_max(1 - 1e-12)))
    return -chance.clamp_min(10**-MOST).log10().float()


def compare(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The largest correlation of each pair of pictures [p, SIDE, SIDE], and the number of its kind."""
    soft = [F.avg_pool2d(F.pad(x[:, None].float(), (0, 1, 0, 1), mode="replicate"), 2, 1)[:, 0] for x in (a, b)]
    wholes = [pixels(x).float() for x in (a, b)]
    flipped = [pixels(x.flip(2)).float() for x in (a, b)]
    best = [(wholes[0] * wholes[1]).sum(dim=1), (flipped[0] * wholes[1]).sum(dim=1)]
    best += [torch.full_like(best[0], -1.0) for _ in range(2)]
    for part, other in ((0, 1), (1, 0)):
        for window in WINDOWS:
            cut = _cut(soft[part], *window)
            best[2] = torch.maximum(best[2], (cut * wholes[other]).sum(dim=1))
            best[3] = torch.maximum(best[3], (cut * flipped[other]).sum(dim=1))
    found = torch.stack(best).max(dim=0)
    return found.values, found.indices


def _cut(soft: Tensor, side: int, top: int, left: int) -> Tensor:
    """A part of pictures that were averaged over 2 x 2 pixels, in the form of `pixels`."""
    steps = (torch.arange(SIDE // 2) * side) // (SIDE // 2)
    flat = soft[:, top + steps][:, :, left + steps].flatten(1)
    return unit(flat - flat.mean(dim=1, keepdim=True))

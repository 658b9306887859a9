"""Triplet separation: how far the worst anchor is from having every positive nearer than every negative.

    H(f) = max over triplets of  [ d(x, x⁺) - d(x, x⁻) + α ]₊  =  max over anchors of  [ farthest⁺ - nearest⁻ + α ]₊

f is triplet-separated (f ∈ F_TS) where H = 0. Distances are Euclidean and not squared, as in Xu et al. 2022, or angles
of unit rows (metric="angle"). In place of classes, graded relevance may define which row must be nearer (ladder.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import check_labels
from nearfar.geometry.ladder import check_relevance, hardest_step
from nearfar.geometry.spaces import Metric, Space, space_of

__all__ = ["HardTriplet", "check_inputs", "hardest_triplet", "hardness", "is_triplet_separated", "strips"]

CELLS = 2**21  # pairs computed at a time: 16 MB of doubles
TILE = (512, 1024)  # rows and columns of a tile: 2 MB, which stay in the cache
DIRECT = 1024  # the largest number of rows for which every distance is computed from differences
AGAIN = 64  # anchors computed exactly at a time, in the order of their upper bounds


@dataclass(frozen=True)
class HardTriplet:
    """The hardest triplet, which determines H.

    Attributes:
        value: d(anchor, positive) - d(anchor, negative) + α, not clipped at zero.
        anchor: the row of the anchor.
        positive: the anchor's farthest row of its own class.
        negative: the anchor's nearest row of another class.
    """

    value: float
    anchor: int
    positive: int
    negative: int


def hardness(embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean") -> float:
    """The hardest triplet violation H: exact over all triplets, tile by tile, for any number of rows.

    Proved: H = 0 if and only if the rows are triplet-separated; H is invariant under rigid motions and, with α = 0,
    proportional to the scale; H/2 ≤ d_iso and H/4 ≤ d_haus. The margin matters: with α = 0 all rows on one point are a
    global minimum (H = 0), with α > 0 they cost α. All except the scale holds for angles and ladders, and H of angles
    is 0 if and only if that of the chords |x - z| of unit rows is, and never smaller.

    Distances are differences in double precision. Above 1,024 rows, products in float32 select the anchors that can be
    the worst, and only these (at most 4,096) are computed in double. A ladder is always computed in double.

    Args:
        embeddings: [n, d]; normalized only with metric="angle".
        labels: [n] integers, or the relevance [n, n] of each row (column) to each anchor (row); the more relevant of
            two rows must be nearer. `ladder` computes it from nested labels.
        margin: α, in units of the metric.
        metric: "euclidean", or "angle": radians between unit rows.

    >>> hardness(torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([0, 0, 1]))
    1.0
    """
    found = hardest_triplet(embeddings, labels, margin=margin, metric=metric)
    return 0.0 if found is None else max(0.0, found.value)


@torch.no_grad()
def hardest_triplet(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean"
) -> HardTriplet | None:
    """The triplet that attains H, or the one closest to a violation; None if there is no triplet.

    With a ladder `positive` is the more relevant row and `negative` the less relevant one.
    """
    space = space_of("hardness", metric)
    x, y = check_inputs("hardness", embeddings, labels, space)
    check_positive("hardness", "margin", margin, zero=True)
    order = torch.arange(len(x)) if y.ndim == 2 else torch.argsort(y, stable=True)
    if y.ndim == 2:
        *places, gap = hardest_step(x, y, space)
    else:
        x = x[order]  # overwrites x: a second copy would double the memory
        *places, gap = _hardest(x, y[order], space)
    if gap == -math.inf:
        return None
    anchor, positive, negative = (int(order[int(place)]) for place in places)
    return HardTriplet(gap + margin, anchor, positive, negative)


def is_triplet_separated(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean", tolerance: float = 1e-9
) -> bool:
    """Whether H ≤ tolerance · radius (the farthest row from the mean): every positive nearer than every negative.

    Proved: the separated maps form a closed cone, unchanged by rigid motions and scaling (α = 0). It contains every
    constant map and every map that sends each class to a point. With a ladder, it contains every constant map and, if
    the ladder is nested, every map that sends each group of its coarsest rung to a point.
    """
    x, _ = check_inputs("is_triplet_separated", embeddings, labels, space_of("is_triplet_separated", metric))
    radius = float(x.norm(dim=1).max()) if len(x) else 0.0
    return hardness(embeddings, labels, margin=margin, metric=metric) <= tolerance * (radius + margin)


def check_inputs(owner: str, embeddings: Tensor, labels: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Check the inputs: rows prepared for the space, and labels 0, 1, ... or the relevance [n, n] unchanged."""
    x = space.rows(owner, "embeddings", embeddings)
    if isinstance(labels, Tensor) and labels.ndim == 2:
        check_relevance(owner, labels, len(embeddings), embeddings.device)
        return x, labels
    check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
    return x, torch.unique(labels, return_inverse=True)[1]


def strips(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of `rows` rows, each of about `CELLS` entries for rows of `width` entries."""
    tall = max(1, CELLS // max(1, width))
    return (slice(i, min(i + tall, rows)) for i in range(0, rows, tall))


def _gap_bounds(x: Tensor, y: Tensor, space: Space) -> Tensor:
    """An upper bound [n] of farthest positive minus nearest negative, from float32 products; -inf for a lone row.

    Rows must be sorted by class, so that positive pairs lie in few tiles near the diagonal, which alone need a mask.
    Each pair is multiplied once. The bound allows for the rounding error of squared distances, at most
    (d + 8)·2⁻²⁴·(|x| + max |z|)².
    """
    norms = x.norm(dim=1)
    z, half = x.float(), (norms * norms / 2).float()
    near, far = torch.full_like(half, math.inf), torch.full_like(half, -math.inf)
    room = torch.empty(TILE[0] * TILE[1], dtype=z.dtype, device=z.device)
    for i in range(0, len(z), TILE[0]):
        rows = slice(i, min(i + TILE[0], len(z)))
        for j in range(i, len(z), TILE[1]):
            cols = slice(j, min(j + TILE[1], len(z)))
            shape = rows.stop - rows.start, cols.stop - cols.start
            tile = room[: shape[0] * shape[1]].view(shape)
            torch.addmm(half[None, cols], z[rows], z[cols].T, alpha=-1, out=tile)
            tile.add_(half[rows, None])  # half the squared distance
            if int(y[cols.start]) <= int(y[rows.stop - 1]):
                same = y[rows, None] == y[None, cols]
                positive = tile.masked_fill(~same, -math.inf)
                torch.maximum(far[rows], positive.amax(dim=1), out=far[rows])
                torch.maximum(far[cols], positive.amax(dim=0), out=far[cols])
                tile.masked_fill_(same, math.inf)
            torch.minimum(near[rows], tile.amin(dim=1), out=near[rows])
            torch.minimum(near[cols], tile.amin(dim=0), out=near[cols])
    slack = (x.shape[1] + 8) * 2.0**-24 * (norms + norms.max()) ** 2
    longest, shortest = (2 * far.double() + slack).clamp(min=0), (2 * near.double() - slack).clamp(min=0)
    most = space.of_chord(longest.sqrt()) - space.of_chord(shortest.sqrt())
    alone = torch.searchsorted(y, y, right=True) - torch.searchsorted(y, y) == 1
    found: Tensor = most.masked_fill(alone, -math.inf)
    return found


def _hardest(x: Tensor, y: Tensor, space: Space) -> tuple[int, int, int, float]:
    """The hardest triplet (anchor, positive, negative, gap) among rows sorted by class.

    Anchors are computed exactly in the order of their upper bounds, until no other can be worse.
    """
    if len(x) <= DIRECT:
        rows, most = torch.arange(len(x), device=x.device), None
    else:
        most, rows = _gap_bounds(x, y, space).sort(descending=True)
    best = (0, 0, 0, -math.inf)
    size = len(x) if most is None else AGAIN
    for i in range(0, min(len(x), DIRECT * 4), max(1, size)):
        if most is not None and float(most[i]) <= best[3]:
            break
        positive, negative, gap = _gaps(x, y, rows[i : i + size], space)
        k = int(gap.argmax())
        if float(gap[k]) > best[3]:
            best = (int(rows[i + k]), int(positive[k]), int(negative[k]), float(gap[k]))
    return best


def _gaps(x: Tensor, y: Tensor, rows: Tensor, space: Space) -> tuple[Tensor, Tensor, Tensor]:
    """Farthest positive, nearest negative and their gap for these rows; -inf if one of them is missing."""
    found = []
    for part in strips(len(rows), len(x)):
        chosen = rows[part]
        apart, same = space.distances(x[chosen], x), y[chosen, None] == y[None, :]
        near, negative = apart.masked_fill(same, math.inf).min(dim=1)
        same[torch.arange(len(chosen), device=x.device), chosen] = False
        far, positive = apart.masked_fill(~same, -math.inf).max(dim=1)
        found.append((positive, negative, far - near))
    positive, negative, gap = (torch.cat(column) for column in zip(*found, strict=True))
    return positive, negative, gap

"""`violations`: which pairs break their distance bound (the feasible set of Can et al. 2019), and by how much."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.relations.relation import Relation
from nearfar.similarity import NegEuclidean, Similarity

CELLS = 2**21  # pairs computed at a time, limited by memory


@dataclass(frozen=True)
class Violations:
    """How many pairs violate their distance bound, and by how much; each unordered pair counts once.

    Attributes:
        share: the share of all pairs that violate their bound (0 where there are no pairs).
        positive: the share of positive pairs that are farther apart than `max_positive_distance`.
        negative: the share of negative pairs that are nearer than `min_negative_distance`.
        positive_excess: by how much the violating positive pairs are too far apart, on average.
        negative_excess: by how much the violating negative pairs are too near, on average.
        positive_pairs: how many positive pairs there are.
        negative_pairs: how many negative pairs there are.
        largest: V, the largest of all excesses (0 where no pair violates its bound): the distance d_iso from the metric
            of the rows to the nearest metric that satisfies all bounds (docs/papers/beyond/theorem.md).
    """

    share: float
    positive: float
    negative: float
    positive_excess: float
    negative_excess: float
    positive_pairs: int
    negative_pairs: int
    largest: float


@torch.no_grad()
def violations(
    embeddings: Tensor,
    labels: Tensor | Relation,
    *,
    max_positive_distance: float,
    min_negative_distance: float,
    similarity: Similarity | None = None,
) -> Violations:
    """Count pairs that violate their bound: positive pairs farther apart than ε₊, negative pairs nearer than ε₋.

    This is what a projection should lower: its loss is a penalty, and the minimum of a penalized loss need not be
    feasible. With `Relation.from_labels(y, representatives=mask)` only the constraints of one projection are looked
    at. Pairs are read in strips of rows, so that memory stays small.

    Args:
        embeddings: [n, d].
        labels: [n] integers, or a square `Relation`.
        max_positive_distance: ε₊, the largest distance allowed for a positive pair.
        min_negative_distance: ε₋, the smallest distance allowed for a negative pair.
        similarity: defines the distance; `NegEuclidean` (of unit rows) by default.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> y = torch.tensor([0, 0, 1])  # distances: 1.41 is too far, 0.63 too near, 0.89 is well
    >>> violations(x, y, max_positive_distance=0.5, min_negative_distance=0.8).share
    0.6666666666666666
    """
    check_embeddings("violations", "embeddings", embeddings)
    check_positive("violations", "max_positive_distance", max_positive_distance, zero=True)
    check_positive("violations", "min_negative_distance", min_negative_distance, zero=True)
    relation = _relation(embeddings, labels)
    similarity = similarity or NegEuclidean()
    rows, _ = similarity.prepared(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)))
    tall = max(1, CELLS // max(1, len(rows)))
    # pairs, broken pairs, excess: positive first
    sums = torch.zeros(2, 3, dtype=torch.float64, device=rows.device)
    largest = rows.new_zeros(())
    for i in range(0, len(rows), tall):
        part = slice(i, min(i + tall, len(rows)))
        tile = relation.tile(part, slice(None))
        distance = similarity.distance(similarity.scores(rows[part], rows))
        for side, (there, excess) in enumerate(
            (
                (tile.positive > 0, distance - max_positive_distance),
                (tile.negative > 0, min_negative_distance - distance),
            )
        ):
            broken = there & ~(excess <= 0)  # NaN counts, so that it shows
            excess = torch.where(broken, excess, 0.0)
            largest = torch.maximum(largest, excess.amax() if excess.numel() else largest)
            by = excess.double().sum()
            sums[side] += torch.stack([there.sum().double(), broken.sum().double(), by])
    return _summary(sums.tolist(), int(relation.orders), float(largest))


def _relation(embeddings: Tensor, labels: Tensor | Relation) -> Relation:
    if not isinstance(labels, Relation):
        check_labels("violations", "labels", labels, len(embeddings), embeddings.device)
        return Relation.from_labels(labels)
    if not labels.square or labels.shape[0] != len(embeddings):
        raise ValueError(
            f"violations: the Relation must be square and of {len(embeddings)} rows, "
            f"but is {labels.shape[0]} x {labels.shape[1]}{'' if labels.square else ' with a reference'}."
        )
    return labels


def _summary(sums: list[list[float]], orders: int, largest: float) -> Violations:
    (positive, far_off, positive_by), (negative, too_near, negative_by) = sums

    def quotient(a: float, b: float) -> float:
        return a / b if b else 0.0

    return Violations(
        share=quotient(far_off + too_near, positive + negative),
        positive=quotient(far_off, positive),
        negative=quotient(too_near, negative),
        positive_excess=quotient(positive_by, far_off),
        negative_excess=quotient(negative_by, too_near),
        positive_pairs=int(positive) // orders,
        negative_pairs=int(negative) // orders,
        largest=largest,
    )

"""`ScoredPairs`: the one container that travels from scores to value, and the miners' hands on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar.relations.relation import Relation
from nearfar.similarity import Similarity

__all__ = ["ScoredPairs", "present"]


@dataclass(frozen=True, eq=False)
class ScoredPairs:
    """Scores of n anchors against m references, and which of the pairs count.

    Args:
        scores: [n, m], larger = more similar.
        positive: [n, m] base measure of the positive pairs: a mask, or weights.
        negative: [n, m] base measure of the negative pairs.
        had_positive: [n] rows that had a positive pair before any mining.
        had_negative: [n] rows that had a negative pair before any mining.
        relation: where the measures came from.
        similarity: where the scores came from.
        rows: [n, d] prepared queries.
        cols: [m, d] prepared references.
        triplets: an explicit list (anchor, positive, negative), where the caller gave one.
        strip: these are some of the relation's rows only, against all of its columns.
        mined: fewer pairs count than the relation has.
    """

    scores: Tensor
    positive: Tensor
    negative: Tensor
    had_positive: Tensor
    had_negative: Tensor
    relation: Relation
    similarity: Similarity
    rows: Tensor
    cols: Tensor
    triplets: tuple[Tensor, Tensor, Tensor] | None = None
    strip: bool = False
    mined: bool = False

    @property
    def anchors(self) -> Tensor:
        """Rows [n] that had any valid pair before mining: what "mean over anchors" divides by."""
        return self.had_positive | self.had_negative

    @property
    def has_positive(self) -> Tensor:
        """Rows [n] with a positive pair that counts."""
        return present(self.positive) if self.mined else self.had_positive

    @property
    def has_negative(self) -> Tensor:
        """Rows [n] with a negative pair that counts."""
        return present(self.negative) if self.mined else self.had_negative

    @property
    def dim(self) -> int:
        """d, the width of the embedding."""
        return self.rows.shape[1]

    def distances(self) -> Tensor:
        """Euclidean distances [n, m] of the unit rows."""
        return self.similarity.distance(self.scores)

    def reference_scores(self) -> Tensor:
        """Scores [m, m] among the references: what a triplet's positive says of its negative."""
        if self.relation.square and not self.strip:
            return self.scores
        return self.similarity.scores(self.cols, self.cols)

    def scores_from(self, place: Tensor) -> Tensor:
        """Scores [n, p, m] of the references `place` [n, p] against all references."""
        if self.strip:  # all m x m of them would be the matrix that strips avoid
            return self.similarity.scores(self.cols[place.reshape(-1)], self.cols).reshape(*place.shape, -1)
        return self.reference_scores()[place]

    def keep(self, positive: Tensor | None = None, negative: Tensor | None = None) -> ScoredPairs:
        """The same pairs, fewer (boolean [n, m]) or counted otherwise (floating [n, m])."""
        return replace(
            self,
            positive=self.positive if positive is None else _narrow(self.positive, positive),
            negative=self.negative if negative is None else _narrow(self.negative, negative),
            mined=True,
        )


def present(measure: Tensor) -> Tensor:
    """Which rows [g] of a measure [g, n] have any member."""
    # bytes: torch's own `any` over a mask is thirty times slower
    return (measure.to(torch.uint8) if measure.dtype == torch.bool else measure).amax(dim=1) > 0


def _narrow(measure: Tensor, by: Tensor) -> Tensor:
    return measure & by if measure.dtype == by.dtype == torch.bool else measure * by

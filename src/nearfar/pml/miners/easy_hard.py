"""Miners of one positive and one negative pair per anchor: the farthest, the nearest, or the semi-hard ones."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.tensors import hidden
from nearfar.miners import ScoredPairs
from nearfar.pml._settings import MinerSettings
from nearfar.pml._tuples import Indices
from nearfar.pml.distances import BaseDistance, score_of
from nearfar.pml.miners.base import BaseMiner

__all__ = ["BatchEasyHardMiner", "BatchHardMiner"]

Range = tuple[float, float]


class BatchEasyHardMiner(BaseMiner):
    """One positive and one negative pair per anchor, each by its own strategy.

    Args:
        pos_strategy: "hard": the farthest positive; "easy": the nearest; "semihard": the farthest that is nearer than
            the negative; "all": all of them.
        neg_strategy: "hard": the nearest negative; "easy": the farthest; "semihard": the nearest that is farther than
            the positive; "all": all of them.
        allowed_pos_range: (low, high), in the distance's own units; positives outside are not chosen.
        allowed_neg_range: likewise for negatives.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.

    Attributes:
        easiest_triplet: smallest distance of a chosen positive minus that of its negative, with `collect_stats`; so are
            `hardest_triplet`, and `easiest_` and `hardest_pos_pair` and `_neg_pair`, the extremes of the chosen.
    """

    HARD, SEMIHARD, EASY, ALL = "hard", "semihard", "easy", "all"
    STATS = (
        "easiest_triplet",
        "hardest_triplet",
        "easiest_pos_pair",
        "hardest_pos_pair",
        "easiest_neg_pair",
        "hardest_neg_pair",
    )

    def __init__(
        self,
        pos_strategy: str = EASY,
        neg_strategy: str = SEMIHARD,
        allowed_pos_range: Range | None = None,
        allowed_neg_range: Range | None = None,
        **settings: Unpack[MinerSettings],
    ) -> None:
        super().__init__(**settings)
        owner = type(self).__name__
        for name, value in (("pos_strategy", pos_strategy), ("neg_strategy", neg_strategy)):
            check_choice(owner, name, value, (self.HARD, self.SEMIHARD, self.EASY, self.ALL))
        if self.SEMIHARD in (pos_strategy, neg_strategy) and {pos_strategy, neg_strategy} <= {self.SEMIHARD, self.ALL}:
            raise ValueError(
                f'{owner}: "semihard" compares with one pair of the other side, so that side must be "hard" or "easy", '
                f"but {pos_strategy!r} and {neg_strategy!r} came."
            )
        self.pos_strategy = pos_strategy
        self.neg_strategy = neg_strategy
        self.allowed_pos_range = allowed_pos_range
        self.allowed_neg_range = allowed_neg_range
        self.add_to_recordable_attributes(list_of_names=self.STATS, is_stat=True)

    def _choose(self, pairs: ScoredPairs) -> Indices:
        positive, negative = _within(self.distance, pairs, self.allowed_pos_range, self.allowed_neg_range)
        if self.pos_strategy == self.SEMIHARD:
            n, has_n = _nearest(pairs.scores, negative, nearest=self.neg_strategy == self.HARD)
            positive = positive & (pairs.scores > pairs.scores.gather(1, n))
            p, has_p = _nearest(pairs.scores, positive, nearest=False)
        else:
            p, has_p = _nearest(pairs.scores, positive, nearest=self.pos_strategy == self.EASY)
            if self.neg_strategy == self.SEMIHARD:
                negative = negative & (pairs.scores < pairs.scores.gather(1, p))
            n, has_n = _nearest(pairs.scores, negative, nearest=self.neg_strategy != self.EASY)
        if self.ALL not in (self.pos_strategy, self.neg_strategy):
            has_p = has_n = has_p & has_n
        every = torch.arange(len(p), device=p.device)
        a1, a2 = every[has_p], every[has_n]
        kept_positive = (
            torch.nonzero(pairs.positive, as_tuple=True) if self.pos_strategy == self.ALL else (a1, p[a1, 0])
        )
        kept_negative = (
            torch.nonzero(pairs.negative, as_tuple=True) if self.neg_strategy == self.ALL else (a2, n[a2, 0])
        )
        if self.collect_stats:
            self._set_stats(pairs.scores[kept_positive], pairs.scores[kept_negative])
        return (*kept_positive, *kept_negative)

    def _set_stats(self, near: Tensor, far: Tensor) -> None:
        """Keep the easiest and the hardest of the chosen, given their scores."""
        chosen = [("pos_pair", near), ("neg_pair", -far)]
        if self.ALL not in (self.pos_strategy, self.neg_strategy):
            chosen.append(("triplet", near - far))
        for name, ease in chosen:
            if len(ease):
                sign = -1 if name == "neg_pair" else 1
                setattr(self, f"easiest_{name}", score_of(self.distance, sign * float(ease.max())))
                setattr(self, f"hardest_{name}", score_of(self.distance, sign * float(ease.min())))


class BatchHardMiner(BatchEasyHardMiner):
    """The farthest positive and the nearest negative of each anchor that has both, as triplets.

    Args:
        allowed_pos_range: see `BatchEasyHardMiner`.
        allowed_neg_range: likewise.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    parts = 3

    def __init__(
        self,
        *,
        allowed_pos_range: Range | None = None,
        allowed_neg_range: Range | None = None,
        **settings: Unpack[MinerSettings],
    ) -> None:
        super().__init__(self.HARD, self.HARD, allowed_pos_range, allowed_neg_range, **settings)

    def _choose(self, pairs: ScoredPairs) -> Indices:
        anchor, positive, _, negative = super()._choose(pairs)
        return anchor, positive, negative


def _within(distance: BaseDistance, pairs: ScoredPairs, *ranges: Range | None) -> tuple[Tensor, Tensor]:
    """Masks of the positive and the negative pairs within their ranges."""
    found = [pairs.positive, pairs.negative]
    for place, limits in enumerate(ranges):
        if limits is not None:
            numbers = score_of(distance, pairs.scores)
            found[place] = found[place] & (numbers >= limits[0]) & (numbers <= limits[1])
    return found[0], found[1]


def _nearest(scores: Tensor, present: Tensor, *, nearest: bool) -> tuple[Tensor, Tensor]:
    """The column [n, 1] of each row's nearest (or farthest) present pair, and whether it has any [n]."""
    if nearest:
        place = hidden(scores, present).argmax(dim=1, keepdim=True)
    else:
        place = hidden(scores, present, math.inf).argmin(dim=1, keepdim=True)
    return place, present.any(dim=1)

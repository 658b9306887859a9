"""Groups of triplets: `Positive` (one p per positive pair) and `Triplets` (one p for all triplets of the batch).

A triplet (a, p, n) is a negative pair judged against a positive one: the negative pair loss sees s_an - s_ap instead of
s_an. Positive pairs are gathered into P columns, P the most that any row has, so that a batch costs n·P·m and not n·m².
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.shortcuts import Part, check_part
from nearfar._utils.tensors import hidden
from nearfar.groups.groupings import Grouping, Problem, Problems, Product, Values
from nearfar.links import Terms
from nearfar.miners import ScoredPairs

__all__ = [
    "AngularScore",
    "Compare",
    "Positive",
    "Rule",
    "SemiHardBand",
    "Triplets",
    "difference",
    "hardness",
    "nearest_difference",
    "positives",
]

Compare = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(s_an, s_ap, s_pn) -> the score that the negative pair loss judges."""


def difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """s_an - s_ap: by how much the negative is nearer than the positive."""
    return s_an - s_ap


def nearest_difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """max(s_an, s_pn) - s_ap: the negative judged from the nearer end of the positive pair ("swap")."""
    return torch.maximum(s_an, s_pn) - s_ap


@dataclass(frozen=True)
class AngularScore(Part, swift=True):
    """4t(s_an + s_pn) - 2(1+t) s_ap with t = tan²α: what is left of the angle at the negative."""

    tan2: float

    def __call__(self, s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
        """The score of each triplet."""
        return 4 * self.tan2 * (s_an + s_pn) - 2 * (1 + self.tan2) * s_ap


@dataclass(frozen=True)
class SemiHardBand(Part, swift=True):
    """Triplets whose negative is farther than the positive, but by less than the margin: -m < s_an - s_ap < 0."""

    margin: float

    def __call__(self, score: Tensor) -> Tensor:
        """Which triplets lie in the band."""
        return (score < 0) & (score > -self.margin)


@dataclass(frozen=True, eq=False)
class Rule(Part, swift=True):
    """What makes a triplet count.

    Args:
        compare: what the negative pair loss sees of a triplet.
        keep: which triplets enter, told from that score without gradient (semi-hard), or None for all.
        wants_reference: `compare` reads s_pn, the score between positive and negative.
        balanced: an anchor's i-th positive pair meets only its i-th hardest negative pair.
    """

    compare: Compare = difference
    keep: Callable[[Tensor], Tensor] | None = None
    wants_reference: bool = False
    balanced: bool = False

    def all(self, product: Product, pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
        """Losses and measure [n, P, m] of every triplet of the batch."""
        real, place = positives(pairs)
        return self.some(product, pairs, real, place, self.ranks(pairs), 0)

    def ranks(self, pairs: ScoredPairs) -> Tensor | None:
        """The rank of each negative pair, where the rule asks for it."""
        return hardness(pairs) if self.balanced else None

    def some(
        self, product: Product, pairs: ScoredPairs, real: Tensor, place: Tensor, ranks: Tensor | None, first: int
    ) -> tuple[Tensor, Tensor]:
        """Losses and measure [n, p, m] of the triplets of some positive pairs [n, p], each row's from `first` on."""
        s_ap = pairs.scores.gather(1, place)[:, :, None]
        if self.wants_reference and pairs.relation.anchors == "representatives":
            raise ValueError(
                "Triplet: swap compares a positive with a negative, two rows that are no representatives; leave it out."
            )
        s_pn = pairs.scores_from(place) if self.wants_reference else s_ap
        score = self.compare(pairs.scores[:, None, :], s_ap, s_pn)
        if real.dtype == pairs.negative.dtype == torch.bool:
            measure = real[:, :, None] & pairs.negative[:, None, :]
        else:
            measure = real[:, :, None].to(score.dtype) * pairs.negative[:, None, :]
        if ranks is not None:
            turn = torch.arange(first, first + measure.shape[1], device=measure.device)[None, :, None]
            measure = _where(measure, ranks[:, None, :] == turn)
        return product.negative(score, -1), self._kept(score, measure)

    def parts(self, product: Product, pairs: ScoredPairs, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Losses, measure [n, p, m] and the positive pairs' own measure [n, p], p at a time so that n·p·m <= most."""
        real, place = positives(pairs)
        ranks = self.ranks(pairs)
        step = max(1, most // max(1, pairs.scores.numel()))
        for first in range(0, real.shape[1], step):
            chosen = slice(first, first + step)
            yield *self.some(product, pairs, real[:, chosen], place[:, chosen], ranks, first), real[:, chosen]

    def listed(
        self, product: Product, pairs: ScoredPairs, triplets: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Losses and measure [T] of an explicit list of triplets."""
        a, p, n = (x.long() for x in triplets)
        s_ap = pairs.scores[a, p]
        s_pn = pairs.reference_scores()[p, n] if self.wants_reference else s_ap
        score = self.compare(pairs.scores[a, n], s_ap, s_pn)
        return product.negative(score, -1), self._kept(score, torch.ones_like(score, dtype=torch.bool))

    def _kept(self, score: Tensor, measure: Tensor) -> Tensor:
        if self.keep is None:
            return measure
        keep = self.keep(score.detach()) | torch.isnan(score.detach())  # a NaN must stay in and show
        return _where(measure, keep)


def _where(measure: Tensor, keep: Tensor) -> Tensor:
    return measure & keep if measure.dtype == torch.bool else measure * keep


def hardness(pairs: ScoredPairs) -> Tensor:
    """The rank [n, m] of each negative pair of a row, 0 for the hardest; what is no negative pair comes last."""
    order = hidden(pairs.scores.detach(), pairs.negative).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1)


def positives(pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
    """The measure [n, P] and the column [n, P] of each row's positive pairs, padded by columns of measure 0."""
    count = max(1, pairs.relation.width(pairs.positive))
    place = (pairs.positive > 0).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :count]
    return pairs.positive.gather(1, place), place


class Positive(Grouping, swift=True):
    """One group per positive pair (a, p): the negative pairs of a, judged against p; reduced over positive pairs."""

    per_anchor = True
    needs = "both"
    strips = True

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = Rule() if rule is None else rule
        check_part(type(self).__name__, "rule", self.rule, Rule, "Rule()")

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        (problems,) = self.blocks(product, pairs, sys.maxsize)
        return problems

    def blocks(self, product: Product, pairs: ScoredPairs, most: int) -> Iterator[Problems]:  # noqa: D102
        for losses, measure, real in self.rule.parts(product, pairs, most):
            # within a group the positive pair is given: its weight counts once, in the reduction
            shape = tuple(losses.shape)
            if real.dtype != torch.bool:
                measure = _where(pairs.negative[:, None, :].expand(shape), measure > 0)
            flat = (-1, losses.shape[-1])
            problem = Problem(product.over_negative, losses.reshape(flat), measure.reshape(flat), shape, counts=real)
            yield (problem,)

    def terms(  # noqa: D102
        self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values
    ) -> tuple[Terms, ...]:
        counts = problems[0].counts
        assert counts is not None  # noqa: S101 - `split` told them
        return (Terms(values[0].reshape(counts.shape), counts),)


class Triplets(Grouping, swift=True):
    """One group of all triplets of the batch, or of those on an explicit list."""

    needs = "both"
    takes_triplets = True
    strips = True

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = Rule() if rule is None else rule
        check_part(type(self).__name__, "rule", self.rule, Rule, "Rule()")

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        if pairs.triplets is None:
            losses, measure = self.rule.all(product, pairs)
        else:
            losses, measure = self.rule.listed(product, pairs, pairs.triplets)
        return (_together(product, losses, measure),)

    def blocks(self, product: Product, pairs: ScoredPairs, most: int) -> Iterator[Problems]:  # noqa: D102
        for losses, measure, _ in self.rule.parts(product, pairs, most):
            yield (_together(product, losses, measure),)


def _together(product: Product, losses: Tensor, measure: Tensor) -> Problem:
    return Problem(product.over_negative, losses.reshape(1, -1), measure.reshape(1, -1), tuple(losses.shape))

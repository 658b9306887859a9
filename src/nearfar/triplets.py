"""Groups of triplets: `Positive` (one p per alike pair) and `Triplets` (one p for all triplets of the batch).

A triplet (a, p, n) is an unlike pair judged against an alike one: the unlike pair loss sees s_an - s_ap instead of
s_an. Alike pairs are gathered into P columns, P the most that any row has, so that a batch costs n·P·m and not n·m².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar.groups import Grouping, Problem, Problems, Product, Values
from nearfar.links import Terms, reduce
from nearfar.pairing import Pairs
from nearfar.sets.base import hidden

Compare = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(s_an, s_ap, s_pn) -> the score that the unlike pair loss judges."""


def difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """s_an - s_ap: by how much the negative is nearer than the positive."""
    return s_an - s_ap


def nearest_difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """max(s_an, s_pn) - s_ap: the negative judged from the nearer end of the alike pair ("swap")."""
    return torch.maximum(s_an, s_pn) - s_ap


@dataclass(frozen=True, eq=False)
class Rule:
    """What makes a triplet count.

    Args:
        compare: what the unlike pair loss sees of a triplet.
        keep: which triplets enter, told from that score without gradient (semi-hard), or None for all.
        wants_reference: `compare` reads s_pn, the score between positive and negative.
        balanced: an anchor's i-th alike pair meets only its i-th hardest unlike pair.
    """

    compare: Compare = difference
    keep: Callable[[Tensor], Tensor] | None = None
    wants_reference: bool = False
    balanced: bool = False

    def all(self, product: Product, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Losses and measure [n, P, m] of every triplet of the batch."""
        real, place = positives(pairs)
        s_ap = pairs.scores.gather(1, place)[:, :, None]
        if self.wants_reference and pairs.relation.anchors == "representatives":
            raise ValueError(
                "Triplet: swap compares a positive with a negative, two rows that are no representatives; leave it out."
            )
        s_pn = pairs.reference_scores()[place] if self.wants_reference else s_ap
        score = self.compare(pairs.scores[:, None, :], s_ap, s_pn)
        if real.dtype == pairs.unlike.dtype == torch.bool:
            measure = real[:, :, None] & pairs.unlike[:, None, :]
        else:
            measure = real[:, :, None].to(score.dtype) * pairs.unlike[:, None, :]
        if self.balanced:
            turn = torch.arange(measure.shape[1], device=measure.device)[None, :, None]
            measure = _where(measure, hardness(pairs)[:, None, :] == turn)
        return product.unlike(score, -1), self._kept(score, measure)

    def listed(self, product: Product, pairs: Pairs, triplets: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and measure [T] of an explicit list of triplets."""
        a, p, n = (x.long() for x in triplets)
        s_ap = pairs.scores[a, p]
        s_pn = pairs.reference_scores()[p, n] if self.wants_reference else s_ap
        score = self.compare(pairs.scores[a, n], s_ap, s_pn)
        return product.unlike(score, -1), self._kept(score, torch.ones_like(score, dtype=torch.bool))

    def _kept(self, score: Tensor, measure: Tensor) -> Tensor:
        if self.keep is None:
            return measure
        keep = self.keep(score.detach()) | torch.isnan(score.detach())  # a NaN must stay in and show
        return _where(measure, keep)


def _where(measure: Tensor, keep: Tensor) -> Tensor:
    return measure & keep if measure.dtype == torch.bool else measure * keep


def hardness(pairs: Pairs) -> Tensor:
    """The rank [n, m] of each unlike pair of a row, 0 for the hardest; what is no unlike pair comes last."""
    order = hidden(pairs.scores.detach(), pairs.unlike).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1)


def positives(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The measure [n, P] and the column [n, P] of each row's alike pairs, padded by columns of measure 0."""
    count = max(1, pairs.relation.width(pairs.alike))
    place = (pairs.alike > 0).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :count]
    return pairs.alike.gather(1, place), place


class Positive(Grouping):
    """One group per alike pair (a, p): the unlike pairs of a, judged against p; reduced over alike pairs."""

    per_anchor = True
    needs = "both"

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule or Rule()

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        # within a group the alike pair is given: its weight counts once, in `join`
        losses, measure = self.rule.all(product, replace(pairs, alike=pairs.alike > 0))
        flat = (-1, losses.shape[-1])
        return (Problem(product.over_unlike, losses.reshape(flat), measure.reshape(flat), tuple(losses.shape)),)

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        real, _ = positives(pairs)
        return reduce(Terms(values[0].reshape(real.shape), real), product.reduction)


class Triplets(Grouping):
    """One group of all triplets of the batch, or of those on an explicit list."""

    needs = "both"
    takes_triplets = True

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule or Rule()

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        if pairs.triplets is None:
            losses, measure = self.rule.all(product, pairs)
        else:
            losses, measure = self.rule.listed(product, pairs, pairs.triplets)
        return (Problem(product.over_unlike, losses.reshape(1, -1), measure.reshape(1, -1), tuple(losses.shape)),)

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        return values[0][0]

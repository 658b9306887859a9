"""Groups: which pairs share one set of weights. A grouping splits pairs into problems and joins their values.

    split(pairs)  ->  problems: losses [g, n] with a measure, one group a row, and the set that weighs them
    join(values)  ->  the loss

Engines and `explain` both work on the problems, so a value and the weights behind it can never come apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import over
from nearfar.links import Link, Sides, Terms
from nearfar.miners import Miner, ScoredPairs, present
from nearfar.pairs import PairLoss
from nearfar.sets.base import Cap, Orders, Stream, UncertaintySet
from nearfar.sets.linear import TopK
from nearfar.similarity import Similarity

__all__ = [
    "REDUCTIONS",
    "Anchor",
    "AnchorSign",
    "Balanced",
    "Batch",
    "Grouping",
    "Needs",
    "Problem",
    "Problems",
    "Product",
    "Reduction",
    "Sign",
    "Taking",
    "Values",
    "reduce",
    "tally",
    "turned",
]

Reduction = Literal["mean", "sum", "nonzero", "none"]
REDUCTIONS: tuple[str, ...] = ("mean", "sum", "nonzero", "none")


@dataclass(frozen=True, eq=False)
class Problem:
    """Groups that one set weighs: losses and measure [g, n], and the shape the flat members came from.

    `counts` [g] says how much each group counts in a reduction over groups, where that is not told elsewhere, and
    `positive` (as the losses, or broadcast to them) which members are judged as positive pairs, where each is one pair.
    """

    over: UncertaintySet
    losses: Tensor
    measure: Tensor
    shape: tuple[int, ...]
    orders: Orders = 1
    cap: Tensor | None = None
    counts: Tensor | None = None
    positive: Tensor | None = None

    def value(self) -> Tensor:
        """F [g]."""
        return self.over.value(self.losses, self.measure, orders=self.orders, cap=self.cap)

    def weights(self) -> Tensor:
        """p* in the shape the members came from."""
        found = self.over.weights(self.losses, self.measure, orders=self.orders, cap=self.cap)
        return found.reshape(self.shape)

    def dual(self) -> Tensor:
        """The leading dual variable [g]."""
        return self.over.dual(self.losses, self.measure, orders=self.orders, cap=self.cap)[0]

    def stream(self, cap: Cap | None = None) -> Stream | None:
        """What finds the dual of these groups if their members come chunk by chunk; None where their set has none."""
        return self.over.stream(len(self.losses), self.losses.detach(), self.orders, cap)

    def taken(self) -> Tensor:
        """How much measure [g] the weight may rest on."""
        return self.over.taken(self.losses, self.measure, orders=self.orders, cap=self.cap)


@dataclass(frozen=True, eq=False)
class Product:
    """The factors of a loss: what an engine multiplies. Pair losses and sets may differ per sign."""

    similarity: Similarity
    positive: PairLoss
    negative: PairLoss
    over_positive: UncertaintySet
    over_negative: UncertaintySet
    groups: Grouping
    link: Link | None
    """None: the two values of an anchor are added."""
    miner: Miner | None
    reduction: Reduction
    everyone: bool
    """The wide side of each anchor holds all its pairs (a softmax denominator), not the negative ones only."""

    @property
    def wants_columns(self) -> bool:
        """Whether the link also reads the negative value of each reference."""
        return self.link is not None and self.link.wants_columns

    def joined(self, sides: Sides) -> tuple[Terms, ...]:
        """Terms of the two sides of each anchor: joined by the link, or added where there is none."""
        if self.link is None:
            return (Terms(sides.positive + sides.negative, sides.anchors),)
        terms: tuple[Terms, ...] = self.link(sides)
        return terms

    @property
    def parts(self) -> tuple[Part | None, ...]:
        """All of them."""
        pairs, sets = (self.positive, self.negative), (self.over_positive, self.over_negative)
        return self.similarity, *pairs, *sets, self.groups, self.link, self.miner

    @property
    def draws(self) -> bool:
        """Whether pairs are drawn at random."""
        return any(x.draws for x in (self.over_positive, self.over_negative, self.miner) if x is not None)


Needs = Literal["any", "positive", "both"]
Problems = tuple[Problem, ...]
Values = tuple[Tensor, ...]


class Taking(Protocol):
    """Exposes the total weight [g] that a set may use: a problem, or a stream of one."""

    def taken(self) -> Tensor: ...  # noqa: D102


class Grouping(Part, ABC):
    """One way to say which pairs compete for the same weights.

    A grouping ends either in one value an anchor (`per_anchor`: it writes `terms`) or in one number (`merge`).
    """

    shortcuts = ("strips",)
    per_anchor: bool = False
    """Values are one an anchor, so that a reduction over anchors makes sense."""
    needs: Needs = "any"
    """The pairs without which an anchor teaches nothing."""
    takes_triplets: bool = False
    """An explicit list of triplets is used as a list, not as the pairs it holds."""
    strips: bool = False
    """`split` may be given some of the rows at a time: groups lie in one row, or streams can follow them."""

    def check(self, positive: UncertaintySet, negative: UncertaintySet) -> None:
        """Refuse sets that cannot weigh these groups, in one sentence."""

    @abstractmethod
    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        """The problems to solve."""

    def blocks(self, product: Product, pairs: ScoredPairs, most: int) -> Iterator[Problems]:
        """The problems of a strip, a part at a time where each pair has several members; `most` entries a part."""
        yield self.split(product, pairs)

    def streams(self, problems: Problems) -> tuple[Stream | None, ...]:
        """One stream a problem, for groups that reach over the whole batch."""
        return tuple(problem.stream() for problem in problems)

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        """What is reduced over anchors."""
        return ()

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:
        """One number of the problems' values [1]."""
        return values[0][0]

    def join(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> Tensor:
        """The loss from the problems' values."""
        if not self.per_anchor:
            return self.merge(values, problems)
        parts = [reduce(terms, product.reduction) for terms in self.terms(product, pairs, problems, values)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


class Batch(Grouping, swift=True):
    """All pairs of the batch, positive and negative together, share one p."""

    strips = True

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        losses, measure = _together(product, pairs)
        whole = _flat(product.over_positive, losses, measure, pairs.relation.orders)
        return (replace(whole, positive=(pairs.positive > 0).reshape(1, -1)),)


class Sign(Grouping, swift=True):
    """All positive pairs share one p, all negative pairs another; the two values are added."""

    strips = True

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        return _by_sign(product, pairs)

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:  # noqa: D102
        return values[0][0] + values[1][0]


class Balanced(Grouping, swift=True):
    """As `Sign`, but the negative side takes no more than the positive side, and the value is the mean over the taken.

    This is Qi et al.'s TopK-PN with its code's rule for batches short of positive pairs.
    """

    needs = "positive"
    strips = True

    def check(self, positive: UncertaintySet, negative: UncertaintySet) -> None:  # noqa: D102
        if not isinstance(positive, TopK) or not isinstance(negative, TopK):
            raise ValueError(
                'RobustLoss: groups="balanced" compares how much each side takes, so both sets must be TopK.'
            )

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        positive, negative = _by_sign(product, pairs)
        return positive, replace(negative, cap=positive.taken())

    def streams(self, problems: Problems) -> tuple[Stream | None, ...]:  # noqa: D102
        positive = problems[0].stream()
        return positive, problems[1].stream(None if positive is None else positive.taken)

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:  # noqa: D102
        positive, negative = (side.taken() for side in solved)
        return over(positive * values[0] + negative * values[1], positive + negative)[0]


class Anchor(Grouping, swift=True):
    """All pairs of one anchor, positive and negative together, share one p."""

    per_anchor = True
    strips = True

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        losses, measure = _together(product, pairs)
        return (_rows(product.over_positive, losses, measure),)

    def terms(  # noqa: D102
        self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values
    ) -> tuple[Terms, ...]:
        return (Terms(values[0], pairs.anchors),)


class AnchorSign(Grouping, swift=True):
    """The positives of an anchor share one p, its negatives (or all its pairs) another; a link joins the two values."""

    per_anchor = True
    strips = True

    def halves(self, product: Product, pairs: ScoredPairs) -> tuple[Problem, Problem]:
        """The positive and the wide side of each anchor."""
        wide = _union(pairs) if product.everyone else pairs.negative
        return (
            _rows(product.over_positive, product.positive(pairs.scores, +1), pairs.positive),
            _rows(product.over_negative, product.negative(pairs.scores, -1), wide),
        )

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:  # noqa: D102
        positive, wide = self.halves(product, pairs)
        if product.wants_columns:
            return positive, wide, turned(wide)
        return positive, wide

    def terms(  # noqa: D102
        self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values
    ) -> tuple[Terms, ...]:
        return product.joined(
            Sides(
                positive=values[0],
                negative=values[1],
                has_positive=pairs.has_positive,
                has_negative=pairs.has_negative,
                anchors=pairs.anchors,
                losses=problems[0].losses,
                measure=pairs.positive,
                columns=values[2] if len(values) > 2 else None,
                has_columns=present(problems[2].measure) if len(values) > 2 else None,
            )
        )


def turned(wide: Problem) -> Problem:
    """The same pairs, one group per reference."""
    return _rows(wide.over, wide.losses.T, wide.measure.T)


def _by_sign(product: Product, pairs: ScoredPairs) -> tuple[Problem, Problem]:
    orders = pairs.relation.orders
    yes = torch.ones(1, 1, dtype=torch.bool, device=pairs.scores.device)
    positive = _flat(product.over_positive, product.positive(pairs.scores, +1), pairs.positive, orders)
    negative = _flat(product.over_negative, product.negative(pairs.scores, -1), pairs.negative, orders)
    return replace(positive, positive=yes), replace(negative, positive=~yes)


def _together(product: Product, pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
    """Losses and measure of positive and negative pairs in one matrix [n, m]."""
    positive, negative = product.positive(pairs.scores, +1), product.negative(pairs.scores, -1)
    return torch.where(pairs.positive > 0, positive, negative), _union(pairs)


def _union(pairs: ScoredPairs) -> Tensor:
    if pairs.positive.dtype == pairs.negative.dtype == torch.bool:
        return pairs.positive | pairs.negative
    return pairs.positive.to(pairs.scores.dtype) + pairs.negative.to(pairs.scores.dtype)


def _rows(over: UncertaintySet, losses: Tensor, measure: Tensor) -> Problem:
    return Problem(over, losses, measure, tuple(losses.shape))


def _flat(over: UncertaintySet, losses: Tensor, measure: Tensor, orders: Orders) -> Problem:
    return Problem(over, losses.reshape(1, -1), measure.reshape(1, -1), tuple(losses.shape), orders)


def tally(terms: Terms, how: Reduction) -> tuple[Tensor, Tensor]:
    """Numerator and denominator, one number each, of "mean", "nonzero" and "sum": parts of a batch add up to the whole.

    With "none" they are one a row, [n].
    """
    weight = terms.measure.to(terms.values.dtype)
    if how == "nonzero":
        # ~(v <= 0): a NaN counts and shows
        weight = weight * ~(terms.values.detach() <= 0)
    values = terms.values * weight
    if how == "none":
        return (values, torch.ones_like(values)) if values.ndim == 1 else (values.sum(dim=1), weight.sum(dim=1))
    top = values.sum()
    return top, torch.ones_like(top) if how == "sum" else weight.sum()


def reduce(terms: Terms, how: Reduction) -> Tensor:
    """One number of the terms: their mean, sum, or mean over the terms above zero; "none" gives one a row, [n]."""
    return over(*tally(terms, how))

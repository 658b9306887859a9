"""Groups: which pairs share one set of weights. A grouping splits pairs into problems and joins their values.

    split(pairs)  ->  problems: losses [g, n] with a measure, one group a row, and the set that weighs them
    join(values)  ->  the loss

Engines and `explain` both work on the problems, so a value and the weights behind it can never come apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearfar.links import Link, Reduction, Sides, Terms, reduce
from nearfar.mining import Filter
from nearfar.pairing import Pairs
from nearfar.pairs import PairLoss
from nearfar.sets.base import Orders, UncertaintySet, over
from nearfar.sets.linear import TopK
from nearfar.similarity import Similarity


@dataclass(frozen=True, eq=False)
class Problem:
    """Groups that one set weighs: losses and measure [g, n], and the shape the flat members came from."""

    over: UncertaintySet
    losses: Tensor
    measure: Tensor
    shape: tuple[int, ...]
    orders: Orders = 1
    cap: Tensor | None = None

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

    def taken(self) -> Tensor:
        """How much measure [g] the weight may rest on."""
        return self.over.taken(self.losses, self.measure, orders=self.orders, cap=self.cap)


@dataclass(frozen=True, eq=False)
class Product:
    """The factors of a loss: what an engine multiplies. Pair losses and sets may differ per sign."""

    similarity: Similarity
    alike: PairLoss
    unlike: PairLoss
    over_alike: UncertaintySet
    over_unlike: UncertaintySet
    groups: Grouping
    link: Link
    filter: Filter | None
    reduction: Reduction
    everyone: bool
    """The wide side of each anchor holds all its pairs (a softmax denominator), not the unlike ones only."""


Needs = Literal["any", "alike", "both"]
Problems = tuple[Problem, ...]
Values = tuple[Tensor, ...]


class Grouping(ABC):
    """One way to say which pairs compete for the same weights."""

    per_anchor: bool = False
    """Values are one an anchor, so that a reduction over anchors makes sense."""
    needs: Needs = "any"
    """The pairs without which an anchor teaches nothing."""
    takes_triplets: bool = False
    """An explicit list of triplets is used as a list, not as the pairs it holds."""

    @abstractmethod
    def split(self, product: Product, pairs: Pairs) -> Problems:
        """The problems to solve."""

    @abstractmethod
    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:
        """The loss from the problems' values."""


def present(measure: Tensor) -> Tensor:
    """Which rows [g] of a measure [g, n] have any member."""
    # bytes: torch's own `any` over a mask is thirty times slower
    return (measure.to(torch.uint8) if measure.dtype == torch.bool else measure).amax(dim=1) > 0


class Batch(Grouping):
    """All pairs of the batch, alike and unlike together, share one p."""

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        losses, measure = _together(product, pairs)
        return (_flat(product.over_alike, losses, measure, pairs.relation.orders),)

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        return values[0][0]


class Sign(Grouping):
    """All alike pairs share one p, all unlike pairs another; the two values are added."""

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        return _by_sign(product, pairs)

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        return values[0][0] + values[1][0]


class Balanced(Grouping):
    """As `Sign`, but the unlike side takes no more than the alike side, and the value is the mean over the taken.

    This is 002's TopK-PN with its code's rule for batches short of alike pairs.
    """

    needs = "alike"

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        if not isinstance(product.over_alike, TopK) or not isinstance(product.over_unlike, TopK):
            raise ValueError(
                'RobustLoss: groups="balanced" compares how much each side takes, so both sets must be TopK.'
            )
        alike, unlike = _by_sign(product, pairs)
        return alike, replace(unlike, cap=alike.taken())

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        alike, unlike = (problem.taken() for problem in problems)
        return over(alike * values[0] + unlike * values[1], alike + unlike)[0]


class Anchor(Grouping):
    """All pairs of one anchor, alike and unlike together, share one p."""

    per_anchor = True

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        losses, measure = _together(product, pairs)
        return (_rows(product.over_alike, losses, measure),)

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        return reduce(Terms(values[0], pairs.anchors), product.reduction)


class AnchorSign(Grouping):
    """The alike pairs of one anchor share one p, its unlike pairs (or everyone) another; a link joins the values."""

    per_anchor = True

    def split(self, product: Product, pairs: Pairs) -> Problems:  # noqa: D102
        alike = product.alike(pairs.scores, +1)
        unlike = product.unlike(pairs.scores, -1)
        wide = _union(pairs) if product.everyone else pairs.unlike
        problems = (_rows(product.over_alike, alike, pairs.alike), _rows(product.over_unlike, unlike, wide))
        if product.link.wants_columns:
            return (*problems, _rows(product.over_unlike, unlike.T, wide.T))
        return problems

    def join(self, product: Product, pairs: Pairs, problems: Problems, values: Values) -> Tensor:  # noqa: D102
        sides = Sides(
            alike=values[0],
            unlike=values[1],
            has_alike=present(pairs.alike),
            has_unlike=present(pairs.unlike),
            anchors=pairs.anchors,
            losses=problems[0].losses,
            measure=pairs.alike,
            columns=values[2] if len(values) > 2 else None,
            has_columns=present(problems[2].measure) if len(values) > 2 else None,
        )
        parts = [reduce(terms, product.reduction) for terms in product.link(sides)]
        return torch.stack(parts).sum(dim=0)


def _by_sign(product: Product, pairs: Pairs) -> tuple[Problem, Problem]:
    orders = pairs.relation.orders
    return (
        _flat(product.over_alike, product.alike(pairs.scores, +1), pairs.alike, orders),
        _flat(product.over_unlike, product.unlike(pairs.scores, -1), pairs.unlike, orders),
    )


def _together(product: Product, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Losses and measure of alike and unlike pairs in one matrix [n, m]."""
    alike, unlike = product.alike(pairs.scores, +1), product.unlike(pairs.scores, -1)
    return torch.where(pairs.alike > 0, alike, unlike), _union(pairs)


def _union(pairs: Pairs) -> Tensor:
    if pairs.alike.dtype == pairs.unlike.dtype == torch.bool:
        return pairs.alike | pairs.unlike
    return pairs.alike.to(pairs.scores.dtype) + pairs.unlike.to(pairs.scores.dtype)


def _rows(over: UncertaintySet, losses: Tensor, measure: Tensor) -> Problem:
    return Problem(over, losses, measure, tuple(losses.shape))


def _flat(over: UncertaintySet, losses: Tensor, measure: Tensor, orders: Orders) -> Problem:
    return Problem(over, losses.reshape(1, -1), measure.reshape(1, -1), tuple(losses.shape), orders)

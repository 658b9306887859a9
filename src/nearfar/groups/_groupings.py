"""Groupings: which pairs share one set of weights. A grouping splits pairs into problems and joins their values.

    split(pairs)  ->  problems: losses [g, n] with a measure, one group per row, and the set that weights them
    join(values)  ->  the loss

Engines and `explain` use the same problems, so a loss value and its explanation are always consistent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import mask_of, over
from nearfar.links import Link, Sides, Terms
from nearfar.miners import Miner, ScoredPairs, present
from nearfar.pairs import PairLoss
from nearfar.sets.base import UncertaintySet
from nearfar.sets.stream import Cap, Orders, Stream
from nearfar.sets.top_k import TopK
from nearfar.similarity import Similarity

Reduction = Literal["mean", "sum", "nonzero", "none"]
REDUCTIONS: tuple[str, ...] = ("mean", "sum", "nonzero", "none")


@dataclass(frozen=True, eq=False)
class Problem:
    """The groups that one uncertainty set weights: their losses, and which members are present.

    Args:
        over: the set.
        losses: [g, n], one group per row.
        measure: [g, n] mask or weights of the members.
        shape: shape of the members before they were flattened to [g, n].
        orders: how often each unordered pair occurs in a group.
        cap: [g] upper limit on the measure that carries weight, or None.
        counts: weight of each group in the reduction over groups, if `Grouping.terms` needs it; else None.
        positive: which members are positive pairs, broadcastable to the losses, if each member is one pair; else None.
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
        """Worst-case value F [g] of each group."""
        return self.over.value(self.losses, self.measure, orders=self.orders, cap=self.cap)

    def weights(self) -> Tensor:
        """Weights p*, in the original `shape` of the members."""
        found = self.over.weights(self.losses, self.measure, orders=self.orders, cap=self.cap)
        return found.reshape(self.shape)

    def dual(self) -> Tensor:
        """First dual variable [g] of each group."""
        return self.over.dual(self.losses, self.measure, orders=self.orders, cap=self.cap)[0]

    def stream(self, cap: Cap | None = None) -> Stream:
        """A solver for these groups if their members arrive chunk by chunk."""
        return self.over.stream(len(self.losses), self.losses.detach(), self.orders, cap)

    def taken(self) -> Tensor:
        """Total measure [g] that may carry weight."""
        return self.over.taken(self.losses, self.measure, orders=self.orders, cap=self.cap)


@dataclass(frozen=True, eq=False)
class Product:
    """The factors of a loss, as an engine evaluates them. Pair losses and sets may differ between the signs."""

    similarity: Similarity
    positive: PairLoss
    negative: PairLoss
    over_positive: UncertaintySet
    over_negative: UncertaintySet
    groups: Grouping
    link: Link | None
    """Combines the two values of an anchor; None adds them."""
    miner: Miner | None
    reduction: Reduction
    everyone: bool
    """Whether the negative group of each anchor contains all its pairs (a softmax denominator)."""

    def at(self, rows: int) -> Product:
        """The factors for a batch of `rows` rows: counts such as "8B" become numbers, as engines need them."""
        positive, negative = self.over_positive.at(rows), self.over_negative.at(rows)
        if positive is self.over_positive and negative is self.over_negative:
            return self
        return replace(self, over_positive=positive, over_negative=negative)

    @property
    def over_wide(self) -> UncertaintySet:
        """The set that weights negative pairs, or all pairs if both signs share a group."""
        return self.over_positive if self.groups.scope in ("batch", "anchor") else self.over_negative

    @property
    def wants_columns(self) -> bool:
        """Whether the link also uses the negative value of each column."""
        return self.link is not None and self.link.wants_columns

    @property
    def wants_both(self) -> bool:
        """Whether an anchor must have both positive and negative pairs."""
        linked = self.groups.scope == "anchor_sign" and self.link is not None and self.link.both
        return linked or self.groups.needs == "both" or (self.miner is not None and self.miner.both)

    def joined(self, sides: Sides) -> tuple[Terms, ...]:
        """Combine the positive and negative values of each anchor by the link, or add them if there is none."""
        if self.link is None:
            return (Terms(sides.positive + sides.negative, sides.anchors),)
        terms: tuple[Terms, ...] = self.link(sides)
        return terms

    @property
    def parts(self) -> tuple[Part | None, ...]:
        """All factors, in the order in which they are applied."""
        pairs, sets = (self.positive, self.negative), (self.over_positive, self.over_negative)
        return self.similarity, *pairs, *sets, self.groups, self.link, self.miner

    @property
    def draws(self) -> bool:
        """Whether a set or the miner draws pairs at random."""
        return any(x.draws for x in (self.over_positive, self.over_negative, self.miner) if x is not None)

    @property
    def remembers(self) -> bool:
        """Whether the loss keeps a memory for a set."""
        return self.over_positive.remembers or self.over_negative.remembers


Needs = Literal["any", "positive", "both"]
Problems = tuple[Problem, ...]
Values = tuple[Tensor, ...]


class Taking(Protocol):
    """Anything with a total measure [g] that may carry weight: a `Problem` or a `Stream`."""

    def taken(self) -> Tensor: ...


class Grouping(Part, ABC):
    """Base class: which pairs share one set of weights.

    A subclass implements `split` and either `terms` (with `per_anchor`: one value per anchor) or `merge` (one number).
    """

    shortcuts = ("strips", "scope")
    per_anchor: bool = False
    """Whether there is one value per anchor, which a reduction over anchors then combines."""
    needs: Needs = "any"
    """The pairs that an anchor must have to contribute to the loss."""
    takes_triplets: bool = False
    """Whether an explicit list of triplets is used as it is, not as the pairs it contains."""
    strips: bool = False
    """Whether `split` may be called on some rows at a time: groups lie within a row, or have streams."""
    scope: str | None = None
    """The name of the built-in grouping whose groups these are; None for any other."""

    def check(self, positive: UncertaintySet, negative: UncertaintySet) -> None:
        """Raise ValueError if the sets cannot weight these groups."""

    @abstractmethod
    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        """Split the pairs into the problems to solve."""

    def streams(self, problems: Problems) -> tuple[Stream, ...]:
        """One stream per problem, for groups that span the whole batch."""
        return tuple(problem.stream() for problem in problems)

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        """The terms that the reduction over anchors combines."""
        return ()

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:
        """Combine the values [1] of the problems into one number."""
        return values[0][0]

    def join(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> Tensor:
        if not self.per_anchor:
            return self.merge(values, problems)
        parts = [reduce(terms, product.reduction) for terms in self.terms(product, pairs, problems, values)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


class Batch(Grouping, swift=True):
    """One group of all pairs of the batch: positive and negative pairs share the weights."""

    strips = True
    scope = "batch"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        losses, measure = _together(product, pairs)
        whole = _flat(product.over_positive, losses, measure, pairs.relation.orders)
        return (replace(whole, positive=(pairs.positive > 0).reshape(1, -1)),)


class Sign(Grouping, swift=True):
    """Two groups: all positive pairs, and all negative pairs of the batch; their values are added."""

    strips = True
    scope = "sign"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        return _by_sign(product, pairs)

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:
        return values[0][0] + values[1][0]


class Balanced(Grouping, swift=True):
    """Two groups like `Sign`, but the negative group uses at most as many pairs as the positive one.

        F = (K₊F₊ + K₋F₋) / (K₊ + K₋),    K₋ ≤ K₊

    with K₊ and K₋ the numbers of pairs that carry weight. This is TopK-PN of Qi et al. 2020, with the rule of its code
    for batches with few positive pairs.
    """

    needs = "positive"
    strips = True
    scope = "balanced"

    def check(self, positive: UncertaintySet, negative: UncertaintySet) -> None:
        if not isinstance(positive, TopK) or not isinstance(negative, TopK):
            raise ValueError('RobustLoss: groups="balanced" compares how much each side takes, so both must be TopK.')

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        positive, negative = _by_sign(product, pairs)
        return positive, replace(negative, cap=positive.taken())

    def streams(self, problems: Problems) -> tuple[Stream, ...]:
        positive = problems[0].stream()
        return positive, problems[1].stream(positive.taken)

    def merge(self, values: Values, solved: Sequence[Taking]) -> Tensor:
        positive, negative = (side.taken() for side in solved)
        return over(positive * values[0] + negative * values[1], positive + negative)[0]


class Anchor(Grouping, swift=True):
    """One group per anchor: all its positive and negative pairs share the weights."""

    per_anchor = True
    strips = True
    scope = "anchor"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        losses, measure = _together(product, pairs)
        return (_rows(product.over_positive, losses, measure),)

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        return (Terms(values[0], pairs.anchors),)


class AnchorSign(Grouping, swift=True):
    """Two groups per anchor: its positive pairs, and its negative (or all) pairs; a link combines the two values."""

    per_anchor = True
    strips = True
    scope = "anchor_sign"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        positive, wide = halves(product, pairs)
        if product.wants_columns:
            return positive, wide, turned(wide)
        return positive, wide

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        has_columns = present(problems[2].measure) if len(values) > 2 else None
        return product.joined(sides_of(pairs, problems[0], values, has_columns))


def halves(product: Product, pairs: ScoredPairs) -> tuple[Problem, Problem]:
    """The problems of the positive pairs and of the negative (or all) pairs of each anchor, as in `AnchorSign`."""
    wide = _union(pairs) if product.everyone else pairs.negative
    return (
        _rows(product.over_positive, product.positive(pairs.scores, +1), pairs.positive),
        _rows(product.over_negative, product.negative(pairs.scores, -1), wide),
    )


def sides_of(pairs: ScoredPairs, positive: Problem, values: Values, has_columns: Tensor | None = None) -> Sides:
    """The arguments of a link: values of positive and negative pairs, and of columns if there is a third."""
    return Sides(
        positive=values[0],
        negative=values[1],
        has_positive=pairs.has_positive,
        has_negative=pairs.has_negative,
        anchors=pairs.anchors,
        losses=positive.losses,
        measure=pairs.positive,
        columns=values[2] if len(values) > 2 else None,
        has_columns=has_columns,
    )


def turned(wide: Problem) -> Problem:
    """Transpose a problem: the same pairs, one group per column."""
    return _rows(wide.over, wide.losses.T, wide.measure.T)


def _by_sign(product: Product, pairs: ScoredPairs) -> tuple[Problem, Problem]:
    """One problem of all positive pairs, and one of all negative pairs."""
    orders = pairs.relation.orders
    yes = torch.ones(1, 1, dtype=torch.bool, device=pairs.scores.device)
    positive = _flat(product.over_positive, product.positive(pairs.scores, +1), pairs.positive, orders)
    negative = _flat(product.over_negative, product.negative(pairs.scores, -1), pairs.negative, orders)
    return replace(positive, positive=yes), replace(negative, positive=~yes)


def _together(product: Product, pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
    """Losses and measure of positive and negative pairs in one matrix [n, m]."""
    positive, negative = product.positive(pairs.scores, +1), product.negative(pairs.scores, -1)
    return torch.where(mask_of(pairs.positive), positive, negative), _union(pairs)


def _union(pairs: ScoredPairs) -> Tensor:
    """Measure [n, m] of positive and negative pairs together."""
    if pairs.positive.dtype == pairs.negative.dtype == torch.bool:
        return pairs.positive | pairs.negative
    return pairs.positive.to(pairs.scores.dtype) + pairs.negative.to(pairs.scores.dtype)


def _rows(over: UncertaintySet, losses: Tensor, measure: Tensor) -> Problem:
    """A problem with one group per row of losses [n, m]."""
    return Problem(over, losses, measure, tuple(losses.shape))


def _flat(over: UncertaintySet, losses: Tensor, measure: Tensor, orders: Orders) -> Problem:
    """A problem with one group of all losses [n, m]."""
    return Problem(over, losses.reshape(1, -1), measure.reshape(1, -1), tuple(losses.shape), orders)


def tally(terms: Terms, how: Reduction) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a reduction; those of the parts of a batch add up to those of the whole.

    One number each for "mean", "nonzero" and "sum"; one per row, [n], for "none".
    """
    weight = terms.measure
    if how == "nonzero":
        # not(v <= 0): NaN counts and propagates
        free = terms.values.detach() <= 0
        weight = weight > free if weight.dtype == torch.bool else weight * ~free
    weight = weight.to(terms.values.dtype)
    values = terms.values * weight
    if how == "none":
        return (values, torch.ones_like(values)) if values.ndim == 1 else (values.sum(dim=1), weight.sum(dim=1))
    top = values.sum()
    return top, torch.ones_like(top) if how == "sum" else weight.sum()


def reduce(terms: Terms, how: Reduction) -> Tensor:
    """Reduce terms to their mean, their sum, the mean of those above 0 ("nonzero"), or one value per row ("none")."""
    return over(*tally(terms, how))

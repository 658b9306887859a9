"""Groupings of triplets: `Positive` (one group per positive pair) and `Triplets` (one group of all triplets).

A triplet (a, p, n) compares a negative pair with a positive pair: the negative pair loss is applied to s_an - s_ap
instead of s_an. Positive pairs are gathered into P columns, with P the maximum per row, so that a batch costs n·P·m
instead of n·m².
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.settings import Number
from nearfar._utils.shortcuts import Part, check_part
from nearfar._utils.tensors import hidden, mask_of, readable
from nearfar.groups._groupings import Grouping, Problem, Problems, Product, Values
from nearfar.links import Terms
from nearfar.miners import ScoredPairs
from nearfar.relations.layout import NOWHERE, POSITION, POSITIVE
from nearfar.relations.relation import Relation

Compare = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(s_an, s_ap, s_pn) -> the score of a triplet, to which the negative pair loss is applied."""


At = Callable[[Tensor, Tensor, Tensor], Tensor]  # (matrix, rows, columns) -> the entries at these places


def index(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The entries of a matrix at listed places."""
    return matrix[rows, columns]


def difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """Score s_an - s_ap: by how much the negative is more similar to the anchor than the positive."""
    return s_an - s_ap


def nearest_difference(s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
    """Score max(s_an, s_pn) - s_ap: the negative against the nearer of anchor and positive ("swap")."""
    return torch.maximum(s_an, s_pn) - s_ap


class Judge(Part):
    """Base class of functions that score or select triplets and expose the numbers that define them to fast paths."""

    shortcuts = ("angle", "band")
    angle: float | None = None
    """t, if the score is an `AngularScore`; else None."""
    band: float | None = None
    """m, if the selection is a `SemiHardBand`; else None."""


@dataclass(frozen=True)
class AngularScore(Judge, swift=True):
    """Score of the angular loss, 4t(s_an + s_pn) - 2(1+t) s_ap with t = tan²α: bounds the angle at the negative.

    Args:
        tan2: t = tan²α.
    """

    tan2: float

    @property
    def angle(self) -> float:  # type: ignore[override]
        return self.tan2

    def __call__(self, s_an: Tensor, s_ap: Tensor, s_pn: Tensor) -> Tensor:
        """Score of each triplet."""
        return 4 * self.tan2 * (s_an + s_pn) - 2 * (1 + self.tan2) * s_ap


@dataclass(frozen=True)
class SemiHardBand(Judge, swift=True):
    """Semi-hard triplets: the negative is farther than the positive, by less than the margin: -m < s_an - s_ap < 0.

    Args:
        margin: m.
    """

    margin: Number

    @property
    def band(self) -> float | None:  # type: ignore[override]
        return None if isinstance(self.margin, Tensor) else self.margin

    def __call__(self, score: Tensor) -> Tensor:
        """Which triplets are semi-hard, from their scores."""
        return (score < 0) & (score > -self.margin)


@dataclass(frozen=True, eq=False)
class Rule(Part, swift=True):
    """How a triplet is scored, and which triplets count.

    Args:
        compare: the score of a triplet, to which the negative pair loss is applied.
        keep: selects triplets by that score, without gradient (semi-hard); None for all.
        wants_reference: whether `compare` uses s_pn, the score between positive and negative.
        balanced: the i-th positive pair of an anchor forms a triplet with its i-th hardest negative pair only.
    """

    compare: Compare = difference
    keep: Callable[[Tensor], Tensor] | None = None
    wants_reference: bool = False
    balanced: bool = False

    @property
    def angle(self) -> float | None:
        """The number t of an angular score; None for any other score."""
        found: float | None = getattr(self.compare, "angle", None)
        return found

    @property
    def band(self) -> float | None:
        """The margin m of a selection of semi-hard triplets; None for any other."""
        found: float | None = getattr(self.keep, "band", None)
        return found

    def all(self, product: Product, pairs: ScoredPairs) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and measure [n, P, m] of every triplet, and the measure [n, P] of the positive pairs."""
        real, place = positives(pairs)
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
        if self.balanced:
            turn = torch.arange(measure.shape[1], device=measure.device)[None, :, None]
            measure = _where(measure, hardness(pairs)[:, None, :] == turn)
        return product.negative(score, -1), self._kept(score, measure), real

    def listed(
        self, product: Product, pairs: ScoredPairs, triplets: tuple[Tensor, Tensor, Tensor], *, at: At = index
    ) -> tuple[Tensor, Tensor]:
        """Losses and measure [T] of an explicit list of triplets, whose scores `at` reads from a matrix."""
        a, p, n = (x.long() for x in triplets)
        s_ap = at(pairs.scores, a, p)
        s_pn = at(pairs.reference_scores(), p, n) if self.wants_reference else s_ap
        score = self.compare(at(pairs.scores, a, n), s_ap, s_pn)
        return product.negative(score, -1), self._kept(score, torch.ones_like(score, dtype=torch.bool))

    def _kept(self, score: Tensor, measure: Tensor) -> Tensor:
        """Measure of the triplets that `keep` selects."""
        if self.keep is None:
            return measure
        keep = self.keep(score.detach()) | torch.isnan(score.detach())  # NaN is kept and propagates
        return _where(measure, keep)


def _where(measure: Tensor, keep: Tensor) -> Tensor:
    """A mask or weights, with 0 where `keep` is false."""
    return measure & keep if measure.dtype == torch.bool else measure * keep


def hardness(pairs: ScoredPairs) -> Tensor:
    """Hardness rank [n, m] of each negative pair within its row, 0 for the hardest; other pairs are ranked last."""
    order = hidden(pairs.scores.detach(), pairs.negative).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1)


def positives(pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
    """Measure [n, P] and columns [n, P] of the positive pairs of each row, padded with columns of measure 0."""
    count = max(1, pairs.relation.width(pairs.positive))
    # the first columns have the largest numbers; faster than a stable sort of the mask
    order = torch.arange(pairs.positive.shape[1], 0, -1, device=pairs.positive.device, dtype=torch.float32)
    place = (mask_of(pairs.positive) * order).topk(count, dim=1).indices
    return pairs.positive.gather(1, place), place


def widest(relation: Relation) -> int:
    """P of the dense engine: the most positives of a row where counting is free, else `width`, else m."""
    empty = torch.empty(0, device=relation.device)
    limit = relation.width(empty)
    if not readable(empty) or not limit:
        return limit
    layout = relation.layout()
    if layout is not None and layout.itself in (NOWHERE, POSITION) and limit == relation.shape[1] and relation.shape[0]:
        return int(layout.ranked().count(POSITIVE, own=layout.itself == POSITION).amax())
    tall = max(1, 2**20 // relation.shape[1])
    strips = (relation.tile(slice(i, i + tall), slice(None)).positive for i in range(0, relation.shape[0], tall))
    return max((relation.width(positive) for positive in strips), default=0)


class ByPositive(Grouping):
    """Base class of groupings that hold every reference once per positive of its anchor."""

    needs = "both"

    def depth(self, relation: Relation) -> int:
        """Number of positives per row in the dense engine, which holds n x depth x m numbers."""
        return widest(relation)


class _OfTriplets(ByPositive):
    """Base class of groupings whose members are the triplets of a rule."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = Rule() if rule is None else rule
        check_part(type(self).__name__, "rule", self.rule, Rule, "Rule()")


class Positive(_OfTriplets, swift=True):
    """One group per positive pair (a, p): its triplets with all negatives of a; reduced over positive pairs."""

    per_anchor = True
    strips = True
    scope = "positive"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        losses, measure, real = self.rule.all(product, pairs)
        # the weight of the positive pair counts in the reduction, not in its group
        shape = tuple(losses.shape)
        if real.dtype != torch.bool:
            measure = _where(pairs.negative[:, None, :].expand(shape), measure > 0)
        flat = (-1, losses.shape[-1])
        problem = Problem(product.over_negative, losses.reshape(flat), measure.reshape(flat), shape, counts=real)
        return (problem,)

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        counts = problems[0].counts
        assert counts is not None  # noqa: S101 - set by `split`
        return (Terms(values[0].reshape(counts.shape), counts),)


class Triplets(_OfTriplets, swift=True):
    """One group of all triplets of the batch, or of an explicit list of triplets."""

    takes_triplets = True
    strips = True
    scope = "triplets"

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        if pairs.triplets is None:
            losses, measure, _ = self.rule.all(product, pairs)
        else:
            losses, measure = self.rule.listed(product, pairs, pairs.triplets)
        shape = tuple(losses.shape)
        return (Problem(product.over_negative, losses.reshape(1, -1), measure.reshape(1, -1), shape),)

"""Groupings of losses of average precision: one group per positive pair (`Ranking`), or per histogram bin (`Bins`).

The average precision of an anchor is the mean, over its positives p, of (rank of p among the positives) / (rank of p
among all references). A rank counts the references that are more similar; smoothed, it is a sum of pair losses over a
group. So both losses are ordinary products: the pair loss says how much one reference counts, a `Mean` times the group
size sums these counts, and `terms` forms the quotient.
"""

import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.tensors import over, total
from nearfar.groups._groupings import Grouping, Problem, Problems, Product, Values
from nearfar.groups._triplets import ByPositive, positives
from nearfar.links import Terms
from nearfar.miners import ScoredPairs
from nearfar.relations.relation import Relation
from nearfar.sets.base import UncertaintySet


class Ranking(ByPositive, swift=True):
    """Two groups per positive pair (a, p): the positives and the negatives of a, each by its score against p's.

        term of (a, p) = 1 - R₊ / (R₊ + R₋),   R₊ = ½ + Σ_{j ∈ P_a} l(s_aj - s_ap),   R₋ = Σ_{j ∈ N_a} l(s_aj - s_ap)

    A pair loss that counts half at 0 (a sigmoid) counts p itself as ½, so that R₊ + R₋ is the rank of p, from 1. Terms
    are averaged over the positives of an anchor, and anchors without positives are left out.
    """

    per_anchor = True
    strips = True

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        real, place = positives(pairs)
        counts = over(real.to(pairs.scores.dtype), total(pairs.positive, pairs.scores)[:, None])
        ahead = pairs.scores[:, None, :] - pairs.scores.gather(1, place)[:, :, None]
        there = real[:, :, None] > 0
        return (
            _each(product.over_positive, product.positive(ahead, +1), pairs.positive, there, counts),
            _each(product.over_negative, product.negative(ahead, -1), pairs.negative, there, counts),
        )

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        counts = problems[0].counts
        assert counts is not None  # noqa: S101 - set by `split`
        near, far = (_sums(*each).reshape(counts.shape) for each in zip(problems, values, strict=True))
        near = near + 0.5
        return (Terms(far / (near + far), counts),)


class Bins(Grouping, swift=True):
    """Two groups per anchor and histogram bin, its positives and negatives; a loss is a pair's share in the bin.

        term of a = 1 - (1/|P_a|) Σ_b h₊(b) H₊(b) / H(b),   h(b) = Σ_j l(s_aj - center of b),   H(b) = h(1) + ... + h(b)

    Bins run from the most similar to the least; H counts both signs. Anchors without positives are left out.

    Args:
        count: number of steps that divide the range of scores; there is one more center.
        low: the smallest score.
        high: the largest score.
    """

    per_anchor = True
    needs = "both"
    strips = True

    def __init__(self, count: int = 10, low: float = -1.0, high: float = 1.0) -> None:
        check_whole("Bins", "count", count)
        self.count = count
        self.low = low
        self.high = high

    def depth(self, relation: Relation) -> int:
        """How often the dense engine holds each pair: once per bin center."""
        return self.count + 1

    def split(self, product: Product, pairs: ScoredPairs) -> Problems:
        centers = torch.linspace(
            self.high, self.low, self.count + 1, dtype=pairs.scores.dtype, device=pairs.scores.device
        )
        inside = pairs.scores[:, None, :] - centers[:, None]
        there = torch.ones_like(inside[:, :, :1], dtype=torch.bool)
        return (
            _each(product.over_positive, product.positive(inside, +1), pairs.positive, there),
            _each(product.over_negative, product.negative(inside, -1), pairs.negative, there),
        )

    def terms(self, product: Product, pairs: ScoredPairs, problems: Problems, values: Values) -> tuple[Terms, ...]:
        shape = (len(pairs.scores), self.count + 1)
        near, far = (_sums(problem, value).reshape(shape) for problem, value in zip(problems, values, strict=True))
        above = near.cumsum(dim=1)
        precision = over(near * above, above + far.cumsum(dim=1)).sum(dim=1)
        found = over(precision, total(pairs.positive, pairs.scores))
        both = pairs.has_positive & pairs.has_negative  # without negatives it is 0 up to rounding
        return (Terms(torch.where(both, 1 - found, 0.0), pairs.has_positive),)


def _each(
    weigh: UncertaintySet, losses: Tensor, measure: Tensor, there: Tensor, counts: Tensor | None = None
) -> Problem:
    """A problem of losses [n, p, m] with one group per row and p; the pairs of a row are repeated for each p."""
    shape = tuple(losses.shape)
    measure = measure[:, None, :].expand(shape)
    measure = measure & there if measure.dtype == torch.bool else measure * there
    flat = (-1, shape[-1])
    return Problem(weigh, losses.reshape(flat), measure.reshape(flat), shape, counts=counts)


def _sums(problem: Problem, value: Tensor) -> Tensor:
    """The sum over each group: its mean times its measure."""
    return value * total(problem.measure, problem.losses)

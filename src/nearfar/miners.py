"""Miners select the pairs that enter a loss. A miner takes `ScoredPairs` and returns fewer, or reweighted, ones.

Every miner works row by row on scores without gradient, does not depend on the later weights, and works with any
loss: `nf.losses.Contrastive(miner=nf.miners.Hard())`. Nothing here loops over anchors or classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, dataclass_transform

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.keywords import suggest_names
from nearfar._utils.settings import Settings
from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import as_bytes, hidden, readable, total
from nearfar.relations.relation import Relation
from nearfar.sets.wrapped import draw
from nearfar.similarity import Similarity

__all__ = [
    "BalancedHard",
    "DistanceWeighted",
    "Hard",
    "Miner",
    "MultiSimilarity",
    "ScoredPairs",
    "SemiHard",
    "Window",
    "present",
]


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
        triplets: an explicit list (anchor, positive, negative), if the caller gave one.
        strip: these are only some rows of the relation, with all of its columns.
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
        """Rows [n] that had any pair before mining: the denominator of "mean over anchors"."""
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
        """Scores [m, m] among the references, which give s_pn of a triplet."""
        if self.relation.square and not self.strip:
            return self.scores
        return self.similarity.scores(self.cols, self.cols).to(self.scores.dtype)

    def scores_from(self, place: Tensor) -> Tensor:
        """Scores [n, p, m] of the references `place` [n, p] against all references."""
        if self.strip:  # all m x m of them would form the matrix that strips avoid
            found = self.similarity.scores(self.cols[place.reshape(-1)], self.cols)
            return found.to(self.scores.dtype).reshape(*place.shape, -1)
        return self.reference_scores()[place]

    def keep(self, positive: Tensor | None = None, negative: Tensor | None = None) -> ScoredPairs:
        """The same pairs with a smaller mask (boolean [n, m]) or new weights (floating [n, m])."""
        return replace(
            self,
            positive=self.positive if positive is None else _narrow(self.positive, positive),
            negative=self.negative if negative is None else _narrow(self.negative, negative),
            mined=True,
        )


def present(measure: Tensor) -> Tensor:
    """Which rows [g] of a measure [g, n] have any member."""
    # torch's own `any` over a mask is thirty times slower
    top = as_bytes(measure).amax(dim=1)
    return top > 0 if measure.dtype != torch.bool or torch.compiler.is_compiling() else top.view(torch.bool)


def _narrow(measure: Tensor, by: Tensor) -> Tensor:
    return measure & by if measure.dtype == by.dtype == torch.bool else measure * by


@dataclass(frozen=True, eq=False)
class Window:
    """The pairs of t anchors that a miner keeps: a mask of positive pairs, and an interval of scores of negative ones.

    Args:
        positive: [t, P] which of the positive pairs are kept.
        low: [t] or a number; negative pairs with a score above it are kept. None for all.
        high: a number; negative pairs with a score below it are kept. None for all.
        closed: negative pairs at `low` are kept too.
        most: [t] measure of the hardest negative pairs that are kept, including all ties at the last one.
    """

    positive: Tensor
    low: Tensor | float | None = None
    high: float | None = None
    closed: bool = False
    most: Tensor | None = None


@dataclass_transform()
class Miner(Part, Settings, ABC):
    """Selects the pairs that enter a loss, from scores without gradient; its arguments may be set at any time."""

    shortcuts = ("window", "log_odds", "ordinal")
    ordinal: ClassVar[bool] = False
    """Whether only the order of an anchor's scores determines which of its pairs are kept."""
    both: ClassVar[bool] = False
    """Whether a row without positive or without negative pairs keeps none."""
    draws: ClassVar[bool] = False
    """Whether pairs are drawn at random."""

    @abstractmethod
    def forward(self, pairs: ScoredPairs) -> ScoredPairs:
        """The pairs to keep, row by row."""

    def window(self, near: Tensor, measure: Tensor, top: Tensor) -> Window | None:
        """The pairs to keep as a window, which an engine can apply without masks; None if they are not a window.

        Args:
            near: [t, P] scores of the positive pairs of t anchors.
            measure: [t, P] mask or weights of these pairs, 0 for padding.
            top: [t] largest score of a negative pair, -inf if there is none.
        """
        return None

    def log_odds(self, distances: Tensor, dim: int) -> Tensor | None:
        """Log-odds of drawing negative pairs at these distances; None for a miner that does not sample by distance.

        A miner with log-odds keeps all positive pairs, and draws equally many negative ones for each anchor.

        Args:
            distances: Euclidean distances of unit rows, of any shape.
            dim: d, the width of the embedding.
        """
        return None


class MultiSimilarity(Miner, swift=True):
    """Keep the pairs of an anchor that are out of order, up to a slack: the miner of the multi-similarity loss.

        positive: s < max of the anchor's negatives + ε        negative: s > min of the anchor's positives - ε

    A row without positive or without negative pairs keeps none.

    Args:
        epsilon: ε, the slack.
    """

    both = True

    epsilon: float = 0.1

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        s = pairs.scores
        # an empty side gives -inf or +inf, so that no pair passes
        worst_negative = hidden(s, pairs.negative).amax(dim=1, keepdim=True)
        worst_positive = hidden(s, pairs.positive, math.inf).amin(dim=1, keepdim=True)
        return pairs.keep(positive=s - self.epsilon < worst_negative, negative=s + self.epsilon > worst_positive)

    def window(self, near: Tensor, measure: Tensor, top: Tensor) -> Window:  # noqa: D102
        least = hidden(near, measure, math.inf).amin(dim=1)
        return Window((measure > 0) & (near - self.epsilon < top[:, None]), least - self.epsilon)


class Hard(Miner, swift=True):
    """Keep each anchor's hardest positive and hardest negative pair (batch-hard); ties are all kept."""

    ordinal = True

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        s = pairs.scores
        hardest_negative = hidden(s, pairs.negative).amax(dim=1, keepdim=True)
        hardest_positive = hidden(s, pairs.positive, math.inf).amin(dim=1, keepdim=True)
        return pairs.keep(positive=s == hardest_positive, negative=s == hardest_negative)

    def window(self, near: Tensor, measure: Tensor, top: Tensor) -> Window:  # noqa: D102
        least = hidden(near, measure, math.inf).amin(dim=1, keepdim=True)
        return Window((measure > 0) & (near == least), top, closed=True)


class SemiHard(Miner, swift=True):
    """Keep the semi-hard negatives: less similar than a threshold λ, which represents the positive, by less than m.

        λ - m < s < λ

    Qi et al. 2020, section 4.2.2. All positive pairs stay. (Semi-hard triplets compare with each positive:
    `nf.losses.Triplet(mining="semihard")`.)

    Args:
        threshold: λ.
        margin: m; None keeps everything below λ.
    """

    threshold: float = 0.5
    margin: float | None = 0.2

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        near = pairs.scores < self.threshold
        if self.margin is not None:
            near = near & (pairs.scores > self.threshold - self.margin)
        return pairs.keep(negative=near)

    def window(self, near: Tensor, measure: Tensor, top: Tensor) -> Window:  # noqa: D102
        low = None if self.margin is None else self.threshold - self.margin
        return Window(measure > 0, low, self.threshold)


class BalancedHard(Miner, swift=True):
    """Keep, for each anchor, all positive pairs and as many of its hardest negative ones.

    Contrastive-hard and margin-hard of Can et al. 2019. Negative pairs tied at the last place are all kept.
    """

    ordinal = True

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        wanted = total(pairs.positive, pairs.scores)[:, None]
        ranked, order = hidden(pairs.scores, pairs.negative).sort(dim=1, descending=True)
        measure = pairs.negative.to(pairs.scores.dtype).gather(1, order)
        # the last place that begins before the measure of the positive pairs is used up
        begun = (measure.cumsum(dim=1) - measure < wanted).sum(dim=1, keepdim=True)
        last = ranked.gather(1, (begun - 1).clamp(min=0))
        return pairs.keep(negative=(pairs.scores >= last) & (wanted > 0))

    def window(self, near: Tensor, measure: Tensor, top: Tensor) -> Window:  # noqa: D102
        return Window(measure > 0, closed=True, most=total(measure, near))


class DistanceWeighted(Miner, swift=True):
    """Draw, for each anchor, as many negative pairs as it has positive ones, with probability ∝ 1 / q(d).

    q(d) ∝ d^{dim-2} (1 - d²/4)^{(dim-3)/2} is the density of distances between random points of the unit sphere
    (Wu et al. 2017), so that distances below `upper` are drawn uniformly. All positive pairs stay. Draws are with
    replacement: a pair drawn twice counts twice. Scores must be those of unit rows.

    Args:
        cutoff: distances below are treated as this one, which bounds the weights.
        upper: no pair at this distance or beyond is drawn: its loss is zero under the usual margins.
        sample: False keeps every pair with its expected count instead of drawing.
    """

    cutoff: Annotated[float, check_positive] = 0.5
    upper: Annotated[float, check_positive] = 1.4
    _: KW_ONLY
    sample: bool = True

    @property
    def draws(self) -> bool:  # type: ignore[override] # noqa: D102
        return self.sample

    def log_odds(self, distances: Tensor, dim: int) -> Tensor | None:  # noqa: D102
        return self._log_odds(distances, dim) if self.sample else None

    def _log_odds(self, distances: Tensor, dim: int) -> Tensor:
        """-log q(d), and -inf from `upper` on."""
        d = distances.clamp(self.cutoff, 2 - torch.finfo(distances.dtype).eps)  # the last number below 2
        log_weight = torch.log1p(-0.25 * d**2) * (0.5 * (3 - dim)) + d.log() * (2 - dim)
        near = distances < min(self.upper, 2.0) if self.cutoff < self.upper else torch.zeros_like(d, dtype=torch.bool)
        return torch.where(near, log_weight, -math.inf)

    def probabilities(self, pairs: ScoredPairs) -> Tensor:
        """The probability [n, m] of drawing each negative pair: rows sum to 1, or are 0 if no pair qualifies."""
        log_weight = hidden(self._log_odds(pairs.distances(), pairs.dim), pairs.negative > 0)
        top = log_weight.amax(dim=1, keepdim=True)
        # one maximum per row, not one per batch: in high dimensions a whole row could underflow
        weight = torch.where(torch.isfinite(log_weight), torch.exp(log_weight - top), 0.0)
        weight = weight if pairs.negative.dtype == torch.bool else weight * pairs.negative
        norm = weight.sum(dim=1, keepdim=True)
        return weight / torch.where(norm > 0, norm, torch.ones_like(norm))

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        chance = self.probabilities(pairs)
        wanted = total(pairs.positive, chance)[:, None]
        most = chance.shape[1]
        if readable(wanted):  # as many draws as the row with the most positive pairs needs
            most = min(most, max(1, math.ceil(float(wanted.amax())))) if len(wanted) else 1
        counts = draw(chance, most, wanted) if self.sample else chance * wanted
        return replace(pairs, negative=torch.where(pairs.negative > 0, counts, 0.0))


__getattr__ = suggest_names("nearfar.miners", __all__)

"""Miners of pairs: by a slack, by margins, the hardest share of all, or evenly over distances."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar.miners import MultiSimilarity, ScoredPairs
from nearfar.pml._settings import MinerSettings
from nearfar.pml._tuples import Indices
from nearfar.pml.distances import BaseDistance, CosineSimilarity, score_of
from nearfar.pml.miners.base import BaseMiner, listed
from nearfar.relations.index_tuples import as_pairs

__all__ = ["HDCMiner", "MultiSimilarityMiner", "PairMarginMiner", "UniformHistogramMiner"]


class MultiSimilarityMiner(BaseMiner):
    """Positive pairs less similar than the row's hardest negative pair plus ε, and negative pairs likewise.

    The same as `nf.miners.MultiSimilarity`.

    Args:
        epsilon: ε.
        settings: see `MinerSettings`; the distance is `CosineSimilarity` where none is given.
    """

    def __init__(self, epsilon: float = 0.1, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(**settings)
        self.epsilon = epsilon
        self.add_to_recordable_attributes(name="epsilon")

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _choose(self, pairs: ScoredPairs) -> Indices:
        a, p, *negative = listed(MultiSimilarity(self.epsilon)(pairs))
        # in PML's order, the least number of an anchor first: `NPairsLoss` takes the first pair of a class
        order = torch.argsort(score_of(self.distance, pairs.scores[a, p]), stable=True)
        order = order[torch.argsort(a[order], stable=True)]
        return a[order], p[order], *negative


class PairMarginMiner(BaseMiner):
    """Positive pairs farther than `pos_margin`, negative pairs nearer than `neg_margin`.

    Args:
        pos_margin: in the distance's own units.
        neg_margin: likewise.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.

    Attributes:
        pos_pair_dist: mean distance of all positive pairs, with `collect_stats`.
        neg_pair_dist: mean distance of all negative pairs, likewise.
    """

    def __init__(self, pos_margin: float = 0.2, neg_margin: float = 0.8, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(**settings)
        self.pos_margin = pos_margin
        self.neg_margin = neg_margin
        self.pos_pair_dist = self.neg_pair_dist = 0.0
        self.add_to_recordable_attributes(list_of_names=["pos_margin", "neg_margin"])
        self.add_to_recordable_attributes(list_of_names=["pos_pair_dist", "neg_pair_dist"], is_stat=True)

    def _choose(self, pairs: ScoredPairs) -> Indices:
        if self.collect_stats:
            numbers = score_of(self.distance, pairs.scores)
            near, far = numbers[pairs.positive], numbers[pairs.negative]
            self.pos_pair_dist = float(near.mean()) if len(near) else 0.0
            self.neg_pair_dist = float(far.mean()) if len(far) else 0.0
        low, high = score_of(self.distance, float(self.pos_margin)), score_of(self.distance, float(self.neg_margin))
        return listed(pairs.keep(positive=pairs.scores < low, negative=pairs.scores > high))


class HDCMiner(BaseMiner):
    """The hardest share of all positive pairs, and of all negative ones (hard-aware deeply cascaded embedding).

    Args:
        filter_percentage: the share, in (0, 1], rounded up to whole pairs.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.

    Attributes:
        was_set_externally: pairs are chosen among those that `set_idx_externally` got, not among all.
    """

    a1: Tensor | None
    p: Tensor | None
    a2: Tensor | None
    n: Tensor | None

    def __init__(self, filter_percentage: float = 0.5, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(**settings)
        if not 0 < filter_percentage <= 1:
            raise ValueError(f"HDCMiner: filter_percentage must lie in (0, 1], but came as {filter_percentage!r}.")
        self.filter_percentage = filter_percentage
        self.add_to_recordable_attributes(name="filter_percentage")
        self.reset_idx()

    def set_idx_externally(self, external_indices_tuple: Indices, labels: Tensor) -> None:
        """Choose from now on among these pairs; each call leaves those that it chose to the next one."""
        self.a1, self.p, self.a2, self.n = as_pairs(external_indices_tuple)
        self.was_set_externally = True

    def reset_idx(self) -> None:
        """Choose among all pairs again."""
        self.a1 = self.p = self.a2 = self.n = None
        self.was_set_externally = False

    def _choose(self, pairs: ScoredPairs) -> Indices:
        given = (self.a1, self.p, self.a2, self.n) if self.was_set_externally else listed(pairs)
        a1, p, a2, n = (part for part in given if part is not None)
        hard, far = self._hardest(-pairs.scores[a1, p]), self._hardest(pairs.scores[a2, n])
        self.a1, self.p, self.a2, self.n = a1[hard], p[hard], a2[far], n[far]
        return self.a1, self.p, self.a2, self.n

    def _hardest(self, hardness: Tensor) -> Tensor:
        """Places of the hardest pairs, hardest first."""
        return torch.topk(hardness, math.ceil(self.filter_percentage * len(hardness))).indices


class UniformHistogramMiner(BaseMiner):
    """Pairs drawn evenly over distances: equally many, with replacement, from each bin that has any.

    Bins divide the range of the distances of the positive pairs, and that of the negative pairs, evenly. Draws follow
    `torch.manual_seed` as in PML.

    Args:
        num_bins: how many bins.
        pos_per_bin: how many positive pairs are drawn from each.
        neg_per_bin: how many negative pairs.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    def __init__(
        self, num_bins: int = 100, pos_per_bin: int = 10, neg_per_bin: int = 10, **settings: Unpack[MinerSettings]
    ) -> None:
        super().__init__(**settings)
        for name, value in (("num_bins", num_bins), ("pos_per_bin", pos_per_bin), ("neg_per_bin", neg_per_bin)):
            check_whole("UniformHistogramMiner", name, value)
        self.num_bins = num_bins
        self.pos_per_bin = pos_per_bin
        self.neg_per_bin = neg_per_bin
        self.add_to_recordable_attributes(list_of_names=["pos_per_bin", "neg_per_bin"])

    def _choose(self, pairs: ScoredPairs) -> Indices:
        a1, p, a2, n = listed(pairs)
        numbers = score_of(self.distance, pairs.scores)
        near = self._drawn(numbers[a1, p], self.pos_per_bin)
        far = self._drawn(numbers[a2, n], self.neg_per_bin)
        return a1[near], p[near], a2[far], n[far]

    def _drawn(self, numbers: Tensor, count: int) -> Tensor:
        """Places of `count` pairs of every bin that has any, bin after bin."""
        if not len(numbers):
            return torch.zeros(0, dtype=torch.int64, device=numbers.device)
        lowest, highest = numbers.aminmax()
        edges = torch.linspace(
            lowest.item(), highest.item(), self.num_bins + 1, dtype=numbers.dtype, device=numbers.device
        )
        inner = edges[1:-1].contiguous()  # the first bin begins with the smallest, the last ends with the largest
        bins = torch.searchsorted(inner, numbers, right=True)
        order = bins.argsort(stable=True)
        sizes = torch.bincount(bins, minlength=self.num_bins).tolist()
        # one draw per bin, as in PML, so that one seed gives both libraries the same pairs
        places = [
            part[torch.multinomial(torch.ones(len(part), device=part.device), count, replacement=True)]
            for part in torch.split(order, sizes)
            if len(part)
        ]
        return torch.cat(places)

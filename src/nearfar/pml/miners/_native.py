"""PML's miners that can choose pairs from masks, without sorting rows or listing all pairs and triplets first."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pytorch_metric_learning import miners
from torch import Tensor

from nearfar._utils.tensors import hidden
from nearfar.pml._mined import Mined
from nearfar.pml._native import SCALARS, Indices, is_ours, masks, suit

__all__ = ["BatchHardMiner", "MultiSimilarityMiner", "Native", "PairMarginMiner", "TripletMarginMiner"]


class Native:
    """Mixin placed before a PML miner; `choose` computes the indices from scores and masks."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that `choose` reads."""

    # attributes of PML's class
    distance: Any

    def choose(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Mined | None:
        """Choose pairs; returns the index tuple, or None if PML must compute it.

        Args:
            scores: [n, m], larger = more similar.
            positive: [n, m] mask.
            negative: [n, m] mask.
            sign: sign of scores relative to PML's distance: 1 for similarities, -1 for distances.
        """
        return None

    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Indices:
        """Mine the batch; arguments and result as in PML."""
        found = self._mine(embeddings, labels, ref_emb, ref_labels)
        if found is None:
            indices: Indices = super().forward(embeddings, labels, ref_emb, ref_labels)  # type: ignore[misc]
            return indices
        self.output_assertion(found)  # type: ignore[attr-defined]
        return found

    def _mine(self, embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> Mined | None:
        if not is_ours(self):
            return None
        if not suit(embeddings, labels, ref_emb, ref_labels):
            return None
        if not all(isinstance(getattr(self, name), SCALARS) for name in self.settings):
            return None
        with torch.no_grad():
            others = ref_emb
            if ref_emb is None and not type(self.distance).__module__.startswith("pytorch_metric_learning."):
                others = embeddings  # a custom distance may need both; PML's own would normalize each once
            numbers: Tensor = self.distance(embeddings, others)
            if not math.isfinite(float(numbers.sum())):
                return None  # comparisons with NaN are false, and PML compares in another order
            inverted = self.distance.is_inverted
            scores = numbers if inverted else -numbers
            return self.choose(scores, *masks(labels, ref_labels), 1 if inverted else -1)


class MultiSimilarityMiner(Native, miners.MultiSimilarityMiner):
    """PML's MultiSimilarityMiner."""

    settings = ("epsilon",)

    def choose(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Mined:
        hardest = hidden(scores, negative).amax(dim=1, keepdim=True)
        farthest = hidden(scores, positive, math.inf).amin(dim=1, keepdim=True)
        found = _listed(positive & (scores - self.epsilon < hardest), negative & (scores + self.epsilon > farthest))
        # in PML's order, hardest positives of a row first, because `NPairsLoss` takes the first pair of a class
        a, p, *rest = found
        order = torch.argsort(scores[a, p], stable=True)
        order = order[torch.argsort(a[order], stable=True)]
        return Mined((a[order], p[order], *rest), *found.masks((len(scores), scores.shape[1])) or ())


class PairMarginMiner(Native, miners.PairMarginMiner):
    """PML's PairMarginMiner."""

    settings = ("pos_margin", "neg_margin")

    def choose(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Mined:
        return _listed(positive & (scores < sign * self.pos_margin), negative & (scores > sign * self.neg_margin))


class BatchHardMiner(Native, miners.BatchHardMiner):
    """PML's BatchHardMiner."""

    settings = ("pos_strategy", "neg_strategy", "allowed_pos_range", "allowed_neg_range")

    def choose(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Mined | None:
        if (self.pos_strategy, self.neg_strategy) != (self.HARD, self.HARD):
            return None
        if self.allowed_pos_range is not None or self.allowed_neg_range is not None:
            return None
        far, near = hidden(scores, positive, math.inf).min(dim=1), hidden(scores, negative).max(dim=1)
        (anchors,) = torch.nonzero((far.values < math.inf) & (near.values > -math.inf), as_tuple=True)
        return Mined((anchors, far.indices[anchors], near.indices[anchors]))


class TripletMarginMiner(Native, miners.TripletMarginMiner):
    """PML's TripletMarginMiner."""

    settings = ("margin", "type_of_triplets")

    def choose(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Mined:
        a, p = torch.nonzero(positive, as_tuple=True)
        gap = scores[a, p][:, None] - scores[a]
        keep = gap > self.margin if self.type_of_triplets == "easy" else gap <= self.margin
        if self.type_of_triplets == "hard":
            keep &= gap <= 0
        elif self.type_of_triplets == "semihard":
            keep &= gap > 0
        pair, n = torch.nonzero(keep & negative[a], as_tuple=True)
        return Mined((a[pair], p[pair], n))


def _listed(positive: Tensor, negative: Tensor) -> Mined:
    """The index tuple of the pairs in two masks."""
    indices = (*torch.nonzero(positive, as_tuple=True), *torch.nonzero(negative, as_tuple=True))
    return Mined(indices, positive, negative)

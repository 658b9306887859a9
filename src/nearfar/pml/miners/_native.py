"""PML's miners that can choose pairs from masks, without sorting rows or listing all pairs and triplets first.

On a GPU what precedes the listing is recorded as a CUDA graph, because launching its kernels takes longer than their
work.
"""

import math
from typing import Any, ClassVar

import torch
from pytorch_metric_learning import miners
from torch import Tensor

from nearfar._utils.tensors import hidden
from nearfar.engines.recordings import Given, Replays
from nearfar.pml._native import SCALARS, Indices, Mined, find_similarity, is_ours, keep, masks, record, suit

__all__ = ["BatchHardMiner", "MultiSimilarityMiner", "Native", "PairMarginMiner", "TripletMarginMiner"]


class Native:
    """Mixin placed before a PML miner; `mark` chooses pairs from scores and masks, and `list_pairs` lists them."""

    settings: ClassVar[tuple[str, ...]] = ()  # attributes that `mark` and `list_pairs` read
    reads: ClassVar[tuple[str, ...]] = ()  # those of them that are read from a tensor
    least: ClassVar[int] = 0  # number of rows below which PML is faster on a CPU
    carried: ClassVar[int] = 2  # how many marks, the last ones, go with the index tuple

    # attributes of PML's class
    distance: Any

    def knows(self) -> bool:
        """Whether our code supports the present settings."""
        return True

    def mark(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Indices:
        """Tensors that say which pairs are chosen; their shapes depend on the shapes of the arguments alone.

        Scores [n, m] are larger for more similar rows; `sign` is theirs relative to PML's distance: -1 for distances.
        """
        return scores, positive, negative

    def list_pairs(self, *marks: Tensor) -> Indices:
        """The index tuple of what `mark` chose: of two masks, unless a miner says otherwise."""
        *_, positive, negative = marks
        return *torch.nonzero(positive, as_tuple=True), *torch.nonzero(negative, as_tuple=True)

    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Indices:
        """Mine the batch; arguments and result as in PML."""
        found = self._mine(embeddings, labels, ref_emb, ref_labels)
        if found is None:
            indices: Indices = super().forward(embeddings, labels, ref_emb, ref_labels)  # type: ignore[misc]
            return indices
        self.output_assertion(found)  # type: ignore[attr-defined]
        self.__dict__["_kept"].refresh()  # PML has counted the pairs
        return found

    def _mine(self, embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> Mined | None:
        here = isinstance(embeddings, Tensor) and embeddings.ndim > 0 and embeddings.device.type == "cpu"
        if here and len(embeddings) < self.least:
            return None
        kept = keep(self, self._look)
        if kept.value is None or not suit(embeddings, labels, ref_emb, ref_labels):
            return None
        given = embeddings, labels, ref_emb, ref_labels
        key, replays = kept.value
        with torch.no_grad():
            found = None if key is None else record(replays, key, _run, self, given)
            finite, *marks = self._marks(*given) if found is None else found
            # comparisons with NaN are false, and PML compares in another order
            if not finite:
                return None
            shape = len(embeddings), len(embeddings if ref_emb is None else ref_emb)
            return Mined(self.list_pairs(*marks), tuple(marks[len(marks) - self.carried :]), shape)

    def _look(self) -> tuple[Any, Replays] | None:
        """The settings if they can be recorded, and the recordings; None if PML must mine."""
        if not is_ours(self) or not self.knows():
            return None
        values = tuple(getattr(self, name) for name in self.settings)
        if not all(isinstance(value, SCALARS) for value in values):
            return None
        known = find_similarity(self.distance)
        return known and (values, known[2]), self.__dict__.setdefault("_replays", Replays())

    def _marks(self, embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> Indices:
        """Whether all scores are finite, and the marks."""
        others = ref_emb
        if ref_emb is None and not type(self.distance).__module__.startswith("pytorch_metric_learning."):
            others = embeddings  # a custom distance may need both; PML's own would normalize each once
        numbers: Tensor = self.distance(embeddings, others)
        scores, sign = (numbers, 1) if self.distance.is_inverted else (-numbers, -1)
        whole = numbers.sum()
        return whole - whole == 0, *self.mark(scores, *masks(labels, ref_labels), sign)


class MultiSimilarityMiner(Native, miners.MultiSimilarityMiner):
    """PML's MultiSimilarityMiner."""

    settings = ("epsilon",)

    def mark(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Indices:
        hardest = hidden(scores, negative).amax(dim=1, keepdim=True)
        farthest = hidden(scores, positive, math.inf).amin(dim=1, keepdim=True)
        return scores, positive & (scores - self.epsilon < hardest), negative & (scores + self.epsilon > farthest)

    def list_pairs(self, *marks: Tensor) -> Indices:
        scores, positive, negative = marks
        a, p = torch.nonzero(positive, as_tuple=True)
        # in PML's order, hardest positives of a row first, because `NPairsLoss` takes the first pair of a class
        order = torch.argsort(scores[a, p], stable=True)
        order = order[torch.argsort(a[order], stable=True)]
        return a[order], p[order], *torch.nonzero(negative, as_tuple=True)


class PairMarginMiner(Native, miners.PairMarginMiner):
    """PML's PairMarginMiner."""

    settings = ("pos_margin", "neg_margin")

    def mark(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Indices:
        return positive & (scores < sign * self.pos_margin), negative & (scores > sign * self.neg_margin)


class BatchHardMiner(Native, miners.BatchHardMiner):
    """PML's BatchHardMiner."""

    carried = 3
    settings = ("pos_strategy", "neg_strategy", "allowed_pos_range", "allowed_neg_range")

    def knows(self) -> bool:
        hard = (self.pos_strategy, self.neg_strategy) == (self.HARD, self.HARD)
        return hard and self.allowed_pos_range is None and self.allowed_neg_range is None

    def mark(self, scores: Tensor, positive: Tensor, negative: Tensor, sign: int) -> Indices:
        far, near = hidden(scores, positive, math.inf).min(dim=1), hidden(scores, negative).max(dim=1)
        return (far.values < math.inf) & (near.values > -math.inf), far.indices, near.indices

    def list_pairs(self, *marks: Tensor) -> Indices:
        anchors, far, near = marks
        (a,) = torch.nonzero(anchors, as_tuple=True)
        return a, far[a], near[a]


class TripletMarginMiner(Native, miners.TripletMarginMiner):
    """PML's TripletMarginMiner."""

    least = 48
    carried = 0
    settings = ("margin", "type_of_triplets")

    def list_pairs(self, *marks: Tensor) -> Indices:
        scores, positive, negative = marks
        a, p = torch.nonzero(positive, as_tuple=True)
        gap = scores[a, p][:, None] - scores[a]
        keep = gap > self.margin if self.type_of_triplets == "easy" else gap <= self.margin
        if self.type_of_triplets == "hard":
            keep &= gap <= 0
        elif self.type_of_triplets == "semihard":
            keep &= gap > 0
        pair, n = torch.nonzero(keep & negative[a], as_tuple=True)
        return a[pair], p[pair], n


def _run(miner: Native, given: Given) -> Indices:
    return miner._marks(*given)

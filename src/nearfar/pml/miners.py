"""PML's miners: they choose pairs or triplets of a batch, as index tuples.

A miner that returns pairs gives (anchor, positive, anchor, negative), one that returns triplets (anchor, positive,
negative). Where nearfar has a miner of the same rule, that one is used and its mask is converted to a list.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nearfar._utils.checks import check_choice
from nearfar._utils.shortcuts import exactly, touched
from nearfar._utils.tensors import check_embeddings, check_labels, hidden
from nearfar.engines.listed import valid_rows
from nearfar.groups.triplets import positives
from nearfar.miners import DistanceWeighted, MultiSimilarity, ScoredPairs
from nearfar.pml._names import check_names
from nearfar.pml._settings import MinerSettings, chosen_distance
from nearfar.pml._theirs import theirs
from nearfar.pml._tuples import Indices, draw_triplets
from nearfar.pml.distances import CosineSimilarity, Distance, LpDistance
from nearfar.relations.relation import Relation
from nearfar.similarity import SAMPLE, NegEuclidean, NegSquaredEuclidean, Similarity, called, origin

__all__ = [
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "DistanceWeightedMiner",
    "MultiSimilarityMiner",
    "PairMarginMiner",
    "TripletMarginMiner",
]

__getattr__, __dir__ = theirs(__name__)

Range = tuple[float, float]
FEW = 2**16
"""Number of pairs up to which distances are computed in float64; the search for an origin would take longer."""


class Miner(nn.Module, ABC):
    """Base class of miners: index tuples from embeddings and labels, without gradient.

    Attributes:
        distance: PML's distance.
        num_triplets: how many triplets the last call returned (miners of triplets).
        num_pos_pairs: how many positive pairs the last call returned (miners of pairs).
        num_neg_pairs: how many negative pairs.
    """

    parts = 4
    """How many tensors the tuple has: 4 for pairs, 3 for triplets."""

    def __init__(self, settings: MinerSettings, default: Distance, *, fixed: bool = False) -> None:
        super().__init__()
        check_names(self, settings, MinerSettings)
        self.distance = chosen_distance(type(self).__name__, settings, default, fixed=fixed)
        self.num_triplets = self.num_pos_pairs = self.num_neg_pairs = 0

    @abstractmethod
    def mine(self, pairs: ScoredPairs) -> Indices:
        """Choose the index tuple from scored pairs."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Indices:
        """Compute the index tuple.

        Args:
            embeddings: [n, d].
            labels: [n] integers.
            ref_emb: [m, d] reference rows; by default the batch is its own reference and no row is paired with itself.
            ref_labels: [m] integers.
            ids: [n] the sample of each row; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise.
        """
        with torch.no_grad():
            pairs = self._pairs(embeddings, labels, ref_emb, ref_labels, ids, ref_ids)
            if pairs is None:
                found: Indices = tuple(torch.zeros(self.parts, 0, dtype=torch.int64, device=embeddings.device))
            else:
                found = self.mine(pairs)
        if self.parts == 3:
            self.num_triplets = len(found[0])
        else:
            self.num_pos_pairs, self.num_neg_pairs = len(found[0]), len(found[2])
        return found

    def _pairs(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        ids: Tensor | None,
        ref_ids: Tensor | None,
    ) -> ScoredPairs | None:
        """Score the pairs; None if there are no rows."""
        owner = type(self).__name__
        check_embeddings(owner, "embeddings", embeddings)
        labels = labels.to(embeddings.device) if isinstance(labels, Tensor) else labels
        check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
        if (ref_emb is None) != (ref_labels is None):
            raise ValueError(f"{owner}: ref_emb and ref_labels belong together, but only one of them came.")
        if ref_emb is not None and ref_labels is not None:
            check_embeddings(owner, "ref_emb", ref_emb)
            ref_labels = ref_labels.to(embeddings.device)
            check_labels(owner, "ref_labels", ref_labels, len(ref_emb), embeddings.device)
        relation = Relation.from_labels(labels, ref_labels, ids=ids, ref_ids=ref_ids)
        if 0 in relation.shape:
            return None
        similarity = called(self.distance.similarity)
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        x, y = embeddings.to(dtype), None if ref_emb is None else ref_emb.to(dtype)
        rows, cols, scores = _scored(similarity, x, y)
        return ScoredPairs(scores, *_masks(relation), *valid_rows(relation), relation, similarity, rows, cols)


def _scored(similarity: Similarity, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Prepared rows and references, and their scores [n, m], without gradient."""
    plain = exactly(similarity, NegEuclidean, NegSquaredEuclidean) and touched((similarity,)) is None
    if not plain or x.dtype == torch.float64 or x.device.type == "mps":
        rows, cols = similarity.prepared(x, y)
        return rows, cols, similarity.scores(rows, cols)
    # float64: distances of near rows drown in the rounding of their norms; many rows are moved among each other instead
    rows = _wide(similarity, x)
    cols = rows if y is None else _wide(similarity, y)
    if len(rows) * len(cols) > FEW:
        start = origin(torch.cat([z[:: max(1, len(z) // SAMPLE)] for z in ((rows,) if y is None else (rows, cols))]))
        rows = (rows - start).to(x.dtype)
        cols = rows if y is None else (cols - start).to(x.dtype)
    # the product, and all that follows, in one matrix
    here = (rows * rows).sum(dim=1)
    there = here if y is None else (cols * cols).sum(dim=1)
    scores = torch.addmm(there, rows, cols.T, alpha=-2).add_(here[:, None]).clamp_min_(0.0).to(x.dtype)
    scores = scores.sqrt_() if exactly(similarity, NegEuclidean) else scores
    rows = rows.to(x.dtype)
    return rows, rows if y is None else cols.to(x.dtype), scores.neg_()


def _wide(similarity: Similarity, x: Tensor) -> Tensor:
    """Rows in float64, divided by their norms if the similarity does so; squares of float32 numbers do not overflow."""
    return normalize(x.double(), dim=1, eps=1e-300) if similarity.normalize else x.double()


def _masks(relation: Relation) -> tuple[Tensor, Tensor]:
    """Masks [n, m] of the positive and of the negative pairs."""
    plain = relation.plain_labels()
    if plain is None or not relation.square:
        tile = relation.dense()
        return tile.positive, tile.negative
    same = plain[0][:, None] == plain[1]
    return same.clone().fill_diagonal_(False), ~same


def _listed(pairs: ScoredPairs) -> Indices:
    return (*torch.nonzero(pairs.positive, as_tuple=True), *torch.nonzero(pairs.negative, as_tuple=True))


class MultiSimilarityMiner(Miner):
    """Positive pairs less similar than the row's hardest negative pair plus ε, and negative pairs likewise.

    The same as `nf.miners.MultiSimilarity`.

    Args:
        epsilon: ε.
        settings: see `MinerSettings`; the distance is `CosineSimilarity` where none is given.
    """

    def __init__(self, epsilon: float = 0.1, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(settings, CosineSimilarity())
        self.epsilon = epsilon

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        return _listed(MultiSimilarity(self.epsilon)(pairs))


class PairMarginMiner(Miner):
    """Positive pairs farther than `pos_margin`, negative pairs nearer than `neg_margin`.

    Args:
        pos_margin: in the distance's own units.
        neg_margin: likewise.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    def __init__(self, pos_margin: float = 0.2, neg_margin: float = 0.8, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(settings, LpDistance())
        self.pos_margin = pos_margin
        self.neg_margin = neg_margin

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        low, high = self.distance.score(float(self.pos_margin)), self.distance.score(float(self.neg_margin))
        return _listed(pairs.keep(positive=pairs.scores < low, negative=pairs.scores > high))


class TripletMarginMiner(Miner):
    """Triplets chosen by g = s_ap - s_an, by how much the negative is farther than the positive.

    Args:
        margin: m.
        type_of_triplets: "all" that violate the margin (g ≤ m); of those "hard" (g ≤ 0) or "semihard" (g > 0); or
            "easy", the ones that do not violate it.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    parts = 3

    def __init__(self, margin: float = 0.2, type_of_triplets: str = "all", **settings: Unpack[MinerSettings]) -> None:
        super().__init__(settings, LpDistance())
        check_choice("TripletMarginMiner", "type_of_triplets", type_of_triplets, ("all", "hard", "semihard", "easy"))
        self.margin = margin
        self.type_of_triplets = type_of_triplets

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        real, place = positives(pairs)
        gap = pairs.scores.gather(1, place)[:, :, None] - pairs.scores[:, None, :]
        keep = gap > self.margin if self.type_of_triplets == "easy" else gap <= self.margin
        if self.type_of_triplets == "hard":
            keep &= gap <= 0
        elif self.type_of_triplets == "semihard":
            keep &= gap > 0
        anchor, slot, negative = torch.nonzero(keep & real[:, :, None] & pairs.negative[:, None, :], as_tuple=True)
        return anchor, place[anchor, slot], negative


class DistanceWeightedMiner(Miner):
    """Triplets whose negatives are drawn uniformly over distances: `nf.miners.DistanceWeighted`.

    An anchor has as many triplets as its class has columns. Draws follow `torch.manual_seed`.

    Args:
        cutoff: smaller distances are treated as this one.
        nonzero_loss_cutoff: negatives at this distance or beyond are not drawn.
        settings: see `MinerSettings`; the distance must be `LpDistance()`.
    """

    parts = 3

    def __init__(
        self, cutoff: float = 0.5, nonzero_loss_cutoff: float = 1.4, **settings: Unpack[MinerSettings]
    ) -> None:
        super().__init__(settings, LpDistance(), fixed=True)
        self.cutoff = float(cutoff)
        self.nonzero_loss_cutoff = float(nonzero_loss_cutoff)

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        chance = DistanceWeighted(self.cutoff, self.nonzero_loss_cutoff).probabilities(pairs)
        return draw_triplets(pairs.positive, chance, pairs.relation.dense().same.sum(dim=1))


class BatchEasyHardMiner(Miner):
    """One positive and one negative pair per anchor, each by its own strategy.

    Args:
        pos_strategy: "hard": the farthest positive; "easy": the nearest; "semihard": the farthest that is nearer than
            the negative; "all": all of them.
        neg_strategy: "hard": the nearest negative; "easy": the farthest; "semihard": the nearest that is farther than
            the positive; "all": all of them.
        allowed_pos_range: (low, high), in the distance's own units; positives outside are not chosen.
        allowed_neg_range: likewise for negatives.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    HARD, SEMIHARD, EASY, ALL = "hard", "semihard", "easy", "all"

    def __init__(
        self,
        pos_strategy: str = EASY,
        neg_strategy: str = SEMIHARD,
        allowed_pos_range: Range | None = None,
        allowed_neg_range: Range | None = None,
        **settings: Unpack[MinerSettings],
    ) -> None:
        super().__init__(settings, LpDistance())
        owner = type(self).__name__
        for name, value in (("pos_strategy", pos_strategy), ("neg_strategy", neg_strategy)):
            check_choice(owner, name, value, (self.HARD, self.SEMIHARD, self.EASY, self.ALL))
        if self.SEMIHARD in (pos_strategy, neg_strategy) and {pos_strategy, neg_strategy} <= {self.SEMIHARD, self.ALL}:
            raise ValueError(
                f'{owner}: "semihard" compares with one pair of the other side, so that side must be "hard" or "easy", '
                f"but {pos_strategy!r} and {neg_strategy!r} came."
            )
        self.pos_strategy = pos_strategy
        self.neg_strategy = neg_strategy
        self.allowed_pos_range = allowed_pos_range
        self.allowed_neg_range = allowed_neg_range

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        positive, negative = _within(self.distance, pairs, self.allowed_pos_range, self.allowed_neg_range)
        if self.pos_strategy == self.SEMIHARD:
            n, has_n = _nearest(pairs.scores, negative, nearest=self.neg_strategy == self.HARD)
            positive = positive & (pairs.scores > pairs.scores.gather(1, n))
            p, has_p = _nearest(pairs.scores, positive, nearest=False)
        else:
            p, has_p = _nearest(pairs.scores, positive, nearest=self.pos_strategy == self.EASY)
            if self.neg_strategy == self.SEMIHARD:
                negative = negative & (pairs.scores < pairs.scores.gather(1, p))
            n, has_n = _nearest(pairs.scores, negative, nearest=self.neg_strategy != self.EASY)
        if self.ALL not in (self.pos_strategy, self.neg_strategy):
            has_p = has_n = has_p & has_n
        every = torch.arange(len(p), device=p.device)
        a1, a2 = every[has_p], every[has_n]
        kept_positive = (
            torch.nonzero(pairs.positive, as_tuple=True) if self.pos_strategy == self.ALL else (a1, p[a1, 0])
        )
        kept_negative = (
            torch.nonzero(pairs.negative, as_tuple=True) if self.neg_strategy == self.ALL else (a2, n[a2, 0])
        )
        return (*kept_positive, *kept_negative)


class BatchHardMiner(Miner):
    """The farthest positive and the nearest negative of each anchor that has both, as triplets.

    Args:
        allowed_pos_range: see `BatchEasyHardMiner`.
        allowed_neg_range: likewise.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.
    """

    parts = 3

    def __init__(
        self,
        *,
        allowed_pos_range: Range | None = None,
        allowed_neg_range: Range | None = None,
        **settings: Unpack[MinerSettings],
    ) -> None:
        super().__init__(settings, LpDistance())
        self.allowed_pos_range = allowed_pos_range
        self.allowed_neg_range = allowed_neg_range

    def mine(self, pairs: ScoredPairs) -> Indices:  # noqa: D102
        positive, negative = _within(self.distance, pairs, self.allowed_pos_range, self.allowed_neg_range)
        p, has_p = _nearest(pairs.scores, positive, nearest=False)
        n, has_n = _nearest(pairs.scores, negative, nearest=True)
        (anchor,) = torch.nonzero(has_p & has_n, as_tuple=True)
        return anchor, p[anchor, 0], n[anchor, 0]


def _within(distance: Distance, pairs: ScoredPairs, *ranges: Range | None) -> tuple[Tensor, Tensor]:
    """Masks of the positive and the negative pairs within their ranges."""
    found = [pairs.positive, pairs.negative]
    for place, limits in enumerate(ranges):
        if limits is not None:
            numbers = distance.score(pairs.scores)
            found[place] = found[place] & (numbers >= limits[0]) & (numbers <= limits[1])
    return found[0], found[1]


def _nearest(scores: Tensor, present: Tensor, *, nearest: bool) -> tuple[Tensor, Tensor]:
    """The column [n, 1] of each row's nearest (or farthest) present pair, and whether it has any [n]."""
    if nearest:
        place = hidden(scores, present).argmax(dim=1, keepdim=True)
    else:
        place = hidden(scores, present, math.inf).argmin(dim=1, keepdim=True)
    return place, present.any(dim=1)

"""Miners of triplets: by margin, by angle, drawn by distance, or as the batch is packed."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar.groups.triplets import positives
from nearfar.miners import DistanceWeighted, ScoredPairs
from nearfar.pml._settings import MinerSettings
from nearfar.pml._tuples import Indices, draw_triplets
from nearfar.pml.distances import score_of
from nearfar.pml.miners.base import BaseMiner

__all__ = ["AngularMiner", "DistanceWeightedMiner", "EmbeddingsAlreadyPackagedAsTriplets", "TripletMarginMiner"]


class TripletMarginMiner(BaseMiner):
    """Triplets chosen by g = s_ap - s_an, by how much the negative is farther than the positive.

    Args:
        margin: m.
        type_of_triplets: "all" that violate the margin (g ≤ m); of those "hard" (g ≤ 0) or "semihard" (g > 0); or
            "easy", the ones that do not violate it.
        settings: see `MinerSettings`; the distance is `LpDistance` where none is given.

    Attributes:
        avg_triplet_margin: mean of g over all triplets, with `collect_stats`.
        pos_pair_dist: mean over all triplets of the distance of anchor and positive, likewise.
        neg_pair_dist: that of anchor and negative.
    """

    parts = 3

    def __init__(self, margin: float = 0.2, type_of_triplets: str = "all", **settings: Unpack[MinerSettings]) -> None:
        super().__init__(**settings)
        check_choice("TripletMarginMiner", "type_of_triplets", type_of_triplets, ("all", "hard", "semihard", "easy"))
        self.margin = margin
        self.type_of_triplets = type_of_triplets
        self.avg_triplet_margin = self.pos_pair_dist = self.neg_pair_dist = 0.0
        self.add_to_recordable_attributes(name="margin")
        self.add_to_recordable_attributes(
            list_of_names=["avg_triplet_margin", "pos_pair_dist", "neg_pair_dist"], is_stat=True
        )

    def _choose(self, pairs: ScoredPairs) -> Indices:
        if self.collect_stats:
            self._set_stats(pairs)
        real, place = positives(pairs)
        gap = pairs.scores.gather(1, place)[:, :, None] - pairs.scores[:, None, :]
        keep = gap > self.margin if self.type_of_triplets == "easy" else gap <= self.margin
        if self.type_of_triplets == "hard":
            keep &= gap <= 0
        elif self.type_of_triplets == "semihard":
            keep &= gap > 0
        anchor, slot, negative = torch.nonzero(keep & real[:, :, None] & pairs.negative[:, None, :], as_tuple=True)
        return anchor, place[anchor, slot], negative

    def _set_stats(self, pairs: ScoredPairs) -> None:
        # each positive pair stands in as many triplets as its anchor has negatives, and the reverse
        near, far = pairs.positive.to(pairs.scores.dtype), pairs.negative.to(pairs.scores.dtype)
        many, most = near.sum(dim=1), far.sum(dim=1)
        whole = many @ most
        positive = ((near * pairs.scores).sum(dim=1) @ most) / whole
        negative = ((far * pairs.scores).sum(dim=1) @ many) / whole
        self.pos_pair_dist = float(score_of(self.distance, positive))
        self.neg_pair_dist = float(score_of(self.distance, negative))
        self.avg_triplet_margin = float(positive - negative)


class AngularMiner(BaseMiner):
    """Triplets whose angle at the negative, of the angular loss, is above a threshold.

    tan(angle) = |a - p| / (2 |n - (a + p)/2|), of the rows as they came: pass unit rows for the angles of the paper.

    Args:
        angle: the threshold, in degrees.
        settings: see `MinerSettings`; the distance must be `LpDistance()`.

    Attributes:
        angle: the threshold in radians, as in PML.
        average_angle: mean over all triplets in degrees, with `collect_stats`; so are `min_angle`, `max_angle`,
            `std_of_angle`, and the means of those above and below the threshold, `average_angle_above_threshold` and
            `average_angle_below_threshold`.
    """

    parts = 3
    fixed = True
    STATS = (
        "average_angle",
        "average_angle_above_threshold",
        "average_angle_below_threshold",
        "min_angle",
        "max_angle",
        "std_of_angle",
    )

    def __init__(self, angle: float = 20, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(**settings)
        self.angle = math.radians(angle)
        self.add_to_recordable_attributes(name="angle")
        self.add_to_recordable_attributes(list_of_names=self.STATS, is_stat=True)

    def _choose_from(self, pairs: ScoredPairs, rows: Tensor, cols: Tensor | None) -> Indices:
        middle = rows.double().mean(dim=0)  # distances come from products: an origin among the rows keeps their digits
        x = rows.double() - middle
        return self._by_angle(pairs, x, x if cols is None else cols.double() - middle)

    def _by_angle(self, pairs: ScoredPairs, rows: Tensor, cols: Tensor) -> Indices:
        real, place = positives(pairs)
        squares = (rows * rows).sum(dim=1), (cols * cols).sum(dim=1)
        products = rows @ cols.T
        among = products if rows is cols else cols @ cols.T
        angles, chosen = [], []
        tall = max(1, 2**22 // max(1, place.shape[1] * len(cols)))  # anchors at a time: a table [t, P, m]
        for start in range(0, len(rows), tall):
            part = slice(start, start + tall)
            table = _angles(products[part], among, squares[0][part], squares[1], place[part])
            counts = (real[part] > 0)[:, :, None] & (pairs.negative[part] > 0)[:, None, :]
            anchor, slot, negative = torch.nonzero(counts & (table > self.angle), as_tuple=True)
            chosen.append((anchor + start, place[part][anchor, slot], negative))
            if self.collect_stats:
                angles.append(table[counts])
        if self.collect_stats:
            self._set_stats(torch.cat(angles))
        return tuple(torch.cat(side) for side in zip(*chosen, strict=True))

    def _set_stats(self, angles: Tensor) -> None:
        above = angles > self.angle
        if len(angles):
            numbers = angles.mean(), angles.min(), angles.max(), angles.std()
            names = "average_angle", "min_angle", "max_angle", "std_of_angle"
            for name, number in zip(names, numbers, strict=True):
                setattr(self, name, math.degrees(float(number)))
        for name, some in (("above", angles[above]), ("below", angles[~above])):
            if len(some):
                setattr(self, f"average_angle_{name}_threshold", math.degrees(float(some.mean())))


def _angles(products: Tensor, among: Tensor, here: Tensor, there: Tensor, place: Tensor) -> Tensor:
    """Angles [t, P, m] of the triplets of t anchors, from the products of rows and their squared lengths."""
    near = products.gather(1, place)  # of anchor and positive [t, P]
    both = here[:, None] + there[place]
    across = (both - 2 * near).clamp_min(0).sqrt()
    middle = (both + 2 * near) / 4  # the squared length of (anchor + positive) / 2
    along = products[:, None, :] + among[place]  # of anchor + positive with the negative [t, P, m]
    return torch.atan2(across[:, :, None], 2 * (middle[:, :, None] + there - along).clamp_min(0).sqrt())


class DistanceWeightedMiner(BaseMiner):
    """Triplets whose negatives are drawn uniformly over distances: `nf.miners.DistanceWeighted`.

    An anchor has as many triplets as its class has columns. Draws follow `torch.manual_seed`.

    Args:
        cutoff: smaller distances are treated as this one; with 0, negatives at distance 0 (up to rounding) are left
            out.
        nonzero_loss_cutoff: negatives at this distance or beyond are not drawn.
        settings: see `MinerSettings`; the distance must be `LpDistance()`.
    """

    parts = 3
    fixed = True

    def __init__(
        self, cutoff: float = 0.5, nonzero_loss_cutoff: float = 1.4, **settings: Unpack[MinerSettings]
    ) -> None:
        super().__init__(**settings)
        self.cutoff = float(cutoff)
        self.nonzero_loss_cutoff = float(nonzero_loss_cutoff)
        self.add_to_recordable_attributes(list_of_names=["cutoff", "nonzero_loss_cutoff"])

    def _choose(self, pairs: ScoredPairs) -> Indices:
        cutoff, there = self.cutoff, pairs
        if cutoff <= 0:  # the weight of distance 0 would be infinite, and rounding makes distances of this size
            least = 4 * math.sqrt(torch.finfo(pairs.scores.dtype).eps)
            cutoff, there = least, pairs.keep(negative=pairs.distances() > least)
        chance = DistanceWeighted(cutoff, self.nonzero_loss_cutoff).probabilities(there)
        return draw_triplets(pairs.positive, chance, pairs.relation.dense().same.sum(dim=1))


class EmbeddingsAlreadyPackagedAsTriplets(BaseMiner):
    """The triplets of a batch that holds anchor, positive, negative, anchor, positive, negative, ...

    Labels are not read, and a reference is not used.

    Args:
        settings: see `MinerSettings`; the distance is not used.
    """

    parts = 3

    def mine(  # noqa: D102
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Indices:
        if len(embeddings) % 3:
            raise ValueError(
                f"EmbeddingsAlreadyPackagedAsTriplets: rows must come in threes, but {len(embeddings)} came."
            )
        return torch.arange(len(embeddings), device=embeddings.device).view(-1, 3).unbind(dim=1)

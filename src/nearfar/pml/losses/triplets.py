"""Losses of triplets: triplet margin and angular."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from nearfar._utils.checks import check_positive
from nearfar.groups.triplets import AngularScore, Positive, Rule, Triplets, difference, nearest_difference
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Hinge, Identity
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml._tuples import draw_triplets
from nearfar.pml.losses.base import Call, Loss, LossDict, nothing, part
from nearfar.pml.losses.elements import log_sum
from nearfar.pml.reducers import AvgNonZeroReducer, BaseReducer
from nearfar.sets import KL
from nearfar.similarity import Cosine

__all__ = ["AngularLoss", "PerAnchor", "TripletMarginLoss", "checked_per_anchor", "with_drawn"]

PerAnchor = int | Literal["all"]


def checked_per_anchor(owner: str, per_anchor: PerAnchor) -> PerAnchor:
    """Require `triplets_per_anchor` to be "all" or a number above zero."""
    if per_anchor != "all":
        check_positive(owner, "triplets_per_anchor, where it is not 'all',", per_anchor)
    return per_anchor


def with_drawn(call: Call, per_anchor: PerAnchor) -> Call:
    """Add `per_anchor` random triplets per anchor to a call without an index tuple, unless all are wanted."""
    if per_anchor == "all" or call.indices is not None:
        return call
    tile = call.relation().dense()
    times = torch.full((len(call.embeddings),), int(per_anchor), device=call.embeddings.device)
    drawn = draw_triplets(tile.positive > 0, tile.negative, times)
    # where there is no triplet to draw, the whole batch goes on: a zero, and the warning that says why
    return replace(call, indices=drawn) if len(drawn[0]) else call


class TripletMarginLoss(Loss):
    """mean over triplets above zero of  [ d_ap - d_an + m ]₊.

    Args:
        margin: m.
        swap: use the distance of the negative to the nearer of anchor and positive.
        smooth_loss: softplus in place of the hinge.
        triplets_per_anchor: "all", or how many to draw at random.
        settings: see `Settings`; defaults `LpDistance()`, `AvgNonZeroReducer()`.
    """

    def __init__(
        self,
        margin: float = 0.05,
        swap: bool = False,
        smooth_loss: bool = False,
        triplets_per_anchor: PerAnchor = "all",
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        self.margin = margin
        self.swap = swap
        self.smooth_loss = smooth_loss
        self.triplets_per_anchor = checked_per_anchor("TripletMarginLoss", triplets_per_anchor)
        self._make(record=["margin"])

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return AvgNonZeroReducer()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return RobustLoss(
            pair=Hinge(self.margin, 0.0, smooth=1.0 if self.smooth_loss else 0.0),
            over=reducer.over,
            groups=Triplets(Rule(nearest_difference if self.swap else difference, wants_reference=self.swap)),
            similarity=self.similarity,
        )

    def _value(self, call: Call) -> Tensor:
        return with_drawn(call, self.triplets_per_anchor).into(self.robust)

    def _elements(self, call: Call) -> LossDict:
        a, p, n = with_drawn(call, self.triplets_per_anchor).triplets()
        s = call.entries(self.similarity)
        far = s[a, n]
        if self.swap:
            far = torch.maximum(far, s.of_references()[p, n])
        excess = far - s[a, p] + self.margin
        losses = functional.softplus(excess) if self.smooth_loss else torch.relu(excess)
        return {"loss": part(losses, (a, p, n), "triplet")}


class AngularLoss(Loss):
    """mean over positive pairs of  log( 1 + Σ_{N_a} e^{ 4t⟨x_a+x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩ } ),  t = tan²α.

    Like PML's, it takes positive pairs from an index tuple, and all negative ones from the labels.

    Args:
        alpha: α, in degrees.
        settings: see `Settings`; the distance must be `LpDistance()`; default `MeanReducer()`.
    """

    lists = True
    reads_tuple = True
    stats = ("average_angle",)
    average_angle: float

    def __init__(self, alpha: float = 40, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, fixed=True)
        self.alpha = alpha
        self._make(record=["alpha"])

    def _recipe(self, reducer: Translation) -> RobustLoss:
        score = AngularScore(math.tan(math.radians(self.alpha)) ** 2)
        return RobustLoss(
            pair=Identity(),
            over=KL(1.0, normalized=False, zero_member=True),
            groups=Positive(Rule(score, wants_reference=True)),
            reduction=reducer.how,
            similarity=Cosine(),
        )

    def _elements(self, call: Call) -> LossDict:
        labels = call.own_labels()
        a, p, b, _ = call.pairs()
        if not len(b):  # PML: nothing to learn where no negative pair is listed
            return {"loss": nothing()}
        if (call.ref_emb is None) != (call.ref_labels is None):
            raise ValueError("AngularLoss: ref_emb and ref_labels belong together, but only one of them came.")
        others = labels if call.ref_labels is None else call.ref_labels
        rows = functional.normalize(call.embeddings, dim=1)
        refs = rows if call.ref_emb is None else functional.normalize(call.ref_emb, dim=1)
        tan2 = math.tan(math.radians(self.alpha)) ** 2
        near = 2 * (1 + tan2) * (rows[a] * refs[p]).sum(dim=1, keepdim=True)
        form = 4 * tan2 * (rows[a] + refs[p]) @ refs.T - near
        apart = labels[a][:, None] != others[None, :]
        if self.collect_stats:
            with torch.no_grad():  # the angle at a negative between the center of a positive pair and one of its ends
                width = (rows[a] - refs[p]).norm(dim=1, keepdim=True)
                angles = torch.atan(width / (2 * torch.cdist((rows[a] + refs[p]) / 2, refs)))
                self.average_angle = math.degrees(float(angles[apart].mean()))
        return {"loss": part(log_sum(form, apart, with_one=True), (a, p), "pos_pair")}

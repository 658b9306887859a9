"""The margin loss: a hinge around a boundary β that may be learned, one for all or one per class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.tensors import over
from nearfar.losses.robust import RobustLoss
from nearfar.miners import Miner, ScoredPairs
from nearfar.pairs import PairLoss
from nearfar.pml._settings import Settings
from nearfar.pml._tuples import check_classes
from nearfar.pml.distances import LpDistance
from nearfar.pml.losses.base import Call, Loss
from nearfar.pml.losses.triplets import PerAnchor, checked_per_anchor, with_drawn
from nearfar.pml.reducers import DivisorReducer, MeanReducer, SumReducer

__all__ = ["AnchorHinge", "MarginLoss", "PerTriplet"]


class PerTriplet(Miner):
    """Weight each pair by the number of triplets that contain it."""

    both = True

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        dtype = pairs.scores.dtype
        positive, negative = (side.sum(dim=1, keepdim=True).to(dtype) for side in (pairs.positive, pairs.negative))
        return pairs.keep(positive=negative, negative=positive)


class AnchorHinge(PairLoss):
    """A hinge l = [m + sign·(λ - s)]₊ with a threshold λ that each call sets, [1] or [n, 1]."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin
        self._threshold: Tensor | float = 0.0

    @contextmanager
    def at(self, threshold: Tensor) -> Iterator[None]:
        """Set the threshold within the block."""
        self._threshold = threshold
        try:
            yield
        finally:
            self._threshold = 0.0

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return torch.relu(self.margin + sign * (self._threshold - s))


class MarginLoss(Loss):
    """Σ over triplets of ([m + d_ap - β]₊ + [m - d_an + β]₊), over the number of brackets above zero.

    Args:
        margin: m.
        nu: weight of the regularizer ν·β, if β is learned.
        beta: β, or its initial value.
        triplets_per_anchor: "all", or how many to draw at random.
        learn_beta: make `beta` a parameter.
        num_classes: one β per class of the anchor.
        settings: see `Settings`; defaults `LpDistance()`, `DivisorReducer()`. `MeanReducer` and `SumReducer` reduce
            over triplets.

    Attributes:
        beta: [1] or [num_classes].
    """

    reducers = (DivisorReducer, MeanReducer, SumReducer)
    beta: Tensor

    reads_tuple = True

    def __init__(
        self,
        margin: float = 0.2,
        nu: float = 0,
        beta: float = 1.2,
        triplets_per_anchor: PerAnchor = "all",
        learn_beta: bool = False,
        num_classes: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings, LpDistance(), DivisorReducer())
        self.margin = margin
        self.nu = nu
        self.triplets_per_anchor = checked_per_anchor("MarginLoss", triplets_per_anchor)
        self.learn_beta = learn_beta
        start = torch.full((num_classes or 1,), float(beta))
        if learn_beta:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start, persistent=False)
        self.hinge = AnchorHinge(margin)
        self.robust, self.listed = self._recipe(PerTriplet()), self._recipe(None)

    def _recipe(self, miner: Miner | None) -> RobustLoss:
        return self._take(
            RobustLoss(
                pair=self.hinge,
                over=self.reducer.over,
                groups="batch" if isinstance(self.reducer, DivisorReducer) else "sign",
                similarity=self.distance.similarity,
                miner=miner,
            )
        )

    def _value(self, call: Call) -> Tensor:
        call = with_drawn(call, self.triplets_per_anchor)
        # a list of triplets already holds each pair as often as it counts
        robust = self.listed if call.indices is not None and len(call.indices) == 3 else self.robust
        beta = self.beta.to(call.embeddings.device, torch.promote_types(call.embeddings.dtype, self.beta.dtype))
        if len(beta) > 1:
            labels = self._labels(call)
            check_classes(call.owner, labels, len(beta))
            beta = beta[labels][:, None]
        with self.hinge.at(self.distance.score(beta)):
            value = call.into(robust)
            return value + self._price(call, robust, beta) if self.learn_beta and self.nu else value

    def _price(self, call: Call, robust: RobustLoss, beta: Tensor) -> Tensor:
        """The regularizer ν·β; with one β per class, over triplets and reduced like their losses."""
        triplets = _triplets_per_anchor(call)
        if beta.ndim == 1:
            return torch.where(triplets.sum() > 0, self.nu * beta[0], torch.zeros_like(beta[0]))
        total = self.nu * (triplets * beta[:, 0]).sum()
        if isinstance(self.reducer, SumReducer):
            return total
        if isinstance(self.reducer, MeanReducer):
            return over(total, triplets.sum().to(total.dtype))
        found = call.explained(robust)
        return over(total, found.dual.sum())  # the dual of a mean is its denominator


def _triplets_per_anchor(call: Call) -> Tensor:
    """The number of triplets of each anchor, [n]."""
    if call.indices is None:
        positive, negative = call.relation().counts()
        return positive * negative
    first, *_ = counts = [torch.bincount(part.long(), minlength=len(call.embeddings)) for part in call.indices[::2]]
    return first if len(call.indices) == 3 else first * counts[1]

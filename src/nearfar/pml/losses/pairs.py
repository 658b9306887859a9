"""Losses of pairs: contrastive, multi-similarity, and the two lifted structure losses."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from nearfar.links import HingeLink, Link, Sides, Terms
from nearfar.losses import MultiSimilarity
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Linear, Squared
from nearfar.pml._settings import Settings
from nearfar.pml.distances import CosineSimilarity, Distance, LpDistance
from nearfar.pml.losses.base import Call, Loss
from nearfar.pml.reducers import AvgNonZeroReducer, MeanReducer
from nearfar.sets import KL

__all__ = [
    "ContrastiveLoss",
    "GeneralizedLiftedStructureLoss",
    "LiftedEnds",
    "LiftedStructureLoss",
    "MultiSimilarityLoss",
]


class ContrastiveLoss(Loss):
    """mean of the positive losses [d - m₊]₊ above zero, plus that of the negative ones [m₋ - d]₊.

    Args:
        pos_margin: m₊, in the distance's own units: with `CosineSimilarity` use 1, with distances 0.
        neg_margin: m₋, likewise.
        settings: see `Settings`; defaults `LpDistance()`, `AvgNonZeroReducer()`.
    """

    def __init__(self, pos_margin: float = 0, neg_margin: float = 1, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, LpDistance(), AvgNonZeroReducer())
        self.pos_margin = pos_margin
        self.neg_margin = neg_margin
        near, far = (-self.distance.score(float(margin)) for margin in (pos_margin, neg_margin))
        self.robust = self._take(
            RobustLoss(
                pair=Squared(near, far, power=1),
                over=self.reducer.over,
                groups="sign",
                similarity=self.distance.similarity,
            )
        )


class MultiSimilarityLoss(Loss):
    """mean over anchors of  (1/α) log(1 + Σ e^{-α(s-λ)}) + (1/β) log(1 + Σ e^{β(s-λ)}).

    Args:
        alpha: α.
        beta: β.
        base: λ.
        settings: see `Settings`; defaults `CosineSimilarity()`, `MeanReducer()`.
    """

    once = True

    def __init__(self, alpha: float = 2, beta: float = 50, base: float = 0.5, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, CosineSimilarity(), MeanReducer())
        self.alpha = alpha
        self.beta = beta
        self.base = base
        self.robust = self._take(
            MultiSimilarity(
                alpha=alpha,
                beta=beta,
                threshold=self.distance.score(float(base)),
                miner=None,
                reduction=self.reducer.how,
                similarity=self.distance.similarity,
            )
        )


class GeneralizedLiftedStructureLoss(Loss):
    """mean over anchors of  [ log Σ e^{d_ij - m₊} + log Σ e^{m₋ - d_ik} ]₊.

    Args:
        neg_margin: m₋.
        pos_margin: m₊.
        settings: see `Settings`; defaults `LpDistance()`, `MeanReducer()`.
    """

    once = True

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, LpDistance(), MeanReducer())
        self.neg_margin = neg_margin
        self.pos_margin = pos_margin
        self.robust = self._take(
            RobustLoss(
                pair=_margins(self.distance, pos_margin, neg_margin),
                over=KL(1.0, normalized=False),
                groups="anchor_sign",
                link=HingeLink(both=False),
                reduction=self.reducer.how,
                similarity=self.distance.similarity,
            )
        )


class LiftedEnds(Link):
    """One term per positive pair: v_ij = ½ [log(e^{negative_i} + e^{negative_j}) + l_ij]₊².

    A missing logarithm counts 0. The negative pairs of j are those of row j, or with a reference those of column j.
    """

    def __init__(self, *, wants_columns: bool) -> None:
        super().__init__()
        self.wants_columns = wants_columns

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        row, has_row = sides.negative, sides.has_negative
        col, has_col = (row, has_row) if sides.columns is None else (sides.columns, sides.has_columns)
        assert has_col is not None  # noqa: S101 - comes with the columns
        # -1e30 and not -inf: an end without negative pairs adds nothing, and no NaN to the gradient
        row, col = torch.where(has_row, row, -1e30), torch.where(has_col, col, -1e30)
        either = has_row[:, None] | has_col[None, :]
        ends = torch.where(either, torch.logaddexp(row[:, None], col[None, :]), torch.zeros_like(sides.losses))
        values = torch.relu(ends + sides.losses) ** 2 / 2
        present = (sides.measure > 0) & has_row.any()
        return (Terms(torch.where(present, values, torch.zeros_like(values)), sides.measure),)


class LiftedStructureLoss(Loss):
    """mean over positive pairs of  ½ [ d_ij - m₊ + log( Σ_{N_i} e^{m₋-d_ik} + Σ_{N_j} e^{m₋-d_jk} ) ]₊².

    Args:
        neg_margin: m₋.
        pos_margin: m₊.
        settings: see `Settings`; defaults `LpDistance()`, `MeanReducer()`.
    """

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, LpDistance(), MeanReducer())
        self.neg_margin = neg_margin
        self.pos_margin = pos_margin
        self.robust, self.across = self._recipe(wants_columns=False), self._recipe(wants_columns=True)

    def _recipe(self, *, wants_columns: bool) -> RobustLoss:
        return self._take(
            RobustLoss(
                pair=_margins(self.distance, self.pos_margin, self.neg_margin),
                over=KL(1.0, normalized=False),
                groups="anchor_sign",
                link=LiftedEnds(wants_columns=wants_columns),
                reduction=self.reducer.how,
                similarity=self.distance.similarity,
            )
        )

    def _value(self, call: Call) -> Tensor:
        return call.into(self.robust if call.ref_emb is None else self.across)


def _margins(distance: Distance, pos_margin: float, neg_margin: float) -> tuple[Linear, Linear]:
    """The terms d - m₊ for positive pairs and m₋ - d for negative ones."""
    return Linear(distance.score(float(pos_margin))), Linear(distance.score(float(neg_margin)))

"""Losses of pairs: contrastive, multi-similarity, and the two lifted structure losses."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from nearfar.links import HingeLink, LiftedLink, Link, Sides, Terms
from nearfar.losses import MultiSimilarity
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Linear, Squared
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml.distances import BaseDistance, CosineSimilarity, Matrix
from nearfar.pml.losses.base import Call, Loss, LossDict, nothing, part
from nearfar.pml.losses.elements import log_sum, log_sum_of
from nearfar.pml.reducers import AvgNonZeroReducer, BaseReducer
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

    names = ("pos_loss", "neg_loss")

    def __init__(self, pos_margin: float = 0, neg_margin: float = 1, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.pos_margin = pos_margin
        self.neg_margin = neg_margin
        self._make(record=["pos_margin", "neg_margin"])

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return AvgNonZeroReducer()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        near, far = (-self.score(float(margin)) for margin in (self.pos_margin, self.neg_margin))
        pair = Squared(near, far, power=1)
        return RobustLoss(pair=pair, over=reducer.over, groups="sign", similarity=self.similarity)

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.pairs()
        s = call.entries(self.similarity)
        near, far = (self.score(float(margin)) for margin in (self.pos_margin, self.neg_margin))
        return {
            "pos_loss": part(torch.relu(near - s[a, p]), (a, p), "pos_pair"),
            "neg_loss": part(torch.relu(s[b, n] - far), (b, n), "neg_pair"),
        }


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
        super().__init__(settings)
        self.alpha = alpha
        self.beta = beta
        self.base = base
        self._make(record=["alpha", "beta", "base"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return MultiSimilarity(
            alpha=self.alpha,
            beta=self.beta,
            threshold=self.score(float(self.base)),
            miner=None,
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _elements(self, call: Call) -> LossDict:
        positive, negative = call.masks()
        s = call.scores(self.similarity) - self.score(float(self.base))
        near = log_sum(-self.alpha * s, positive, with_one=True) / self.alpha
        far = log_sum(self.beta * s, negative, with_one=True) / self.beta
        return {"loss": part(near + far, call.rows, "element")}


class GeneralizedLiftedStructureLoss(Loss):
    """mean over anchors of  [ log Σ e^{d_ij - m₊} + log Σ e^{m₋ - d_ik} ]₊.

    Args:
        neg_margin: m₋.
        pos_margin: m₊.
        settings: see `Settings`; defaults `LpDistance()`, `MeanReducer()`.
    """

    once = True

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.neg_margin = neg_margin
        self.pos_margin = pos_margin
        self._make(record=["pos_margin", "neg_margin"])

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return RobustLoss(
            pair=_margins(self, self.pos_margin, self.neg_margin),
            over=KL(1.0, normalized=False),
            groups="anchor_sign",
            link=HingeLink(both=False),
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _elements(self, call: Call) -> LossDict:
        positive, negative = call.masks()
        s = call.scores(self.similarity)
        near = log_sum(self.score(float(self.pos_margin)) - s, positive)
        far = log_sum(s - self.score(float(self.neg_margin)), negative)
        return {"loss": part(torch.relu(near + far), call.rows, "element")}


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

    lists = True

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.neg_margin = neg_margin
        self.pos_margin = pos_margin
        self._make(record=["pos_margin", "neg_margin"])

    def _recipe(self, reducer: Translation) -> RobustLoss:
        # without a tuple, columns and rows of labels say the same, and every engine knows this link
        self.across = self._take(self._with_ends(reducer, LiftedLink()))
        return self._with_ends(reducer, LiftedEnds(wants_columns=False))

    def _with_ends(self, reducer: Translation, link: Link) -> RobustLoss:
        return RobustLoss(
            pair=_margins(self, self.pos_margin, self.neg_margin),
            over=KL(1.0, normalized=False),
            groups="anchor_sign",
            link=link,
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _value(self, call: Call) -> Tensor:
        # a distance of one's own may not be symmetric: then a row is not what its column is
        rows = call.ref_emb is None and isinstance(self.similarity, Matrix)
        return call.into(self.robust if rows else self.across)

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.pairs()
        if not len(b):
            return {"loss": nothing()}
        s = call.entries(self.similarity)
        cost = s[b, n] - self.score(float(self.neg_margin))
        # the negative pairs of the anchor, and those of the positive: its row, or its column of a reference
        row, has_row = log_sum_of(cost, b, len(call.embeddings))
        col, has_col = (row, has_row) if call.ref_emb is None else log_sum_of(cost, n, call.columns)
        far = torch.where(has_row[a] | has_col[p], torch.logaddexp(row[a], col[p]), 0.0)
        losses = torch.relu(far + self.score(float(self.pos_margin)) - s[a, p]) ** 2 / 2
        return {"loss": part(losses, (a, p), "pos_pair")}


def _margins(loss: Loss, pos_margin: float, neg_margin: float) -> tuple[Linear, Linear]:
    """The terms d - m₊ for positive pairs and m₋ - d for negative ones."""
    return Linear(loss.score(float(pos_margin))), Linear(loss.score(float(neg_margin)))

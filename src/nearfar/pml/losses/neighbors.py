"""Losses of pairs that PML builds on `GenericPairLoss`, and neighborhood components."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from nearfar.losses import NCA, TupletMargin
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import AngularMargin
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml._tuples import sample_weights
from nearfar.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearfar.pml.losses.base import Call, Loss, LossDict, nothing, part
from nearfar.pml.losses.elements import log_sum
from nearfar.pml.losses.listed import reduced

__all__ = ["GenericPairLoss", "IntraPairVarianceLoss", "NCALoss", "TupletMarginLoss"]


class GenericPairLoss(Loss):
    """Base class of losses of one's own, which get distances and pairs and return the parts of a loss.

    A subclass writes `_compute_loss`. With `mat_based_loss` it is called with all distances [n, m] and two masks of
    the same shape, of positive and of negative pairs; else with the distances of the positive pairs, those of the
    negative pairs (an empty list where there are none), and the tuple (anchors, positives, anchors, negatives).
    Distances are in the units of `distance`. It returns {name: {"losses", "indices", "reduction_type"}}.

    Args:
        mat_based_loss: which of the two.
        settings: see `Settings`; defaults `LpDistance()`, `MeanReducer()`.
    """

    def __init__(self, mat_based_loss: bool, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.loss_method = self.mat_based_loss if mat_based_loss else self.pair_based_loss
        self._make()

    def _compute_loss(self, *given: Any) -> LossDict:
        raise TypeError(f"{type(self).__name__}: a subclass of GenericPairLoss must write _compute_loss.")

    def mat_based_loss(self, mat: Tensor, indices_tuple: tuple[Tensor, ...]) -> LossDict:
        """The parts of the loss from all distances [n, m] and masks of the pairs."""
        a, p, b, n = indices_tuple
        positive, negative = torch.zeros_like(mat), torch.zeros_like(mat)
        positive[a, p] = 1
        negative[b, n] = 1
        if bool(((positive != 0) & (negative != 0)).any()):
            raise ValueError(f"{type(self).__name__}: the index tuple lists a pair both as positive and as negative.")
        return self._compute_loss(mat, positive, negative)

    def pair_based_loss(self, mat: Tensor, indices_tuple: tuple[Tensor, ...]) -> LossDict:
        """The parts of the loss from the distances of the pairs."""
        a, p, b, n = indices_tuple
        return self._compute_loss(mat[a, p] if len(a) else [], mat[b, n] if len(b) else [], indices_tuple)

    def _elements(self, call: Call) -> LossDict:
        pairs = call.pairs()
        if not any(len(each) for each in pairs):
            return {name: nothing() for name in self._sub_loss_names()}
        return self.loss_method(self.distance(call.embeddings, call.ref_emb), pairs)


class TupletMarginLoss(Loss):
    """mean over positive pairs of  log(1 + Σ_{N_i} e^{c·(cos θ_ik - cos(θ_ij - m))}).

    Args:
        margin: m, in degrees.
        scale: c.
        settings: see `Settings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        margin: m, in radians, as in PML.
    """

    stats = ("avg_pos_angle", "avg_neg_angle")

    def __init__(self, margin: float = 5.73, scale: float = 64, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, fixed=True)
        self.margin = math.radians(margin)
        self.scale = scale
        self._make(record=["margin", "scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return TupletMargin(pair=AngularMargin(-self.margin, self.scale), reduction=reducer.how)

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.pairs()
        if not len(b):
            return {"loss": nothing()}
        s = call.scores(self.similarity)
        near, far = s[a, p], s[b, n]
        if self.collect_stats:
            for name, each in zip(self.stats, (near, far), strict=True):
                setattr(self, name, math.degrees(torch.acos(each.detach().clamp(-1, 1)).mean().item()))
        pull = AngularMargin(-self.margin, self.scale)(near, +1)
        losses = log_sum(self.scale * far[None, :] + pull[:, None], b[None, :] == a[:, None], with_one=True)
        return {"loss": part(losses, (a, p), "pos_pair")}


class IntraPairVarianceLoss(Loss):
    """[(1-ε)·mean - s]₊² of positive pairs plus [s - (1+ε)·mean]₊² of negative pairs, against the mean of their sign.

    A pair's loss holds the mean of all pairs of its sign, so that this loss has no factors (`robust`).

    Args:
        pos_eps: ε of positive pairs.
        neg_eps: ε of negative pairs.
        settings: see `Settings`; defaults `CosineSimilarity()`, `MeanReducer()`.
    """

    names = ("pos_loss", "neg_loss")

    def __init__(self, pos_eps: float = 0.01, neg_eps: float = 0.01, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.pos_eps = pos_eps
        self.neg_eps = neg_eps
        self._make(record=["pos_eps", "neg_eps"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.pairs()
        matrix: Tensor = self.distance(call.embeddings, call.ref_emb)
        larger = self.distance.is_inverted  # positive pairs are to have larger numbers
        return {
            "pos_loss": part(self._excess(matrix[a, p], self.pos_eps, larger), (a, p), "pos_pair"),
            "neg_loss": part(self._excess(matrix[b, n], self.neg_eps, not larger), (b, n), "neg_pair"),
        }

    def _excess(self, pairs: Tensor, eps: float, larger: bool) -> Tensor:
        """How far pairs [k] are on the wrong side of their mean, squared."""
        mean = pairs.mean() if len(pairs) else pairs.sum()
        return torch.relu((1 - eps) * mean - pairs if larger else pairs - (1 + eps) * mean) ** 2


class NCALoss(Loss):
    """mean over rows with positives of  -log( Σ_{P_i} e^{c·s_ij} / Σ_{all k} e^{c·s_ik} ).

    An index tuple weights rows: by how often each occurs, relative to the largest count; with a reference by how often
    it is an anchor.

    Args:
        softmax_scale: c.
        settings: see `Settings`; defaults `LpDistance(power=2)`, `MeanReducer()`.
    """

    reads_tuple = True

    def __init__(self, softmax_scale: float = 1, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.softmax_scale = softmax_scale
        self._make(record=["softmax_scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return LpDistance(power=2)

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return NCA(scale=self.softmax_scale, reduction=reducer.how, similarity=self.similarity)

    def _value(self, call: Call) -> Tensor:
        return call.into(self.robust) if call.indices is None else reduced(self, call)

    def _elements(self, call: Call) -> LossDict:
        tile = call.relation().dense()
        s = self.softmax_scale * call.scores(self.similarity)
        rows = (tile.positive > 0).any(dim=1).nonzero()[:, 0]
        losses = log_sum(s, (tile.positive > 0) | (tile.negative > 0)) - log_sum(s, tile.positive > 0)
        weights = sample_weights(call.indices, call.embeddings, anchors_only=call.ref_emb is not None)
        return {"loss": part((losses if weights is None else losses * weights)[rows], rows, "element")}

"""Losses against one learned vector per class: proxy-NCA, proxy-anchor, ArcFace."""

from __future__ import annotations

import math
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar.links import Add
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import AngularMargin, Linear, PairLoss
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import ClassSettings
from nearfar.pml.distances import BaseDistance, CosineSimilarity, LpDistance, Matrix
from nearfar.pml.losses.class_base import ClassLoss, Init
from nearfar.pml.losses.elements import Call, LossDict, log_sum, part
from nearfar.pml.reducers import AvgNonZeroReducer, BaseReducer, DivisorReducer, MeanReducer, SumReducer
from nearfar.relations.relation import Relation
from nearfar.sets import KL

__all__ = ["ArcFaceLoss", "ProxyAnchorLoss", "ProxyNCALoss"]


class ProxyNCALoss(ClassLoss):
    """mean over rows of  -log( e^{c·s_iy} / Σ_{all classes} e^{c·s_ik} ),  s = -|x - proxy|² of unit vectors.

    Args:
        num_classes: how many proxies.
        embedding_size: their width.
        softmax_scale: c.
        settings: see `ClassSettings`; defaults `LpDistance(power=2)`, `MeanReducer()`.

    Attributes:
        proxies: [num_classes, embedding_size].
    """

    anchors_only = True

    def __init__(
        self, num_classes: int, embedding_size: int, *, softmax_scale: float = 1, **settings: Unpack[ClassSettings]
    ) -> None:
        super().__init__(settings)
        self.num_classes = num_classes
        self.softmax_scale = softmax_scale
        self.proxies = self._fresh(num_classes, embedding_size)
        self._make(record=["num_classes", "softmax_scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return LpDistance(power=2)

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.proxies

    def _row_pair(self) -> PairLoss:
        return Linear(scale=self.softmax_scale)


class ArcFaceLoss(ClassLoss):
    """mean over rows of the cross-entropy of logits c·cos θ, with an angular margin for the own class: c·cos(θ + m).

    Args:
        num_classes: how many class vectors.
        embedding_size: their width.
        margin: m, in degrees.
        scale: c.
        settings: see `ClassSettings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes]: the class vectors are its columns, as in PML.
        margin: m, in radians, as in PML.
        avg_angle: mean angle in degrees between rows and their class vectors, with `collect_stats`.
    """

    stats = ("avg_angle",)
    avg_angle: float

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 28.6,
        scale: float = 64,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings, fixed=True)
        self.num_classes = num_classes
        self.margin = math.radians(margin)
        self.scale = scale
        self.W = self._fresh(embedding_size, num_classes)
        self._make(record=["num_classes", "margin", "scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.W.t()

    def _row_pair(self) -> PairLoss:
        return AngularMargin(self.margin, self.scale)

    def _elements(self, call: Call) -> LossDict:
        if self.collect_stats:
            with torch.no_grad():
                own = self._scores(call).gather(1, call.own_labels()[:, None]).clamp(-1, 1)
                self.avg_angle = math.degrees(float(torch.acos(own).mean()))
        return super()._elements(call)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes]: the scaled cosines, without a margin."""
        return self.scale * super().get_logits(embeddings)


class ProxyAnchorLoss(ClassLoss):
    """(1/|C₊|) Σ_c log(1 + Σ_{y_i=c} e^{-a(s-δ)}) + (1/|C|) Σ_c log(1 + Σ_{y_i≠c} e^{a(s+δ)}),  C₊: classes present.

    The weight w of an index tuple's sample enters as the factor e^{w-1}, as in PML.

    Args:
        num_classes: how many proxies.
        embedding_size: their width.
        margin: δ.
        alpha: a.
        settings: see `ClassSettings`; defaults `CosineSimilarity()`, `DivisorReducer()`. `MeanReducer` divides
            both sums by all classes.

    Attributes:
        proxies: [num_classes, embedding_size].
    """

    names = ("pos_loss", "neg_loss")
    native = (DivisorReducer, MeanReducer, AvgNonZeroReducer, SumReducer)

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings)
        self.num_classes = num_classes
        self.margin = margin
        self.alpha = alpha
        self.proxies = self._fresh(num_classes, embedding_size)
        self._make(record=["num_classes", "alpha", "margin"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return DivisorReducer()

    def get_default_weight_init_func(self) -> Init:  # noqa: D102
        return partial(nn.init.kaiming_normal_, mode="fan_out")

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.proxies

    def _recipe(self, reducer: Translation) -> RobustLoss | None:
        if isinstance(self.similarity, Matrix):
            return None  # proxies are the rows below, and a distance of one's own may not be symmetric
        return RobustLoss(
            pair=Linear(margin=self.score(float(self.margin)), scale=self.alpha),
            over=KL(1.0, normalized=False, zero_member=True),
            groups="anchor_sign",
            link=Add(apart=reducer.kind in (DivisorReducer, AvgNonZeroReducer)),
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _value(self, call: Call) -> Tensor:
        labels, vectors, weights = call.own_labels(), self.class_vectors(), call.weights
        names = torch.arange(len(vectors), device=labels.device)
        relation = Relation.from_labels(names, labels)
        if weights is not None:  # rows are the proxies, so the samples' weights are those of the reference
            ones = torch.ones_like(weights[:1]).expand(len(vectors))
            relation = Relation.from_labels(names, labels, weights=ones, ref_weights=torch.exp(weights - 1))
        value: Tensor = self.robust(vectors, relation, ref_emb=call.embeddings)
        return value

    def _elements(self, call: Call) -> LossDict:
        s, names = self._scores(call).T, torch.arange(self.num_classes, device=call.embeddings.device)
        own = names[:, None] == call.own_labels()[None, :]
        shift = torch.zeros_like(s[:1]) if call.weights is None else call.weights[None, :] - 1
        line = self.score(float(self.margin))
        near = log_sum(self.alpha * (line - s) + shift, own, with_one=True)
        far = log_sum(self.alpha * (s + line) + shift, ~own, with_one=True)
        return {
            "pos_loss": part(near, names, "element", int(own.any(dim=1).sum())),
            "neg_loss": part(far, names, "element", self.num_classes),
        }

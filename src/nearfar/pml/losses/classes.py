"""Losses against one learned vector per class: proxy-NCA, proxy-anchor, ArcFace."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.groups.groupings import reduce
from nearfar.links import Add, PerPositive, Terms
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import AngularMargin, Linear, PairLoss
from nearfar.pml._names import check_names
from nearfar.pml._settings import ClassSettings, chosen_distance, chosen_reducer
from nearfar.pml._tuples import Indices, check_classes, sample_weights
from nearfar.pml.distances import CosineSimilarity, Distance, LpDistance
from nearfar.pml.reducers import AvgNonZeroReducer, DivisorReducer, MeanReducer, Reducer, SumReducer
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation
from nearfar.sets import KL, Mean

__all__ = ["ArcFaceLoss", "ClassLoss", "Init", "ProxyAnchorLoss", "ProxyNCALoss"]

Init = Callable[[Tensor], object]


class ClassLoss(nn.Module, ABC):
    """Base class of losses with class vectors; pass `loss.parameters()` to an optimizer, or they are never trained.

    An index tuple weights samples here: by how often each occurs, relative to the largest count.

    Attributes:
        robust: the native recipe, rows against class vectors.
        distance: PML's distance.
        reducer: PML's reducer.
    """

    robust: RobustLoss
    reducers: tuple[type[Reducer], ...] = (MeanReducer, AvgNonZeroReducer, SumReducer)
    """The reducers that it supports."""

    anchors_only = False
    """Whether an index tuple weights a sample by how often it is an anchor, not by how often it occurs."""

    def __init__(self, settings: ClassSettings, distance: Distance, reducer: Reducer, *, fixed: bool = False) -> None:
        super().__init__()
        check_names(self, settings, ClassSettings)
        owner = type(self).__name__
        self.distance = chosen_distance(owner, settings, distance, fixed=fixed)
        self.reducer = chosen_reducer(owner, settings, reducer, self.reducers)
        self.embedding_regularizer = settings.get("embedding_regularizer")
        self.embedding_reg_weight = settings.get("embedding_reg_weight", 1.0)
        self.weight_regularizer = settings.get("weight_regularizer")
        self.weight_reg_weight = settings.get("weight_reg_weight", 1.0)

    @abstractmethod
    def class_vectors(self) -> Tensor:
        """The class vectors [classes, d]."""

    @abstractmethod
    def _value(self, embeddings: Tensor, labels: Tensor, vectors: Tensor, weights: Tensor | None) -> Tensor: ...

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a differentiable scalar.

        Args:
            embeddings: [n, d].
            labels: [n] integers in 0..classes - 1.
            indices_tuple: a miner's tuple, which weights the samples.
            ref_emb: must be None: the class vectors are the reference.
            ref_labels: likewise.
        """
        owner = type(self).__name__
        if ref_emb is not None or ref_labels is not None:
            raise ValueError(f"{owner}: its class vectors are the reference; leave ref_emb and ref_labels out.")
        check_embeddings(owner, "embeddings", embeddings)
        for parameter in self.parameters(recurse=False):  # as in PML, they follow the embeddings to their device
            parameter.data = parameter.data.to(embeddings.device)
        vectors = self.class_vectors()
        labels = _checked(owner, embeddings, labels, vectors)
        if indices_tuple is not None:
            check_indices(owner, indices_tuple, (len(embeddings), len(embeddings)))
        weights = sample_weights(indices_tuple, embeddings, anchors_only=self.anchors_only)
        value = self._value(embeddings, labels, vectors, weights)
        if self.embedding_regularizer is not None:
            value = value + self.embedding_reg_weight * self.embedding_regularizer(embeddings)
        if self.weight_regularizer is not None:
            value = value + self.weight_reg_weight * self.weight_regularizer(vectors)
        return value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes], in the distance's own units."""
        logits: Tensor = self.distance(embeddings, self.class_vectors())
        return logits

    def _rows_recipe(self, pair: PairLoss) -> RobustLoss:
        """The recipe of -log softmax of the own class, one value per row."""
        robust = RobustLoss(
            pair=pair,
            over=(Mean(), KL(1.0, normalized=False)),
            groups="anchor_sign",
            link=PerPositive(),
            reduction="none",
            similarity=self.distance.similarity,
        )
        robust.owner = type(self).__name__
        return robust

    def _rows_value(self, embeddings: Tensor, labels: Tensor, vectors: Tensor, weights: Tensor | None) -> Tensor:
        names = torch.arange(len(vectors), device=labels.device)
        rows = self.robust(embeddings, Relation.from_labels(labels, names), ref_emb=vectors)
        return reduce(Terms(rows if weights is None else rows * weights, torch.ones_like(rows)), self.reducer.how)


def _checked(owner: str, embeddings: Tensor, labels: Tensor | None, vectors: Tensor) -> Tensor:
    if not isinstance(labels, Tensor):
        raise ValueError(f"{owner}: labels are missing; pass a 1-D integer tensor of class indices.")
    labels = labels.to(embeddings.device)
    check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
    check_classes(owner, labels, len(vectors))
    if embeddings.shape[1] != vectors.shape[1]:
        raise ValueError(
            f"{owner}: embeddings must be as wide as the class vectors ({vectors.shape[1]}), "
            f"but are {embeddings.shape[1]} wide."
        )
    return labels


def _fresh(settings: ClassSettings, default: Init, *shape: int) -> nn.Parameter:
    vectors = nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        (settings.get("weight_init_func") or default)(vectors)
    return vectors


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
        super().__init__(settings, LpDistance(power=2), MeanReducer())
        self.softmax_scale = softmax_scale
        self.proxies = _fresh(settings, nn.init.normal_, num_classes, embedding_size)
        self.robust = self._rows_recipe(Linear(scale=softmax_scale))

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.proxies

    def _value(self, embeddings: Tensor, labels: Tensor, vectors: Tensor, weights: Tensor | None) -> Tensor:
        return self._rows_value(embeddings, labels, vectors, weights)


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
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 28.6,
        scale: float = 64,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings, CosineSimilarity(), MeanReducer(), fixed=True)
        self.num_classes = num_classes
        self.margin = math.radians(margin)
        self.scale = scale
        self.W = _fresh(settings, nn.init.normal_, embedding_size, num_classes)
        self.robust = self._rows_recipe(AngularMargin(self.margin, scale))

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.W.t()

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes]: the scaled cosines, without a margin."""
        return self.scale * super().get_logits(embeddings)

    def _value(self, embeddings: Tensor, labels: Tensor, vectors: Tensor, weights: Tensor | None) -> Tensor:
        return self._rows_value(embeddings, labels, vectors, weights)


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

    reducers = (DivisorReducer, MeanReducer, AvgNonZeroReducer, SumReducer)

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings, CosineSimilarity(), DivisorReducer())
        self.num_classes = num_classes
        self.margin = margin
        self.alpha = alpha
        kaiming = partial(nn.init.kaiming_normal_, mode="fan_out")
        self.proxies = _fresh(settings, kaiming, num_classes, embedding_size)
        self.robust = RobustLoss(
            pair=Linear(margin=self.distance.score(float(margin)), scale=alpha),
            over=KL(1.0, normalized=False, zero_member=True),
            groups="anchor_sign",
            link=Add(apart=isinstance(self.reducer, DivisorReducer | AvgNonZeroReducer)),
            reduction=self.reducer.how,
            similarity=self.distance.similarity,
        )
        self.robust.owner = "ProxyAnchorLoss"

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.proxies

    def _value(self, embeddings: Tensor, labels: Tensor, vectors: Tensor, weights: Tensor | None) -> Tensor:
        names = torch.arange(len(vectors), device=labels.device)
        relation = Relation.from_labels(names, labels)
        if weights is not None:  # rows are the proxies, so the samples' weights are those of the reference
            ones = torch.ones_like(weights[:1]).expand(len(vectors))
            relation = Relation.from_labels(names, labels, weights=ones, ref_weights=torch.exp(weights - 1))
        value: Tensor = self.robust(vectors, relation, ref_emb=embeddings)
        return value

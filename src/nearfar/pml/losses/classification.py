"""Softmax losses over learned class vectors: large-margin softmax, SphereFace, CosFace, normalized softmax."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Linear, PairLoss
from nearfar.pml._settings import ClassSettings
from nearfar.pml.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from nearfar.pml.losses.class_base import ClassLoss
from nearfar.pml.losses.elements import Call, LossDict, part
from nearfar.relations.relation import Relation

__all__ = ["CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "SphereFaceLoss"]


class LargeMarginSoftmaxLoss(ClassLoss):
    """mean over rows of the cross-entropy of |x||w|·cos θ, with ψ(θ) = (-1)^k cos(mθ) - 2k for the own class.

    k is the whole number with θ in [kπ/m, (k+1)π/m]. The logits hold the lengths of rows and class vectors beside
    their angle, so that this loss has no factors (`robust`).

    Args:
        num_classes: how many class vectors.
        embedding_size: their width.
        margin: m, a whole number.
        scale: a factor of the logits.
        settings: see `ClassSettings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes]: the class vectors are its columns, as in PML.
    """

    stats = ("avg_angle",)

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 4,
        scale: float = 1,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings, fixed=True)
        self.num_classes = num_classes
        self.margin = margin
        self.scale = scale
        self.init_margin()
        self.W = self._fresh(embedding_size, num_classes)
        self._make(record=["num_classes", "margin", "scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.W.t()

    def init_margin(self) -> None:
        """Bring the margin into the form that the loss computes with."""
        self.margin = int(self.margin)

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        """Cosines [n, classes] of rows and class vectors."""
        return super().get_logits(embeddings)

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Angles of cosines, in radians."""
        angles = torch.acos(cosine_of_target_classes.clamp(-1, 1))
        if self.collect_stats:
            self.avg_angle = math.degrees(angles.detach().mean().item())
        return angles

    def modify_cosine_of_target_classes(self, cosine_of_target_classes: Tensor) -> Tensor:
        """ψ of the cosines [n] of the own classes."""
        before, now = torch.ones_like(cosine_of_target_classes), cosine_of_target_classes
        for _ in range(int(self.margin) - 1):  # Chebyshev: cos mθ from cos θ, without an arc cosine in the gradient
            before, now = now, 2 * cosine_of_target_classes * now - before
        with torch.no_grad():
            k = (self.get_angles(cosine_of_target_classes) / (math.pi / self.margin)).floor()
        return (1 - 2 * (k % 2)) * now - 2 * k

    def scale_logits(self, logits: Tensor, embeddings: Tensor) -> Tensor:
        """The cosines times both lengths and the scale."""
        return logits * _lengths(embeddings)[:, None] * _lengths(self.W.t().to(logits))[None, :] * self.scale

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes], without a margin."""
        return self.scale_logits(self.get_cosine(embeddings), embeddings)

    def _elements(self, call: Call) -> LossDict:
        labels = call.own_labels().long()
        cosine = self.get_cosine(call.embeddings)
        own = cosine.gather(1, labels[:, None])
        turned = self.modify_cosine_of_target_classes(own[:, 0])[:, None]
        logits = self.scale_logits(cosine.scatter(1, labels[:, None], turned), call.embeddings)
        losses = cross_entropy(logits, labels, reduction="none")
        return {"loss": part(losses if call.weights is None else losses * call.weights, call.rows, "element")}


class SphereFaceLoss(LargeMarginSoftmaxLoss):
    """`LargeMarginSoftmaxLoss` with class vectors of length 1.

    Args:
        num_classes: how many class vectors.
        embedding_size: their width.
        margin: m, a whole number.
        scale: a factor of the logits.
        settings: see `ClassSettings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes]: the class vectors are its columns, as in PML.
    """

    def scale_logits(self, logits: Tensor, embeddings: Tensor) -> Tensor:
        """The cosines times the length of the row and the scale."""
        return logits * _lengths(embeddings)[:, None] * self.scale


class CosFaceLoss(LargeMarginSoftmaxLoss):
    """mean over rows of the cross-entropy of logits c·cos θ, lowered by a margin for the own class: c·(cos θ - m).

    Args:
        num_classes: how many class vectors.
        embedding_size: their width.
        margin: m.
        scale: c.
        settings: see `ClassSettings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes]: the class vectors are its columns, as in PML.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        margin: float = 0.35,
        scale: float = 64,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(num_classes, embedding_size, margin, scale, **settings)

    def init_margin(self) -> None:
        """Leave the margin as it is: a cosine."""

    def modify_cosine_of_target_classes(self, cosine_of_target_classes: Tensor) -> Tensor:
        """The cosines less the margin."""
        if self.collect_stats:
            self.get_angles(cosine_of_target_classes)
        return cosine_of_target_classes - self.margin

    def scale_logits(self, logits: Tensor, embeddings: Tensor) -> Tensor:
        """The cosines times the scale."""
        return logits * self.scale

    def _row_pair(self) -> PairLoss | None:
        # a subclass with logits of its own is computed from them
        hooks = ("get_cosine", "modify_cosine_of_target_classes", "scale_logits")
        own = any(getattr(type(self), name) is not getattr(CosFaceLoss, name) for name in hooks)
        return None if own else Linear(self.margin / 2, self.margin / 2, self.scale)


class NormalizedSoftmaxLoss(ClassLoss):
    """mean over rows of  -log( e^{s_iy/τ} / Σ_{all classes} e^{s_ik/τ} ),  with class vectors of length 1.

    Args:
        num_classes: how many class vectors.
        embedding_size: their width.
        temperature: τ.
        settings: see `ClassSettings`; defaults `DotProductSimilarity()`, `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes]: the class vectors are its columns, as in PML.
    """

    def __init__(
        self, num_classes: int, embedding_size: int, temperature: float = 0.05, **settings: Unpack[ClassSettings]
    ) -> None:
        super().__init__(settings)
        self.temperature = temperature
        self.W = self._fresh(embedding_size, num_classes)
        self._make(record=["temperature"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return DotProductSimilarity()

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.W.t()

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes]: scores over the temperature."""
        vectors = self._unit_vectors(embeddings)
        scores: Tensor = self.score(self.distance(embeddings.to(vectors.dtype), vectors))
        return scores / self.temperature

    def _unit_vectors(self, like: Tensor) -> Tensor:
        """The class vectors [classes, d] divided by their norm, in the type that is computed with."""
        dtype = torch.promote_types(torch.promote_types(like.dtype, self.W.dtype), torch.float32)
        found: Tensor = self.distance.normalize(self.W.to(like.device, dtype), dim=0).t()
        return found

    def _row_pair(self) -> PairLoss:
        return Linear(scale=1 / self.temperature)

    def _rows(self, call: Call, recipe: RobustLoss) -> Tensor:
        vectors = self._unit_vectors(call.embeddings)
        names = torch.arange(len(vectors), device=vectors.device)
        rows: Tensor = recipe(call.embeddings, Relation.from_labels(call.own_labels(), names), ref_emb=vectors)
        return rows if call.weights is None else rows * call.weights


def _lengths(rows: Tensor) -> Tensor:
    """The norms of rows [n]."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms

"""Losses against several learned centers per class: sub-center ArcFace and SoftTriple."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearfar.groups.groupings import reduce
from nearfar.links import Terms
from nearfar.losses.centers import AgainstCenters
from nearfar.losses.factors import Factors
from nearfar.losses.proxies import class_softmax
from nearfar.losses.robust import Labels, RobustLoss
from nearfar.pairs import AngularMargin, Linear, PairLoss
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import ClassSettings
from nearfar.pml._tuples import Indices, check_classes
from nearfar.pml.distances import BaseDistance, CosineSimilarity
from nearfar.pml.losses.class_base import ClassLoss, Init
from nearfar.pml.losses.elements import Call, LossDict, part
from nearfar.relations.relation import Relation
from nearfar.similarity import Centers

__all__ = ["SoftTripleLoss", "SubCenterArcFaceLoss"]


class _CenterLoss(ClassLoss):
    """Base class of losses with several centers per class; `class_vectors` are all of them, class by class."""

    num_classes: int

    @abstractmethod
    def _logit_pair(self) -> PairLoss:
        """The logits: l(s, -1) of another class, -l(s, +1) of the own one."""

    @abstractmethod
    def _joined(self, each: Tensor) -> Tensor:
        """One score per class [n, classes] from those of its centers [n, classes, centers]."""

    def _gamma(self) -> float:
        return 0.0

    def _call(
        self,
        embeddings: Tensor,
        labels: Labels,
        indices: Indices | None,
        ref_emb: Tensor | None,
        *names: Tensor | None,
    ) -> Call:
        call = super()._call(embeddings, labels, indices, ref_emb, *names)
        check_classes(call.owner, call.own_labels(), self.num_classes)
        return call

    def _recipe(self, reducer: Translation) -> RobustLoss | None:
        self._how, known = reducer.how, self.similarity
        if known.form != "dot":  # another distance is computed as a matrix, by `_elements`
            return None
        centers = Centers(self.class_vectors().shape[1], gamma=self._gamma(), normalize=known.normalize)
        return RobustLoss(**(class_softmax(self._logit_pair()) | Factors(similarity=centers, reduction="none")))

    def _value(self, call: Call) -> Tensor:
        vectors = self.class_vectors().reshape(self.num_classes, -1)
        names = torch.arange(len(vectors), device=vectors.device)
        relation = Relation.from_labels(call.own_labels(), names)
        rows = self.robust._judged(AgainstCenters(call.owner, call.embeddings, relation, ref_emb=vectors))
        rows = rows if call.weights is None else rows * call.weights
        return reduce(Terms(rows, torch.ones_like(rows)), self._how)

    def _class_scores(self, embeddings: Tensor) -> Tensor:
        """Scores of inference [n, classes]."""
        return self._joined(ClassLoss.get_logits(self, embeddings).reshape(len(embeddings), self.num_classes, -1))

    def _elements(self, call: Call) -> LossDict:
        labels, pair = call.own_labels().long()[:, None], self._logit_pair()
        scores = self._class_scores(call.embeddings)
        logits = pair(scores, -1).scatter(1, labels, -pair(scores.gather(1, labels), +1))
        losses = cross_entropy(logits, labels[:, 0], reduction="none")
        return {"loss": part(losses if call.weights is None else losses * call.weights, call.rows, "element")}


class SubCenterArcFaceLoss(_CenterLoss):
    """`ArcFaceLoss` in which each class has several centers, and a row meets the nearest of them.

    Args:
        num_classes: how many classes.
        embedding_size: width of the centers.
        margin: m, in degrees.
        scale: c.
        sub_centers: centers of each class.
        settings: see `ClassSettings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.

    Attributes:
        W: [embedding_size, num_classes·sub_centers], the centers of a class beside each other, as in PML.
        margin: m, in radians, as in PML.
    """

    stats = ("avg_angle",)

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        margin: float = 28.6,
        scale: float = 64,
        sub_centers: int = 3,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings, fixed=True)
        self.num_classes = num_classes
        self.sub_centers = sub_centers
        self.margin = math.radians(margin)
        self.scale = scale
        self.W = self._fresh(embedding_size, num_classes * sub_centers)
        self._make(record=["num_classes", "margin", "scale"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.W.t()

    def _logit_pair(self) -> PairLoss:
        return AngularMargin(self.margin, self.scale)

    def _joined(self, each: Tensor) -> Tensor:
        return each.amax(dim=2)

    def _elements(self, call: Call) -> LossDict:
        if self.collect_stats:
            own = self.get_cosine(call.embeddings).gather(1, call.own_labels().long()[:, None])
            self.avg_angle = math.degrees(torch.acos(own.detach().clamp(-1, 1)).mean().item())
        return super()._elements(call)

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        """Cosines [n, classes] of rows and the nearest center of each class."""
        return self._class_scores(embeddings)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes]: the scaled cosines, without a margin."""
        return self.scale * self.get_cosine(embeddings)

    @torch.no_grad()
    def get_outliers(
        self, embeddings: Tensor, labels: Tensor, threshold: float = 75, return_dominant_centers: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Rows far from the center that most rows of their class are nearest to: their labels may be wrong.

        Args:
            embeddings: [n, d].
            labels: [n].
            threshold: how far, in degrees.
            return_dominant_centers: as in PML, both are returned whatever it says.

        Returns:
            The numbers of the rows, class by class, and these centers [d, classes] (0 for a class without rows).
        """
        centers = self.W.t().reshape(self.num_classes, self.sub_centers, -1).to(embeddings)
        dominant, found = embeddings.new_zeros(embeddings.shape[1], self.num_classes), []
        for label in range(self.num_classes):
            rows = (labels.to(embeddings.device) == label).nonzero()[:, 0]
            if len(rows):
                cosine = self.distance(embeddings[rows], centers[label])
                most = torch.bincount(cosine.argmax(dim=1)).argmax()
                dominant[:, label] = centers[label, most]
                found.append(rows[cosine[:, most] < math.cos(math.radians(threshold))])
        outliers = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=embeddings.device)
        return outliers, dominant


class SoftTripleLoss(_CenterLoss):
    """mean over rows of the cross-entropy of λ·S_ik, the own class's lowered by a margin: λ·(S_iy - δ).

        S_ik = Σ_c softmax(s_ikc/γ) · s_ikc over the centers c of class k

    Args:
        num_classes: how many classes.
        embedding_size: width of the centers.
        centers_per_class: centers of each class.
        la: λ.
        gamma: γ.
        margin: δ.
        settings: see `ClassSettings`; the distance must be one in which larger means more similar; defaults
            `CosineSimilarity()`, `MeanReducer()`.

    Attributes:
        fc: [embedding_size, num_classes·centers_per_class], the centers of a class beside each other, as in PML.
        gamma: 1/γ, as in PML.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        centers_per_class: int = 10,
        la: float = 20,
        gamma: float = 0.1,
        margin: float = 0.01,
        **settings: Unpack[ClassSettings],
    ) -> None:
        super().__init__(settings)
        if not self.distance.is_inverted:
            raise ValueError(
                f"SoftTripleLoss: distance must be one in which larger means more similar, such as CosineSimilarity(), "
                f"but came as {self.distance!r}."
            )
        self.num_classes = num_classes
        self.centers_per_class = centers_per_class
        self.la = la
        self.gamma = 1.0 / gamma
        self.margin = margin
        self.fc = self._fresh(embedding_size, num_classes * centers_per_class)
        self._make(record=["la", "gamma", "margin", "centers_per_class", "num_classes"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def get_default_weight_init_func(self) -> Init:  # noqa: D102
        return partial(nn.init.kaiming_uniform_, a=math.sqrt(5))

    def class_vectors(self) -> Tensor:  # noqa: D102
        return self.fc.t()

    def _gamma(self) -> float:
        return 1.0 / self.gamma

    def _logit_pair(self) -> PairLoss:
        return Linear(self.margin / 2, self.margin / 2, self.la)

    def _joined(self, each: Tensor) -> Tensor:
        return (torch.softmax(each * self.gamma, dim=2) * each).sum(dim=2)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The scores of inference [n, classes], without scale and margin."""
        return self._class_scores(embeddings)

"""`ClassLoss`: the base class of PML's losses with learned class vectors.

    class MyLoss(ClassLoss):
        def __init__(self, num_classes: int, embedding_size: int, scale: float = 1, **settings: Unpack[ClassSettings]):
            super().__init__(settings)                            # as in `Loss`, with regularizer and start of vectors
            self.scale = scale
            self.W = self._fresh(embedding_size, num_classes)     # a parameter, started by weight_init_func
            self._make(record=["scale"])

        def class_vectors(self) -> Tensor:
            return self.W.t()

        def _row_pair(self) -> PairLoss:                          # -log softmax of the own class, one value per row
            return Linear(scale=self.scale)

A loss of another form leaves `_row_pair` out and writes `_elements(call)`, with `call.weights` and
`self._scores(call)`, or `_recipe` and `_value`, as in `Loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nearfar._utils.tensors import check_labels
from nearfar.groups.groupings import Reduction, reduce
from nearfar.links import Terms
from nearfar.losses.factors import Factors
from nearfar.losses.proxies import class_softmax
from nearfar.losses.robust import Labels, RobustLoss
from nearfar.pairs import PairLoss
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import ClassSettings
from nearfar.pml._tuples import Indices, check_classes, sample_weights
from nearfar.pml.losses.base import Loss
from nearfar.pml.losses.elements import Call, LossDict, number, part
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation
from nearfar.similarity import called

__all__ = ["ClassLoss", "Init"]

Init = Callable[[Tensor], object]


class ClassLoss(Loss, ABC):
    """Base class of losses with class vectors; pass `loss.parameters()` to an optimizer, or they are never trained.

    An index tuple weights samples here: by how often each occurs, relative to the largest count.

    Attributes:
        robust: the native recipe, rows against class vectors.
    """

    known = ClassSettings
    anchors_only = False
    """Whether an index tuple weights a sample by how often it is an anchor, not by how often it occurs."""

    def __init__(self, settings: ClassSettings, *, fixed: bool = False) -> None:
        super().__init__(settings, fixed=fixed)
        self.weight_regularizer = settings.get("weight_regularizer")
        self.weight_reg_weight = settings.get("weight_reg_weight", 1.0)
        self.weight_init_func: Init = settings.get("weight_init_func") or self.get_default_weight_init_func()

    @abstractmethod
    def class_vectors(self) -> Tensor:
        """The class vectors [classes, d]."""

    def get_default_weight_init_func(self) -> Init:
        """What starts the class vectors where nothing is given."""
        return nn.init.normal_

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The logits of inference [n, classes], in the distance's own units."""
        vectors = self.class_vectors()
        dtype = torch.promote_types(torch.promote_types(embeddings.dtype, vectors.dtype), torch.float32)
        logits: Tensor = self.distance(embeddings.to(dtype), vectors.to(embeddings.device, dtype))
        return logits

    def all_regularization_loss_names(self) -> list[str]:  # noqa: D102
        own = [] if getattr(self, "weight_regularizer", None) is None else ["weight_reg_loss"]
        return [*own, *super().all_regularization_loss_names()]

    def _finish(self, call: Call) -> Tensor:
        value = super()._finish(call)
        if self._factored and self.weight_regularizer is not None:
            value = value + self.weight_reg_weight * self.weight_regularizer(self.class_vectors())
        return value

    def _call(
        self,
        embeddings: Tensor,
        labels: Labels,
        indices: Indices | None,
        ref_emb: Tensor | None,
        *names: Tensor | None,
    ) -> Call:
        if ref_emb is not None or any(name is not None for name in names):
            raise ValueError(
                f"{type(self).__name__}: its class vectors are the reference; leave ref_emb and ref_labels out."
            )
        call = super()._call(embeddings, labels, indices, None, *names)
        if indices is not None:
            check_indices(call.owner, indices, (len(embeddings), len(embeddings)))
        for parameter in self.parameters(recurse=False):  # as in PML, they follow the embeddings to their device
            if parameter.device != embeddings.device:
                parameter.data = parameter.data.to(embeddings.device)
        _check(call, self.class_vectors())
        return replace(call, weights=sample_weights(call.indices, embeddings, anchors_only=self.anchors_only))

    def _fresh(self, *shape: int) -> nn.Parameter:
        """Class vectors of this shape, as `weight_init_func` starts them."""
        vectors = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            self.weight_init_func(vectors)
        return vectors

    def _regularized(self, call: Call) -> LossDict:
        own = {}
        if self.weight_regularizer is not None:
            penalty = self.weight_regularizer(self.class_vectors()) * self.weight_reg_weight
            own["weight_reg_loss"] = number(penalty)
        return {**own, **super()._regularized(call)}

    def _row_pair(self) -> PairLoss | None:
        """The logits of a row, if the loss is -log softmax of its own class, one value per row."""
        return None

    def _make(self, record: Iterable[str] = ()) -> None:
        pair = self._row_pair()
        self._per_row: tuple[RobustLoss, ...] = () if pair is None else (self._of_rows(pair, "none"),)
        super()._make(record)

    def _of_rows(self, pair: PairLoss, reduction: Reduction) -> RobustLoss:
        return self._take(
            RobustLoss(**(class_softmax(pair) | Factors(similarity=self.similarity, reduction=reduction)))
        )

    def _recipe(self, reducer: Translation) -> RobustLoss | None:
        self._how, pair = reducer.how, self._row_pair()
        return None if pair is None else self._of_rows(pair, reducer.how)

    def _value(self, call: Call) -> Tensor:
        if call.weights is None:
            return self._rows(call, self.robust)
        rows = self._rows(call, self._per_row[0])
        return reduce(Terms(rows, torch.ones_like(rows)), self._how)

    def _elements(self, call: Call) -> LossDict:
        if not self._per_row:
            return super()._elements(call)
        return {"loss": part(self._rows(call, self._per_row[0]), call.rows, "element")}

    def _rows(self, call: Call, recipe: RobustLoss) -> Tensor:
        """What a recipe of rows against class vectors gives, times the weights of the index tuple."""
        vectors, labels = self.class_vectors(), call.labels
        assert isinstance(labels, Tensor)  # noqa: S101 - `_call` has checked it
        names = torch.arange(len(vectors), device=vectors.device)
        rows: Tensor = recipe(call.embeddings, Relation.from_labels(labels, names), ref_emb=vectors)
        return rows if call.weights is None else rows * call.weights

    def _scores(self, call: Call) -> Tensor:
        """All scores [n, classes], larger = more similar."""
        similarity, vectors = called(self.similarity), self.class_vectors()
        dtype = torch.promote_types(call.embeddings.dtype, vectors.dtype)
        return similarity.scores(*similarity.prepared(call.embeddings.to(dtype), vectors.to(dtype)))


def _check(call: Call, vectors: Tensor) -> None:
    if not isinstance(call.labels, Tensor):
        raise ValueError(f"{call.owner}: labels are missing; pass a 1-D integer tensor of class indices.")
    check_labels(call.owner, "labels", call.labels, len(call.embeddings), call.embeddings.device)
    check_classes(call.owner, call.labels, len(vectors))
    if call.embeddings.shape[1] != vectors.shape[1]:
        raise ValueError(
            f"{call.owner}: embeddings must be as wide as the class vectors ({vectors.shape[1]}), "
            f"but are {call.embeddings.shape[1]} wide."
        )

"""`Loss`: the base class of PML's losses of pairs and triplets, with PML's signature of a call."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace

from torch import Tensor, nn

from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Labels, RobustLoss
from nearfar.pml._names import check_names
from nearfar.pml._settings import Settings, chosen_distance, chosen_reducer
from nearfar.pml._tuples import Indices
from nearfar.pml.distances import Distance
from nearfar.pml.reducers import AvgNonZeroReducer, MeanReducer, Reducer, SumReducer
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation

__all__ = ["Call", "Loss"]


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, checked and on one device."""

    owner: str
    embeddings: Tensor
    labels: Labels
    indices: Indices | None
    ref_emb: Tensor | None
    ref_labels: Tensor | None
    ids: Tensor | None
    ref_ids: Tensor | None

    @property
    def columns(self) -> int:
        """The number of reference rows (of the batch itself, if there is no reference)."""
        return len(self.embeddings if self.ref_emb is None else self.ref_emb)

    def relation(self) -> Relation:
        """The relation by the labels: which rows form positive pairs."""
        if isinstance(self.labels, Relation):
            return self.labels
        if self.labels is None:
            raise ValueError(f"{self.owner}: labels are missing; pass a 1-D integer tensor.")
        return Relation.from_labels(self.labels, self.ref_labels, ids=self.ids, ref_ids=self.ref_ids)

    def into(self, robust: RobustLoss) -> Tensor:
        """Evaluate a recipe on these arguments."""
        value: Tensor = robust(*self._arguments(), ids=self.ids, ref_ids=self.ref_ids)
        return value

    def explained(self, robust: RobustLoss) -> Explanation:
        """Explain a recipe on these arguments."""
        return robust.explain(*self._arguments(), ids=self.ids, ref_ids=self.ref_ids)

    def _arguments(self) -> tuple[Tensor, Labels, Indices | None, Tensor | None, Tensor | None]:
        # pairs that are listed need no labels, so an index tuple with a reference may come without ref_labels
        spare = self.indices is not None and (self.ref_emb is None) != (self.ref_labels is None)
        labels, ref_labels = (None, None) if spare else (self.labels, self.ref_labels)
        return self.embeddings, labels, self.indices, self.ref_emb, ref_labels


class Loss(nn.Module, ABC):
    """Base class of losses of pairs or triplets.

    Attributes:
        robust: the native recipe; `loss.robust.explain(...)` shows the weights behind a value.
        distance: PML's distance.
        reducer: PML's reducer.
    """

    robust: RobustLoss
    once = False
    """Whether a pair that an index tuple lists twice counts once (PML computes the loss from masks)."""
    reads_tuple = False
    """Whether it reads an index tuple before its recipe does, which checks it."""
    reducers: tuple[type[Reducer], ...] = (MeanReducer, AvgNonZeroReducer, SumReducer)
    """The reducers that it supports."""

    def __init__(self, settings: Settings, distance: Distance, reducer: Reducer, *, fixed: bool = False) -> None:
        super().__init__()
        check_names(self, settings, Settings)
        owner = type(self).__name__
        self.distance = chosen_distance(owner, settings, distance, fixed=fixed)
        self.reducer = chosen_reducer(owner, settings, reducer, self.reducers)
        self.embedding_regularizer = settings.get("embedding_regularizer")
        self.embedding_reg_weight = settings.get("embedding_reg_weight", 1.0)

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a differentiable scalar.

        Args:
            embeddings: [n, d].
            labels: [n] integers.
            indices_tuple: a miner's tuple.
            ref_emb: [m, d] reference rows; by default the batch is its own reference and no row is paired with itself.
            ref_labels: [m] integers.
            ids: [n] the sample of each row; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise.
        """
        call = self._call(embeddings, labels, indices_tuple, ref_emb, ref_labels, ids, ref_ids)
        value = self._value(call)
        if self.embedding_regularizer is not None:
            value = value + self.embedding_reg_weight * self.embedding_regularizer(embeddings)
        return value

    def _call(
        self,
        embeddings: Tensor,
        labels: Labels,
        indices: Indices | None,
        ref_emb: Tensor | None,
        *names: Tensor | None,
    ) -> Call:
        owner = type(self).__name__
        check_embeddings(owner, "embeddings", embeddings, finite=self.reads_tuple)  # else the recipe looks at values
        device = embeddings.device  # as in PML, labels may come from another
        ref_labels, ids, ref_ids = (x.to(device) if isinstance(x, Tensor) else x for x in names)
        labels = labels.to(device) if isinstance(labels, Tensor) else labels
        call = Call(owner, embeddings, labels, None, ref_emb, ref_labels, ids, ref_ids)
        if indices is None:
            return call
        if self.reads_tuple or not _tensors(indices):
            check_indices(owner, indices, (len(embeddings), call.columns))
        return replace(call, indices=tuple(part.to(device) for part in indices))

    def _value(self, call: Call) -> Tensor:
        """The loss without its regularizer."""
        return call.into(self.robust)

    def _take(self, robust: RobustLoss) -> RobustLoss:
        """Take a recipe, and let its error messages name this loss."""
        robust.owner = type(self).__name__
        robust.listed_once = robust.listed_apart = self.once
        return robust

    def _labels(self, call: Call) -> Tensor:
        """The labels, for losses that require them."""
        if not isinstance(call.labels, Tensor):
            raise ValueError(f"{call.owner}: labels must come as a 1-D integer tensor, with an index tuple too.")
        check_labels(call.owner, "labels", call.labels, len(call.embeddings), call.embeddings.device)
        return call.labels


def _tensors(indices: object) -> bool:
    """Whether these are several tensors, whatever they hold."""
    return isinstance(indices, tuple | list) and all(isinstance(part, Tensor) for part in indices)

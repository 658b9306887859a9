"""`Loss`: the one call shape of every loss, and `Call`, what such a call brought."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_embeddings, check_labels, check_reference, check_reference_rows
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.renamed import NewKeywords
from nearfar.losses.explanation import Explanation
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation

__all__ = ["Call", "Labels", "Loss"]

Labels = Tensor | Relation | None


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, see `Loss.forward`, and the processes that share its work, each holding all of it."""

    owner: str
    embeddings: Tensor
    labels: Labels
    indices: tuple[Tensor, ...] | None = None
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    ranks: ProcessGroup | None = None

    @property
    def reference(self) -> Tensor:
        """The rows that are compared with: the batch itself, where no others came."""
        return self.embeddings if self.ref_emb is None else self.ref_emb

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m), the size of the matrix of pairs."""
        return len(self.embeddings), len(self.reference)

    def relation(self) -> Relation:
        """The checked relation: as given, from labels, or left open where an index tuple says which pairs there are."""
        if self.ref_emb is not None:
            check_reference_rows(self.owner, self.embeddings, self.ref_emb)
        if self.indices is not None:
            check_indices(self.owner, self.indices, self.shape)
        if isinstance(self.labels, Relation):
            self._check_relation(self.labels)
            return self.labels
        if self.labels is None:
            return self._open_relation()
        device = self.embeddings.device
        check_labels(self.owner, "labels", self.labels, len(self.embeddings), device)
        check_reference(self.owner, self.embeddings, self.ref_emb, self.ref_labels)
        if self.ref_labels is not None:
            check_labels(self.owner, "ref_labels", self.ref_labels, len(self.reference), device)
        return Relation.from_labels(self.labels, self.ref_labels, ids=self.ids, ref_ids=self.ref_ids)

    def _open_relation(self) -> Relation:
        if self.indices is None:
            raise ValueError(
                f"{self.owner}: labels are missing; pass a 1-D integer tensor, an nf.Relation, or an index tuple."
            )
        same = torch.zeros(self.shape, dtype=torch.bool, device=self.embeddings.device)
        return Relation.from_matrix(same, square=self.ref_emb is None, ids=self.ids, ref_ids=self.ref_ids)

    def _check_relation(self, relation: Relation) -> None:
        owner, square = self.owner, self.ref_emb is None
        if relation.device != self.embeddings.device:
            raise ValueError(
                f"{owner}: the Relation is on {relation.device} but the embeddings are on {self.embeddings.device}; "
                "move one of them."
            )
        if any(x is not None for x in (self.ref_labels, self.ids, self.ref_ids)):
            raise ValueError(
                f"{owner}: a Relation already holds ref_labels, ids and ref_ids; give them to its constructor."
            )
        if relation.shape != self.shape or relation.square != square:
            given = "its own reference" if square else "a reference"
            raise ValueError(
                f"{owner}: the Relation is {relation.shape[0]} x {relation.shape[1]}"
                f"{' (square)' if relation.square else ''}, but the embeddings are {self.shape[0]} x {self.shape[1]} "
                f"with {given}."
            )


class Loss(NewKeywords, nn.Module, ABC):
    """A metric-learning loss: called with embeddings and labels, and able to explain itself."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = type(self).__name__
        """Whom messages name; a loss inside another one bears the outer name."""

    @abstractmethod
    def _value(self, call: Call) -> Tensor: ...

    @abstractmethod
    def _explanation(self, call: Call) -> Explanation: ...

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss, a differentiable scalar (or [n] with reduction="none").

        Args:
            embeddings: [n, d] floating. Half precision is computed in float32.
            labels: [n] integers, or a `Relation`; may be left out where `indices` say everything.
            indices: a miner's index tuple, (anchor, positive, negative) or (anchor, positive, anchor, negative).
            ref_emb: [m, d] reference rows; without them the batch is its own reference and no row meets itself.
            ref_labels: [m] integers of the reference rows.
            ids: [n] which sample each row is; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise for the reference rows.

        A batch with nothing to learn from gives a zero that keeps the graph, and one warning that says why.
        """
        return self._judged(Call(self.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids))

    def _judged(self, call: Call) -> Tensor:
        """The value of a call that nobody has looked at yet."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            return self._value(call)

    def explain(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Explanation:
        """The value, and the losses, weights p* and dual variables that produced it. Same arguments as the call."""
        return self._examined(Call(self.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids))

    def _examined(self, call: Call) -> Explanation:
        """The explanation of a call that nobody has looked at yet."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            return self._explanation(call)

"""`Loss`, the base class of all losses, and `Call`, the checked arguments of one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.settings import Settings
from nearfar._utils.tensors import check_embeddings, check_labels, check_placed, check_reference, check_reference_rows
from nearfar.engines.recordings import DEVICES, Replays, replayed
from nearfar.losses.arguments import check_relation
from nearfar.losses.explanation import Explanation
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation

__all__ = ["Call", "Labels", "Loss", "raw_rows", "work_type"]

Labels = Tensor | Relation | None


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, see `Loss.forward`, and the processes that share its work, each holding all of it.

    A recording knows more: the type that products may be taken in, and the most positives of a row.
    """

    owner: str
    embeddings: Tensor
    labels: Labels
    indices: tuple[Tensor, ...] | None = None
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    ranks: ProcessGroup | None = None
    low: torch.dtype | None = None
    width: int | None = None

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
            check_relation(
                self.owner, self.labels, self.embeddings, self.ref_emb, (self.ref_labels, self.ids, self.ref_ids)
            )
            return self.labels
        if self.labels is None:
            if self.indices is None:
                raise ValueError(
                    f"{self.owner}: labels are missing; pass a 1-D integer tensor, an nf.Relation, or an index tuple."
                )
            # no two rows are positives of each other, and no matrix has to say so
            n, m = self.shape
            each = torch.arange(n + m, device=self.embeddings.device)
            others = None if self.ref_emb is None else each[n:]
            return Relation.from_labels(each[:n], others, ids=self.ids, ref_ids=self.ref_ids)
        device = self.embeddings.device
        check_labels(self.owner, "labels", self.labels, len(self.embeddings), device)
        check_reference(self.owner, self.embeddings, self.ref_emb, self.ref_labels)
        if self.ref_labels is not None:
            check_labels(self.owner, "ref_labels", self.ref_labels, len(self.reference), device)
        ids, ref_ids = self.ids, self.ref_ids
        return Relation.from_labels(self.labels, self.ref_labels, ids=ids, ref_ids=ref_ids, width=self.width)


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Loss(Settings, ABC):
    """A metric-learning loss: called with embeddings and labels, and able to explain itself."""

    keyword_only = True
    owner = ""
    """The name in messages; that of the class, unless the loss is part of another one."""

    def _prepare(self) -> None:
        self.owner = type(self).__name__
        self._replays = Replays()

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
        """Validate the embeddings, switch autocast off, compute the value."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            core = None
            if call.embeddings.device.type in DEVICES and not torch.compiler.is_compiling():
                core = self._core()
            value = None if core is None else replayed(self, core, call)
            if value is None:
                check_placed(self.owner, self, call.embeddings.device)
            return self._value(call) if value is None else value

    def _core(self) -> Any:
        """The product inside, if a call depends on its arguments, parameters and settings alone; else None."""
        return None

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
        """Validate the embeddings, switch autocast off, explain the value."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            check_placed(self.owner, self, call.embeddings.device)
            return self._explanation(call)


def raw_rows(call: Call) -> tuple[Tensor, Tensor | None]:
    """Rows [n, d] and references [m, d] in the type that is computed with."""
    dtype = work_type(call)
    return call.embeddings.to(dtype), None if call.ref_emb is None else call.ref_emb.to(dtype)


def work_type(call: Call) -> torch.dtype:
    """The wider type of rows and references, and never less than float32: half precision loses the sums."""
    wide = torch.promote_types(call.embeddings.dtype, call.reference.dtype)
    return torch.promote_types(wide, torch.float32)

"""`Call`: the arguments of one call of a loss, checked, and the types that it is computed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import check_labels, check_reference, check_reference_rows
from nearfar.groups.groupings import Product
from nearfar.losses.arguments import check_relation
from nearfar.relations.index_tuples import check_indices
from nearfar.relations.relation import Relation

__all__ = ["Call", "Labels", "dealt", "low_type", "raw", "work_type", "zero"]

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
        return Relation.from_labels(self.labels, self.ref_labels, ids=self.ids, ref_ids=self.ref_ids)


def dealt(call: Call, product: Product) -> bool:
    """Whether strips can be dealt out: each rank gets some, and no draw depends on who sweeps which."""
    return call.ranks is None or (not product.draws and len(call.embeddings) >= call.ranks.world)


def raw(call: Call) -> tuple[Tensor, Tensor | None]:
    """Rows [n, d] and references [m, d] in the type that is computed with."""
    dtype = work_type(call)
    return call.embeddings.to(dtype), None if call.ref_emb is None else call.ref_emb.to(dtype)


def work_type(call: Call) -> torch.dtype:
    """The wider type of rows and references, and never less than float32: half precision loses the sums."""
    wide = torch.promote_types(call.embeddings.dtype, call.reference.dtype)
    return torch.promote_types(wide, torch.float32)


def low_type(call: Call) -> torch.dtype:
    """The type in which the fused engine takes products: half precision if rows and references came in it."""
    return torch.promote_types(call.embeddings.dtype, call.reference.dtype)


def zero(call: Call) -> Tensor:
    """A zero that keeps the graph of a batch without rows."""
    return (call.embeddings.sum() * 0 + call.reference.sum() * 0).to(work_type(call))

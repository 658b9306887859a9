"""PML's `CrossBatchMemory`, with its position saved in checkpoints; the native one is `nf.CrossBatchMemory`."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_whole
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.pml._names import Recorded, check_names
from nearfar.pml._tuples import Indices
from nearfar.pml.losses.base import Loss
from nearfar.pml.losses.class_base import ClassLoss
from nearfar.pml.losses.softmax import NPairsLoss
from nearfar.pml.miners import BaseMiner
from nearfar.relations.index_tuples import as_pairs

__all__ = ["CrossBatchMemory"]


class CrossBatchMemory(nn.Module):
    """Compare a batch with the last `memory_size` rows, the batch among them, all without a gradient.

    As in PML the batch is remembered first and then compared with the memory, a row never with itself. Other than in
    PML, no list of all pairs is made without a miner; triplets and their miners work; position and fill level are in
    the state dict (a PML checkpoint without them is taken for an empty memory, as by PML itself).

    Args:
        loss: a loss of pairs or triplets of `nearfar.pml`, except `NPairsLoss`.
        embedding_size: dimension of the embeddings.
        memory_size: how many rows to remember.
        miner: a miner of `nearfar.pml`, or None for all pairs.
        settings: see `Recorded`.
    """

    embedding_memory: Tensor
    label_memory: Tensor

    def __init__(
        self,
        loss: Loss,
        embedding_size: int,
        memory_size: int = 1024,
        miner: BaseMiner | None = None,
        **settings: Unpack[Recorded],
    ) -> None:
        super().__init__()
        check_names(self, settings)
        if not isinstance(loss, Loss) or isinstance(loss, NPairsLoss | ClassLoss):
            raise TypeError(
                f"CrossBatchMemory: loss must be one of pairs or triplets of nearfar.pml that takes a reference, "
                f"but came as {type(loss).__name__}."
            )
        check_whole("CrossBatchMemory", "embedding_size", embedding_size)
        check_whole("CrossBatchMemory", "memory_size", memory_size)
        self.loss, self.miner = loss, miner
        self.embedding_size, self.memory_size = embedding_size, memory_size
        self.register_buffer("embedding_memory", torch.zeros(memory_size, embedding_size))
        self.register_buffer("label_memory", torch.zeros(memory_size, dtype=torch.int64))
        self.queue_idx = 0
        self.has_been_filled = False

    def reset_queue(self) -> None:
        """Forget all rows."""
        self.queue_idx, self.has_been_filled = 0, False

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Indices | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a differentiable scalar.

        Args:
            embeddings: [n, d].
            labels: [n] integers.
            indices_tuple: pairs or triplets of the batch, added to those with the memory.
            enqueue_mask: [n] rows that are remembered and not in the loss; the others are in the loss and not
                remembered.
        """
        labels = self._check(embeddings, labels, indices_tuple, enqueue_mask)
        rows, names = embeddings, labels
        if enqueue_mask is not None:
            chosen = enqueue_mask.to(embeddings.device)
            rows, names, embeddings, labels = rows[chosen], names[chosen], embeddings[~chosen], labels[~chosen]
        places = self._remember(rows.detach(), names)
        count = self.memory_size if self.has_been_filled else self.queue_idx
        past, past_labels = self.embedding_memory[:count], self.label_memory[:count]
        ids = places if enqueue_mask is None else torch.full_like(labels, -1)
        identity = {"ids": ids, "ref_ids": torch.arange(count, device=embeddings.device)}
        indices = None if self.miner is None else self.miner(embeddings, labels, past, past_labels, **identity)
        if indices_tuple is not None:
            given = tuple(part.to(embeddings.device) for part in indices_tuple)
            indices = self._with_given(labels, past_labels, ids, indices, given)
        value: Tensor = self.loss(embeddings, labels, indices, past, past_labels, **identity)
        return value

    def _check(self, embeddings: Tensor, labels: Tensor, indices: Indices | None, mask: Tensor | None) -> Tensor:
        check_embeddings("CrossBatchMemory", "embeddings", embeddings)
        labels = labels.to(embeddings.device) if isinstance(labels, Tensor) else labels
        check_labels("CrossBatchMemory", "labels", labels, len(embeddings), embeddings.device)
        if embeddings.shape[1] != self.embedding_size:
            raise ValueError(
                f"CrossBatchMemory: embeddings must be embedding_size={self.embedding_size} wide, "
                f"but are {embeddings.shape[1]} wide."
            )
        if indices is not None and mask is not None:
            raise ValueError("CrossBatchMemory: indices_tuple and enqueue_mask exclude each other; pass one of them.")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != labels.shape):
            raise ValueError(f"CrossBatchMemory: enqueue_mask must be a boolean [{len(labels)}] tensor.")
        count = len(labels) if mask is None else int(mask.sum())
        if count > self.memory_size:
            raise ValueError(
                f"CrossBatchMemory: {count} rows do not fit a memory of {self.memory_size}; raise memory_size."
            )
        return labels

    def _with_given(self, labels: Tensor, past: Tensor, ids: Tensor, mined: Indices | None, given: Indices) -> Indices:
        """Join the pairs or triplets with the memory and those given; as in PML the latter index the memory's rows."""
        if mined is None:
            positive = labels[:, None] == past[None, :]
            itself = ids[:, None] == torch.arange(len(past), device=past.device)[None, :]
            mined = (*(positive & ~itself).nonzero(as_tuple=True), *(~positive).nonzero(as_tuple=True))
        if len(mined) == 3 and len(given) == 4:
            raise ValueError(
                "CrossBatchMemory: the miner gives triplets but indices_tuple holds pairs; pass triplets, or mine "
                "pairs."
            )
        more = as_pairs(given) if len(mined) == 4 else given
        return tuple(torch.cat([a, b]) for a, b in zip(mined, more, strict=True))

    @torch.no_grad()
    def _remember(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Write rows into the ring buffer, and return their positions."""
        if self.embedding_memory.device != rows.device or self.embedding_memory.dtype != rows.dtype:
            self.embedding_memory = self.embedding_memory.to(rows.device, rows.dtype)
            self.label_memory = self.label_memory.to(rows.device)
        places = (torch.arange(len(rows), device=rows.device) + self.queue_idx) % self.memory_size
        # a new tensor: the old one may still stand in a graph that has not gone backward
        self.embedding_memory = self.embedding_memory.index_copy(0, places, rows)
        self.label_memory = self.label_memory.index_copy(0, places, labels.long())
        self.has_been_filled = self.has_been_filled or self.queue_idx + len(rows) >= self.memory_size
        self.queue_idx = (self.queue_idx + len(rows)) % self.memory_size
        return places

    def get_extra_state(self) -> Tensor:
        """Position and fill level [2], which `state_dict` saves with the rows."""
        return torch.tensor([self.queue_idx, int(self.has_been_filled)])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state that `get_extra_state` returned."""
        self.queue_idx, filled = state.tolist()
        self.has_been_filled = bool(filled)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", torch.zeros(2, dtype=torch.int64))
        super()._load_from_state_dict(state_dict, prefix, *rest)

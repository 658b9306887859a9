"""PML's `CrossBatchMemory`, with its position saved in checkpoints; the native one is `nf.CrossBatchMemory`."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_whole
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.pml._names import Recorded, check_names
from nearfar.pml._records import Records
from nearfar.pml._tuples import Indices
from nearfar.pml.losses.base import Loss
from nearfar.pml.losses.elements import Call
from nearfar.pml.miners import BaseMiner
from nearfar.relations.index_tuples import as_pairs

__all__ = ["CrossBatchMemory"]

SUPPORTED = """
    AngularLoss CircleLoss ContrastiveLoss GeneralizedLiftedStructureLoss IntraPairVarianceLoss LiftedStructureLoss
    MarginLoss MultiSimilarityLoss NCALoss NTXentLoss SignalToNoiseRatioContrastiveLoss SupConLoss TripletMarginLoss
    TupletMarginLoss
"""


class CrossBatchMemory(Records):
    """Compare a batch with the last `memory_size` rows, the batch among them, all without a gradient.

    As in PML the batch is remembered first and then compared with the memory, a row never with itself. Other than in
    PML, no list of all pairs is made without a miner; triplets and their miners work; an index tuple of the batch
    points at where its rows were stored. The state dict is PML's, and where the memory stood is in its metadata, which
    `torch.save` keeps: where that is lost, or PML wrote it, rows that are not zero are taken for remembered ones.

    Args:
        loss: one of `supported_losses()`, ours or PML's, or a subclass of one.
        embedding_size: dimension of the embeddings.
        memory_size: how many rows to remember.
        miner: a miner, ours or PML's, or None for all pairs.
        settings: see `Recorded`.
    """

    embedding_memory: Tensor
    label_memory: Tensor

    def __init__(
        self,
        loss: nn.Module,
        embedding_size: int,
        memory_size: int = 1024,
        miner: nn.Module | None = None,
        **settings: Unpack[Recorded],
    ) -> None:
        check_names(self, settings)
        super().__init__(settings.get("collect_stats"))
        if not any(kind.__name__ in self.supported_losses() for kind in type(loss).__mro__):
            raise TypeError(
                f"CrossBatchMemory: loss must be one of pairs or triplets that takes a reference "
                f"({', '.join(self.supported_losses())}), but came as {type(loss).__name__}."
            )
        check_whole("CrossBatchMemory", "embedding_size", embedding_size)
        check_whole("CrossBatchMemory", "memory_size", memory_size)
        self.loss, self.miner = loss, miner
        self.embedding_size, self.memory_size = embedding_size, memory_size
        self.reset_queue()
        self.add_to_recordable_attributes(list_of_names=["embedding_size", "memory_size", "queue_idx"])

    @staticmethod
    def supported_losses() -> list[str]:
        """The names of the losses that may be inside."""
        return SUPPORTED.split()

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Raise TypeError if a loss of this name may not be inside."""
        if loss_name not in cls.supported_losses():
            raise TypeError(f"CrossBatchMemory: {loss_name} takes no reference, or is not known here.")

    def reset_queue(self) -> None:
        """Forget all rows."""
        self.register_buffer("embedding_memory", torch.zeros(self.memory_size, self.embedding_size))
        self.register_buffer("label_memory", torch.zeros(self.memory_size, dtype=torch.int64))
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
        self.reset_stats()
        labels = self._check(embeddings, labels, indices_tuple, enqueue_mask)
        rows, names = embeddings, labels
        if enqueue_mask is not None:
            chosen = enqueue_mask.to(embeddings.device)
            rows, names, embeddings, labels = rows[chosen], names[chosen], embeddings[~chosen], labels[~chosen]
        places = self._remember(rows.detach(), names)
        count = self.memory_size if self.has_been_filled else self.queue_idx
        past, past_labels = self.embedding_memory[:count], self.label_memory[:count]
        ids = places if enqueue_mask is None else torch.full_like(labels, -1)
        call = Call("CrossBatchMemory", embeddings, labels, None, past, past_labels, ids)
        indices = None if self.miner is None else self._mined(call)
        if indices_tuple is not None:
            given = tuple(part.to(embeddings.device) for part in indices_tuple)
            indices = _joined(self._all(call) if indices is None else indices, _stored(given, places))
        if isinstance(self.loss, Loss) and type(self.loss).compute_loss is Loss.compute_loss:
            every = torch.arange(count, device=embeddings.device)
            value: Tensor = self.loss(embeddings, labels, indices, past, past_labels, ids=ids, ref_ids=every)
            return value
        # one that knows no ids has the pairs listed, without those of a row with itself
        indices = self._all(call) if indices is None else indices
        found: Tensor = self.loss(embeddings, labels, indices, past, past_labels)
        return found

    def _mined(self, call: Call) -> Indices:
        """The pairs or triplets that the miner finds in the memory, none of a row with itself."""
        assert self.miner is not None  # noqa: S101
        arguments = (call.embeddings, call.labels, call.ref_emb, call.ref_labels)
        if isinstance(self.miner, BaseMiner) and type(self.miner).mine is BaseMiner.mine:
            names = {"ids": call.ids, "ref_ids": torch.arange(call.columns, device=call.embeddings.device)}
            found: Indices = self.miner(*arguments, **names)
            return found
        mined: Indices = self.miner(*arguments)
        return _without_itself(mined, call)

    def _all(self, call: Call) -> Indices:
        """All pairs of the batch with the memory, none of a row with itself."""
        assert isinstance(call.labels, Tensor)  # noqa: S101
        assert call.ref_labels is not None  # noqa: S101
        same = call.labels[:, None] == call.ref_labels[None, :]
        return _without_itself((*same.nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True)), call)

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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:  # beside the keys, so that PML takes them as its own
            state = {"queue_idx": self.queue_idx, "has_been_filled": self.has_been_filled}
            metadata.setdefault(prefix[:-1], {}).update(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        rows = state_dict.get(f"{prefix}embedding_memory")
        if "queue_idx" in local_metadata:
            self.queue_idx, self.has_been_filled = local_metadata["queue_idx"], local_metadata["has_been_filled"]
        elif isinstance(rows, Tensor):
            written = torch.nonzero((rows != 0).any(dim=1))
            count = int(written.max()) + 1 if len(written) else 0
            self.queue_idx, self.has_been_filled = count % self.memory_size, count == self.memory_size


def _stored(given: Indices, places: Tensor) -> Indices:
    """An index tuple of the batch, whose columns point at where its rows are in the memory."""
    if len(given) == 3:
        return given[0], places[given[1]], places[given[2]]
    return given[0], places[given[1]], given[2], places[given[3]]


def _joined(found: Indices, given: Indices) -> Indices:
    """Both tuples, as pairs or triplets as the first one is."""
    if len(found) == 4:
        given = as_pairs(given)
    elif len(given) == 4:
        a, p, b, n = given
        left, right = torch.nonzero(a[:, None] == b[None, :], as_tuple=True)
        given = a[left], p[left], n[right]
    return tuple(torch.cat(both) for both in zip(found, given, strict=True))


def _without_itself(found: Indices, call: Call) -> Indices:
    """The tuple without positives that are the anchor itself, as it lies in the memory."""
    assert call.ids is not None  # noqa: S101
    other = call.ids[found[0]] != found[1]
    if len(found) == 3:
        return tuple(part[other] for part in found)
    return found[0][other], found[1][other], *found[2:]

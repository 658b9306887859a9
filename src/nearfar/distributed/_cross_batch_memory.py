"""`CrossBatchMemory`: embeddings of past batches as further references, in a ring buffer saved in checkpoints."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.memory import check_room
from nearfar._utils.tensors import check_labels
from nearfar.distributed._gather import Distributed
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, Loss
from nearfar.relations.relation import Relation

COPIES, POSITION_BYTES = 7, 40
"""How many copies of a remembered row a step holds (the row and its gradient are gathered, concatenated and scaled; the
fewest of five measured losses), and the bytes of its label, id and position."""
COUNTS = 3  # number of entries before the ages in a memory's state


def bytes_of(size: int, width: int, bytes_each: int = 4) -> int:
    """The least number of bytes that a full memory takes during a step.

    >>> bytes_of(1000, 128)
    3624000
    """
    return size * (COPIES * width * bytes_each + POSITION_BYTES)


@dataclass(frozen=True)
class Staleness:
    """The age of the rows in the memory.

    Args:
        rows: the number of rows that the next call would use.
        mean: their mean age in calls.
        oldest: the age of the oldest of them in calls.
    """

    rows: int
    mean: float
    oldest: int


class CrossBatchMemory(Loss):
    """Compare a batch with itself and with the last `size` embeddings of earlier batches (cross-batch memory).

    The value is loss(batch, reference = batch and memory). Rows of the batch get a gradient on both sides of a pair;
    remembered rows get none. With an empty memory it is exactly the wrapped loss. It works with every loss that takes
    reference rows (all except those with proxies). The k of `DroTopK` then counts entries of the n x (n + size) matrix,
    in which pairs within the batch occur twice.

    In evaluation mode (`memory.eval()`) the memory is used but not updated. The ring buffer, its position and the ages
    are in `state_dict`. With several processes use `Distributed(CrossBatchMemory(loss, ...))`: each rank then remembers
    the rows of all ranks, in the same order.

    Args:
        loss: any loss without proxies.
        size: the number of rows to remember.
        warmup: the number of initial calls that fill the memory without using it.
        max_age: rows older than this number of calls are not used; None for no limit.

    Example:
        >>> import nearfar as nf
        >>> memory = nf.CrossBatchMemory(nf.losses.Contrastive(), size=1000)
        >>> for seed in range(3):
        ...     rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        ...     value = memory(rows, torch.arange(8) // 2)
        >>> memory.staleness()
        Staleness(rows=24, mean=2.0, oldest=3)
    """

    embeddings: Tensor
    labels: Tensor
    ids: Tensor

    moves_buffers = True  # the remembered rows follow the embeddings to their device

    def __init__(self, loss: Loss, size: int, warmup: int = 0, *, max_age: int | None = None) -> None:
        super().__init__()
        if not isinstance(loss, Loss) or hasattr(loss, "proxies") or isinstance(loss, CrossBatchMemory | Distributed):
            raise TypeError(
                f"CrossBatchMemory: loss must be a nearfar loss that takes reference rows, but came as "
                f"{type(loss).__name__}; proxies are a reference "
                "already, and Distributed goes around a memory, not inside."
            )
        check_whole("CrossBatchMemory", "size", size)
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(f"CrossBatchMemory: warmup must be a whole number from 0 on, but came as {warmup!r}.")
        if max_age is not None:
            check_whole("CrossBatchMemory", "max_age", max_age)
        self.loss, self.size, self.warmup, self.max_age = loss, size, warmup, max_age
        check_room("CrossBatchMemory", f"size={size:,}", bytes_of(size, 0))
        self.register_buffer("embeddings", torch.empty(0, 0))
        self.register_buffer("labels", torch.empty(0, dtype=torch.int64))
        self.register_buffer("ids", torch.empty(0, dtype=torch.int64))
        # the call in which each position was written, 0 for never; on the host, since each call reads it
        self._written = torch.zeros(size, dtype=torch.int64)
        self._position = 0
        self._calls = 0
        self._named: bool | None = None

    def staleness(self) -> Staleness:
        """The age of the rows that the next call would use, counted from that call."""
        ages = self._calls + 1 - self._written[self._positions()]
        if not len(ages):
            return Staleness(0, 0.0, 0)
        return Staleness(len(ages), float(ages.double().mean()), int(ages.amax()))

    def drift(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """How far samples have moved since they were remembered: Euclidean distances [k] of unit rows.

        Args:
            embeddings: [n, d] present embeddings; the k samples among them that are remembered are compared.
            ids: [n] the ids of these samples; earlier calls must have passed ids too.
        """
        if not self._named:
            raise ValueError("CrossBatchMemory: drift needs to know which row is which sample; pass ids= at each call.")
        positions = self._positions()
        now, then = (ids.to(self.ids.device)[:, None] == self.ids[positions][None, :]).nonzero(as_tuple=True)
        unit = torch.nn.functional.normalize
        moved: Tensor = unit(embeddings.detach()[now]) - unit(self.embeddings[positions][then])
        return moved.square().sum(dim=1).sqrt()

    def reset(self) -> None:
        """Forget all rows, and start ages and warm-up anew."""
        self._written.zero_()
        self._position = self._calls = 0
        self._named = None

    def _value(self, call: Call) -> Tensor:
        value = self.loss._value(self._inside(call))
        if self.training:
            self._remember(call)
        return value

    def _explanation(self, call: Call) -> Explanation:
        """Explain the batch against the batch and the memory, without updating the memory."""
        return self.loss._explanation(self._inside(call))

    def _inside(self, call: Call) -> Call:
        """The call with the remembered rows as further references."""
        labels = self._check(call)
        call = replace(call, owner=f"CrossBatchMemory({self.loss.owner})")
        positions = self._positions() if self._calls >= self.warmup else self._written[:0]
        if not len(positions) or not len(call.embeddings):
            return replace(call, ids=None)
        self._move_to(call.embeddings.device)
        at = positions.to(self.labels.device)
        relation = Relation.from_labels(
            labels,
            torch.cat([labels.long(), self.labels[at]]),
            ids=call.ids,
            ref_ids=torch.cat([call.ids.long(), self.ids[at]]) if call.ids is not None else None,
            reference_starts_with_batch=True,
        )
        past = self.embeddings[at].to(call.embeddings.dtype)
        reference = torch.cat([call.embeddings, past])
        return replace(call, labels=relation, ref_emb=reference, ids=None)

    def _positions(self) -> Tensor:
        """Positions of the rows that are not too old, oldest first, on the host."""
        youngest = 1 if self.max_age is None else max(1, self._calls + 1 - self.max_age)
        in_time = (torch.arange(self.size) + self._position) % self.size
        return in_time[self._written[in_time] >= youngest]

    def _check(self, call: Call) -> Tensor:
        if any(x is not None for x in (call.ref_emb, call.ref_labels, call.ref_ids, call.indices)):
            raise ValueError(
                "CrossBatchMemory: it brings its own reference rows and takes no others, nor an index tuple; leave "
                "them out, and choose pairs with miner= on the loss."
            )
        if not isinstance(call.labels, Tensor):
            raise TypeError(
                f"CrossBatchMemory: labels must be a 1-D integer tensor, which it can remember, but came as "
                f"{type(call.labels).__name__}."
            )
        check_labels("CrossBatchMemory", "labels", call.labels, len(call.embeddings), call.embeddings.device)
        if self._named is not None and self._named != (call.ids is not None):
            raise ValueError(
                f"CrossBatchMemory: ids came {'not ' if self._named else ''}with this call but "
                f"{'' if self._named else 'not '}with earlier ones; pass them always or never, or call reset()."
            )
        width = self.embeddings.shape[1] if len(self.embeddings) else call.embeddings.shape[1]
        if self._holds_any and call.embeddings.shape[1] != width:
            raise ValueError(
                f"CrossBatchMemory: embeddings must be as wide as those remembered ({width}), but are "
                f"{call.embeddings.shape[1]} wide; call reset() to forget them."
            )
        return call.labels

    @property
    def _in_step(self) -> str:
        """A description for `agree`, equal on ranks whose memories hold the same rows."""
        return f"{self._calls} calls, at place {self._position} of the ring"

    @property
    def _holds_any(self) -> bool:
        return bool(self._written.any())

    @torch.no_grad()
    def _remember(self, call: Call) -> None:
        self._calls += 1
        rows = call.embeddings.detach()[-self.size :]
        if not len(rows):
            return
        self._named = call.ids is not None
        if self.embeddings.shape != (self.size, rows.shape[1]) or self.embeddings.device != rows.device:
            self._allocate(rows)
        positions = (torch.arange(len(rows)) + self._position) % self.size
        at = positions.to(rows.device)
        self.embeddings[at] = rows.to(self.embeddings.dtype)
        assert isinstance(call.labels, Tensor)  # noqa: S101 - `_check` said so
        self.labels[at] = call.labels[-self.size :].long()
        if call.ids is not None:
            self.ids[at] = call.ids[-self.size :].to(rows.device).long()
        self._written[positions] = self._calls
        self._position = (self._position + len(rows)) % self.size

    def _allocate(self, rows: Tensor) -> None:
        """Allocate buffers of the right dimension, dtype and device; remembered rows are kept."""
        if self._holds_any:
            self._move_to(rows.device)
            return
        width = rows.shape[1]
        what = f"size={self.size:,} rows of width {width:,}"
        check_room("CrossBatchMemory", what, bytes_of(self.size, width, rows.element_size()), rows.device)
        self.embeddings = rows.new_zeros(self.size, width)
        self.labels, self.ids = (torch.zeros(self.size, dtype=torch.int64, device=rows.device) for _ in range(2))

    def _move_to(self, device: torch.device) -> None:
        """Move the memory to the device of the batch; a checkpoint may have been loaded on another one."""
        self.embeddings, self.labels, self.ids = (x.to(device) for x in (self.embeddings, self.labels, self.ids))

    def get_extra_state(self) -> Tensor:
        """State for `state_dict` besides the rows: int64 [3 + size].

        Position, number of calls, whether rows have ids (-1: not known yet), and the call that wrote each row.
        """
        named = -1 if self._named is None else int(self._named)
        return torch.cat([torch.tensor([self._position, self._calls, named]), self._written])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state that `get_extra_state` returned."""
        state = state.cpu()
        self._position, self._calls, named = state[:COUNTS].tolist()
        self._named = None if named < 0 else bool(named)
        self._written = state[COUNTS:].clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(f"{prefix}_extra_state")
        if saved is not None and len(saved) != COUNTS + self.size:
            raise ValueError(
                f"CrossBatchMemory: the checkpoint remembers {len(saved) - COUNTS} rows, but this memory has "
                f"size={self.size}; make it as large, or leave its state out."
            )
        for name in ("embeddings", "labels", "ids"):  # made at the first call, so their shapes are the checkpoint's
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"size={self.size}, warmup={self.warmup}, max_age={self.max_age}"

"""How much memory work takes at its peak: asked of the allocator on a GPU; elsewhere tensors are counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Counted", "allocated"]


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are made while it is on, and of those that are still alive.

    Attributes:
        live: bytes made here and not yet freed.
        peak: the most that were alive at once, since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look at what it gave."""
        out = func(*args, **(kwargs or {}))
        given = {_key(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_iter(out):
            if isinstance(value, Tensor) and _key(value) not in given and _key(value) not in self._known:
                self._count(value)
        return out

    def restart(self) -> int:
        """Let the peak begin at what is alive now; gives that."""
        self.peak = self.live
        return self.live

    def _count(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self._known.pop(key, None)


def _key(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def allocated(work: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What the work gives, and the bytes of tensors at its peak beyond those that were there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = work()
        return found, torch.cuda.max_memory_allocated(device) - before
    with Counted() as counted:
        found = work()
    return found, counted.peak

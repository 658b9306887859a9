"""Journal values read from the device one step late, so that no step waits for the one before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["NotFiniteError", "Readings"]


class NotFiniteError(RuntimeError):
    """The loss is NaN or infinite; the message says at which step, and what can be done."""


class Readings:
    """A short queue of journal entries: returned at once on a CPU, one step later on a GPU."""

    def __init__(self, last_finite: int = 0) -> None:
        self._waiting: deque[tuple[dict[str, Any], list[str], Tensor, torch.cuda.Event | None]] = deque()
        self.last_finite = last_finite

    def put(self, entry: dict[str, Any], scalars: Mapping[str, Tensor]) -> None:
        """Queue an entry whose `scalars` may still be computed on the device."""
        device = scalars["loss"].device
        values = torch.stack([value.detach().to(device, torch.float64).reshape(()) for value in scalars.values()])
        event = None
        if values.is_cuda:
            place = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = place.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._waiting.append((entry, list(scalars), values, event))

    def take(self, *, all_of_them: bool = False) -> Iterator[dict[str, Any]]:
        """Return the entries that have arrived, in order; with `all_of_them` wait for the rest.

        Raises:
            NotFiniteError: a loss was NaN or infinite.
        """
        while self._waiting:
            entry, names, values, event = self._waiting[0]
            if event is not None:
                if len(self._waiting) == 1 and not all_of_them:
                    return
                event.synchronize()
            self._waiting.popleft()
            numbers = dict(zip(names, values.tolist(), strict=True))
            if not math.isfinite(numbers["loss"]):
                raise NotFiniteError(
                    f"train: the loss was {numbers['loss']} at step {entry['step']} (finite up to {self.last_finite})"
                )
            self.last_finite = entry["step"]
            yield {"step": entry["step"], **numbers, **{k: v for k, v in entry.items() if k != "step"}}

"""Measure what training costs: the time of a step, and the peak memory of a piece of work."""

import copy
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nearfar._utils.progress import duration
from nearfar.train._checkpoints import random_state, set_random_state
from nearfar.train._state import TrainState, load_batches, take_step

MEASURED = 2  # how many steps are timed, after one that warms up


def copy_state(state: TrainState) -> TrainState:
    """Copy what training steps change, and share the rest: the copy trains without changing the original."""
    changed = {name: getattr(state, name) for name in ("model", "loss", "sampler", "step")}
    shared = {id(each): each for each in (state.machine, state.config)}
    return replace(state, **copy.deepcopy(changed, shared))


def measure_seconds(state: TrainState, *, cached: bool = False) -> float:
    """Measure the mean time of a step in seconds; with workers, their number divides the time of reading samples.

    With `cached` the time of reading is left out, since the run decodes pictures only once. The steps change `state`;
    random generators are restored.
    """
    before, workers = random_state(), state.config.data.workers
    batches = load_batches(state)
    reading = computing = 0.0
    for turn in range(1 + MEASURED):
        start = time.monotonic()
        step, batch = next(batches)
        read = time.monotonic()
        take_step(state, step, batch).scalars["loss"].item()  # a GPU has finished once its loss is known
        if turn:
            reading, computing = reading + (0.0 if cached else read - start), computing + time.monotonic() - read
    set_random_state(before)
    return (max(reading / workers, computing) if workers else reading + computing) / MEASURED


def describe_time(steps: int | None, seconds: float) -> str:
    """Format the time of a run whose steps take this many seconds each; None if their number is still to be found.

    >>> describe_time(600, 8.21)
    'about 1 h 22 min for 600 steps of 8.2 s, without evaluations'
    """
    if steps is None:
        return f"{seconds:.2g} s a step; finding the length takes at most about as many steps as the training after it"
    return f"about {duration(steps * seconds)} for {steps:,} steps of {seconds:.2g} s, without evaluations"


def measure_peak(work: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Run `work`; return its result, and the peak bytes of tensors beyond those that existed before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = work()
        return found, torch.cuda.max_memory_allocated(device) - before
    with _MemoryCounter() as counter:
        found = work()
    return found, counter.peak


class _MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of tensor storages made within the block, for devices without allocator statistics."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages that its results do not share with its arguments."""
        out = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in given and key not in self._known:
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    self._known[key] = weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self._known.pop(key, None)

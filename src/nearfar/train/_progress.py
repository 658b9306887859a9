"""Progress of a run in the terminal, the scalars of each step, and a clean stop on Ctrl-C."""

import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from nearfar._utils.console import Terminal, visible
from nearfar._utils.progress import Progress
from nearfar.evaluation import Evaluation
from nearfar.train._state import TrainState


class RunProgress:
    """Progress of a run in the terminal, silent on every rank but the first: messages above the progress bar `bar`."""

    def __init__(
        self, state: TrainState, console: Console | None, *, quiet: bool, done: int = 0, search: bool = False
    ) -> None:
        self.console = Terminal(quiet=True) if quiet else console or Terminal()
        self._begun = False
        what, total = ("finding the length", None) if search else ("training", state.config.training.length)
        self.bar = Progress(what, total, done=done, console=self.console, stays=True)

    def step(self, entry: dict[str, Any]) -> None:
        """Report a step; the rate leaves out the first one, which waits for workers, caches and compilers."""
        if not self._begun:
            self._begun = True
            self.bar.begin(entry["step"])
        self.bar.to(entry["step"], f"loss {entry['loss']:.4f}, lr {entry['lr']:.1e}")

    def scores(self, step: int, found: dict[str, Any]) -> None:
        words = ", ".join(
            f"{name} {100 * value:.1f}" for name, value in found.items() if name.endswith(("@1", "violation"))
        )
        self.tell(f"step {step}: {words}")

    def final(self, scores: Evaluation, step: int, *, paper: bool) -> None:
        how = "the best of all evaluations on the test classes, as the papers report it" if paper else "tested once"
        self.tell(f"test classes, weights of step {step}, {how}:\n{scores!r}")

    def tell(self, words: str) -> None:
        """Print a line above the bar."""
        self.console.print(visible(words, self.console.encoding), highlight=False, markup=False)


@contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt at once."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class NotFiniteError(RuntimeError):
    """The loss is NaN or infinite; the message names the step and what to do."""


class ScalarQueue:
    """Journal entries whose scalars may still be computed on a GPU: read one step late, so that no step waits."""

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
        """Yield the entries that have arrived, in order; with `all_of_them` wait for the rest.

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

"""Progress of a run: a progress bar, scores; and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console

from nearfar._utils.console import Terminal, visible
from nearfar._utils.progress import Progress, Watch
from nearfar.evaluation import Evaluation
from nearfar.train.state import TrainState

__all__ = ["Show", "stopping"]


class Show:
    """Progress in the terminal; silent on every rank but the first."""

    def __init__(self, state: TrainState, console: Console | None, *, quiet: bool, done: int = 0) -> None:
        self.console = Terminal(quiet=True) if quiet else console or Terminal()
        self._begun = False
        self._bar = Progress("training", state.config.training.steps, done=done, console=self.console, stays=True)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, at)

    def step(self, entry: dict[str, Any]) -> None:
        """Report a step; the rate counts from the first one's end, which waits for workers, caches and compilers."""
        if not self._begun:
            self._begun = True
            self._bar.begin(entry["step"])
        self._bar.to(entry["step"], f"loss {entry['loss']:.4f}, lr {entry['lr']:.1e}")

    def scores(self, step: int, found: dict[str, Any]) -> None:
        """Report an evaluation."""
        words = ", ".join(
            f"{name} {100 * value:.1f}" for name, value in found.items() if name.endswith(("@1", "violation"))
        )
        self.tell(f"step {step}: {words}")

    def final(self, scores: Evaluation, step: int, *, paper: bool) -> None:
        """Report the test at the end."""
        how = "the best of all evaluations on the test classes, as the papers report it" if paper else "tested once"
        self.tell(f"test classes, weights of step {step}, {how}:\n{scores!r}")

    @property
    def watch(self) -> Watch:
        """What evaluations report to while the training waits for them."""
        return self._bar.aside

    def tell(self, words: str) -> None:
        """Print a line above the bar."""
        self.console.print(visible(words, self.console.encoding), highlight=False, markup=False)


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; the first lets the step end, the second ends at once."""
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

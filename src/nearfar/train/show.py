"""Progress of a run: a progress bar, scores, TensorBoard if it is installed; and Ctrl-C."""

from __future__ import annotations

import importlib.util
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
    """Progress in the terminal and in TensorBoard; silent on every rank but the first."""

    def __init__(self, state: TrainState, console: Console | None, *, folder: Any, quiet: bool, done: int = 0) -> None:
        self.console = Terminal(quiet=True) if quiet else console or Terminal()
        self._bar = Progress("training", state.config.training.steps, done=done, console=self.console, stays=True)
        wanted = state.config.training.tensorboard and not quiet
        self._board = _board(folder / "tensorboard") if wanted else None

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, at)
        if self._board is not None:
            self._board.close()

    def step(self, entry: dict[str, Any]) -> None:
        """Report a step."""
        self._bar.to(entry["step"], f"loss {entry['loss']:.4f}, lr {entry['lr']:.1e}")
        self._plot(entry["step"], entry)

    def scores(self, step: int, found: dict[str, Any]) -> None:
        """Report an evaluation."""
        words = ", ".join(
            f"{name} {100 * value:.1f}" for name, value in found.items() if name.endswith(("@1", "violation"))
        )
        self.tell(f"step {step}: {words}")
        self._plot(step, found)

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

    def _plot(self, step: int, values: dict[str, Any]) -> None:
        if self._board is not None:
            for name, value in values.items():
                if name not in ("step", "time"):
                    self._board.add_scalar(name.replace(" ", "/").replace("@", "_at_"), value, step)


def _board(folder: Any) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


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

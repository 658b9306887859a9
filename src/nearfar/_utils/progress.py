"""Progress of long work: a bar with rate and time left in a terminal, otherwise a plain line now and then."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, ProgressColumn, Task, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from nearfar._utils.console import Terminal, visible

Watch = Callable[[str, int, int], None]  # called as watch(what, done, total); total is 0 if it is unknown
FIRST, EVERY = 5.0, 10.0  # seconds before the first plain line, and between two of them


def rate(count: float, seconds: float) -> str:
    """Format a rate: how many per second, or seconds for each if that is longer.

    >>> rate(300, 2), rate(1, 4), rate(0, 4)
    ('150/s', '4.0 s each', '')
    """
    if count <= 0 or seconds <= 0:
        return ""
    if count < seconds:
        return f"{seconds / count:.1f} s each"
    return f"{count / seconds:,.0f}/s" if count >= 10 * seconds else f"{count / seconds:.1f}/s"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(41.6), duration(90), duration(7320)
    ('42 s', '1 min 30 s', '2 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _Cell(ProgressColumn):
    """A text about a task, escaped before it is measured, since it may contain the name of a file."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(visible(self._text(task)))


def _rate(task: Task) -> str:
    """Rate and time left, if they are known."""
    if not task.total or not task.speed:
        return ""
    left = "" if task.time_remaining is None else f"  {duration(task.time_remaining)} left"
    return f"{rate(task.speed, 1.0)}{left}"


def _count(task: Task) -> str:
    """The count done of the total, if that is known, and a message."""
    count = f"{int(task.completed):,} of {int(task.total):,}" if task.total else ""
    return "  ".join(word for word in (count, task.fields["words"]) if word)


class Progress:
    """Show the progress of work while its block runs; it can be used as a `Watch`.

    In a terminal it is a bar with rate and time left, which `stays` leaves there when it is finished. Otherwise nothing
    is printed for `FIRST` seconds, then a plain line at most every `EVERY` seconds, so that the log of a short job
    stays empty. `total` is None if it is unknown; `done` items were done before.

    >>> with Progress("counting", 3) as bar:
    ...     for _ in range(3):
    ...         bar.advance()
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        done: int = 0,
        console: Console | None = None,
        shown: bool = True,
        stays: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.done, self.words = what, total or 0, done, ""
        self._console = console or Terminal(file=sys.stderr)  # read now, because exporters redirect it for a while
        self._clock = clock
        self._shown = shown and not self._console.quiet
        self._bars = _bars(self._console, stays) if self._shown and self._console.is_terminal else None
        self._task: Any = None
        self._other: Any = None
        self._start = self._next = self._from = 0.0
        self._first = done
        self._ended, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        self._start = self._from = self._clock()
        self._next = self._start + FIRST
        if self._bars is not None:
            try:
                self._bars.start()
            except LiveError:  # other code already shows a bar in this terminal
                self._bars = None
                self._shown = False
        if self._bars is not None:
            self._task = self._bars.add_task(self.what, total=self.total or None, completed=self.done, words="")
        elif self._shown and not self.total:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()

    def begin(self, done: int) -> None:
        """Measure the rate from here on, with `done` items done; everything before was preparation."""
        self.done = self._first = done
        self._from = self._clock()

    def advance(self, count: int = 1, words: str = "") -> None:
        """Report that `count` more items are done."""
        self.to(self.done + count, words)

    def to(self, done: int, words: str = "") -> None:
        """Report that `done` items are done in total."""
        self.done, self.words = done, words
        if self._bars is not None:
            self._bars.update(self._task, completed=done, words=words)
        else:
            self._line()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report `done` of `total` items of the stage `what`; a new stage counts from its own beginning."""
        if (what, total) != (self.what, self.total):
            self.what, self.total, self._first, self._from = what, total, 0, self._clock()
            if self._bars is not None:
                self._bars.remove_task(self._task)  # a reset would keep the old total where the new one is unknown
                self._task = self._bars.add_task(what, total=total or None, words="")
        self.to(done)

    def aside(self, what: str, done: int, total: int) -> None:
        """A `Watch` for other work in between: a second bar until it is done, or a plain line when one is due."""
        if self._bars is None:
            self._tell(f"{what}: {done:,} of {total:,}" if total else what)
            return
        if self._other is None:
            self._other = self._bars.add_task(what, total=total or None, words="")
        self._bars.update(self._other, description=what, total=total or None, completed=done)
        if done >= total:
            self._bars.remove_task(self._other)
            self._other = None

    def _line(self) -> None:
        now = self._clock()
        if not self._shown or now < self._next:
            return
        pace = rate(self.done - self._first, now - self._from)
        count = f"{self.done:,} of {self.total:,}" if self.total else f"{duration(now - self._start)} so far"
        left = ""
        if self.total and self.done > self._first:
            left = f"{duration((self.total - self.done) * (now - self._from) / (self.done - self._first))} left"
        self._tell(f"{self.what}: " + ", ".join(word for word in (count, self.words, pace, left) if word))

    def _tell(self, words: str) -> None:
        with self._lock:
            now = self._clock()
            if not self._shown or now < self._next:
                return
            self._next = now + EVERY
            self._console.print(visible(words, self._console.encoding), highlight=False, markup=False, soft_wrap=True)

    def _beat(self) -> None:
        """Print that the work is still running, if it reports nothing."""
        while not self._ended.wait(max(self._next - self._clock(), 0.01)):
            self._line()


def _bars(console: Console, stays: bool) -> Bars:
    name = _Cell(lambda task: task.description)
    columns = (name, BarColumn(), _Cell(_count), TimeElapsedColumn(), _Cell(_rate))
    return Bars(*columns, console=console, transient=not stays)

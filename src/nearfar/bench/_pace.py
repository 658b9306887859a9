"""Predict the time of a step from smaller sizes, so that steps that would exceed their limit are not started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from nearfar.bench._results import Row
from nearfar.bench._timing import LIMIT

REPEATS = 5
"""Number of steps that a contestant is expected to take per row: warm-up, the step that measures memory, and rounds."""


class Pace:
    """Predicts the time of larger sizes from smaller ones, in proportion to the number of pairs.

    Args:
        step: seconds that one step may take.
        total: seconds that the run may take, or None.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, step: float, total: float | None, clock: Callable[[], float]) -> None:
        self.step, self.total, self.clock, self.start = step, total, clock, clock()
        self._took: dict[tuple[str, str, str], tuple[int, float]] = {}
        self._failed: dict[tuple[str, str, str], tuple[int, str]] = {}

    def note(self, row: Row) -> None:
        """Record the times and failures of a row."""
        for who, cell in row.cells.items():
            key = row.loss, row.precision, who
            if cell.seconds is not None:
                self._took[key] = row.rows, cell.seconds
            elif cell.failed and row.rows < self._failed.get(key, (sys.maxsize, ""))[0]:
                self._failed[key] = row.rows, f"{cell.failed} at {row.rows:,}"
        if row.limit is not None:
            self._took["", row.precision, LIMIT] = row.rows, row.limit

    def failed(self, loss: str, rows: int, precision: str, who: str) -> str:
        """The reason to skip a contestant: it failed at a smaller size, or would take too long; "" to try it."""
        first, word = self._failed.get((loss, precision, who), (sys.maxsize, ""))
        if rows >= first:
            return word
        return "time" if self.expected(loss, rows, precision, who) > self.step else ""

    def expected(self, loss: str, rows: int, precision: str, who: str) -> float:
        """Seconds of one step; 0 if nothing is known."""
        before, seconds = self._took.get(("" if who == LIMIT else loss, precision, who), (rows, 0.0))
        return seconds * (rows / before) ** 2

    def fits(self, loss: str, rows: int, precision: str, contestants: Iterable[str]) -> bool:
        """Whether a row is expected to end before the time of the run is up."""
        if self.total is None:
            return True
        tried = [who for who in (LIMIT, *contestants) if not self.failed(loss, rows, precision, who)]
        wanted = REPEATS * sum(self.expected(loss, rows, precision, who) for who in tried)
        return self.clock() - self.start + wanted <= self.total

"""What all evaluations share: a table of scores with their intervals, and the values of each query to compare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from nearfar._utils import html
from nearfar._utils.extras import need
from nearfar.evaluation._bootstrap import Interval, Unit


class Scored(ABC):
    """Base class of evaluations: `scores` by name in 0..1, and an `Interval` over `unit`s for those in `intervals`."""

    intervals: dict[str, Interval]
    classes: int
    queries: int
    unit: Unit

    @property
    @abstractmethod
    def usual(self) -> str:
        """The score that is compared by default."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Every score by name, without those that were not computed."""

    @abstractmethod
    def about(self) -> str:
        """One line about the queries."""

    @abstractmethod
    def _column(self, score: str) -> np.ndarray | None:
        """The score of each query, NaN for one that was left out; None if there is no such score."""

    @abstractmethod
    def _units(self) -> np.ndarray:
        """The class of each query, or its number."""

    @abstractmethod
    def _matches(self, other: Scored) -> bool:
        """Whether another evaluation is of the same queries in the same order, and of the same right answers."""

    def _folded(self) -> str:
        """HTML below the table of a notebook."""
        return ""

    def to_frame(self) -> Any:
        """A pandas table with one row per score, with its interval."""
        pandas = need("pandas", "to_frame", "pandas", instead="use to_dict")
        rows = [
            (name, value, *((bar.low, bar.high, bar.error) if bar else (None, None, None)))
            for name, value, bar in self._rows()
        ]
        return pandas.DataFrame(rows, columns=["score", "value", "low", "high", "error"]).set_index("score")

    def __repr__(self) -> str:
        lines = [self.about()]
        for name, value, bar in self._rows():
            ends = f"  [{100 * bar.low:5.1f}, {100 * bar.high:5.1f}]" if bar else ""
            lines.append(f"  {name:<15} {100 * value:5.1f}{ends}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """HTML for notebooks: each score with its interval."""
        rows: list[tuple[object, ...]] = []
        for name, value, bar in self._rows():
            ends = f"{100 * bar.low:.1f} to {100 * bar.high:.1f}" if bar else ""
            drawn = html.interval(bar.low, value, bar.high) if bar else ""
            rows.append((name, f"{100 * value:.1f}", ends, drawn))
        return html.table(("score", "%", "interval", ""), rows, caption=self.about()) + self._folded()

    def _rows(self) -> list[tuple[str, float, Interval | None]]:
        return [(name, value, self.intervals.get(name)) for name, value in self.scores().items()]


def check_ks(owner: str, ks: Sequence[int]) -> tuple[int, ...]:
    """Require whole numbers from 1 on; returns them in ascending order, each once."""
    given = ks if isinstance(ks, Sequence) else ()
    if not given or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in given):
        raise ValueError(f"{owner}: ks must be whole numbers from 1 on, such as (1, 2, 4, 8), but came as {ks!r}.")
    return tuple(sorted(set(ks)))

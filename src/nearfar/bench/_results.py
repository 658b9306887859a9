"""Results of a benchmark: a row for one loss at one size, a cell for each engine and for PML, and growth with B."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

FIT_FROM, FIT_LEAST = 4096, 3
"""Growth is fitted from this number of rows, where every loss runs in strips, or over the three largest sizes."""


@dataclass(frozen=True)
class Cell:
    """The result of one engine or PML at one size: median seconds, peak megabytes, launches, or why it failed."""

    seconds: float | None = None
    megabytes: float | None = None
    failed: str = ""
    launches: int | None = None

    @property
    def word(self) -> str:
        """Why it failed, short enough for a table: an error by its type alone.

        >>> Cell(failed="memory at 64").word, Cell(failed="ValueError: no such luck").word
        ('memory at 64', 'ValueError')
        """
        return self.failed.split(": ")[0]


CELL = tuple(each.name for each in fields(Cell))


@dataclass(frozen=True)
class Row:
    """One loss at one size.

    Attributes:
        loss: its name.
        rows: B.
        width: d.
        threads: threads of PyTorch.
        limit: seconds of the two products in the same precision; None if they were not run.
        rounds: the number of rounds behind the medians.
        cells: results by engine, and "PML".
        precision: of the embeddings.
    """

    loss: str
    rows: int
    width: int
    threads: int
    limit: float | None
    rounds: int
    cells: Mapping[str, Cell]
    precision: str = "float32"

    @property
    def key(self) -> tuple[str, int, str]:
        """Loss, rows and precision."""
        return self.loss, self.rows, self.precision

    def x_limit(self, who: str) -> float | None:
        """Time relative to that of the two products."""
        return _ratio(self._seconds(who), self.limit)

    def over(self, who: str, base: str) -> float | None:
        """Time relative to that of another engine or PML; None if one is missing."""
        return _ratio(self._seconds(who), self._seconds(base))

    def _seconds(self, who: str) -> float | None:
        return self.cells[who].seconds if who in self.cells else None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        """Build from the result of `to_dict`; values that an older file lacks keep their defaults."""
        cells = {who: Cell(**{key: cell[key] for key in CELL if key in cell}) for who, cell in found["cells"].items()}
        return cls(**{**found, "cells": cells})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the ratios."""
        ratios = {who: {**asdict(cell), "x_limit": self.x_limit(who)} for who, cell in self.cells.items()}
        return {**asdict(self), "cells": ratios}


def exponent(points: Iterable[tuple[int, float | None]]) -> float | None:
    """The slope of log value against log rows by least squares; None with fewer than three points.

    >>> exponent([(4096, 1.0), (8192, 4.0), (16384, 16.0)])
    2.0
    """
    there = sorted((rows, value) for rows, value in points if value is not None and value > 0)
    large = [point for point in there if point[0] >= FIT_FROM]
    there = large if len(large) >= FIT_LEAST else there[-FIT_LEAST:]
    if len(there) < FIT_LEAST:
        return None
    x, y = [math.log2(rows) for rows, _ in there], [math.log2(value) for _, value in there]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def growth(rows: Iterable[Row], who: str) -> dict[str, dict[str, float | None]]:
    """The growth of time and memory of each loss with B in the first precision: their exponents."""
    rows = list(rows)
    by_loss: dict[str, list[Row]] = {}
    for row in rows:
        if row.precision == rows[0].precision:
            by_loss.setdefault(row.loss, []).append(row)
    return {
        loss: {
            "time": exponent((row.rows, row.cells[who].seconds) for row in each if who in row.cells),
            "memory": exponent((row.rows, row.cells[who].megabytes) for row in each if who in row.cells),
        }
        for loss, each in by_loss.items()
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b

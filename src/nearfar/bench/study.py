"""A benchmark: each loss at each size, its time beside PML's and the two-product limit, its memory, and growth."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.progress import Watch
from nearfar.bench.memory import Limits, Peak, Task, peak, peak_on_gpu
from nearfar.bench.subjects import PEER, Step, Subject, backward, batch, chosen
from nearfar.bench.timing import LIMIT, Patience, taking_turns, threads

__all__ = ["Cell", "Plan", "Row", "Watch", "about", "exponent", "growth", "measure", "peer_version"]

ENGINES = ("auto", "dense", "tiled", "compiled")
FIT_FROM, FIT_LEAST = 4096, 3
"""Growth is fitted from this number of rows, where every loss is tiled, or over the three largest sizes."""


@dataclass(frozen=True)
class Plan:
    """The plan of a benchmark.

    Args:
        losses: names of subjects; the usual ones if empty.
        sizes: rows of a batch, B.
        width: d.
        threads: threads of PyTorch, on a CPU.
        device: "cpu" or "cuda".
        engines: our engines; "compiled" is dense under `torch.compile`. The first one is compared with PML.
        peers: whether to run PML too, if it is installed.
        memory: whether to measure peak memory; without it, only the time limit can stop PML.
        patience: rounds and time of the timing.
        limits: limits of one step; what exceeds them is marked as failed, and larger sizes are not tried.
    """

    losses: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (128, 512, 2048, 8192)
    width: int = 128
    threads: int = 1
    device: str = "cpu"
    engines: tuple[str, ...] = ("auto",)
    peers: bool = True
    memory: bool = True
    patience: Patience = field(default_factory=Patience)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        chosen(self.losses)
        if not self.sizes or min(self.sizes) < 8:
            raise ValueError(
                f"bench: sizes must be numbers of rows, each at least 8, but came as {list(self.sizes)}; try 128,1024."
            )
        for name, value in (("width", self.width), ("threads", self.threads)):
            if value < 1:
                raise ValueError(f"bench: {name} must be at least 1, but came as {value}.")
        for engine in self.engines:
            check_choice("bench", "engine", engine, ENGINES)
        check_choice("bench", "device", self.device, ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("bench: device is 'cuda', but PyTorch sees no GPU here; leave --device out.")


@dataclass(frozen=True)
class Cell:
    """The result of one engine or PML at one size: median seconds, peak megabytes, or why it failed."""

    seconds: float | None = None
    megabytes: float | None = None
    failed: str = ""


CELL = tuple(each.name for each in fields(Cell))


@dataclass(frozen=True)
class Row:
    """One loss at one size.

    Attributes:
        loss: its name.
        rows: B.
        width: d.
        threads: threads of PyTorch.
        limit: seconds of the two products.
        rounds: the number of rounds behind the medians.
        cells: results by engine, and "PML".
    """

    loss: str
    rows: int
    width: int
    threads: int
    limit: float
    rounds: int
    cells: Mapping[str, Cell]

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
        """Build from the result of `to_dict`."""
        cells = {who: Cell(**{key: cell[key] for key in CELL}) for who, cell in found["cells"].items()}
        return cls(**{**found, "cells": cells})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the ratios."""
        ratios = {who: {**asdict(cell), "x_limit": self.x_limit(who)} for who, cell in self.cells.items()}
        return {**asdict(self), "cells": ratios}


def measure(plan: Plan, watch: Watch = lambda what, done, total: None) -> Iterator[Row]:
    """Measure every loss at every size, from small to large; `watch` is called with progress messages."""
    contestants = plan.engines + ((PEER,) if plan.peers and peer_version() else ())
    with threads(plan.threads):
        subjects, sizes = list(chosen(plan.losses)), sorted(set(plan.sizes))
        for number, subject in enumerate(subjects):
            failed: dict[str, str] = {}
            for place, rows in enumerate(sizes):
                watch(
                    f"measuring {subject.name}, {rows:,} rows", number * len(sizes) + place, len(subjects) * len(sizes)
                )
                mine = [who for who in contestants if who != PEER or subject.peer is not None]
                yield _row(plan, subject, rows, mine, failed)


def _row(plan: Plan, subject: Subject, rows: int, contestants: Iterable[str], failed: dict[str, str]) -> Row:
    """Measure one row; failures are added to `failed` and not tried again at larger sizes."""
    cells: dict[str, Cell] = {}
    steps: dict[str, Step] = {}
    e, y = batch(rows, plan.width, plan.device)
    for who in contestants:
        task = Task(subject.name, who, rows, plan.width, plan.threads, plan.device)
        took = Peak(failed=failed.get(who, ""))
        if not took.failed:
            steps[who] = task.step()
            took = _took(plan, task, steps[who], e, y)
        # a step that takes so long is not taken again: its time is that of the process which measured its memory
        long = took.seconds is not None and took.seconds > plan.patience.seconds
        cells[who] = Cell(took.seconds if long else None, took.megabytes, took.failed)
        if took.failed or long:
            steps.pop(who, None)
        if took.failed:
            failed.setdefault(who, f"{took.failed} at {rows:,}")
    timed = taking_turns(steps, e, y, plan.patience)
    cells = {who: replace(cell, seconds=timed.seconds.get(who, cell.seconds)) for who, cell in cells.items()}
    return Row(subject.name, rows, plan.width, plan.threads, timed.seconds[LIMIT], timed.rounds, cells)


def _took(plan: Plan, task: Task, step: Step, e: Tensor, y: Tensor) -> Peak:
    if plan.device == "cuda":
        return peak_on_gpu(step, e, y)
    if task.engine == "compiled":
        backward(step, e, y)  # compilation is no part of a round
    return peak(task, plan.limits) if plan.memory else Peak()


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
    """The growth of time and memory of each loss with B: their exponents."""
    by_loss: dict[str, list[Row]] = {}
    for row in rows:
        by_loss.setdefault(row.loss, []).append(row)
    return {
        loss: {
            "time": exponent((row.rows, row.cells[who].seconds) for row in each if who in row.cells),
            "memory": exponent((row.rows, row.cells[who].megabytes) for row in each if who in row.cells),
        }
        for loss, each in by_loss.items()
    }


def peer_version() -> str | None:
    """The version of pytorch-metric-learning, or None if it is not installed."""
    return _installed("pytorch-metric-learning")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def about(plan: Plan) -> dict[str, Any]:
    """The configuration and the versions that the results depend on."""
    return {
        "config": asdict(plan),
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else f"CPU, {platform.machine()}",
        "versions": {
            "nearfar": _installed("nearfar"),
            "torch": torch.__version__,
            "pytorch-metric-learning": peer_version(),
            "python": platform.python_version(),
        },
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b

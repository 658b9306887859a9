"""A benchmark: time, memory and launches of each loss at each size, beside PML and the two-product limit."""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.extras import version_of
from nearfar._utils.progress import Watch
from nearfar.bench import _subjects as subjects
from nearfar.bench._launches import launches
from nearfar.bench._memory import Limits, Peak, Task, peak, peak_on_gpu
from nearfar.bench._results import Cell, Row
from nearfar.bench._subjects import PEER, SUBJECTS, Step, Subject
from nearfar.bench._timing import LIMIT, Patience, reason, threads, time_in_turns

REPEATS = 5
"""Number of steps that a contestant is expected to take per row: warm-up, the step that measures memory, and rounds."""
ENGINES = ("auto", "dense", "tiled", "fused", "compiled")


class DeviceLostError(RuntimeError):
    """Raised when the device no longer responds, such as after an illegal access; only a new process can continue."""


@dataclass(frozen=True)
class Plan:
    """The plan of a benchmark.

    Args:
        losses: names of subjects; the usual ones if empty.
        sizes: rows of a batch, B.
        width: d.
        threads: threads of PyTorch, on a CPU.
        device: "cpu" or "cuda".
        engines: our engines; for "compiled" see `our_step`. The first one is compared with PML.
        peers: whether to run PML too, if it is installed.
        memory: whether to measure peak memory; without it, only the time limit can stop PML.
        patience: rounds and time of the timing.
        limits: limits of one step; a step that exceeds them is marked as failed, and larger sizes are not tried.
        precisions: of the embeddings: "float32", "tf32" (float32 with TF32 products), "bf16", "fp16", "float64".
        launches: the most rows for which launches are counted; 0 for never.
        seconds: begin no step that is not expected to end within this time; None for no limit.
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
    precisions: tuple[str, ...] = ("float32",)
    launches: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        subjects.choose_subjects(self.losses)
        if not self.sizes or min(self.sizes) < 8:
            raise ValueError(
                f"bench: sizes must be numbers of rows, each at least 8, but came as {list(self.sizes)}; try 128,1024."
            )
        for name, value in (("width", self.width), ("threads", self.threads)):
            if value < 1:
                raise ValueError(f"bench: {name} must be at least 1, but came as {value}.")
        for engine in self.engines:
            check_choice("bench", "engine", engine, ENGINES)
        for precision in self.precisions:
            check_choice("bench", "precision", precision, subjects.PRECISIONS)
        check_choice("bench", "device", self.device, ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("bench: device is 'cuda', but PyTorch sees no GPU here; leave --device out.")


def offered(device: str, engines: Iterable[str] = ("auto", "dense", "tiled", "fused")) -> tuple[str, ...]:
    """The engines that run on a device, found by calling a loss with a few rows.

    >>> offered("cpu")[:3]
    ('auto', 'dense', 'tiled')
    """
    return tuple(engine for engine in engines if not _refusal(SUBJECTS["MultiSimilarity"], engine, device))


def _refusal(subject: Subject, engine: str, device: str) -> str:
    """The reason, in one line, why a loss does not run with an engine on a device; "" if it runs."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            subjects.backward(subjects.our_step(subject, 16, 32, engine, device), *subjects.batch(16, 32, device))
        except Exception as error:  # any error of an engine is an answer
            return reason(error)
    # a warning that names the engine means that another one runs instead
    return next((str(each.message) for each in heard if engine in str(each.message)), "")


def measure(plan: Plan, watch: Watch = lambda what, done, total: None, known: Sequence[Row] = ()) -> Iterator[Row]:
    """Measure every loss at every size, from small to large; `watch` is called with progress messages.

    Args:
        plan: what to measure.
        watch: called as watch(what, done, total).
        known: rows of an earlier run, which are not measured again.

    Raises:
        DeviceLostError: a step broke the device; the row with its failure came before.
    """
    contestants = plan.engines + ((PEER,) if plan.peers and peer_version() else ())
    work = [
        (subject, rows, precision)
        for rows in sorted(set(plan.sizes))
        for subject in subjects.choose_subjects(plan.losses)
        for precision in plan.precisions
    ]
    pace = Pace(plan.limits.seconds, plan.seconds, time.monotonic)
    had = {row.key for row in known}
    for row in sorted(known, key=lambda row: row.rows):
        pace.note(row)
    with threads(plan.threads):
        for place, (subject, rows, precision) in enumerate(work):
            if (subject.name, rows, precision) in had:
                continue
            watch(f"{subject.name}, {rows:,} rows, {precision}", place, len(work))
            mine = [who for who in contestants if who != PEER or subject.peer is not None]
            if not pace.fits(subject.name, rows, precision, mine):
                continue
            row = _row(plan, subject, rows, precision, mine, pace)
            pace.note(row)
            yield row
            if not _alive(plan.device):
                raise DeviceLostError(f"bench: the device was lost at {subject.name}, {rows:,} rows; use --resume.")


def _row(plan: Plan, subject: Subject, rows: int, precision: str, contestants: Iterable[str], pace: Pace) -> Row:
    """Measure one row; a contestant that fails is marked with the reason, and the others go on."""
    cells = {who: Cell(failed=pace.failed(subject.name, rows, precision, who)) for who in contestants}
    made = Row(subject.name, rows, plan.width, plan.threads, None, 0, cells, precision)
    if pace.failed(subject.name, rows, precision, LIMIT):
        return replace(made, cells={who: Cell(failed=cell.failed or "time") for who, cell in cells.items()})
    steps: dict[str, Step] = {}
    with subjects.matmul(precision):
        try:
            e, y = subjects.batch(rows, plan.width, plan.device, precision)
        except (RuntimeError, MemoryError) as error:  # not even the embeddings
            return replace(made, cells={who: Cell(failed=reason(error)) for who in cells})
        for who, cell in cells.items():
            if not cell.failed:
                task = Task(subject.name, who, rows, plan.width, plan.threads, plan.device, precision)
                cells[who] = _cell(plan, task, steps, e, y)
        failed: dict[str, str] = {}
        timed = time_in_turns(steps, e, y, plan.patience, failed)
    for who in steps:
        cells[who] = replace(cells[who], seconds=timed.seconds.get(who), failed=failed.get(who, ""))
    return replace(made, limit=timed.seconds.get(LIMIT), rounds=timed.rounds, cells=cells)


def _cell(plan: Plan, task: Task, steps: dict[str, Step], e: Tensor, y: Tensor) -> Cell:
    """Memory and launches of one contestant; it is added to `steps`, which are timed, unless it failed."""
    if not _alive(plan.device):
        return Cell(failed="device lost")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a loss are not results
        try:
            step = task.step()
            found = _peak(plan, task, step, e, y)
            if found.failed:
                return Cell(failed=found.failed)
            # a long step is not repeated: its time is that of the step that measured memory
            if found.seconds is not None and found.seconds > plan.patience.seconds:
                return Cell(found.seconds, found.megabytes)
            counted = launches(step, e, y) if task.rows <= plan.launches else None
        except Exception as error:  # any error of a loss is a result
            return Cell(failed=reason(error))
    steps[task.engine] = step
    return Cell(None, found.megabytes, "", counted)


def _peak(plan: Plan, task: Task, step: Step, e: Tensor, y: Tensor) -> Peak:
    if task.engine == "compiled" or plan.device == "cuda":
        subjects.backward(step, e, y)  # compile before measuring
    if not plan.memory:
        return Peak()
    return peak_on_gpu(step, e, y) if plan.device == "cuda" else peak(task, plan.limits)


def _alive(device: str) -> bool:
    """Whether the device still responds."""
    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def peer_version() -> str | None:
    """The version of pytorch-metric-learning, or None if it is not installed."""
    return version_of("pytorch-metric-learning")


def about(plan: Plan) -> dict[str, Any]:
    """The configuration and the versions that the results depend on."""
    return {
        "config": asdict(plan),
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else f"CPU, {platform.machine()}",
        "versions": {
            "nearfar": version_of("nearfar"),
            "torch": torch.__version__,
            "pytorch-metric-learning": peer_version(),
            "python": platform.python_version(),
        },
    }


class Pace:
    """Predicts the time of larger sizes from smaller ones, in proportion to the number of pairs.

    A step may take `step` seconds, and the run `total` seconds (None: no limit).
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

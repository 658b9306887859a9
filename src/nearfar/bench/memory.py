"""How much memory a step takes: forward and backward in a process of its own, under a limit of memory and of time.

The process is fresh: what another loss left behind, or what a library loads once, does not count. A loss that wants
more than it may is stopped by the operating system there, and this process goes on.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.subjects import PEER, SUBJECTS, Step, backward, batch, our_step, peer_step
from nearfar.bench.timing import clock_of

__all__ = ["Limits", "Peak", "Task", "peak", "peak_on_gpu"]

WARM_ROWS = 64
READY = "ready"
LOADING = 120.0
"""Seconds that a process may take to load its libraries."""
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Limits:
    """What one step may take.

    Args:
        megabytes: of memory beyond what a process has before the step.
        seconds: for the step; starting the process comes on top.
    """

    megabytes: float = 4096.0
    seconds: float = 60.0


@dataclass(frozen=True)
class Task:
    """One step to be taken in a process of its own.

    Args:
        name: of the subject.
        engine: "auto", "dense", "tiled", "compiled", or "PML".
        rows: B.
        width: d.
        threads: of PyTorch.
        device: "cpu" or "cuda".
    """

    name: str
    engine: str
    rows: int
    width: int
    threads: int = 1
    device: str = "cpu"

    def step(self, rows: int | None = None) -> Step:
        """The loss, for so many rows."""
        subject, rows = SUBJECTS[self.name], rows or self.rows
        if self.engine == PEER:
            return peer_step(subject, rows, self.width, self.device)
        return our_step(subject, rows, self.width, self.engine, self.device)


@dataclass(frozen=True)
class Peak:
    """What a step took.

    Attributes:
        megabytes: at its peak, beyond the embeddings and their gradient; None where it failed.
        seconds: of that one step; None where it failed.
        failed: why it did not end: "memory", "time", or an error in one line; "" where it did.
    """

    megabytes: float | None = None
    seconds: float | None = None
    failed: str = ""


def peak(task: Task, limits: Limits) -> Peak:
    """Take the step on a CPU in a fresh process, and say what it took or why it failed."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([__name__, "pytorch_metric_learning.losses", "pytorch_metric_learning.miners"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(task, limits, there), daemon=True)
    child.start()
    there.close()
    try:
        return _answer(here, limits)
    finally:
        here.close()
        child.kill()
        child.join()


def _answer(told: Connection, limits: Limits) -> Peak:
    """What the child says; it says "ready" before the step, from where the time counts."""
    try:
        if not told.poll(limits.seconds + LOADING):
            return Peak(failed="time")
        found = told.recv()
        if found == READY:
            if not told.poll(limits.seconds):
                return Peak(failed="time")
            found = told.recv()
    except EOFError:  # killed by the operating system, which kills for want of memory
        return Peak(failed="memory")
    assert isinstance(found, Peak)  # noqa: S101 - the child says nothing else
    return found


def _child(task: Task, limits: Limits, tell: Connection) -> None:
    torch.set_num_threads(task.threads)
    tell.send(_caught(lambda: _in_child(task, limits, tell)))


def _in_child(task: Task, limits: Limits, tell: Connection) -> Peak:
    few = min(WARM_ROWS, task.rows)
    backward(task.step(few), *batch(few, task.width))  # what is loaded once does not count
    step = task.step()
    e, y = batch(task.rows, task.width)
    e.grad = torch.zeros_like(e)
    tell.send(READY)
    _bounded(limits)
    clock = clock_of(task.device, task.threads)
    before, start = _from_now(), clock()
    backward(step, e, y)
    return Peak(_highest() - before, clock() - start)


def peak_on_gpu(step: Step, e: torch.Tensor, y: torch.Tensor) -> Peak:
    """The same on a GPU, in this process, because CUDA counts what is allocated; a first step is not counted."""

    def measured() -> Peak:
        e.grad = torch.zeros_like(e)
        backward(step, e, y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        clock = clock_of("cuda", 1)
        before, start = torch.cuda.memory_allocated(), clock()
        backward(step, e, y)
        spent = clock() - start
        return Peak((torch.cuda.max_memory_allocated() - before) / 2**20, spent)

    try:
        return _caught(measured)
    finally:
        e.grad = None
        torch.cuda.empty_cache()  # what a failed step had taken


def _caught(measured: Callable[[], Peak]) -> Peak:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss warns of is not what is measured
        try:
            return measured()
        except Exception as error:  # whatever a loss raises is a finding
            return Peak(failed=_reason(error))


def _bounded(limits: Limits) -> None:
    """Let the operating system refuse what goes beyond the limit."""
    if STATUS.exists():
        import resource

        most = int((_resident("VmSize") + limits.megabytes) * 2**20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _from_now() -> float:
    """Megabytes held now; where the system can, the peak begins anew."""
    if not STATUS.exists():
        return _highest()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:  # not allowed in some containers: then the peak of the small step stands
        return _resident("VmHWM")
    return _resident("VmRSS")


def _highest() -> float:
    """Megabytes at the peak so far."""
    if STATUS.exists():
        return _resident("VmHWM")
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _resident(key: str) -> float:
    line = next(x for x in STATUS.read_text(encoding="utf-8").splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


def _reason(error: BaseException) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "memory"
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}".rstrip(": ")[:160]

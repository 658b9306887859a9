"""Peak memory of a step: forward and backward in a separate process, under limits of memory and time.

A new process does not count memory that another loss has left, or libraries that are loaded once. If a loss exceeds the
limit, the operating system stops that process, and the benchmark continues.
"""

import multiprocessing
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nearfar.bench._subjects import PEER, SUBJECTS, Step, backward, batch, our_step, peer_step
from nearfar.bench._timing import clock_of, reason

WARM_ROWS = 64
READY = "ready"
LOADING = 120.0  # seconds for a process to load its libraries
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Limits:
    """The limits of one step.

    Args:
        megabytes: memory beyond what the process has before the step.
        seconds: time of the step, without starting the process.
    """

    megabytes: float = 4096.0
    seconds: float = 60.0


@dataclass(frozen=True)
class Task:
    """One step to run in a separate process.

    Args:
        name: name of the subject.
        engine: "auto", "dense", "tiled", "fused", "compiled", or "PML".
        rows: B.
        width: d.
        threads: threads of PyTorch.
        device: "cpu" or "cuda".
        precision: of the embeddings.
    """

    name: str
    engine: str
    rows: int
    width: int
    threads: int = 1
    device: str = "cpu"
    precision: str = "float32"

    def step(self, rows: int | None = None) -> Step:
        """The loss for a number of rows."""
        subject, rows = SUBJECTS[self.name], rows or self.rows
        if self.engine == PEER:
            return peer_step(subject, rows, self.width, self.device)
        return our_step(subject, rows, self.width, self.engine, self.device)


@dataclass(frozen=True)
class Peak:
    """Memory and time of a step.

    Attributes:
        megabytes: peak memory beyond the embeddings and their gradient; None if it failed.
        seconds: time of that step; None if it failed.
        failed: why it failed: "memory", "time", or an error in one line; "" if it did not.
    """

    megabytes: float | None = None
    seconds: float | None = None
    failed: str = ""


def peak(task: Task, limits: Limits) -> Peak:
    """Run the step on a CPU in a new process, and return its memory and time or why it failed."""
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


def _answer(pipe: Connection, limits: Limits) -> Peak:
    """Receive the child's result; the time limit starts when the child sends `READY`, before the step."""
    try:
        if not pipe.poll(limits.seconds + LOADING):
            return Peak(failed="time")
        found = pipe.recv()
        if found == READY:
            if not pipe.poll(limits.seconds):
                return Peak(failed="time")
            found = pipe.recv()
    except EOFError:  # killed by the operating system, for lack of memory
        return Peak(failed="memory")
    assert isinstance(found, Peak)  # noqa: S101 - the child sends nothing else
    return found


def _child(task: Task, limits: Limits, answer: Connection) -> None:
    torch.set_num_threads(task.threads)
    answer.send(_catch(lambda: _in_child(task, limits, answer)))


def _in_child(task: Task, limits: Limits, answer: Connection) -> Peak:
    few = min(WARM_ROWS, task.rows)
    backward(task.step(few), *batch(few, task.width, precision=task.precision))  # loads libraries
    step = task.step()
    e, y = batch(task.rows, task.width, precision=task.precision)
    e.grad = torch.zeros_like(e)
    answer.send(READY)
    _limit_memory(limits)
    clock = clock_of(task.device, task.threads)
    before, start = _reset_peak(), clock()
    backward(step, e, y)
    return Peak(_peak_so_far() - before, clock() - start)


def peak_on_gpu(step: Step, e: torch.Tensor, y: torch.Tensor) -> Peak:
    """Peak memory of a step on a GPU, from CUDA's allocator in this process, after a first step."""

    def measure() -> Peak:
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
        return _catch(measure)
    finally:
        e.grad = None
        torch.cuda.empty_cache()  # release the memory of a failed step


def _catch(measure: Callable[[], Peak]) -> Peak:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a loss are not results
        try:
            return measure()
        except Exception as error:  # any error of a loss is a result
            return Peak(failed=reason(error))


def _limit_memory(limits: Limits) -> None:
    """Limit the memory of this process by the operating system."""
    if STATUS.exists():
        import resource

        most = int((_resident("VmSize") + limits.megabytes) * 2**20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _reset_peak() -> float:
    """Megabytes in use now; resets the peak if the system allows it."""
    if not STATUS.exists():
        return _peak_so_far()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:  # not allowed in some containers, where the peak includes the small step
        return _resident("VmHWM")
    return _resident("VmRSS")


def _peak_so_far() -> float:
    if STATUS.exists():
        return _resident("VmHWM")
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _resident(key: str) -> float:
    line = next(x for x in STATUS.read_text(encoding="utf-8").splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024

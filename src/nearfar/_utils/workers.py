"""`Workers`: run many jobs concurrently, in processes that share the cores and the GPU."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from nearfar._utils.checks import check_workers

Name = TypeVar("Name")
Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

_here: dict[str, Any] = {}  # in a worker process: the work, and the event that asks it to stop
_busy, _alone = threading.Lock(), threading.Event()
"""In a worker process: held during a job; set when the parent process is gone."""


class Stopped(Exception):  # noqa: N818  (not an error)
    """Raised when a job ends early because it was asked to stop."""


class Workers(Generic[Job, Outcome]):
    """A pool of processes with one thread each, started at the first job; a pool of one works in the calling process.

    Each process gets `work` once. It is called for each job, and returns None if Ctrl-C or `stopping` ended it.
    """

    def __init__(self, work: Callable[[Job], Outcome | None], jobs: int) -> None:
        check_workers("Workers", "jobs", jobs)
        self.jobs, self._work = jobs, work
        self._pool: ProcessPoolExecutor | None = None
        self._stop: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._stop.set()  # running jobs end after their current step
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def outcomes(self, named: Iterable[tuple[Name, Job]]) -> Iterator[tuple[Name, Outcome]]:
        """Yield the name and the outcome of each job as it ends; the next job is taken when a process is free.

        Raises:
            KeyboardInterrupt: a job was interrupted.
        """
        if self.jobs == 1:
            for name, job in named:
                yield name, _check_done(self._work(job))
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._stop = context.Event()
            self._pool = ProcessPoolExecutor(self.jobs, context, initializer=_begin, initargs=(self._work, self._stop))
        waiting = iter(named)
        under_way: dict[Future[Outcome | None], Name] = {}
        while True:
            while len(under_way) < self.jobs and (found := next(waiting, None)) is not None:
                under_way[self._pool.submit(_do, found[1])] = found[0]
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(future), _check_done(future.result())


def stopping() -> bool:
    """Whether the current job should end, because its outcome is no longer needed."""
    return _alone.is_set() or ("stop" in _here and _here["stop"].is_set())


def _check_done(outcome: Outcome | None) -> Outcome:
    if outcome is None:
        raise KeyboardInterrupt
    return outcome


def _begin(work: Callable[[Any], Any], stop: Any) -> None:
    """Use one thread, since processes share the cores, and leave Ctrl-C to `fit` and to the parent process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _here.update(work=work, stop=stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End with the parent process; otherwise this one would wait for jobs forever, and hold GPU memory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        _alone.set()
        with _busy:  # the running job ends after its step and removes its files
            os._exit(1)


def _do(job: Any) -> Any:
    with _busy:
        return _here["work"](job)

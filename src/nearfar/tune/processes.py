"""`Processes`: train trials side by side, in processes that share the cores and the GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from nearfar.data import DataSet
from nearfar.tune.trial import Job, Outcome, attempt

__all__ = ["Processes"]

T = TypeVar("T")
_shared: dict[str, Any] = {}
"""In a process of the pool: the event that asks to stop, and the data."""
_training, _alone = threading.Lock(), threading.Event()
"""Likewise: held during a trial; set when the process that started us is gone."""


class Processes:
    """Processes of one thread each; a search with one job trains in the calling process.

    Args:
        jobs: number of processes.
        data: what `judged` made of a data set of the caller's.
    """

    def __init__(self, jobs: int, data: DataSet | None) -> None:
        self._jobs, self._data = jobs, data
        self._pool: ProcessPoolExecutor | None = None
        self._stop: Any = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            context = multiprocessing.get_context("spawn")
            self._stop = context.Event()
            self._pool = ProcessPoolExecutor(
                self._jobs, context, initializer=_prepare, initargs=(self._stop, self._data)
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._stop.set()  # trials that are under way end after their step
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def results(self, next_job: Callable[[], tuple[T, Job] | None]) -> Iterator[tuple[T, Outcome]]:
        """Yield what each trial was called and how it ended; `next_job` is asked when a process is free.

        Raises:
            KeyboardInterrupt: a trial was interrupted.
        """
        if self._pool is None:
            while (found := next_job()) is not None:
                yield found[0], _whole(attempt(found[1], self._data, _never))
            return
        under_way: dict[Future[Outcome | None], T] = {}
        while True:
            while len(under_way) < self._jobs and (found := next_job()) is not None:
                under_way[self._pool.submit(_attempt, found[1])] = found[0]
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(future), _whole(future.result())


def _whole(outcome: Outcome | None) -> Outcome:
    if outcome is None:
        raise KeyboardInterrupt
    return outcome


def _never() -> bool:
    return False


def _prepare(stop: Any, data: DataSet | None) -> None:
    """Use one thread, since processes share the cores, and leave Ctrl-C to `fit` and to the process that started us."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shared.update(stop=stop, data=data)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the process that started us is gone: it would wait for trials forever, and hold memory of the GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        _alone.set()
        with _training:  # the trial under way ends after its step and removes its files
            os._exit(1)


def _attempt(job: Job) -> Outcome | None:
    with _training:
        return attempt(job, _shared["data"], lambda: _alone.is_set() or _shared["stop"].is_set())

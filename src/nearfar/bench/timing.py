"""Timing: engines and PML take turns within a round, and medians over rounds are compared.

One thread on a CPU is timed in CPU seconds, so that other processes do not count; several threads, and a GPU, by the
wall clock.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.bench.subjects import Step, backward

__all__ = ["LIMIT", "Patience", "Timed", "clock_of", "products", "reason", "taking_turns", "threads"]

LIMIT = "limit"
"""The name of the two products `(E @ E.T) @ E`."""
WHOLE = {"cpu": 8192, "cuda": 32768}
"""Rows up to which the two products hold all scores; beyond, strips of rows are as fast and need less memory."""
STRIP = 2**30
"""The most scores of such a strip."""
WARM = 5
"""Calls before a GPU is timed."""
SMALL = 2048


@dataclass(frozen=True)
class Patience:
    """How many rounds are timed for one loss at one size, and for how long.

    Args:
        rounds: the most rounds; one more round before them is discarded as warm-up.
        seconds: begin no round after this; a first round as long as this counts, since warm-up is negligible in it. A
            single step as long as this is not repeated if it was already run to measure its memory.
    """

    rounds: int = 9
    seconds: float = 5.0


@dataclass(frozen=True)
class Timed:
    """Median seconds of each step that did not fail, and the number of rounds."""

    seconds: Mapping[str, float]
    rounds: int


def products(e: Tensor) -> None:
    """The two matrix products (E Eᵀ) E that every pairwise loss of E [n, d] needs."""
    whole = WHOLE[e.device.type]
    for rows in torch.split(e, len(e) if len(e) <= whole else max(1, min(whole // 8, STRIP // len(e)))):
        (rows @ e.T) @ e


def taking_turns(
    steps: dict[str, Step], e: Tensor, y: Tensor, patience: Patience, failed: dict[str, str] | None = None
) -> Timed:
    """Time forward and backward of each step, and of the two products, in turns.

    Args:
        steps: by name.
        e: [n, d] embeddings.
        y: [n] labels.
        patience: for how long.
        failed: where to note why a step failed, which has no other turn then; without it the error is raised.
    """
    clock = clock_of(e.device.type, torch.get_num_threads())
    found: dict[str, list[float]] = {name: [] for name in (LIMIT, *steps)}
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss warns of is not what is measured
        if e.is_cuda:
            _warm(steps, e, y, patience.seconds, failed)
            begin = time.perf_counter()
        for turn in range(patience.rounds + 1):
            if turn and time.perf_counter() - begin > patience.seconds:
                break
            # in alternating order: the first step finds the cache of another, and must not always be the same one
            order = dict(reversed(steps.items())) if turn % 2 else steps
            for name, seconds in _round(order, e, y, clock, failed):
                found[name].append(seconds)
    kept = {name: all_of[1:] or all_of for name, all_of in found.items() if all_of and name not in (failed or ())}
    rounds = max((len(all_of) for all_of in kept.values()), default=0)
    return Timed({name: statistics.median(each) for name, each in kept.items()}, rounds)


def _warm(steps: Mapping[str, Step], e: Tensor, y: Tensor, seconds: float, failed: dict[str, str] | None) -> None:
    """Run each step until it has recorded itself, which takes a few calls and is no part of a step."""
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(WARM):
            if time.perf_counter() - begin > seconds / WARM:
                break
            try:
                _turn(step, e, y, time.perf_counter)
            except Exception as error:  # whatever a loss raises is a finding
                if failed is None:
                    raise
                failed[name] = reason(error)
                break


def _round(
    steps: Mapping[str, Step], e: Tensor, y: Tensor, clock: Callable[[], float], failed: dict[str, str] | None
) -> Iterator[tuple[str, float]]:
    for name in (LIMIT, *steps):
        if failed is not None and name in failed:
            continue
        try:
            seconds = _limit(e, clock) if name == LIMIT else _turn(steps[name], e, y, clock)
        except Exception as error:  # whatever a loss raises is a finding
            if failed is None:
                raise
            failed[name] = reason(error)
            continue
        yield name, seconds


def _limit(e: Tensor, clock: Callable[[], float]) -> float:
    with torch.no_grad():
        if len(e) <= SMALL:  # what came before has cleared the cache, and the smallest step would pay for it
            products(e)
        start = clock()
        products(e)
    return clock() - start


def _turn(step: Step, e: Tensor, y: Tensor, clock: Callable[[], float]) -> float:
    e.grad = None
    start = clock()
    backward(step, e, y)
    return clock() - start


def reason(error: BaseException) -> str:
    """Why a step failed: a word for memory, else one line.

    >>> reason(MemoryError()), reason(ValueError("no such luck"))
    ('memory', 'ValueError: no such luck')
    """
    text = str(error).lower()
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "memory"
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}".rstrip(": ")[:160]


def clock_of(device: str, threads: int) -> Callable[[], float]:
    """The clock to use; see the module."""
    if device == "cpu":
        return time.process_time if threads == 1 else time.perf_counter

    def waited() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return waited


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of threads of PyTorch within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Timing: engines and PML take turns within a round, and medians over rounds are compared.

One thread on a CPU is timed in CPU seconds, so that other processes do not count; several threads and GPUs by the wall
clock.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.bench._subjects import Step, backward

LIMIT = "limit"  # the name of the two products `(E @ E.T) @ E`
WHOLE = {"cpu": 8192, "cuda": 32768}
"""Rows up to which the two products hold all scores; above, strips of rows are as fast and need less memory."""
STRIP = 2**30  # maximum number of scores in a strip
WARM, COMPILING = 5, 15.0
"""Warm-up calls on a GPU, and the seconds after which no further one begins: the first compile kernels."""
SMALL = 2048


@dataclass(frozen=True)
class Patience:
    """How many rounds are timed for one loss at one size, and for how long.

    Args:
        rounds: the most rounds; one more round before them is discarded as warm-up.
        seconds: no round begins after this time. A first round that takes as long counts, since warm-up is negligible
            in it. A single step that takes as long is not repeated if it was already run to measure its memory.
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


def time_in_turns(
    steps: dict[str, Step], e: Tensor, y: Tensor, patience: Patience, failed: dict[str, str] | None = None
) -> Timed:
    """Time forward and backward of each step, and of the two products, in turns.

    `failed` receives the reason of each step that failed, which is then left out; if it is None, errors are raised.
    """
    clock = clock_of(e.device.type, torch.get_num_threads())
    found: dict[str, list[float]] = {name: [] for name in (LIMIT, *steps)}
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a loss are not results
        if e.is_cuda:
            _warm(steps, e, y, patience.seconds, failed)
            begin = time.perf_counter()
        for turn in range(patience.rounds + 1):
            if turn and time.perf_counter() - begin > patience.seconds:
                break
            # alternate the order, because each step runs with the cache that the one before has left
            order = dict(reversed(steps.items())) if turn % 2 else steps
            for name, seconds in _round(order, e, y, clock, failed):
                found[name].append(seconds)
    times = {name: each[1:] or each for name, each in found.items() if each and name not in (failed or ())}
    rounds = max(map(len, times.values()), default=0)
    return Timed({name: statistics.median(each) for name, each in times.items()}, rounds)


def _warm(steps: Mapping[str, Step], e: Tensor, y: Tensor, seconds: float, failed: dict[str, str] | None) -> None:
    """Warm up: the first calls of a step on a GPU compile and record it."""
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(WARM):
            if time.perf_counter() - begin > max(seconds / WARM, COMPILING):
                break
            try:
                _turn(step, e, y, time.perf_counter)
            except Exception as error:  # any error of a loss is a result
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
        except Exception as error:  # any error of a loss is a result
            if failed is None:
                raise
            failed[name] = reason(error)
            continue
        yield name, seconds


def _limit(e: Tensor, clock: Callable[[], float]) -> float:
    with torch.no_grad():
        if len(e) <= SMALL:  # warm the cache, which matters for the smallest sizes
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
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")[:160]


def clock_of(device: str, threads: int) -> Callable[[], float]:
    """CPU seconds for one thread on a CPU, else the wall clock; a GPU is synchronized first."""
    if device == "cpu":
        return time.process_time if threads == 1 else time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of threads of PyTorch within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

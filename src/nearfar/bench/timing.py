"""How it is timed: contestants take turns within a round, and medians over rounds are compared.

One thread on a CPU is timed in CPU seconds, so that others on the machine do not count; more threads, and a GPU, by
the clock.
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

__all__ = ["LIMIT", "Patience", "Timed", "clock_of", "products", "taking_turns", "threads"]

LIMIT = "limit"
"""The contestant that stands for `(E @ E.T) @ E`."""
WHOLE = {"cpu": 8192, "cuda": 32768}
"""Rows up to which the limit makes all scores at once; beyond, strips of rows are as fast and need no gigabytes."""
SMALL = 2048


@dataclass(frozen=True)
class Patience:
    """How long the contestants of one loss at one size take turns.

    Args:
        rounds: at most; one more comes first and is thrown away.
        seconds: begin no round after this; a first round as long as this stands, since no warm-up is felt in it. A
            single step as long as this is not taken again, where it was taken already to measure its memory.
    """

    rounds: int = 9
    seconds: float = 5.0


@dataclass(frozen=True)
class Timed:
    """Median seconds of each contestant, and of how many rounds."""

    seconds: Mapping[str, float]
    rounds: int


def products(e: Tensor) -> None:
    """(E Eᵀ) E: the two products that no pairwise loss [n, d] can do without."""
    whole = WHOLE[e.device.type]
    for rows in torch.split(e, len(e) if len(e) <= whole else whole // 8):
        (rows @ e.T) @ e


def taking_turns(steps: dict[str, Step], e: Tensor, y: Tensor, patience: Patience) -> Timed:
    """Time forward and backward of each step, and the limit, in turns."""
    clock = clock_of(e.device.type, torch.get_num_threads())
    found: dict[str, list[float]] = {name: [] for name in (LIMIT, *steps)}
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss warns of is not what is measured
        for turn in range(patience.rounds + 1):
            if turn and time.perf_counter() - begin > patience.seconds:
                break
            # there and back: whoever comes first finds the cache of another, and must not always be the same
            order = dict(reversed(steps.items())) if turn % 2 else steps
            for name, seconds in _round(order, e, y, clock):
                found[name].append(seconds)
    kept = {name: all_of[1:] or all_of for name, all_of in found.items()}
    return Timed({name: statistics.median(each) for name, each in kept.items()}, len(kept[LIMIT]))


def _round(steps: dict[str, Step], e: Tensor, y: Tensor, clock: Callable[[], float]) -> Iterator[tuple[str, float]]:
    with torch.no_grad():
        if len(e) <= SMALL:  # what came before has cleared the cache, and the smallest step would pay for it
            products(e)
        start = clock()
        products(e)
    yield LIMIT, clock() - start
    for name, step in steps.items():
        e.grad = None
        start = clock()
        backward(step, e, y)
        yield name, clock() - start


def clock_of(device: str, threads: int) -> Callable[[], float]:
    """What tells the time: see the head of this file."""
    if device == "cpu":
        return time.process_time if threads == 1 else time.perf_counter

    def waited() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return waited


@contextmanager
def threads(number: int) -> Iterator[None]:
    """PyTorch on so many threads, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

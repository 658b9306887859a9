"""How long a run will take: two of its steps are measured before it begins."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

from nearfar._utils.progress import duration
from nearfar.train.checkpoint import random_state, set_random_state
from nearfar.train.feed import feed
from nearfar.train.moment import take_step
from nearfar.train.state import TrainState

__all__ = ["copy_of", "estimate", "seconds"]

MEASURED = 2


def copy_of(state: TrainState) -> TrainState:
    """A copy to train without a trace in the original: what steps change is copied, and all else is shared."""
    changed = {name: getattr(state, name) for name in ("model", "loss", "sampler", "step")}
    return replace(state, **copy.deepcopy(changed, {id(state.machine): state.machine}))


def seconds(state: TrainState, *, cached: bool = False) -> float:
    """Seconds of a step: the mean of two, after one that warms up; the workers share the reading of samples.

    The steps change `state`; random generators are put back.

    Args:
        state: the run.
        cached: leave reading out, as the run itself decodes pictures once.
    """
    before, workers = random_state(), state.config.data.workers
    batches = feed(state.view, state.sampler, after=0, workers=0, pin=False)
    reading = computing = 0.0
    for turn in range(1 + MEASURED):
        start = time.monotonic()
        step, batch = next(batches)
        read = time.monotonic()
        take_step(state, step, batch).scalars["loss"].item()  # a GPU has finished once its loss is known
        if turn:
            reading, computing = reading + (0.0 if cached else read - start), computing + time.monotonic() - read
    set_random_state(before)
    return (max(reading / workers, computing) if workers else reading + computing) / MEASURED


def estimate(steps: int, each: float) -> str:
    """Format the time of a run.

    >>> estimate(600, 8.21)
    'about 1 h 22 min for 600 steps of 8.2 s, without evaluations'
    """
    return f"about {duration(steps * each)} for {steps:,} steps of {each:.2g} s, without evaluations"

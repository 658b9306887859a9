"""One trial: train a configuration with each seed, score it on held-out training classes, stop it when it is behind."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nearfar._utils.console import Terminal
from nearfar._utils.journal import read_lines
from nearfar._utils.workers import Stopped
from nearfar.data import DataSet
from nearfar.runs.config import Config, DataConfig
from nearfar.studies.grid import held_out, run_folder, words_of
from nearfar.train import Moment, NotFiniteError, fit
from nearfar.train.build import open_dataset

__all__ = ["SCORES", "Curve", "Job", "Outcome", "attempt", "behind", "judged"]

SCORES = ("recall@1", "map_at_r")
STARTUP = 5
"""Trials that must have finished before one is stopped for being behind, as in Optuna's median pruner."""

Curve = tuple[tuple[int, float], ...]
"""(step, score on the validation classes) of each evaluation of a run."""


@dataclass(frozen=True, eq=False)
class Job:
    """What a process needs for a trial.

    Attributes:
        config: the configuration; the seeds of its runs begin at its own.
        seeds: number of runs, whose scores are averaged.
        score: one of `SCORES`.
        held_out: the share of the training classes that is scored.
        rivals: curves of the trials of the same loss that have ended, one for each seed; empty if nothing is stopped.
    """

    config: Config
    seeds: int = 1
    score: str = "recall@1"
    held_out: float = 0.2
    rivals: tuple[tuple[Curve, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a trial ended.

    Attributes:
        state: "done", "pruned" (stopped because it was behind), "diverged" (its loss was not finite, which counts as a
            score of 0) or "failed".
        score: the mean over the seeds; None if it was stopped or failed.
        scores: of each seed.
        curves: of each seed.
        error: why it failed or diverged.
        seconds: the time it took.
    """

    state: str
    score: float | None = None
    scores: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()
    error: str | None = None
    seconds: float = field(default=0.0)


class Pruned(Exception):  # noqa: N818  (not an error)
    """The run is behind the others."""


def judged(data: DataSet, share: float) -> DataSet:
    """The data of a trial: some training classes take the place of the test classes, which are left out altogether."""
    found = held_out(data, share)
    if len(found.test.classes) < 2:
        count = len(data.train.classes)
        raise ValueError(
            f"tune: held_out {share:g} of {count} training classes is one class, which every query finds; hold out "
            f"more, such as {min(0.5, 2.0 / max(count, 4)):.2g}."
        )
    return found


@functools.lru_cache(maxsize=2)
def _opened(spec: DataConfig, share: float) -> DataSet:
    return judged(open_dataset(spec), share)


def behind(curve: Curve, rivals: Sequence[Curve]) -> bool:
    """Whether the best score so far is below the median of the others' scores at the same step.

    >>> others = [((10, 0.5),), ((10, 0.6),), ((10, 0.6),), ((10, 0.7),), ((10, 0.9),)]
    >>> behind(((10, 0.55),), others), behind(((10, 0.65),), others), behind(((10, 0.55),), others[:4])
    (True, False, False)
    """
    if not curve:
        return False
    theirs = [value for other in rivals for step, value in other if step == curve[-1][0]]
    return len(theirs) >= STARTUP and max(value for _, value in curve) < statistics.median(theirs)


def attempt(job: Job, data: DataSet | None, stop: Callable[[], bool]) -> Outcome | None:
    """Train and score one trial; None if it was interrupted.

    Args:
        job: the trial.
        data: what `judged` made of a data set of the caller's; None opens the one of the configuration.
        stop: asked after each step whether to give up.
    """
    start, scores, curves = time.monotonic(), list[float](), list[Curve]()
    try:
        for place in range(job.seeds):
            if stop():
                return None
            found = _run(job, place, data or _opened(job.config.data, job.held_out), curves, stop)
            if found is None:
                return None
            scores.append(found)
        result = Outcome("done", statistics.fmean(scores))
    except Stopped:
        return None
    except Pruned:
        result = Outcome("pruned")
    except NotFiniteError as error:
        result = Outcome("diverged", 0.0, error=words_of(error))
    except Exception as error:  # whatever one trial does, the others go on
        result = Outcome("failed", error=words_of(error))
    seconds = round(time.monotonic() - start, 2)
    return replace(result, scores=tuple(scores), curves=tuple(curves), seconds=seconds)


def _run(job: Job, place: int, data: DataSet, curves: list[Curve], stop: Callable[[], bool]) -> float | None:
    """Train with one seed and return its score; its curve is added to `curves` however it ends."""
    rivals = [each[place] for each in job.rivals if place < len(each)]
    with run_folder() as folder:
        look = _Look(folder / "journal.jsonl", job.score, rivals, stop)
        try:
            result = fit(_bare(job.config, place), folder, data=data, callbacks=[look], console=Terminal(quiet=True))
        finally:
            curves.append(look.read())
        return None if result.test is None else result.test.scores()[job.score]


def _bare(config: Config, place: int) -> Config:
    """The configuration of a run whose score alone is wanted, with the next seed."""
    plan = replace(
        config.training,
        seed=config.training.seed + place,
        protocol="validation",
        baselines=False,
        diagnose_every=0,
        explain_every=0,
        checkpoint_every=config.training.steps,
        trackers=(),
    )
    return replace(config, training=plan)


class _Look:
    """A callback that reads the scores of the validation classes from the journal after each evaluation.

    `fit` evaluates after its callbacks, so that the scores of step s are there at step s + 1.
    """

    def __init__(self, file: Path, score: str, rivals: Sequence[Curve], stop: Callable[[], bool]) -> None:
        self._file, self._key, self._rivals, self._stop = file, f"validation {score}", rivals, stop

    def __call__(self, moment: Moment) -> dict[str, Any] | None:
        if self._stop():
            raise Stopped
        every = moment.state.config.training.evaluate_every
        if self._rivals and moment.step > 1 and (moment.step - 1) % every == 0 and behind(self.read(), self._rivals):
            raise Pruned
        return None

    def read(self) -> Curve:
        """The scores so far."""
        entries = read_lines(self._file).entries
        return tuple((entry["step"], float(entry[self._key])) for entry in entries if self._key in entry)

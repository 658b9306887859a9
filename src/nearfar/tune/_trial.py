"""One trial: train a configuration with each seed, and score it on held-out training classes unless it is pruned."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nearfar._utils.console import Terminal
from nearfar._utils.journal import read_lines
from nearfar._utils.workers import Stopped
from nearfar.data import DataSet
from nearfar.runs._sections import Config, DataConfig
from nearfar.studies.grid import held_out, run_folder, words_of
from nearfar.train import Moment, NotFiniteError, fit
from nearfar.train._build import open_dataset

SCORES = ("recall@1", "map_at_r")
STARTUP = 5  # how many trials must have finished before one is pruned, as in Optuna's median pruner

Curve = Sequence[tuple[int, float]]  # (step, score on the validation classes) of each evaluation of a run


@dataclass(frozen=True, eq=False)
class Job:
    """A trial to run."""

    config: Config  # the configuration; its seed is that of the first run
    seeds: int = 1  # the number of runs, whose scores are averaged
    score: str = "recall@1"  # one of `SCORES`
    held_out: float = 0.2  # the share of the training classes that is scored
    # the curves of each ended trial of the same loss, one per seed; empty if nothing is pruned
    rivals: Sequence[Sequence[Curve]] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a trial ended."""

    # "done", "pruned" (stopped because it was behind), "diverged" (its loss was not finite, which counts as a score of
    # 0) or "failed"
    state: str
    score: float | None = None  # the mean score over the seeds; None if the trial was pruned or failed
    scores: Sequence[float] = ()  # the score of each seed
    curves: Sequence[Curve] = ()  # the curve of each seed
    error: str | None = None  # why it failed or diverged
    seconds: float = 0.0  # the time it took


@dataclass(frozen=True, eq=False)
class Trial:
    """A trial that has ended: the label of its loss, its number within the loss, its values and its outcome."""

    loss: str
    number: int
    values: Mapping[str, Any]
    outcome: Outcome

    @staticmethod
    def of(entry: Mapping[str, Any]) -> Trial:
        """Build a trial from the mapping that `to_tree` returned."""
        rest = dict(entry)
        return Trial(rest.pop("loss"), rest.pop("number"), rest.pop("values"), Outcome(**rest))

    def to_tree(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {"loss": self.loss, "number": self.number, "values": dict(self.values), **asdict(self.outcome)}


class Pruned(Exception):  # noqa: N818  (not an error)
    """Raised when the run is behind the others, to stop it."""


def hold_out_test(data: DataSet, share: float) -> DataSet:
    """Drop the test classes, and test on a held-out share of the training classes in their place."""
    found = held_out(data, share)
    if len(found.test.classes) < 2:
        count = len(data.train.classes)
        raise ValueError(
            f"tune: held_out {share:g} of {count} training classes is one class, which every query finds; hold out "
            f"more, such as {min(0.5, 2.0 / max(count, 4)):.2g}."
        )
    return found


@functools.lru_cache(maxsize=2)
def _open_held_out(spec: DataConfig, share: float) -> DataSet:
    return hold_out_test(open_dataset(spec), share)


def is_behind(curve: Curve, rivals: Sequence[Curve]) -> bool:
    """Whether the best score so far is below the median of the others' scores at the same step.

    >>> others = [((10, 0.5),), ((10, 0.6),), ((10, 0.6),), ((10, 0.7),), ((10, 0.9),)]
    >>> is_behind(((10, 0.55),), others), is_behind(((10, 0.65),), others), is_behind(((10, 0.55),), others[:4])
    (True, False, False)
    """
    if not curve:
        return False
    theirs = [value for other in rivals for step, value in other if step == curve[-1][0]]
    return len(theirs) >= STARTUP and max(value for _, value in curve) < statistics.median(theirs)


def run_trial(job: Job, data: DataSet | None, stop: Callable[[], bool]) -> Outcome | None:
    """Train and score one trial; return None if it was interrupted, as `stop` may ask after each step.

    Without `data`, as `hold_out_test` returns it, the data set of the configuration is opened.
    """
    start, scores, curves = time.monotonic(), list[float](), list[Curve]()
    try:
        for place in range(job.seeds):
            if stop():
                return None
            found = _run(job, place, data or _open_held_out(job.config.data, job.held_out), curves, stop)
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
    except Exception as error:  # a failed trial does not end the search
        result = Outcome("failed", error=words_of(error))
    seconds = round(time.monotonic() - start, 2)
    return replace(result, scores=tuple(scores), curves=tuple(curves), seconds=seconds)


def _run(job: Job, place: int, data: DataSet, curves: list[Curve], stop: Callable[[], bool]) -> float | None:
    """Train with one seed and return its score; its curve is added to `curves` even if the run fails."""
    rivals = [each[place] for each in job.rivals if place < len(each)]
    with run_folder() as folder:
        pruner = _Pruner(folder / "journal.jsonl", job.score, rivals, stop)
        try:
            config, console = _score_only(job.config, place), Terminal(quiet=True)
            result = fit(config, folder, data=data, callbacks=[pruner], console=console)
        finally:
            curves.append(pruner.read())
        return None if result.test is None else result.test.scores()[job.score]


def _score_only(config: Config, place: int) -> Config:
    """The configuration of run number `place` of a trial, without settings that do not affect the score."""
    plan = replace(
        config.training,
        seed=config.training.seed + place,
        protocol="validation",
        baselines=False,
        diagnose_every=0,
        explain_every=0,
        checkpoint_every=sys.maxsize,  # only at the end
        trackers=(),
    )
    return replace(config, training=plan)


class _Pruner:
    """A callback that stops a run if its validation scores in the journal are behind those of its rivals.

    `fit` evaluates after its callbacks, so the scores of step s are available at step s + 1.
    """

    def __init__(self, file: Path, score: str, rivals: Sequence[Curve], stop: Callable[[], bool]) -> None:
        self._file, self._key, self._rivals, self._stop = file, f"validation {score}", rivals, stop

    def __call__(self, moment: Moment) -> dict[str, Any] | None:
        if self._stop():
            raise Stopped
        every = moment.state.config.training.evaluate_every
        if self._rivals and moment.step > 1 and (moment.step - 1) % every == 0 and is_behind(self.read(), self._rivals):
            raise Pruned
        return None

    def read(self) -> Curve:
        entries = read_lines(self._file).entries
        return tuple((entry["step"], float(entry[self._key])) for entry in entries if self._key in entry)

"""`Proposals`: Optuna's study of one loss. It proposes values and is told how trials with them ended."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nearfar._utils.extras import need
from nearfar.tune.space import Space
from nearfar.tune.trial import Outcome

__all__ = ["Proposals", "importances", "optuna_quiet"]

TRIES = 20
"""Proposals of values that were tried before, after which the ones that are left are taken in order."""


@contextmanager
def optuna_quiet() -> Iterator[Any]:
    """Optuna, without its lines about every study and its warnings about options that may change."""
    optuna = need("optuna", "tune", "tune")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(before)


class Proposals:
    """Proposes values for the trials of one loss, by Optuna's tree-structured Parzen estimator.

    The n-th proposal depends on the seed, on n, and on the trials that have ended: a search that goes on proposes what
    it would have proposed without the break.

    Args:
        space: the space.
        seed: seed of the sampler.
        ended: values and outcomes of the trials before.
    """

    def __init__(self, space: Space, seed: int, ended: Iterable[tuple[Mapping[str, Any], Outcome]] = ()) -> None:
        self.space, self._seed = space, seed
        with optuna_quiet() as optuna:
            self._study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
            self._ranges = {key: each.distribution(optuna) for key, each in space.ranges.items()}
        self._taken: set[str] = set()
        for values, outcome in ended:
            self._add(values, outcome)

    def ask(self, number: int) -> tuple[Any, dict[str, Any]] | None:
        """The trial to be told about and its values, which no trial had before; None if all values were tried."""
        with optuna_quiet() as optuna:
            for again in range(TRIES):
                found = self._drawn(optuna, number, again)
                if found is not None:
                    return found
            left = self._left()
            if left is None:
                return None
            self._study.enqueue_trial({key: each.encode(left[key]) for key, each in self.space.ranges.items()})
            return self._drawn(optuna, number, TRIES)

    def tell(self, trial: Any, outcome: Outcome) -> None:
        """Tell how a trial ended."""
        with optuna_quiet() as optuna:
            for step, value in _reports(outcome).items():
                trial.report(value, step)
            self._study.tell(trial, outcome.score, state=_state(optuna, outcome))

    def _drawn(self, optuna: Any, number: int, again: int) -> tuple[Any, dict[str, Any]] | None:
        seed = int(np.random.SeedSequence([self._seed, number, again]).generate_state(1)[0])
        self._study.sampler = optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
        trial = self._study.ask(self._ranges)
        values = {key: each.decode(trial.params[key]) for key, each in self.space.ranges.items()}
        if _name(values) in self._taken:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # the sampler leaves these out
            return None
        self._taken.add(_name(values))
        return trial, values

    def _left(self) -> dict[str, Any] | None:
        """The first values in order that were not tried, if the space is small enough to be counted."""
        lists = [each.values() for each in self.space.ranges.values()]
        if any(each is None for each in lists):
            return None
        every = itertools.product(*(each for each in lists if each is not None))
        found = (dict(zip(self.space.ranges, values, strict=True)) for values in every)
        return next((values for values in found if _name(values) not in self._taken), None)

    def _add(self, values: Mapping[str, Any], outcome: Outcome) -> None:
        self._taken.add(_name(values))
        with optuna_quiet() as optuna:
            params = {key: each.encode(values[key]) for key, each in self.space.ranges.items()}
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=_state(optuna, outcome),
                    value=outcome.score,
                    params=params,
                    distributions=self._ranges,
                    intermediate_values=_reports(outcome),
                )
            )


def importances(space: Space, ended: Iterable[tuple[Mapping[str, Any], Outcome]]) -> dict[str, float]:
    """The share of each key in the variance of the good scores (PED-ANOVA); empty where too few trials ended."""
    done = [(values, outcome) for values, outcome in ended if outcome.state == "done"]
    if len(space.ranges) < 2 or len(done) < 10 or len({outcome.score for _, outcome in done}) < 3:
        return {}
    study = Proposals(space, 0, done)._study
    with optuna_quiet() as optuna, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties among the best, which make every share equal
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in found.items()}


def _name(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _state(optuna: Any, outcome: Outcome) -> Any:
    states = optuna.trial.TrialState
    return {"done": states.COMPLETE, "diverged": states.COMPLETE, "pruned": states.PRUNED}.get(
        outcome.state, states.FAIL
    )


def _reports(outcome: Outcome) -> dict[int, float]:
    """The curves of all seeds behind one another, as Optuna takes one."""
    found: dict[int, float] = {}
    for curve in outcome.curves:
        before = max(found, default=0)
        found |= {before + step: value for step, value in curve}
    return found

"""`Proposals`: an Optuna study for one loss, which proposes values from the outcomes of earlier trials."""

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nearfar._utils.extras import need
from nearfar.tune._space import Space
from nearfar.tune._trial import Outcome, Trial

TRIES = 20  # how many repeated proposals are rejected before the first values that were not tried are taken


@contextmanager
def optuna_quiet() -> Iterator[Any]:
    """Yield the module optuna, with its messages and its warnings about experimental options silenced."""
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
    """Propose values for the trials of one loss, by Optuna's tree-structured Parzen estimator.

    The n-th proposal depends only on the seed, on n, and on the trials that have ended, so a resumed search proposes
    what it would have proposed without the interruption. `ended` are the earlier trials.
    """

    def __init__(self, space: Space, seed: int, ended: Iterable[Trial] = ()) -> None:
        self.space, self._seed = space, seed
        with optuna_quiet() as optuna:
            self._study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
            self._ranges = {key: each.distribution(optuna) for key, each in space.ranges.items()}
        self._tried: set[str] = set()
        for trial in ended:
            self._add(trial.values, trial.outcome)

    def ask(self, number: int) -> tuple[Any, dict[str, Any]] | None:
        """Propose Optuna's trial and its values, which no trial had before; None if all values were tried."""
        with optuna_quiet() as optuna:
            for again in range(TRIES):
                found = self._draw(optuna, number, again)
                if found is not None:
                    return found
            left = self._first_untried()
            if left is None:
                return None
            self._study.enqueue_trial({key: each.encode(left[key]) for key, each in self.space.ranges.items()})
            return self._draw(optuna, number, TRIES)

    def tell(self, trial: Any, outcome: Outcome) -> None:
        with optuna_quiet() as optuna:
            for step, value in _join_curves(outcome).items():
                trial.report(value, step)
            self._study.tell(trial, outcome.score, state=_state(optuna, outcome))

    def _draw(self, optuna: Any, number: int, again: int) -> tuple[Any, dict[str, Any]] | None:
        seed = int(np.random.SeedSequence([self._seed, number, again]).generate_state(1)[0])
        self._study.sampler = optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
        trial = self._study.ask(self._ranges)
        values = {key: each.decode(trial.params[key]) for key, each in self.space.ranges.items()}
        if _key(values) in self._tried:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # the sampler ignores failed trials
            return None
        self._tried.add(_key(values))
        return trial, values

    def _first_untried(self) -> dict[str, Any] | None:
        """The first values that were not tried, if the space is small enough to be enumerated."""
        lists = [each.values() for each in self.space.ranges.values()]
        if any(each is None for each in lists):
            return None
        every = itertools.product(*(each for each in lists if each is not None))
        found = (dict(zip(self.space.ranges, values, strict=True)) for values in every)
        return next((values for values in found if _key(values) not in self._tried), None)

    def _add(self, values: Mapping[str, Any], outcome: Outcome) -> None:
        self._tried.add(_key(values))
        with optuna_quiet() as optuna:
            trial = optuna.trial.create_trial(
                state=_state(optuna, outcome),
                value=outcome.score,
                params={key: each.encode(values[key]) for key, each in self.space.ranges.items()},
                distributions=self._ranges,
                intermediate_values=_join_curves(outcome),
            )
            self._study.add_trial(trial)


def importances(space: Space, ended: Iterable[Trial]) -> dict[str, float]:
    """The share of each key in the variance of the good scores (PED-ANOVA); empty if too few trials have ended."""
    done = [trial for trial in ended if trial.outcome.state == "done"]
    if len(space.ranges) < 2 or len(done) < 10 or len({trial.outcome.score for trial in done}) < 3:
        return {}
    study = Proposals(space, 0, done)._study
    with optuna_quiet() as optuna, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ties among the best, which make all shares equal
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in found.items()}


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _state(optuna: Any, outcome: Outcome) -> Any:
    states = optuna.trial.TrialState
    known = {"done": states.COMPLETE, "diverged": states.COMPLETE, "pruned": states.PRUNED}
    return known.get(outcome.state, states.FAIL)


def _join_curves(outcome: Outcome) -> dict[int, float]:
    """Concatenate the curves of all seeds: Optuna takes one curve per trial."""
    found: dict[int, float] = {}
    for curve in outcome.curves:
        before = max(found, default=0)
        found |= {before + step: value for step, value in curve}
    return found

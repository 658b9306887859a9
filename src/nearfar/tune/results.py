"""`Tuned` and `Best`: what a search has found, of all losses and of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.runs.config import Config, to_tree
from nearfar.tune.proposals import importances
from nearfar.tune.record import Ended
from nearfar.tune.space import Space

__all__ = ["Best", "Tuned", "summary"]

STATES = ("done", "pruned", "diverged", "failed")


@dataclass(frozen=True, eq=False)
class Best:
    """The best trial of a loss.

    Attributes:
        space: what was searched.
        trials: the trials by number.
        trial: the best one; None if none has ended with a score.
        config: its configuration.
    """

    space: Space
    trials: tuple[Ended, ...]
    trial: Ended | None
    config: Config | None

    @staticmethod
    def of(space: Space, trials: Sequence[Ended]) -> Best:
        """Choose the best of the trials that were trained to the end; of equal ones the first."""
        done = [each for each in trials if each.outcome.state == "done"]
        best = max(done, key=lambda each: each.outcome.score or 0.0, default=None)
        return Best(space, tuple(trials), best, None if best is None else space.config(best.values))

    @property
    def score(self) -> float | None:
        """The score of the best trial."""
        return None if self.trial is None else self.trial.outcome.score

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Keys whose best value lies at an end of its range: the range may be too narrow."""
        if self.trial is None:
            return ()
        return tuple(key for key, each in self.space.ranges.items() if each.at_edge(self.trial.values[key]))

    def count(self, state: str) -> int:
        """How many trials ended so: "done", "pruned", "diverged" or "failed"."""
        return sum(each.outcome.state == state for each in self.trials)

    def importances(self) -> dict[str, float]:
        """The share of each key in the variance of good scores; empty with fewer than ten finished trials."""
        return importances(self.space, [(each.values, each.outcome) for each in self.trials])


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of `search`.

    Attributes:
        folder: the folder of the search.
        score_name: what was maximized.
        trials: all trials in the order in which they ended.
        losses: label of the loss -> its best trial.
        finished: whether all trials were run; False after Ctrl-C.
    """

    folder: Path
    score_name: str
    trials: tuple[Ended, ...]
    losses: Mapping[str, Best]
    finished: bool = True

    @property
    def best_loss(self) -> str | None:
        """The label of the loss with the best trial; None before a trial has ended with a score."""
        scored = {label: each.score for label, each in self.losses.items() if each.score is not None}
        return max(scored, key=lambda label: scored[label], default=None)

    @property
    def best(self) -> Config:
        """The best configuration of all."""
        config = None if self.best_loss is None else self.losses[self.best_loss].config
        if config is None:
            raise RuntimeError("tune: no trial has ended with a score yet.")
        return config

    @property
    def score(self) -> float:
        """The best score of all."""
        score = None if self.best_loss is None else self.losses[self.best_loss].score
        if score is None:
            raise RuntimeError("tune: no trial has ended with a score yet.")
        return score

    def __repr__(self) -> str:
        if self.best_loss is None:
            return f"Tuned({len(self.trials)} trials, none with a score)"
        lines = [f"{self.score_name} on held-out training classes, best of {len(self.trials)} trials:"]
        for label, each in sorted(self.losses.items(), key=lambda item: -(item[1].score or 0.0)):
            score = "-" if each.score is None else f"{100 * each.score:.1f}"
            values = {} if each.trial is None else each.trial.values
            shown = ", ".join(f"{key} {short(value)}" for key, value in values.items())
            lines.append(f"  {score:>5}  {label}: {shown}")
        return "\n".join(lines)


def short(value: Any) -> str:
    """Format a value in few characters.

    >>> short(0.00123456), short(128), short({"name": "Hinge", "margin": 0.2}), short(None)
    ('0.001235', '128', 'Hinge margin=0.2', 'null')
    """
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        rest = [f"{key}={short(each)}" for key, each in value.items() if key != "name"]
        return " ".join([str(value["name"])] * ("name" in value) + rest)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(result: Tuned) -> dict[str, Any]:
    """The whole search for JSON."""
    losses = {
        label: {
            "score": each.score,
            "number": None if each.trial is None else each.trial.number,
            "values": None if each.trial is None else dict(each.trial.values),
            "at_edge": list(each.at_edge),
            "importances": each.importances(),
            "trials": {state: each.count(state) for state in STATES},
            "config": None if each.config is None else to_tree(each.config),
        }
        for label, each in result.losses.items()
    }
    best = {"best": result.best_loss, "score": result.score_name, "finished": result.finished}
    return {**best, "losses": losses, "trials": [each.tree() for each in result.trials]}

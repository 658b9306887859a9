"""The trials of a search: read and written as JSON lines (`TrialLog`), and their results (`Best`, `Tuned`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nearfar._utils.files import write_text
from nearfar._utils.journal import read_lines, to_line
from nearfar._utils.lock import alone
from nearfar.runs._config import flat, to_tree
from nearfar.runs._journal import Journal
from nearfar.runs._sections import Config
from nearfar.tune._proposals import importances
from nearfar.tune._space import Space
from nearfar.tune._trial import Trial

FILE = "trials.jsonl"
STATES = ("done", "pruned", "diverged", "failed")


class TrialLog:
    """The ended trials of a search, read from and appended to `trials.jsonl` in a folder.

    Failed trials are dropped when a search is resumed, and so are tried again. Within its block the folder is locked
    against a second search. A folder is refused if its search differs in `about`, everything that outcomes depend on.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._file, self._about = folder / FILE, dict(about)
        self.trials: list[Trial] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        folder = self._file.parent
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"tune: another search runs in {folder}; wait for it, or name another folder."
        with ExitStack() as stack:
            stack.enter_context(alone(folder, lambda: BlockingIOError(busy), unlocked=lambda error: None))
            self._read()
            self._journal = stack.enter_context(Journal(self._file))
            self._open = stack.pop_all()
        return self

    def _read(self) -> None:
        entries = read_lines(self._file, lambda entry: "search" in entry or "loss" in entry).entries
        if entries or (self._file.is_file() and self._file.stat().st_size):
            self._check_same(entries[0].get("search") if entries else None)
        ended = [entry for entry in entries if entry.get("state") not in (None, "failed")]
        self.trials = [Trial.of(entry) for entry in ended]
        write_text(self._file, "".join(map(to_line, [{"search": self._about}, *ended])))  # drops a torn last line

    def _check_same(self, before: Any) -> None:
        if not isinstance(before, Mapping):
            raise ValueError(f"tune: {self._file} is not the record of a search; name another folder.")
        old, new = flat(before), flat(self._about)
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                was, now = (repr(each[key]) if key in each else "not there" for each in (old, new))
                raise ValueError(
                    f"tune: {self._file.parent} holds another search: {key} was {was}, and is {now} now; name another "
                    "folder."
                )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)

    def add(self, trial: Trial) -> None:
        """Append a trial, and force it to disk."""
        self._journal.write(trial.to_tree())
        self._journal.sync()
        self.trials.append(trial)

    def of(self, loss: str) -> list[Trial]:
        """The trials of a loss, in the order of their numbers."""
        return sorted((each for each in self.trials if each.loss == loss), key=lambda each: each.number)


@dataclass(frozen=True, eq=False)
class Best:
    """The best trial of a loss.

    Attributes:
        space: the search space of the loss.
        trials: all trials of the loss by number.
        trial: the best trial; None before one has ended with a score.
        config: the configuration of the best trial.
    """

    space: Space
    trials: tuple[Trial, ...]
    trial: Trial | None
    config: Config | None

    @staticmethod
    def of(space: Space, trials: Sequence[Trial]) -> Best:
        """Choose the trial with the best score among those that were trained to the end; the first in a tie."""
        done = [each for each in trials if each.outcome.state == "done"]
        best = max(done, key=lambda each: each.outcome.score or 0.0, default=None)
        return Best(space, tuple(trials), best, None if best is None else space.config(best.values))

    @property
    def score(self) -> float | None:
        """The score of the best trial."""
        return None if self.trial is None else self.trial.outcome.score

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Keys whose best value lies at an end of its range, which may be too narrow."""
        if self.trial is None:
            return ()
        return tuple(key for key, each in self.space.ranges.items() if each.at_edge(self.trial.values[key]))

    def count(self, state: str) -> int:
        """Count the trials that ended as "done", "pruned", "diverged" or "failed"."""
        return sum(each.outcome.state == state for each in self.trials)

    def importances(self) -> dict[str, float]:
        """The share of each key in the variance of good scores; empty with fewer than ten finished trials."""
        return importances(self.space, self.trials)


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of `search`.

    Attributes:
        folder: the folder of the search.
        score_name: the name of the score that was maximized.
        trials: all trials in the order in which they ended.
        losses: a mapping from the label of each loss to its `Best`.
        finished: whether all trials were run; False after Ctrl-C.
    """

    folder: Path
    score_name: str
    trials: tuple[Trial, ...]
    losses: Mapping[str, Best]
    finished: bool = True

    @property
    def best_loss(self) -> str | None:
        """The label of the loss with the best trial; None before a trial has ended with a score."""
        scored = {label: each.score for label, each in self.losses.items() if each.score is not None}
        return max(scored, key=lambda label: scored[label], default=None)

    @property
    def best(self) -> Config:
        """The configuration of the best trial of all losses."""
        return self._best()[1]

    @property
    def score(self) -> float:
        """The score of the best trial of all losses."""
        return self._best()[0]

    def _best(self) -> tuple[float, Config]:
        each = self.losses.get(self.best_loss or "")
        if each is None or each.score is None or each.config is None:
            raise RuntimeError("tune: no trial has ended with a score yet.")
        return each.score, each.config

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
    """Format a value of a configuration in few characters.

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
    """Convert a search to plain values for JSON."""
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
    return {**best, "losses": losses, "trials": [each.to_tree() for each in result.trials]}

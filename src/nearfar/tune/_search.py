"""`search`: Optuna varies keys of a configuration, and trials are scored on held-out training classes alone."""

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from nearfar._utils.checks import check_choice, check_seed, check_whole
from nearfar._utils.console import Terminal
from nearfar._utils.extras import need
from nearfar._utils.files import plain_target, write_text
from nearfar._utils.progress import Progress
from nearfar._utils.workers import Workers, stopping
from nearfar.data import DataSet
from nearfar.runs._config import load, save, to_tree
from nearfar.runs._sections import Config
from nearfar.studies.grid import MANNER
from nearfar.train._build import class_shares, open_dataset
from nearfar.train._length import with_usual_length
from nearfar.tune import _page as page
from nearfar.tune._proposals import Proposals
from nearfar.tune._results import Best, TrialLog, Tuned, summary
from nearfar.tune._space import Space, read_space, spaces
from nearfar.tune._trial import SCORES, STARTUP, Job, Trial, hold_out_test, run_trial

BEST, TRIALS, PAGE = "best.yaml", "trials.json", "tune.html"
EVERY = 10.0  # seconds between two updates of the files while trials run
FAILURES = 3  # the search stops if so many trials of a loss fail and none ends with a score
Key = tuple[str, int, Any, Mapping[str, Any]]
"""The label of a loss, the number of a trial, Optuna's trial, and its values."""


def search(
    config: Config | Path | str,
    space: Mapping[str, Any] | Path | str,
    *,
    folder: Path | str,
    trials: int = 30,
    jobs: int = 1,
    score: str = "recall@1",
    seeds: int = 1,
    held_out: float = 0.2,
    prune: Literal["median", "none"] = "median",
    seed: int = 0,
    data: DataSet | None = None,
    console: Console | None = None,
) -> Tuned:
    """Search for the best values of some keys of a configuration; the test classes are never read.

    A share of the training classes is held out of every trial and scored at its end. Several losses get the same number
    of trials each, in turns, and each has its own study. An interrupted search is resumed by calling it again with the
    same folder.

    Args:
        config: the configuration that is changed, or its file; with `training.steps: auto` trials take the usual number
            of steps.
        space: a mapping from keys to {low, high, log}, {low, high, step} or {choices: [...]}, and from `loss` to a list
            of losses with ranges of their own; or the file of such a mapping.
        folder: the folder for best.yaml, trials.json, tune.html and trials.jsonl.
        trials: the number of trials of each loss.
        jobs: how many trials run in parallel, each in a process with one thread; they share a GPU.
        score: "recall@1" or "map_at_r".
        seeds: the number of runs of a trial, whose scores are averaged.
        held_out: the share of the training classes that is scored.
        prune: "median" stops a trial whose scores on the validation classes are below the median of the others at the
            same step, once five have finished (it needs `data.validation` above 0); "none" stops none.
        seed: the seed of the sampler; with one job the same trials are run each time.
        data: a data set of your own instead of the one in the configuration.
        console: the console to print progress to.

    Raises:
        ValueError: a key is unknown, a range is empty, or the folder holds another search.
        RuntimeError: the first trials all fail, or none ends with a score.
    """
    need("optuna", "tune", "tune")  # before anything is read
    config = config if isinstance(config, Config) else load(Path(config))
    space = space if isinstance(space, Mapping) else read_space(Path(space))
    folder = Path(folder)
    for name in (BEST, TRIALS, PAGE):
        plain_target(folder / name)
    check_seed("tune", seed)
    check_choice("tune", "score", score, SCORES)
    check_choice("tune", "prune", prune, ("median", "none"))
    for name, value in (("trials", trials), ("jobs", jobs), ("seeds", seeds)):
        check_whole("tune", name, value)
    if not 0 < held_out < 1:
        raise ValueError(f"tune: held_out must lie between 0 and 1, both excluded, but came as {held_out!r}.")
    reduced = hold_out_test(data or open_dataset(config.data), held_out)
    every = spaces(with_usual_length(config, reduced), space)  # trials are compared at one length
    for each in every:
        class_shares(each.base, reduced)
    plan = Job(config, seeds, score, held_out)
    about = _describe_search(config, space, plan, seed, reduced.name)
    with TrialLog(folder, about) as log:
        run = _Search(every, log, trials, plan, prune == "median", seed)
        varies = any(key.startswith("data") for each in every for key in each.ranges)
        shared = reduced if data is not None or (jobs == 1 and not varies) else None
        work = functools.partial(run_trial, data=shared, stop=stopping)
        total, done = trials * len(every), len(log.trials)
        bar = Progress("trials", max(total, done), done=done, console=console or Terminal(), stays=True)
        updated = 0.0
        with bar, Workers(work, jobs) as workers:
            try:
                for (loss, number, trial, values), outcome in workers.outcomes(iter(run.next, None)):
                    run.tell(trial, ended := Trial(loss, number, values, outcome))
                    result = run.result(folder)
                    bar.advance(words=_describe_progress(ended, result))
                    if result.best_loss is not None and time.monotonic() >= updated + EVERY:
                        _write(result)
                        updated = time.monotonic()
            except KeyboardInterrupt:
                run.stopped = True
    result = run.result(folder)
    if result.best_loss is not None:
        _write(result)
    elif not run.stopped:
        first = next((str(each.outcome.error) for each in result.trials if each.outcome.error), "no word")
        raise RuntimeError(f"tune: no trial ended with a score; the first said: {first}")
    return result


def _describe_search(config: Config, space: Mapping[str, Any], plan: Job, seed: int, data: str) -> dict[str, Any]:
    """Everything that scores depend on; not the path of the data, nor keys that only affect speed."""
    tree = json.loads(json.dumps(to_tree(config)))
    for section, key in (("data", "path"), *MANNER):
        tree[section].pop(key, None)
    options = {"score": plan.score, "seeds": plan.seeds, "held_out": plan.held_out, "seed": seed}
    plain = json.loads(json.dumps(space, default=lambda x: list(x) if isinstance(x, Sequence) else str(x)))
    return {"config": tree, "space": plain, "data": data, **options}


class _Search:
    """Hand out trials, one of each loss in turn, and collect their outcomes."""

    def __init__(self, every: list[Space], log: TrialLog, trials: int, plan: Job, prune: bool, seed: int) -> None:
        self.spaces = {each.label: each for each in every}
        self.log, self.trials, self.plan, self.prune = log, trials, plan, prune
        self.stopped = False
        self._proposals = {each.label: Proposals(each, seed, log.of(each.label)) for each in every}
        self._exhausted: set[str] = set()
        self._waiting = self._missing()

    def _missing(self) -> Iterator[tuple[str, int]]:
        done = {(each.loss, each.number) for each in self.log.trials}
        for number in range(self.trials):
            yield from ((label, number) for label in self.spaces if (label, number) not in done)

    def next(self) -> tuple[Key, Job] | None:
        """The next trial, or None if all have been handed out."""
        for label, number in self._waiting:
            found = None if label in self._exhausted else self._proposals[label].ask(number)
            if found is None:
                self._exhausted.add(label)
                continue
            trial, values = found
            config = self.spaces[label].config(values)
            return (label, number, trial, values), replace(self.plan, config=config, rivals=self._rivals(label))
        return None

    def _rivals(self, label: str) -> tuple[Any, ...]:
        if not self.prune:
            return ()
        ours = [each.outcome for each in self.log.of(label)]
        if sum(each.state == "done" for each in ours) < STARTUP:
            return ()
        # pruned trials count too: the median of the others alone would rise until nearly every trial is below it
        return tuple(each.curves for each in ours if each.state in ("done", "pruned"))

    def tell(self, trial: Any, ended: Trial) -> None:
        """Store a trial that has ended, and report it to Optuna."""
        self.log.add(ended)
        self._proposals[ended.loss].tell(trial, ended.outcome)
        ours = [each.outcome for each in self.log.of(ended.loss)]
        if len(ours) >= FAILURES and all(each.state == "failed" for each in ours):
            raise RuntimeError(
                f"tune: the first {len(ours)} trials of {ended.loss} all failed, the last with "
                f"{str(ended.outcome.error).rstrip('.')}; mend it and run the same command again."
            )

    def result(self, folder: Path) -> Tuned:
        losses = {label: Best.of(space, self.log.of(label)) for label, space in self.spaces.items()}
        return Tuned(folder, self.plan.score, tuple(self.log.trials), losses, finished=not self.stopped)


def _describe_progress(trial: Trial, result: Tuned) -> str:
    score = trial.outcome.state if trial.outcome.score is None else f"{100 * trial.outcome.score:.1f}"
    best = "" if result.best_loss is None else f", best {100 * result.score:.1f} ({result.best_loss})"
    return f"{trial.loss} {score}{best}"


def _write(result: Tuned) -> None:
    save(result.best, result.folder / BEST)
    if len(result.losses) > 1:
        for label, each in result.losses.items():
            if each.config is not None:
                save(each.config, result.folder / f"best-{label.replace(' ', '-')}.yaml")
    write_text(result.folder / TRIALS, json.dumps(summary(result), indent=1, allow_nan=False) + "\n")
    write_text(result.folder / PAGE, page.build(result))

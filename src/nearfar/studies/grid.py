"""Many training runs in parallel. Each result is a line of one file, so that a stopped grid can continue."""

import functools
import gc
import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from nearfar._utils import workers as pool
from nearfar._utils.checks import check_whole
from nearfar._utils.console import Terminal
from nearfar._utils.files import read_arrays, write_text
from nearfar._utils.journal import read_lines
from nearfar._utils.progress import Progress
from nearfar.data import DataSet, Samples, open_data
from nearfar.data._samples import Subset
from nearfar.data._splits import hold_out
from nearfar.doctor._remedies import batch_of
from nearfar.evaluation._clustering import clustering_scores
from nearfar.runs._config import to_tree
from nearfar.runs._journal import Journal
from nearfar.studies import _trace
from nearfar.train import Callback, Config, Moment, fit
from nearfar.train._scores import score

__all__ = ["Line", "Trial", "Workers", "attempt", "held_out", "lines", "permute_labels", "run", "run_folder",
           "words_of"]  # fmt: skip

Line = dict[str, Any]
WRONG_SEED = 77  # with the seed of a run it decides which labels are wrong, the same for every loss
MANNER = (  # keys that change only the speed of a run (and its results by rounding): they do not identify a run
    ("data", "workers"),
    ("data", "cache"),
    ("data", "cache_folder"),
    ("training", "compile"),
    ("training", "threads"),
)


@dataclass(frozen=True)
class Trial:
    """One run, and how it is scored.

    Attributes:
        config: the whole run; its seed is `training.seed`.
        ks: which recall@K.
        wrong: the share of the training labels that is permuted.
        held_out: the share of the training classes that is held out and scored instead of the test classes, which are
            then not read; 0: the test classes.
        held_classes: the names (patterns) of those classes, in place of a share.
        clustering: NMI and F1 on whole test classes of at most this many samples; 0: none.
        checkpoints: score at so many steps, evenly spaced, and keep the scores of the best R@1 too; 0: only at the end.
    """

    config: Config
    ks: tuple[int, ...] = (1, 2, 4, 8, 10)
    wrong: float = 0.0
    held_out: float = 0.0
    clustering: int = 0
    held_classes: tuple[str, ...] = ()
    checkpoints: int = 0

    @functools.cached_property
    def key(self) -> str:
        """A short hash that identifies the run: without paths and without the keys of `MANNER`.

        Keys of the configuration at their default are left out, so that a grid can continue after new keys were added.
        """
        tree = self.tree()
        for section, name in MANNER:
            tree["config"][section].pop(name, None)
        usual = to_tree(Config())
        for section in ("data", "model", "optimizer", "training"):  # losses and samplers have only given keys
            given = tree["config"][section]
            tree["config"][section] = {name: value for name, value in given.items() if value != usual[section][name]}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def tree(self) -> Line:
        """The run as plain values."""
        config = to_tree(self.config)
        config["data"].pop("path")
        config["data"].pop("cache_folder", None)
        weights = config["model"]["weights"]
        config["model"]["weights"] = weights and Path(weights).name
        scored = {"ks": list(self.ks), "wrong": self.wrong, "held_out": self.held_out, "clustering": self.clustering}
        later = {"held_classes": list(self.held_classes), "checkpoints": self.checkpoints}
        return {"config": config, **scored, **{name: value for name, value in later.items() if value}}


class Workers(pool.Workers[Trial, Line]):
    """Processes that train runs, one thread each, sharing a GPU if there is one; they start at the first run.

    One job trains in the calling process. `with Workers(8) as workers:` lets several studies use the same processes.
    """

    def __init__(self, jobs: int = 1) -> None:
        check_whole("Workers", "jobs", jobs)
        super().__init__(attempt, jobs)

    def results(self, trials: Sequence[Trial], end: float | None = None) -> Iterator[Line]:
        """Yield the lines as runs finish; no run begins after the time `end` of `time.monotonic()`."""
        in_time = itertools.takewhile(lambda _: end is None or time.monotonic() <= end, trials)
        return (line for _, line in self.outcomes((trial.key, trial) for trial in in_time))


def run(
    trials: Iterable[Trial],
    file: Path,
    *,
    workers: Workers | None = None,
    seconds: float | None = None,
    console: Console | None = None,
) -> dict[str, Line]:
    """Run the trials that are not in `file` yet, in order, append a line for each, and return all lines by key.

    A run that fails is a line with its error, and is tried again by the next call. Of equal trials only the first is
    run. Runs are trained by `nearfar.train.fit` in folders that are removed, in this process if `workers` is None.
    After `seconds` none begins, and those under way are finished.
    """
    wanted = {trial.key: trial for trial in trials}
    known = lines(file)
    write_text(file, "".join(json.dumps(line) + "\n" for line in known.values()))  # drops an incomplete last line
    missing = [trial for key, trial in wanted.items() if known.get(key, {"error": ""})["error"] is not None]
    if not missing:
        return known
    end = None if seconds is None else time.monotonic() + seconds
    with (
        Journal(file, checked=False) as journal,
        _progress(console, len(wanted), len(wanted) - len(missing)) as advance,
    ):
        for line in (workers or Workers()).results(missing, end):
            journal.write(line)
            known[line["key"]] = line
            advance(line)
    return known


def lines(file: Path) -> dict[str, Line]:
    """The lines of a file by key; the last one if a run was tried twice."""
    return {line["key"]: line for line in read_lines(file, lambda line: isinstance(line.get("key"), str)).entries}


def attempt(trial: Trial) -> Line | None:
    """Train one run and return its line; None if Ctrl-C stopped it."""
    start = time.monotonic()
    line: Line = {"key": trial.key, **trial.tree(), "error": None, "scores": {}, "wrong_share": 0.0}
    try:
        found = _train(trial)
        if found is None:
            return None
        line |= found
    except pool.Stopped:
        return None
    except Exception as error:  # a failed run must not end the others
        line["error"] = words_of(error)
    line["seconds"] = round(time.monotonic() - start, 2)
    return line


def words_of(error: Exception) -> str:
    """The error of a run in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder for one run, which is removed after it."""
    if torch.cuda.is_available():
        gc.collect()  # other processes need the memory of the previous run's network
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="nearfar-") as place:
        yield Path(place) / "run"


def _give_up(moment: Moment) -> None:
    """A callback that ends the run after its step when the grid is stopping."""
    if pool.stopping():
        raise pool.Stopped


@dataclass(eq=False)
class _Course:
    """A callback that scores the test classes at some steps, and keeps the scores of the best one."""

    every: int  # steps between two scores
    best: tuple[int, dict[str, float]] = (0, {})  # the step and the scores of the best R@1

    def __call__(self, moment: Moment) -> None:
        """Score after a step, if it is time; the last step is scored by the run itself."""
        if moment.step % self.every == 0 and moment.step < moment.state.config.training.length:
            state, data = moment.state, moment.state.data
            options: dict[str, Any] = {"gallery": data.gallery, "ks": data.ks, **state.evaluating}
            self.offer(moment.step, score(state.scored_model, data.test, state.plain, **options).evaluation.scores())

    def offer(self, step: int, scores: dict[str, float]) -> None:
        """Keep the scores of a step if they are the best; of equal ones the first."""
        if scores["recall@1"] > self.best[1].get("recall@1", -1.0):
            self.best = step, scores


def _train(trial: Trial) -> Line | None:
    config = trial.config
    data, share = _data_of(trial)
    course = _Course(-(-config.training.length // trial.checkpoints)) if trial.checkpoints else None
    on_gpu = torch.cuda.is_available()
    with run_folder() as folder:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        callbacks: list[Callback] = [_give_up] if course is None else [_give_up, course]
        result = fit(config, folder, data=data, callbacks=callbacks, console=Terminal(quiet=True))
        if result.test is None:
            return None
        scores = result.test.scores()
        if trial.clustering:
            scores |= _clusters(folder / "embeddings.npz", trial.clustering)
        if course is not None:
            course.offer(result.step, result.test.scores())
            scores |= {f"best_{name}": value for name, value in course.best[1].items()} | {"best_step": course.best[0]}
        line: Line = {"scores": scores, "queries": result.test.queries, "steps": result.step, "wrong_share": share}
        line["classes"] = _trace.by_class(result.test)
        line["journal"] = _trace.of_journal(folder, batch_of(config, len(data.train.classes)))
    peak = {"peak_memory": torch.cuda.max_memory_allocated() if on_gpu else None}
    return line | peak | _trace.device()


@functools.lru_cache(maxsize=1)  # only one data set, because its pictures may be cached on the device
def _open(name: str, path: str | None, form: tuple[Any, ...]) -> DataSet:
    """A data set; `form` are the settings that its decoded pictures depend on."""
    return open_data(name, path)


def _data_of(trial: Trial) -> tuple[DataSet, float]:
    """The data of a run, and the share of its training labels that is wrong."""
    spec = trial.config.data
    data = replace(_open(spec.name, spec.path, (spec.transform, spec.size, spec.cache)), ks=trial.ks)
    if trial.held_out or trial.held_classes:
        data = held_out(data, trial.held_out, trial.held_classes)
    if not trial.wrong:
        return data, 0.0
    train = permute_labels(data.train, trial.wrong, seed=trial.config.training.seed)
    return replace(data, train=train), float(np.mean(train.labels != data.train.labels))


def held_out(data: DataSet, share: float, patterns: Sequence[str] = ()) -> DataSet:
    """Replace the test classes by training classes that are held out."""
    train, test = hold_out(data.train, share, patterns)
    return replace(data, train=train, test=test, gallery=None)


def permute_labels(samples: Samples, share: float, *, seed: int) -> Samples:
    """Permute the labels of a random share of the samples: every class keeps its size."""
    from nearfar.data import Tensors

    random = np.random.default_rng([WRONG_SEED, seed])
    rows = random.permutation(len(samples))[: round(share * len(samples))]
    labels = samples.labels.copy()
    labels[rows] = labels[random.permutation(rows)]
    if isinstance(samples, Tensors):
        return Tensors(samples.x, labels, samples.names, samples.classes)
    return Subset(samples, np.arange(len(samples)), labels, samples.classes)


def _clusters(file: Path, most: int) -> dict[str, float]:
    """NMI and F1 of k-means on whole classes, drawn in a fixed random order until `most` samples are reached."""
    arrays = read_arrays("grid", file)
    x, y = arrays["x"], arrays["y"]
    sizes = np.bincount(y)
    order = np.random.default_rng(0).permutation(len(sizes))
    chosen = order[np.cumsum(sizes[order]) <= most]
    rows = np.flatnonzero(np.isin(y, chosen))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = clustering_scores(torch.from_numpy(x[rows]).to(device), torch.from_numpy(y[rows]).to(device))
    return {"nmi": found.nmi, "f1": found.f1}


@contextmanager
def _progress(console: Console | None, total: int, done: int) -> Iterator[Any]:
    """A function that is called with each line and advances the progress bar."""
    failed = 0
    with Progress("runs", total, done=done, console=console or Terminal(), stays=True) as bar:

        def advance(line: Mapping[str, Any]) -> None:
            nonlocal failed
            failed += line["error"] is not None
            name, seconds = line["config"]["loss"]["name"], line["seconds"]
            status = f"{name}: {line['error']}" if line["error"] else f"{name} {seconds:.0f} s"
            bar.advance(words=status[:60] + (f"  ({failed} failed)" if failed else ""))

        yield advance

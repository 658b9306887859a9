"""Common code of the studies that train networks: settings for each kind of data, learning rates, the results file."""

import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.data import open_data
from nearfar.studies import grid
from nearfar.studies._descent_rivals import interval
from nearfar.studies.grid import Line, Trial, Workers
from nearfar.train import Config, parse

Tree = Mapping[str, Any]
Spread = dict[str, Any]
OTHER_RECALLS = ("sop", "inshop")  # data sets on which papers report other recalls than on the rest
HELD_OUT = 0.1  # share of the training classes on which the learning rate is chosen


class Options(TypedDict, total=False):
    """Options of every study that trains networks."""

    data: str  # glyphs (the default), omniglot, cub, cars, sop, inshop, flowers, folder or vectors
    path: str | Path | None  # path of the data; glyphs need none
    seeds: int  # runs of each configuration; 3 by default
    jobs: int | Workers  # number of processes, or `Workers` that are running already
    quick: bool  # a smoke test with few short runs and one learning rate
    seconds: float | None  # begin no run after this time; missing results stay empty, and the next call continues
    precision: str | None  # float32, bf16, fp16 or float64; None: bf16 for photographs on a GPU, else float32
    weights: str | Path | None  # a file of weights for the network's trunk; None: the published ones, where it has some
    network: str | None  # another network, such as torchvision:googlenet; None: the usual one for the data
    width: int | None  # dimensions of the embedding; None: the usual number
    # score the test classes at so many steps, evenly spaced: `best_recall@1` and so on are the scores of the best one,
    # which is the protocol of the papers. 0: at the end alone
    checkpoints: int
    changes: Mapping[str, Tree] | None  # sections of the configuration that replace keys of the usual settings


@dataclass(frozen=True)
class Settings:
    """How a kind of data is trained: sections of the configuration, and the learning rates to choose from."""

    sections: Mapping[str, Tree]
    rates: tuple[float, ...]


DRAWINGS = Settings(
    {"data": {"transform": "none"}, "model": {"name": "small", "embedding_dim": 128}}, (3e-4, 1e-3, 3e-3)
)
VECTORS = Settings(
    # a square head initialized to the identity: with 64 dimensions, recall on CUB was below that of the features
    {"data": {"transform": "none"}, "model": {"name": "linear", "embedding_dim": None}, "optimizer": {"warmup": 50}},
    (1e-4, 3e-4, 1e-3),
)
SETTINGS = {"glyphs": DRAWINGS, "omniglot": DRAWINGS, "vectors": VECTORS}


def photograph_settings() -> Settings:
    """Settings for photographs on this machine: bf16 with a cache on the GPU, else float32 with a cache in memory."""
    on_gpu = torch.cuda.is_available()
    return Settings(
        {
            # pictures are decoded once and cached, so that no process has to read them
            "data": {"cache": "device" if on_gpu else "memory", "workers": 0},
            "model": {"name": "lite0", "embedding_dim": 512, "freeze_norms": True},
            "optimizer": {"head_lr_mult": 10.0, "warmup": 50},
            # the first run of a process compiles the kernels, and later ones reuse them
            "training": {"baselines": False} | ({"precision": "bf16", "compile": "kernels"} if on_gpu else {}),
        },
        (2e-5, 5e-5, 1.2e-4),
    )


@dataclass(frozen=True)
class Method:
    """A loss by name with its arguments, and other settings that it needs."""

    loss: Tree  # as in a configuration
    normalize: bool = True  # embeddings of unit length; N-pair needs longer ones


@dataclass(frozen=True, eq=False)
class TrainingStudy:
    """A study on one data set."""

    name: str
    folder: Path  # the folder for runs, results and figures
    data: str  # name of the data set
    path: str | None  # the path of the data set
    labels: np.ndarray  # labels of the training samples
    seeds: int  # the number of runs of each configuration
    workers: Workers  # the processes that train
    deadline: float | None  # begin no run after this time of `time.monotonic()`; None: no limit
    quick: bool  # a smoke test with one learning rate
    # sections of the configuration that replace keys of the usual settings
    changes: Mapping[str, Tree] = field(default_factory=dict)
    checkpoints: int = 0  # see `Options`
    # which recall@K, where papers report others on the data; None: those of the study
    ks: tuple[int, ...] | None = None
    stem: str = ""  # the names of the result files begin with it

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings for this data set, with the changes."""
        usual = SETTINGS.get(self.data) or photograph_settings()
        names = {**usual.sections, **self.changes}
        sections = {name: {**usual.sections.get(name, {}), **self.changes.get(name, {})} for name in names}
        return Settings(sections, usual.rates)

    @property
    def classes(self) -> int:
        """The number of training classes."""
        return len(np.unique(self.labels))

    def recalls(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Which recall@K: those that papers report on SOP and In-Shop, else the usual ones."""
        return self.ks or usual

    def scores(self, usual: tuple[int, ...], *others: str) -> tuple[str, ...]:
        """The names of the scores in a table: recalls, then others; the best checkpoint's R@1 if there are several."""
        best = ("best_recall@1",) if self.checkpoints else ()
        return (*(f"recall@{k}" for k in self.recalls(usual)), *others, *best)

    def config(
        self,
        method: Method,
        batches: Tree,
        *,
        steps: int,
        rate: float,
        seed: int = 0,
        proximal: float = 0.0,
        width: int | None = None,
        loss_lr_mult: float | None = None,
    ) -> Config:
        """The configuration of a run on all training classes that is scored once, at its end."""
        tree: dict[str, Any] = {name: dict(section) for name, section in self.settings.sections.items()}
        tree["data"] |= {"name": self.data, "path": self.path, "validation": 0.0}
        if batches.get("hard_classes"):
            tree["data"]["workers"] = (
                0  # workers would draw classes before the network has been trained on earlier ones
            )
        tree["model"] |= {"normalize": method.normalize} | ({} if width is None else {"embedding_dim": width})
        tree["optimizer"] = {**tree.get("optimizer", {}), "lr": rate, "proximal": proximal}
        tree["optimizer"] |= {} if loss_lr_mult is None else {"loss_lr_mult": loss_lr_mult}
        # a short run must not consist of warm-up alone
        tree["optimizer"]["warmup"] = min(tree["optimizer"].get("warmup", 0), steps // 4)
        plan = {"steps": steps, "seed": seed, "evaluate_every": steps, "checkpoint_every": steps, "explain_every": 0}
        tree["training"] = {**tree.get("training", {}), **plan}
        return parse({**tree, "loss": method.loss, "batches": batches})

    def trials(self, method: Method, batches: Tree, *, score: Tree | None = None, **how: Any) -> list[Trial]:
        """One run for each seed; `score` has arguments of `Trial`, and `how` those of `config`."""
        configs = [self.config(method, batches, seed=seed, **how) for seed in range(self.seeds)]
        score = {**(score or {}), "checkpoints": self.checkpoints} | ({} if self.ks is None else {"ks": self.ks})
        return [Trial(config, **score) for config in configs]

    def per_class(self, size: int, samples: int) -> Tree:
        """Batches of `size` samples, `samples` per class; smaller if there are too few classes."""
        return {"name": "MPerClass", "classes": min(size // samples, self.classes), "samples": samples}

    def run(self, trials: Iterable[Trial]) -> dict[str, Line]:
        """Run `trials` as far as time allows, and return all lines of this study so far."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        return grid.run(trials, self.folder / f"{self.name}-{self.data}.jsonl", workers=self.workers, seconds=left)

    def choose_rate(self, baselines: Sequence[Method], batches: Tree, *, steps: int) -> Spread:
        """Choose the `rate` with the best R@1 on held-out training classes, the mean over baselines; seed 0.

        Returned with `held_out`: the mean R@1 of every learning rate.
        """
        rates = self.settings.rates
        if self.quick:
            return {"rate": rates[1], "held_out": {}}
        # a batch may not have more classes than are left for training
        most = self.classes - round(HELD_OUT * self.classes)
        batches = {**batches, "classes": min(batches["classes"], most)}
        trials = {
            rate: [
                Trial(self.config(method, batches, steps=steps, rate=rate), held_out=HELD_OUT) for method in baselines
            ]
            for rate in rates
        }
        known = self.run(trial for each in trials.values() for trial in each)
        found = {rate: spread(values(known, each, "recall@1")) for rate, each in trials.items()}
        means = {rate: each["mean"] for rate, each in found.items() if each is not None}
        if not means:
            raise RuntimeError(f"{self.name}: no run ended in time to choose a learning rate; give it more seconds.")
        return {"rate": max(means, key=lambda rate: means[rate]), "held_out": {f"{k:g}": v for k, v in means.items()}}

    def about(self) -> dict[str, Any]:
        """The setting of the study: data, seeds, device and versions."""
        sizes = np.bincount(self.labels)
        return {
            "study": self.name,
            "data": self.data,
            "stem": self.stem,
            "checkpoints": self.checkpoints,
            "training": {"classes": self.classes, "samples": len(self.labels), "largest_class": int(sizes.max())},
            "seeds": self.seeds,
            "quick": self.quick,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        }

    def write(
        self, found: dict[str, Any], known: Mapping[str, Line], draw: Callable[[Mapping[str, Any], Path], None]
    ) -> dict[str, Any]:
        """Write the results, and every run with its configuration, and draw the figures."""
        runs = [line for line in known.values() if line["config"]["training"]["steps"] == found["steps"]]
        whole = {**self.about(), **found, "runs": runs}
        write_text(self.folder / f"{self.stem}.json", as_json(whole, "runs", 7))
        draw(whole, self.folder)
        return whole


@contextmanager
def open_study(name: str, folder: str | Path, **options: Unpack[Options]) -> Iterator[TrainingStudy]:
    """Read the labels of the data set and create the folder; processes that it starts end with the block."""
    seeds, seconds, jobs = options.get("seeds", 3), options.get("seconds"), options.get("jobs", 1)
    data, path = options.get("data", "glyphs"), options.get("path")
    if seeds < 1:
        raise ValueError(f"{name}: seeds must be at least 1, but came as {seeds}.")
    opened = open_data(data, path)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    deadline = None if seconds is None else time.monotonic() + seconds
    changes = {section: dict(keys) for section, keys in (options.get("changes") or {}).items()}
    if precision := options.get("precision"):
        changes.setdefault("training", {})["precision"] = precision
    weights, network, width = options.get("weights"), options.get("network"), options.get("width")
    model = {"weights": weights and os.fspath(weights), "name": network, "embedding_dim": width}
    changes["model"] = changes.get("model", {}) | {key: value for key, value in model.items() if value is not None}
    names = (name, data, network.split(":")[-1] if network else "", str(width or ""))
    with nullcontext(jobs) if isinstance(jobs, Workers) else Workers(jobs) as workers:
        yield TrainingStudy(
            name,
            place,
            data,
            None if path is None else os.fspath(path),
            opened.train.labels,
            seeds,
            workers,
            deadline,
            options.get("quick", False),
            changes,
            options.get("checkpoints", 0),
            opened.ks if data in OTHER_RECALLS else None,
            "-".join(filter(None, names)),
        )


def order_by_seed(cells: Iterable[Sequence[Trial]]) -> list[Trial]:
    """The first seed of every cell, then the second, and so on: a study that is stopped has results in every cell."""
    rows = list(cells)
    return [row[seed] for seed in range(max(map(len, rows), default=0)) for row in rows if seed < len(row)]


def values(known: Mapping[str, Line], trials: Sequence[Trial], score: str) -> list[float]:
    """A score of each finished run, in percent."""
    lines = [known[trial.key] for trial in trials if trial.key in known]
    return [100 * line["scores"][score] for line in lines if score in line["scores"]]


def spread(numbers: Sequence[float]) -> Spread | None:
    """Values, mean, and half the 95% t-interval over seeds (None with one seed); None without values."""
    if not numbers:
        return None
    if len(numbers) == 1:
        return {"values": list(numbers), "mean": numbers[0], "half": None}
    return interval(list(numbers))


def summarize(known: Mapping[str, Line], trials: Sequence[Trial], scores: Sequence[str]) -> dict[str, Any]:
    """One cell of a table: each score over the seeds, the errors of failed runs, and the median time of a run."""
    lines = [known[trial.key] for trial in trials if trial.key in known]
    found: dict[str, Any] = {score: spread(values(known, trials, score)) for score in scores}
    found["errors"] = sorted({line["error"] for line in lines if line["error"]})
    found["runs"] = len(lines)
    found["seconds"] = float(np.median([line["seconds"] for line in lines])) if lines else None
    found["keys"] = [trial.key for trial in trials]
    return found


def tabulate(
    known: Mapping[str, Line], cells: Mapping[tuple[str, str], Sequence[Trial]], scores: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Row -> column -> summary, for cells by row and column."""
    table: dict[str, dict[str, Any]] = {}
    for (row, column), trials in cells.items():
        table.setdefault(row, {})[column] = summarize(known, trials, scores)
    return table


def difference(known: Mapping[str, Line], before: Sequence[Trial], after: Sequence[Trial], score: str) -> Spread | None:
    """The paired difference `after` - `before` over seeds where both finished, with a verdict by its interval."""
    pairs = [
        (before_value, after_value)
        for a, b in zip(before, after, strict=True)
        for before_value, after_value in zip(values(known, [a], score), values(known, [b], score), strict=False)
    ]
    found = spread([b - a for a, b in pairs])
    return None if found is None else found | {"verdict": verdict(found)}


def verdict(found: Spread) -> str:
    """The verdict: whether the interval of a difference is above or below zero."""
    half = math.inf if found["half"] is None else found["half"]
    if found["mean"] - half > 0:
        return "better"
    return "worse" if found["mean"] + half < 0 else "cannot tell"

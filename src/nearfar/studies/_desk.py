"""The common part of the training studies: runs that suit the data, choice of the learning rate, results file."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar._utils.files import write_text
from nearfar.data import open_data
from nearfar.studies import grid
from nearfar.studies._descent_rivals import interval
from nearfar.studies.grid import Line, Trial, Workers
from nearfar.train import Config, parse

Tree = Mapping[str, Any]
Spread = dict[str, Any]
HELD_OUT = 0.1  # share of the training classes that chooses the learning rate


@dataclass(frozen=True)
class Scene:
    """How a kind of data is trained: sections of the configuration, and the learning rates to choose from."""

    sections: Mapping[str, Tree]
    rates: tuple[float, ...]


DRAWINGS = Scene({"data": {"transform": "none"}, "model": {"name": "small", "embedding_dim": 128}}, (3e-4, 1e-3, 3e-3))
VECTORS = Scene(
    # a square head that begins as the identity: one of 64 dimensions found less of CUB than the features themselves
    {"data": {"transform": "none"}, "model": {"name": "linear", "embedding_dim": None}, "optimizer": {"warmup": 50}},
    (1e-4, 3e-4, 1e-3),
)
PHOTOGRAPHS: Mapping[str, Tree] = {
    # `cache` and `workers`: decoded once, and then no process has to read pictures
    "data": {"cache": "device", "workers": 0},
    "model": {"name": "lite0", "embedding_dim": 512, "freeze_norms": True},
    "optimizer": {"head_lr_mult": 10.0, "warmup": 50},
    # the first run of a process pays for the compilation, the others find it
    "training": {"baselines": False, "precision": "bf16", "compile": "kernels"},
}
"""The sections of a run on photographs on a GPU; keys that the configuration does not have are left out."""
PHOTOGRAPH_RATES = (2e-5, 5e-5, 1.2e-4)
UNCACHED_WORKERS = 4  # where pictures must be decoded at each step
SCENES = {"glyphs": DRAWINGS, "omniglot": DRAWINGS, "vectors": VECTORS}


def photographs() -> Scene:
    """How photographs are trained on this machine: without a GPU in float32, and cached in memory."""
    known = {each.name: {key.name for key in fields(type(getattr(Config(), each.name)))} for each in fields(Config)}
    tree: dict[str, dict[str, Any]] = {
        name: {key: value for key, value in section.items() if key in known[name]}
        for name, section in PHOTOGRAPHS.items()
    }
    if "cache" not in tree["data"]:
        tree["data"]["workers"] = UNCACHED_WORKERS
    if not torch.cuda.is_available():
        tree["training"]["precision"] = "float32"
        tree["training"].pop("compile", None)
        tree["data"] |= {"cache": "memory"} if "cache" in tree["data"] else {"workers": 0}
    return Scene(tree, PHOTOGRAPH_RATES)


@dataclass(frozen=True)
class Method:
    """A loss by name with its arguments, and other settings that it needs.

    Attributes:
        loss: as in a configuration.
        normalize: embeddings of unit length; N-pair needs longer ones.
    """

    loss: Tree
    normalize: bool = True


@dataclass(frozen=True, eq=False)
class Desk:
    """The state of a study on one data set.

    Attributes:
        study: its name.
        folder: the folder for runs, results and figures.
        data: name of the data set.
        path: its path.
        labels: labels of the training samples.
        seeds: the number of runs of each configuration.
        workers: the processes that train.
        deadline: begin no run after this time of `time.monotonic()`; None: no limit.
        quick: a quick check: one learning rate, no choice.
        changes: sections that differ from the scene's, such as another precision.
    """

    study: str
    folder: Path
    data: str
    path: str | None
    labels: np.ndarray
    seeds: int
    workers: Workers
    deadline: float | None
    quick: bool
    changes: Mapping[str, Tree] = field(default_factory=dict)

    @functools.cached_property
    def scene(self) -> Scene:
        """The scene of this data set."""
        scene = SCENES.get(self.data) or photographs()
        names = {**scene.sections, **self.changes}
        sections = {name: {**scene.sections.get(name, {}), **self.changes.get(name, {})} for name in names}
        return Scene(sections, scene.rates)

    @property
    def classes(self) -> int:
        """The number of training classes."""
        return len(np.unique(self.labels))

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
        tree: dict[str, Any] = {name: dict(section) for name, section in self.scene.sections.items()}
        tree["data"] |= {"name": self.data, "path": self.path, "validation": 0.0}
        if batches.get("hard_classes"):
            tree["data"]["workers"] = 0  # the choice of classes must not run ahead of the training
        tree["model"] |= {"normalize": method.normalize} | ({} if width is None else {"embedding_dim": width})
        tree["optimizer"] = {**tree.get("optimizer", {}), "lr": rate, "proximal": proximal}
        tree["optimizer"] |= {} if loss_lr_mult is None else {"loss_lr_mult": loss_lr_mult}
        # a warm-up as long as a quick check would leave nothing to learn with
        tree["optimizer"]["warmup"] = min(tree["optimizer"].get("warmup", 0), steps // 4)
        plan = {"steps": steps, "seed": seed, "evaluate_every": steps, "checkpoint_every": steps, "explain_every": 0}
        tree["training"] = {**tree.get("training", {}), **plan}
        return parse({**tree, "loss": method.loss, "batches": batches})

    def per_class(self, size: int, samples: int) -> Tree:
        """Batches of `size` samples, `samples` per class; smaller if there are too few classes."""
        return {"name": "MPerClass", "classes": min(size // samples, self.classes), "samples": samples}

    def run(self, trials: Iterable[Trial]) -> dict[str, Line]:
        """Run `trials` as far as time allows; return all lines of this study so far."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        return grid.run(trials, self.folder / f"{self.study}-{self.data}.jsonl", workers=self.workers, seconds=left)

    def choose_rate(self, baselines: Sequence[Method], batches: Tree, *, steps: int) -> Spread:
        """Choose the learning rate with the best R@1 on held-out training classes, averaged over baselines; seed 0.

        Returns:
            `rate`, and `held_out`: the mean R@1 of every learning rate.
        """
        rates = self.scene.rates
        if self.quick:
            return {"rate": rates[1], "held_out": {}}
        # the held-out classes are gone from training: a batch of all classes would not find as many
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
            raise RuntimeError(f"{self.study}: no run ended in time to choose a learning rate; give it more seconds.")
        return {"rate": max(means, key=lambda rate: means[rate]), "held_out": {f"{k:g}": v for k, v in means.items()}}

    def about(self) -> dict[str, Any]:
        """The setting that the results depend on, besides the runs."""
        sizes = np.bincount(self.labels)
        return {
            "study": self.study,
            "data": self.data,
            "training": {"classes": self.classes, "samples": len(self.labels), "largest_class": int(sizes.max())},
            "seeds": self.seeds,
            "quick": self.quick,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        }

    def write(self, found: dict[str, Any], known: Mapping[str, Line]) -> dict[str, Any]:
        """Write the results, and every run with its configuration."""
        runs = [line for line in known.values() if line["config"]["training"]["steps"] == found["steps"]]
        whole = {**self.about(), **found, "runs": runs}
        write_text(self.folder / f"{self.study}-{self.data}.json", as_json(whole))
        return whole


@contextmanager
def open_desk(
    study: str,
    folder: str | Path,
    *,
    data: str,
    path: str | Path | None,
    seeds: int,
    jobs: int | Workers,
    quick: bool,
    seconds: float | None,
    precision: str | None = None,
    weights: str | Path | None = None,
    changes: Mapping[str, Tree] | None = None,
) -> Iterator[Desk]:
    """Read the labels of the data set and create the folder; processes that it starts end with the block.

    `precision`, `weights` (of the network's trunk) and the sections `changes` stand in place of the scene's.
    """
    if seeds < 1:
        raise ValueError(f"{study}: seeds must be at least 1, but came as {seeds}.")
    labels = open_data(data, path).train.labels
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    deadline = None if seconds is None else time.monotonic() + seconds
    where = None if path is None else os.fspath(path)
    sections = {name: dict(section) for name, section in (changes or {}).items()}
    if precision is not None:
        sections.setdefault("training", {})["precision"] = precision
    if weights is not None:
        sections.setdefault("model", {})["weights"] = os.fspath(weights)
    with nullcontext(jobs) if isinstance(jobs, Workers) else Workers(jobs) as workers:
        yield Desk(study, place, data, where, labels, seeds, workers, deadline, quick, sections)


def in_rounds(cells: Iterable[Sequence[Trial]]) -> list[Trial]:
    """Order trials by seed: the first seed of every cell, then the second, so that a stopped study has all cells."""
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


def cell(known: Mapping[str, Line], trials: Sequence[Trial], scores: Sequence[str]) -> dict[str, Any]:
    """Each score over the seeds, the number of failed runs, and the time of a run."""
    lines = [known[trial.key] for trial in trials if trial.key in known]
    found: dict[str, Any] = {score: spread(values(known, trials, score)) for score in scores}
    found["errors"] = sorted({line["error"] for line in lines if line["error"]})
    found["runs"] = len(lines)
    found["seconds"] = float(np.median([line["seconds"] for line in lines])) if lines else None
    found["keys"] = [trial.key for trial in trials]
    return found


def difference(known: Mapping[str, Line], before: Sequence[Trial], after: Sequence[Trial], score: str) -> Spread | None:
    """The paired difference `after` - `before` over seeds where both finished, with a verdict by its interval."""
    pairs = [
        (before_value, after_value)
        for a, b in zip(before, after, strict=True)
        for before_value, after_value in zip(values(known, [a], score), values(known, [b], score), strict=False)
    ]
    found = spread([b - a for a, b in pairs])
    return None if found is None else found | {"verdict": verdict(found)}


def less(cells: Mapping[str, Any], base: str, score: str) -> dict[str, str]:
    """Each cell minus the one named `base`, paired by seed, for a table; "-" if a run is missing."""
    before = cells[base][score]
    found = {}
    for name, each in cells.items():
        paired = each[score] is not None and before is not None and len(each["keys"]) == len(each[score]["values"])
        found[name] = "-"
        if name != base and paired and len(before["values"]) == len(each["keys"]):
            step = spread([b - a for a, b in zip(before["values"], each[score]["values"], strict=True)])
            found[name] = judged(step | {"verdict": verdict(step)}) if step else "-"
    return found


def judged(found: Mapping[str, Any] | None) -> str:
    """Format a difference and its verdict for a table."""
    return "-" if found is None else f"{shown(dict(found), sign=True)} ({found['verdict']})"


def verdict(found: Spread) -> str:
    """The verdict: whether the interval of a difference is above or below zero."""
    half = math.inf if found["half"] is None else found["half"]
    if found["mean"] - half > 0:
        return "better"
    return "worse" if found["mean"] + half < 0 else "cannot tell"


def shown(found: Spread | None, *, sign: bool = False) -> str:
    """Format mean ± half for a table.

    >>> shown({"mean": 71.26, "half": 0.41}), shown({"mean": 1.5, "half": None}, sign=True), shown(None)
    ('71.3 ± 0.4', '+1.5', '-')
    """
    if found is None:
        return "-"
    mean = f"{found['mean']:+.1f}" if sign else f"{found['mean']:.1f}"
    return mean if found["half"] is None else f"{mean} ± {found['half']:.1f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def setting(found: Tree) -> str:
    """A paragraph about how the runs of a study were made."""
    training, versions = found["training"], found["versions"]
    tried = ", ".join(f"{rate}: {mean:.1f}" for rate, mean in found["rate"]["held_out"].items())
    how = f" (mean R@1 on {HELD_OUT:.0%} of the training classes, held out: {tried})" if tried else ""
    failed = sum(line["error"] is not None for line in found["runs"])
    return (
        f"{found['data']}: {training['classes']} classes and {training['samples']} samples to learn from; "
        f"{found['steps']} steps a run, Adam, cosine to 0, rate {found['rate']['rate']:g}{how}; "
        f"{found['seeds']} seeds; scores in per cent on the test classes, read once, after the last step; ± is half a "
        f"95% t-interval over seeds. "
        f"{len(found['runs'])} runs, {failed} failed. {found['device']}, torch {versions['torch']}, "
        f"python {versions['python']}."
    )


def as_json(found: Mapping[str, Any]) -> str:
    """Readable JSON: indented results, then every run on a line of its own."""
    plain = _plain(found)
    runs = ",\n".join("  " + json.dumps(line, ensure_ascii=False, allow_nan=False) for line in plain.pop("runs"))
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    return text.removesuffix("\n}") + f',\n "runs": [\n{runs}\n ]\n}}\n'


def _plain(value: Any) -> Any:
    """Round numbers to seven digits; values that JSON cannot hold become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value

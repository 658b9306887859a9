"""What the doctor's benchmark trains: one run, watched by the doctor and, apart from it, by the truth.

Truth is set without the doctor, on samples of the training classes that are held out of training: a run has collapsed
where the effective rank of their embeddings is below 2, or their recall@1 below half of what it was before the first
step, and stays so to the end. The onset is the first look from which that holds.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from nearfar.data import DataSet, open_data, part
from nearfar.doctor import prescribe
from nearfar.doctor.course import look
from nearfar.evaluation import evaluate
from nearfar.evaluation.embed import evaluation_mode
from nearfar.losses import Triplet
from nearfar.runs import parts
from nearfar.runs.journal import read
from nearfar.studies.grid import permuted
from nearfar.train import fit, parse, processes
from nearfar.train.state import prepare

ROOT = Path(__file__).parents[2]
FILES = {"omniglot": "omniglot_28.npz", "cub": "cub200_lite0_train.npz"}
HELD = {"glyphs": 3, "omniglot": 4, "cub": 10}
"""Samples of each training class that are held out."""
PROBED, TESTED = 1000, 3000
"""Held-out samples, and samples of test classes, that are looked at: whole classes."""


@dataclass(frozen=True)
class Trial:
    """One run: its configuration as a tree, and what was done to its labels."""

    name: str
    data: str
    tree: dict
    kind: str = "healthy"
    wrong: float = 0.0
    about: dict = field(default_factory=dict)


class HardestOfMany(Triplet):
    """`Triplet(mining="hardest")` for a batch whose triplets do not fit: the worst anchor's hardest triplet."""

    def __init__(self, *, margin):
        super().__init__(margin=margin, mining="hard", reduction="none")

    def _value(self, call):
        """The largest of the anchors' values; its gradient is that of the one triplet."""
        return super()._value(call).max()


parts.LOSSES["HardestOfMany"] = HardestOfMany


def place(name):
    """Where the data lie: `shared/data` beside the repository, or a folder that an environment without it was given."""
    if name == "glyphs":
        return None
    folders = (ROOT.parent / "shared" / "data", ROOT / "nearfar-data")
    found = next((each for each in folders if (each / FILES[name]).is_file()), None)
    if found is None:
        places = " or ".join(map(str, folders))
        raise FileNotFoundError(f"doctor: {FILES[name]} is not in {places}; see docs/guides/data.md.")
    return str(found / FILES[name]) if name == "cub" else str(found)


@functools.lru_cache(maxsize=3)
def opened(name):
    """The data set with its test classes thinned, and places of the held-out samples of training classes."""
    data = open_data("vectors" if name == "cub" else name, place(name))
    random = np.random.default_rng(0)
    labels, held = data.train.labels, []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        held.append(random.permutation(rows)[: HELD[name]])
    kept = np.setdiff1d(np.arange(len(labels)), np.concatenate(held))
    probe = np.concatenate([held[i] for i in random.permutation(len(held))[: PROBED // HELD[name]]])
    sizes = np.bincount(data.test.labels)
    order = random.permutation(len(sizes))
    test = np.flatnonzero(np.isin(data.test.labels, order[np.cumsum(sizes[order]) <= TESTED]))
    shown = DataSet(data.name, part(data.train, kept), part(data.test, test), ks=(1,))
    return shown, part(data.train, probe)


class Truth:
    """A callback that embeds the held-out samples now and then, in evaluation mode."""

    def __init__(self, probe, every):
        self.probe, self.every, self.seen, self._x = probe, every, [], None

    def measure(self, step, setting):
        """Rank, recall@1 and spread of the held-out samples, as they are now."""
        if self._x is None:
            self._x = setting.plain.batch(self.probe.x, iter(())).to(setting.machine.device)
        with evaluation_mode(setting.bare_model, setting.machine.device), torch.inference_mode():
            rows = setting.bare_model(self._x).float()
        if not bool(torch.isfinite(rows).all()):
            self.seen.append([step, 0.0, 0.0, 0.0])
            return
        y = torch.from_numpy(self.probe.labels)
        found = look(step, rows, y)
        right = evaluate(rows, y.to(rows.device), ks=(1,)).recall[1]  # as a user measures it, in float32
        self.seen.append([step, round(found.rank, 3), round(right, 4), round(found.spread, 5)])

    def __call__(self, moment):
        """After a step, where it is time."""
        if moment.step % self.every == 0:
            self.measure(moment.step, moment.state)


def attempt(trial):
    """The line of a run; whatever it does, the others go on."""
    begin = time.monotonic()
    line = {"name": trial.name, "data": trial.data, "kind": trial.kind, "wrong": trial.wrong, "tree": trial.tree}
    line |= trial.about
    try:
        line |= trained(trial)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return line | {"seconds": round(time.monotonic() - begin, 1)}


def configuration(trial):
    """The tree, with what every run of this benchmark shares."""
    steps = trial.tree["training"]["steps"]
    data = {"name": "vectors" if trial.data == "cub" else trial.data, "path": place(trial.data), "validation": 0.0}
    training = {"evaluate_every": steps, "checkpoint_every": steps, "explain_every": max(1, steps // 20)}
    training |= {"diagnose_every": max(1, steps // 100)}
    return parse(
        trial.tree | {"data": data | trial.tree.get("data", {})} | {"training": training | trial.tree["training"]}
    )


def trained(trial):
    config = configuration(trial)
    data, probe = opened(trial.data)
    if trial.wrong:
        data = replace(data, train=permuted(data.train, trial.wrong, seed=config.training.seed))
    with tempfile.TemporaryDirectory(prefix="nearfar-") as folder:
        first, second = Path(folder) / "ill", Path(folder) / "cured"
        found = watched(config, data, probe, first)
        if not trial.about.get("rescue"):
            return found
        try:
            remedy = prescribe(first)  # what `nearfar train --apply-remedy` does
        except ValueError as error:
            return found | {"remedy": None, "said": str(error)}
        return found | {
            "remedy": list(remedy.changes),
            "said": f"{remedy.finding.severity}: {remedy.finding.name}",
            "cured": watched(remedy.config, data, probe, second),
        }


def watched(config, data, probe, folder):
    """Train, with the truth looking on; what is kept of it."""
    truth = Truth(probe, max(1, config.training.steps // 100))
    # the same seed gives the same untrained network
    truth.measure(0, prepare(config, processes.begin(config.training.precision), data))
    result = error = None
    try:
        result = fit(config, folder, data=data, callbacks=[truth], console=Console(quiet=True))
    except RuntimeError as failure:  # a loss that is not finite ends a run, and the doctor has its journal
        error = " ".join(str(failure).split())[:200]
    entries = read(folder / "journal.jsonl")
    test = None if result is None or result.test is None else round(result.test.recall[1], 4)
    return {"truth": truth.seen, "journal": shortened(entries), "test": test, "stopped": error}


def shortened(entries):
    """The journal without times, and with every fifth loss."""
    kept = []
    for entry in entries:
        if "loss" in entry and entry["step"] % 5 != 1 and entry["step"] > 20:
            continue
        kept.append({key: value for key, value in entry.items() if key not in ("time", "lr", "violation")})
    return kept


def _prepare():
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def run_all(trials, jobs, seconds, tell=print):
    """Lines as runs end; none begins after so many seconds."""
    end, begin = time.monotonic() + seconds, time.monotonic()
    if jobs == 1:
        yield from (attempt(trial) for trial in itertools.takewhile(lambda _: time.monotonic() < end, trials))
        return
    waiting, under_way, done_so_far = iter(trials), set(), 0
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare) as pool:
        while True:
            while time.monotonic() < end and len(under_way) < jobs and (trial := next(waiting, None)) is not None:
                under_way.add(pool.submit(attempt, trial))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                done_so_far += 1
                line = future.result()
                tell(
                    f"{time.monotonic() - begin:5.0f} s  {done_so_far:3d}/{len(trials)} {line['name']} "
                    f"{line['seconds']} s {line.get('error') or ''}",
                    flush=True,
                )
                yield line


def onset(truth):
    """The step from which a run is collapsed to its end, by the truth alone; None where it is not."""
    since = None
    for step, bad in zip((each[0] for each in truth), collapsed(truth), strict=True):
        since = (step if since is None else since) if bad else None
    return since


def collapsed(truth):
    """Look by look: effective rank below 2, or recall@1 below half of its start."""
    return [rank < 2 or recall < truth[0][2] / 2 for _, rank, recall, _ in truth]

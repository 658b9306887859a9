"""The doctor's benchmark: calibrate its thresholds on runs made to collapse, try its remedies, and time its looks.

python benchmarks/quality/doctor.py --parts calibration mining --jobs 15 --seconds 300 --out runs.json
python benchmarks/quality/doctor.py --parts rescue softened --ill calibration.json --out more.json
python benchmarks/quality/doctor.py --from runs.json more.json       thresholds, tables, results/doctor.{json,md}
python benchmarks/quality/doctor.py --cost 400                       seconds a step with and without looks

The truth about a run is computed without the doctor, on held-out samples of the training classes: a run has collapsed
if the effective rank of their embeddings is below 2, or their recall@1 below half of its value before the first step,
and stays so to the end. The onset is the first look from which that holds. The file has four parts: the settings to
train, one run, the tables, and their Markdown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from nearfar._utils.files import write_text
from nearfar.data import DataSet, View, open_data, part
from nearfar.doctor import Thresholds, diagnose_journal, prescribe
from nearfar.doctor._looks import judge, read_looks, take_look
from nearfar.doctor._remedies import Patient
from nearfar.evaluation import evaluate
from nearfar.evaluation._embed import evaluation_mode
from nearfar.losses import Triplet
from nearfar.runs import _parts as parts
from nearfar.runs._journal import read
from nearfar.studies.grid import permute_labels
from nearfar.train import _processes as processes
from nearfar.train import fit, load, parse
from nearfar.train._state import prepare

ROOT = Path(__file__).parents[2]
FILES = {"omniglot": "omniglot_28.npz", "cub": "cub200_lite0_train.npz"}
HELD_OUT = {"glyphs": 3, "omniglot": 4, "cub": 10}
"""Samples of each training class that are held out of training."""
PROBED, TESTED = 1000, 3000
"""Numbers of held-out samples and of samples of test classes that are scored, as whole classes."""


@dataclass(frozen=True)
class Trial:
    """One run: its configuration as a tree, the share of wrong labels, and what the tables need to know about it."""

    name: str
    data: str
    tree: dict
    kind: str = "healthy"
    wrong: float = 0.0
    about: dict = field(default_factory=dict)


# ---------------------------------------------------------------- the settings to train

DATA = ("glyphs", "omniglot", "cub")
KINDS = ("rate", "margin", "noise", "tiny", "decay")
STEPS, SHORT, FLOORED = 600, 300, 400
HARD = {"name": "Triplet", "mining": "hard", "margin": 0.2}
HARDEST = HARD | {"mining": "hardest"}
SEMIHARD = HARD | {"mining": "semihard"}
PLAIN = {"margin": 0.0}
MULTI, TOP_K = {"name": "MultiSimilarity"}, {"name": "DroTopK", "k": 160}
SUPCON, CONTRASTIVE, ALL = {"name": "SupCon"}, {"name": "Contrastive"}, {"name": "Triplet", "margin": 0.2}
MLP = {"name": "mlp", "hidden": 256, "embedding_dim": 64}
USUAL = {"glyphs": {"name": "small", "embedding_dim": 64}, "omniglot": {"name": "small", "embedding_dim": 64}}
USUAL["cub"] = {"name": "linear", "embedding_dim": 64}


def adam(rate, **more):
    return {"name": "adam", "lr": rate, "schedule": "constant"} | more


def sgd(rate, **more):
    return adam(rate, name="sgd", **more)


MADE = (  # kind, word, loss, optimizer, networks: u is the usual one of the data, m has one hidden layer
    ("rate", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("rate", "hardest, adam 1", HARDEST, adam(1.0), "u"),
    ("rate", "hard, sgd 1", HARD, sgd(1.0), "um"),
    ("rate", "hard, sgd 10", HARD, sgd(10.0), "um"),
    ("rate", "hardest, sgd 3", HARDEST, sgd(3.0), "um"),
    ("margin", "hard, sgd 3", HARD | PLAIN, sgd(3.0), "um"),
    ("margin", "hardest, adam .3", HARDEST | PLAIN, adam(0.3), "um"),
    ("margin", "hardest, sgd 3", HARDEST | PLAIN, sgd(3.0), "m"),
    ("noise", "hard, adam .001", HARD, adam(1e-3), "um"),
    ("noise", "hard, sgd 3", HARD, sgd(3.0), "um"),
    ("noise", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("tiny", "hard, adam .1", HARD, adam(0.1), "um"),
    ("tiny", "hard, sgd 3", HARD, sgd(3.0), "um"),
    ("tiny", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("decay", "multi, adam .01, 10", MULTI, adam(0.01, weight_decay=10.0), "um"),
    ("decay", "multi, sgd 1, .5", MULTI, sgd(1.0, weight_decay=0.5), "um"),
    ("decay", "semihard, adam .03, 1", SEMIHARD, adam(0.03, weight_decay=1.0), "um"),
    ("decay", "topk, adamw .1, 10", TOP_K, adam(0.1, name="adamw", weight_decay=10.0), "um"),
)
SOUND = (  # word, loss, optimizer, networks, batch, share of wrong labels
    ("semihard", SEMIHARD, adam(1e-3), "um", (32, 4), 0.0),
    ("multi", MULTI, adam(1e-3), "um", (32, 4), 0.0),
    ("contrastive", CONTRASTIVE, adam(1e-3), "um", (32, 4), 0.0),
    ("supcon", SUPCON, adam(1e-3), "um", (32, 4), 0.0),
    ("hard, slow", HARD, adam(3e-4), "um", (32, 4), 0.0),
    ("topk", TOP_K, adam(1e-3), "u", (32, 4), 0.0),
    ("all triplets", ALL, adam(3e-3), "u", (32, 4), 0.0),
    ("hard, annealed", HARD | {"anneal": STEPS // 2}, adam(1e-3), "u", (32, 4), 0.0),
    ("multi, sgd, decay", MULTI, sgd(0.03, weight_decay=1e-4), "u", (32, 4), 0.0),
    ("multi, small batch", MULTI, adam(1e-3), "u", (8, 4), 0.0),
    ("semihard, 20% wrong", SEMIHARD, adam(1e-3), "u", (32, 4), 0.2),
)


def tree(loss, optimizer, model, *, batch=(32, 4), seed=0, steps=STEPS, **more):
    return {
        "model": model,
        "loss": loss,
        "batches": {"name": "MPerClass", "classes": batch[0], "samples": batch[1]},
        "optimizer": optimizer,
        "training": {"steps": steps, "seed": seed},
    } | more


def network(data, letter):
    return USUAL[data] if letter == "u" else MLP


def calibration(seed=0):
    """Every setting once: each way to collapse and each healthy one, on each data set."""
    for data in DATA:
        for kind, word, loss, optimizer, letters in MADE:
            batch, wrong = (2, 2) if kind == "tiny" else (32, 4), 0.5 if kind == "noise" else 0.0
            for letter in letters:
                model = network(data, letter)
                name = f"{data}, {model['name']}, {kind}: {word}"
                yield Trial(name, data, tree(loss, optimizer, model, batch=batch, seed=seed), kind, wrong)
        for word, loss, optimizer, letters, batch, wrong in SOUND:
            for letter in letters:
                model = network(data, letter)
                name = f"{data}, {model['name']}, sound: {word}"
                yield Trial(name, data, tree(loss, optimizer, model, batch=batch, seed=seed), "sound", wrong)


def again():
    """Every setting of the calibration with another seed."""
    return calibration(seed=7)


def largest():
    """The trials of `mining` with `HardestOfMany`: a batch of 1,800 has 6 billion triplets."""
    for trial in mining():
        if trial.about["rows"] > 1000 and trial.about["mining"] == "hardest":
            yield trial


def mining():
    """Batch-hard and hardest mining on glyphs: rows of a batch, dimensions, margin, three seeds."""
    for seed in (0, 1, 2):
        for classes, width, margin, how in itertools.product(
            (18, 450), (2, 8, 32, 128), (0.0, 0.2), ("hard", "hardest")
        ):
            about = {"rows": 4 * classes, "width": width, "margin": margin, "mining": how, "seed": seed}
            model = {"name": "small", "embedding_dim": width}
            loss = HARD | {"mining": how, "margin": margin}
            if how == "hardest" and classes > 100:
                loss = {"name": "HardestOfMany", "margin": margin}
            run = tree(loss, adam(1e-3), model, batch=(classes, 4), seed=seed, steps=SHORT, data={"transform": "none"})
            yield Trial(
                f"glyphs, {how}, N {4 * classes}, n {width}, margin {margin}", "glyphs", run, "mining", 0.0, about
            )


def softened():
    """Hard mining, plain and annealed, and semi-hard mining, at two rates, on three data sets, with three seeds."""
    for seed, data, rate in itertools.product((0, 1, 2), DATA, (0.03, 0.3)):
        arms = {"hard": HARD, "hardest": HARDEST, "semihard": SEMIHARD}
        arms |= {f"{name}, annealed": arms[name] | {"anneal": STEPS // 2} for name in ("hard", "hardest")}
        for arm, loss in arms.items():
            about = {"arm": arm, "rate": rate, "seed": seed}
            run = tree(loss, adam(rate), USUAL[data], seed=seed)
            yield Trial(f"{data}, {arm}, rate {rate}, seed {seed}", data, run, "softened", 0.0, about)


def rescue(names):
    """Named settings of the calibration, seeds 1 to 3; each job trains the run and again with the doctor's remedy."""
    for seed in (1, 2, 3):
        for trial in calibration(seed):
            if trial.name in names:
                yield Trial(
                    f"{trial.name}, seed {seed}",
                    trial.data,
                    trial.tree,
                    trial.kind,
                    trial.wrong,
                    {"setting": trial.name, "seed": seed, "rescue": True},
                )


def prevented():
    """Settings in which plain hard mining collapses: plain, annealed and semi-hard, with three seeds."""
    settings = {
        "omniglot, mlp, adam .0003": ("omniglot", MLP, adam(3e-4), (32, 4), 0.0),
        "cub, mlp, half of the labels wrong": ("cub", MLP, adam(1e-3), (32, 4), 0.5),
        "cub, linear, batches of 4, sgd 3": ("cub", USUAL["cub"], sgd(3.0), (2, 2), 0.0),
    }
    arms = {"hard": HARD, "hard, annealed": HARD | {"anneal": STEPS // 2}, "semihard": SEMIHARD}
    for seed, (name, (data, model, optimizer, batch, wrong)) in itertools.product((0, 1, 2), settings.items()):
        for arm, loss in arms.items():
            about = {"arm": arm, "setting": name, "seed": seed}
            run = tree(loss, optimizer, model, batch=batch, seed=seed)
            yield Trial(f"{name}, {arm}, seed {seed}", data, run, "prevented", wrong, about)


def floored():
    """Hard mining on Omniglot, plain, with a floor under the spread, and annealed, and semi-hard: three seeds."""
    arms = {"hard": HARD, "hard, floor": {"name": "SpreadFloor", "loss": HARD}}
    arms |= {"hard, annealed": HARD | {"anneal": FLOORED // 2}, "semihard": SEMIHARD}
    for seed, (arm, loss) in itertools.product((0, 1, 2), arms.items()):
        about = {"arm": arm, "rate": 0.03, "seed": seed}
        run = tree(loss, adam(0.03), USUAL["omniglot"], seed=seed, steps=FLOORED)
        yield Trial(f"omniglot, {arm}, {FLOORED} steps, seed {seed}", "omniglot", run, "floored", 0.0, about)


# ---------------------------------------------------------------- one run


class HardestOfMany(Triplet):
    """`Triplet(mining="hardest")` for batches whose triplets do not fit into memory: the worst anchor of "hard"."""

    def __init__(self, *, margin):
        super().__init__(margin=margin, mining="hard", reduction="none")

    def _value(self, call):
        """The largest of the anchors' values; its gradient is that of the one triplet."""
        return super()._value(call).max()


parts.LOSSES["HardestOfMany"] = HardestOfMany


def data_path(name):
    """The path of a data set in `shared/data` beside the repository or `nearfar-data` inside it; None for glyphs."""
    if name == "glyphs":
        return None
    folders = (ROOT.parent / "shared" / "data", ROOT / "nearfar-data")
    found = next((each for each in folders if (each / FILES[name]).is_file()), None)
    if found is None:
        places = " or ".join(map(str, folders))
        raise FileNotFoundError(f"doctor: {FILES[name]} is not in {places}; see docs/guides/data.md.")
    return str(found / FILES[name]) if name == "cub" else str(found)


@functools.lru_cache(maxsize=3)
def open_split(name):
    """A data set with fewer test classes, and the held-out samples of its training classes."""
    data = open_data("vectors" if name == "cub" else name, data_path(name))
    random = np.random.default_rng(0)
    labels, held = data.train.labels, []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        held.append(random.permutation(rows)[: HELD_OUT[name]])
    kept = np.setdiff1d(np.arange(len(labels)), np.concatenate(held))
    probe = np.concatenate([held[i] for i in random.permutation(len(held))[: PROBED // HELD_OUT[name]]])
    sizes = np.bincount(data.test.labels)
    order = random.permutation(len(sizes))
    test = np.flatnonzero(np.isin(data.test.labels, order[np.cumsum(sizes[order]) <= TESTED]))
    shown = DataSet(data.name, part(data.train, kept), part(data.test, test), ks=(1,))
    return shown, part(data.train, probe)


class Truth:
    """A callback that measures the held-out samples every few steps, without the doctor."""

    def __init__(self, probe, every):
        self.probe, self.every, self.seen, self._x = probe, every, [], None

    def measure(self, step, setting):
        """Measure effective rank, recall@1 and spread of the held-out samples."""
        if self._x is None:
            rows = list(range(len(self.probe.labels)))
            self._x = (
                View(self.probe, setting.plain, substitutes=False).__getitems__(rows)[0].to(setting.machine.device)
            )
        with evaluation_mode(setting.bare_model, setting.machine.device), torch.inference_mode():
            rows = setting.bare_model(self._x).float()
        if not bool(torch.isfinite(rows).all()):
            self.seen.append([step, 0.0, 0.0, 0.0])
            return
        y = torch.from_numpy(self.probe.labels)
        found = take_look(step, rows, y)
        right = evaluate(rows, y.to(rows.device), ks=(1,)).recall[1]  # as a user measures it, in float32
        self.seen.append([step, round(found.rank, 3), round(right, 4), round(found.spread, 5)])

    def __call__(self, moment):
        """Measure after a step, if it is due."""
        if moment.step % self.every == 0:
            self.measure(moment.step, moment.state)


def attempt(trial):
    """Run a trial and return its line; an error goes into the line, so that other trials continue."""
    begin = time.monotonic()
    line = {"name": trial.name, "data": trial.data, "kind": trial.kind, "wrong": trial.wrong, "tree": trial.tree}
    line |= trial.about
    try:
        line |= train_trial(trial)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return line | {"seconds": round(time.monotonic() - begin, 1)}


def configuration(trial):
    """The configuration of a trial, with the settings that all runs of this benchmark share."""
    steps = trial.tree["training"]["steps"]
    data = {"name": "vectors" if trial.data == "cub" else trial.data, "path": data_path(trial.data), "validation": 0.0}
    training = {"evaluate_every": steps, "checkpoint_every": steps, "explain_every": max(1, steps // 20)}
    training |= {"diagnose_every": max(1, steps // 100)}
    return parse(
        trial.tree | {"data": data | trial.tree.get("data", {})} | {"training": training | trial.tree["training"]}
    )


def train_trial(trial):
    """Train a trial, and if it is part of the rescue, train it again with the doctor's remedy."""
    config = configuration(trial)
    data, probe = open_split(trial.data)
    if trial.wrong:
        data = replace(data, train=permute_labels(data.train, trial.wrong, seed=config.training.seed))
    with tempfile.TemporaryDirectory(prefix="nearfar-") as folder:
        first, second = Path(folder) / "ill", Path(folder) / "cured"
        found = train_and_watch(config, data, probe, first)
        if not trial.about.get("rescue"):
            return found
        try:
            remedy = prescribe(first)  # what `nearfar train --apply-remedy` does
        except ValueError as error:
            return found | {"remedy": None, "said": str(error)}
        return found | {
            "remedy": list(remedy.changes),
            "said": f"{remedy.finding.severity}: {remedy.finding.name}",
            "cured": train_and_watch(remedy.config, data, probe, second),
        }


def train_and_watch(config, data, probe, folder):
    """Train with `Truth` as a callback; return what the tables need."""
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
    return {"truth": truth.seen, "journal": shorten(entries), "test": test, "stopped": error}


def shorten(entries):
    """The journal without times and with every fifth loss."""
    kept = []
    for entry in entries:
        if "loss" in entry and entry["step"] % 5 != 1 and entry["step"] > 20:
            continue
        kept.append({key: value for key, value in entry.items() if key not in ("time", "lr", "violation")})
    return kept


def _use_one_thread():
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def run_all(trials, jobs, seconds, tell=print):
    """Run trials in `jobs` processes and yield their lines; start none after `seconds`."""
    end, begin = time.monotonic() + seconds, time.monotonic()
    if jobs == 1:
        yield from (attempt(trial) for trial in itertools.takewhile(lambda _: time.monotonic() < end, trials))
        return
    waiting, under_way, done_so_far = iter(trials), set(), 0
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_use_one_thread) as pool:
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
    """The step from which a run is collapsed to its end, by the truth; None if it is not collapsed at its end."""
    since = None
    for step, bad in zip((each[0] for each in truth), collapsed(truth), strict=True):
        since = (step if since is None else since) if bad else None
    return since


def collapsed(truth):
    """Whether each measurement is collapsed: effective rank below 2, or recall@1 below half of the first."""
    return [rank < 2 or recall < truth[0][2] / 2 for _, rank, recall, _ in truth]


# ---------------------------------------------------------------- the tables

DELAY = 0.05
GRID = {
    "looks": (1, 2, 3),
    "lost_alarm": (0.3, 0.4, 0.5, 0.6, 0.7),
    "lost_warning": (0.5, 0.6, 0.7, 0.8, 0.9),
    "lost_least": (0.0, 0.05, 0.1, 0.15),
}
"""Thresholds chosen on half of the settings; the others were fixed before."""
TRUTH = ("collapsed", "healthy", "neither")
MEANT = ("semihard", "hard, annealed")
"""Ways of mining that are meant to be healthy; plain hard mining at these rates is not."""
T95 = {1: 12.706, 2: 4.303}
"""Student's t at 95%, by degrees of freedom: two and three seeds."""


def pool(calibration, rescue, softened):
    """Yield the lines of all runs to calibrate on, with their setting and whether they were meant to be healthy."""
    for line in calibration:
        yield line | {"setting": line["name"], "meant": line["kind"] == "sound"}
    for line in softened:
        yield line | {"setting": line["name"].rsplit(", seed", 1)[0], "meant": line["arm"] in MEANT}
    for line in rescue:
        yield line | {"meant": False}
        if line.get("cured"):
            again = {"name": f"{line['name']}, after the remedy", "setting": f"{line['setting']}, after the remedy"}
            cured = (
                {**line["tree"], "loss": {"name": "Triplet", "margin": 0.2}}
                if line["kind"] != "decay"
                else line["tree"]
            )
            yield line | line["cured"] | again | {"meant": True, "tree": cured}


def truth_of(line):
    """The truth about a run: collapsed at its end; healthy, if meant to be and never collapsed; else neither."""
    if onset(line["truth"]) is not None:
        return "collapsed"
    return "healthy" if line["meant"] and not any(collapsed(line["truth"])) else "neither"


_LOOKS = {}


def looks_of(journal, tree):
    """The looks of a run and the facts about it, cached."""
    if id(journal) not in _LOOKS:
        _LOOKS[id(journal)] = journal, read_looks(journal), Patient(parse(tree))
    return _LOOKS[id(journal)][1:]


def findings(line, limits):
    """Yield (step, names) of each look with findings above a note."""
    looks, case = looks_of(line["journal"], line["tree"])
    for i in range(2, len(looks) + 1):
        recent = [*looks[:1], *looks[max(1, i - 4) : i]] if i > 5 else looks[:i]
        names = [each.name for each in judge(recent, limits, case) if each.severity != "note"]
        if names:
            yield looks[i - 1].step, names


def first_finding(line, limits):
    """The first (step, names) of `findings`, or None."""
    return next(findings(line, limits), None)


def in_time(line, limits):
    """Whether a collapse is found within a twentieth of the run after its onset."""
    first = first_finding(line, limits)
    return first is not None and first[0] <= onset(line["truth"]) + DELAY * line["tree"]["training"]["steps"]


def split(lines):
    """Split the runs by setting into two halves: of each truth every second setting, in the order of names."""
    by_group = {}
    for setting in sorted({line["setting"] for line in lines}):
        which = sorted({truth_of(line) for line in lines if line["setting"] == setting})[0]
        by_group.setdefault(which, []).append(setting)
    fitted = {setting for settings in by_group.values() for setting in settings[::2]}
    return [x for x in lines if x["setting"] in fitted], [x for x in lines if x["setting"] not in fitted]


def choose_thresholds(lines):
    """Choose the thresholds that find most collapses in time without a false alarm.

    Among equally good ones: the fewest looks, then for each threshold in turn the middle of its values.
    """
    ill, well = ([line for line in lines if truth_of(line) == which] for which in ("collapsed", "healthy"))
    tried = {}
    for values in itertools.product(*GRID.values()):
        chosen = dict(zip(GRID, values, strict=True))
        if chosen["lost_alarm"] > chosen["lost_warning"]:
            continue
        limits = replace(Thresholds(), **chosen)
        false = sum(first_finding(line, limits) is not None for line in well)
        tried[values] = false, sum(in_time(line, limits) for line in ill)
    good = [values for values, found in tried.items() if found == best(tried)]
    chosen = []
    for place in range(len(GRID)):
        values = sorted({each[place] for each in good})
        chosen.append(values[0] if place == 0 else values[len(values) // 2])
        good = [each for each in good if each[place] == chosen[-1]]
    return dict(zip(GRID, chosen, strict=True)), tried


def count_findings(lines, limits):
    """Count by truth the runs, those with a finding at some look, in time, and by the whole journal."""
    table = {which: {"runs": 0, "named": 0, "in time": 0, "at the end": 0} for which in TRUTH}
    for line in lines:
        row = table[truth_of(line)]
        row["runs"] += 1
        row["named"] += first_finding(line, limits) is not None
        row["in time"] += truth_of(line) == "collapsed" and in_time(line, limits)
        whole = diagnose_journal(line["journal"], config=parse(line["tree"]), thresholds=limits)
        row["at the end"] += not whole.healthy
    return table


def about(line, limits, half):
    """A run as a row of the table of all runs."""
    first, truth = first_finding(line, limits), line["truth"]
    return {
        "run": line["name"],
        "seed": line["tree"]["training"]["seed"],
        "kind": line["kind"],
        "half": half,
        "truth": truth_of(line),
        "onset": onset(truth),
        "named": None if first is None else first[0],
        "as": [] if first is None else first[1],
        "R@1 start": truth[0][2],
        "R@1 end": truth[-1][2],
        "rank end": truth[-1][1],
        "spread end": truth[-1][3],
        "test R@1": line["test"],
    }


def interval(values):
    """The mean over seeds and half of its 95% interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def format_share(values):
    mean, half = interval(values)
    return f"{100 * mean:.1f}" if math.isnan(half) else f"{100 * mean:.1f} ± {100 * half:.1f}"


def best(tried):
    """The best counts: no false alarm, and the most collapses found in time."""
    return 0, max(right for false, right in tried.values() if false == 0)


def summarize_calibration(lines, apart):
    """Choose thresholds on half of the settings; judge them on the other half and on separate runs."""
    first, second = split(lines)
    chosen, tried = choose_thresholds(first)
    limits = replace(Thresholds(), **chosen)
    return {
        "thresholds": chosen,
        "as good": [dict(zip(GRID, values, strict=True)) for values, found in tried.items() if found == best(tried)],
        "tried": len(tried),
        "fitted on": count_findings(first, limits),
        "judged on": count_findings(second, limits),
        "apart": count_findings([line | {"meant": line["arm"] in MEANT} for line in apart], limits),
        "runs": [about(line, limits, half) for half, part in (("fitted", first), ("judged", second)) for line in part],
    }


def summarize_rescue(lines):
    """Recall before and after the remedy, one row per setting."""
    rows = []
    for setting in sorted({line["setting"] for line in lines}, key=lambda name: _order(name)):
        runs = [line for line in lines if line["setting"] == setting]
        cured = [line for line in runs if line.get("cured")]
        row = {"setting": setting, "kind": runs[0]["kind"], "seeds": len(runs), "named": len(cured)}
        row["collapsed before"] = sum(onset(line["truth"]) is not None for line in runs)
        row["start"] = [line["truth"][0][2] for line in runs]
        row["before"] = [line["truth"][-1][2] for line in runs]
        row["after"] = [line["cured"]["truth"][-1][2] for line in cured]
        row["collapsed after"] = sum(onset(line["cured"]["truth"]) is not None for line in cured)
        row["test before"] = [line["test"] for line in runs]
        row["test after"] = [line["cured"]["test"] for line in cured]
        row["remedy"] = sorted({"; ".join(line["remedy"]) for line in cured})
        row["said"] = sorted({line["said"] for line in runs})
        rows.append(row)
    return rows


def _order(name):
    kind = name.split(", ")[2].split(":")[0]
    return KINDS.index(kind) if kind in KINDS else len(KINDS), name


def summarize_softened(lines):
    """R@1 over seeds of plain, annealed and semi-hard mining."""
    keys = sorted({(line["data"], line["rate"]) for line in lines})
    rows = []
    for data, rate in keys:
        row = {"data": data, "rate": rate}
        for line in lines:
            if (line["data"], line["rate"]) == (data, rate):
                arm = row.setdefault(line["arm"], {"held-out": [], "test": [], "spread": [], "collapsed": 0})
                arm["held-out"].append(line["truth"][-1][2])
                arm["test"].append(line["test"])
                arm["spread"].append(line["truth"][-1][3])
                arm["collapsed"] += onset(line["truth"]) is not None
        rows.append(row)
    return rows


def summarize_prevented(lines):
    """R@1 of plain, annealed and semi-hard mining where plain hard mining collapses."""
    rows = {}
    for line in lines:
        row = rows.setdefault((line["setting"], line["arm"]), {"start": [], "held-out": [], "test": [], "collapsed": 0})
        row["start"].append(line["truth"][0][2])
        row["held-out"].append(line["truth"][-1][2])
        row["test"].append(line["test"])
        row["collapsed"] += onset(line["truth"]) is not None
    return [{"setting": setting, "arm": arm} | row for (setting, arm), row in rows.items()]


def summarize_mining(lines):
    """Spread, rank and recall of hard and hardest mining by rows, width and margin."""
    rows = {}
    for line in lines:
        if line.get("test") is None:
            continue
        key = tuple(line[name] for name in ("mining", "rows", "width", "margin"))
        row = rows.setdefault(key, {"spread": [], "start spread": [], "rank": [], "R@1": [], "start": [], "test": []})
        first, last = line["truth"][0], line["truth"][-1]
        for name, value in (("start", first[2]), ("R@1", last[2]), ("rank", last[1]), ("spread", last[3])):
            row[name].append(value)
        row["start spread"].append(first[3])
        row["test"].append(line["test"])
    return [dict(zip(("mining", "rows", "width", "margin"), key, strict=True)) | row for key, row in rows.items()]


# ---------------------------------------------------------------- Markdown


def markdown_table(head, rows):
    """A table in Markdown, with numbers aligned to the right."""
    marks = ["---" if i == 0 else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in [head, marks, *rows])


def confusion_table(found):
    """The confusion on both halves and on the separate runs."""
    titles = {"fitted on": "chosen on", "judged on": "**the other half**", "apart": "**runs apart**"}
    rows = []
    for half, title in titles.items():
        for truth, counts in found[half].items():
            timely = counts["in time"] if truth == "collapsed" else "-"
            rows.append([f"{title}, {truth}", counts["runs"], counts["named"], timely, counts["at the end"]])
    head = ["settings, truth", "runs", "finding above a note", "within 5% of the run after the onset", "at the end"]
    return markdown_table(head, rows)


def chosen_table(found):
    """Each threshold, and the values that are equally good on the half on which it was chosen."""
    good = found["as good"]
    rows = [
        [name, value, ", ".join(f"{each:g}" for each in sorted({one[name] for one in good}))]
        for name, value in found["thresholds"].items()
    ]
    return markdown_table(["line", "chosen", "as good, with some values of the others"], rows)


def rescue_table(rows):
    """The rescue, one row per setting."""
    cells = []
    for row in rows:
        after, test = (format_share(row[name]) if row[name] else "-" for name in ("after", "test after"))
        ill, cured = f"{row['collapsed before']} of {row['seeds']}", f"{row['collapsed after']} of {row['named']}"
        held = [format_share(row["start"]), format_share(row["before"]), after]
        cells.append(
            [
                row["setting"],
                f"{row['named']} of {row['seeds']}",
                ill,
                cured,
                *held,
                format_share(row["test before"]),
                test,
            ]
        )
    head = ["run", "named at its end", "collapsed", "collapsed after the remedy", "R@1 untrained", "R@1 ill"]
    return markdown_table([*head, "R@1 after the remedy", "unseen classes, ill", "after the remedy"], cells)


def changes_table(rows):
    """The changes of the remedies."""
    return markdown_table(
        ["run", "what the remedy changed"], [[row["setting"], " or ".join(row["remedy"]) or "-"] for row in rows]
    )


def softened_table(rows, arms=("hard", "hard, annealed", "semihard", "hardest", "hardest, annealed")):
    """R@1 on unseen classes and spread at the end, for each way of mining."""
    cells = [[f"{row['data']}, {row['rate']:g}", *(format_share(row[arm]["test"]) for arm in arms)] for row in rows]
    spreads = [
        [
            f"{row['data']}, {row['rate']:g}",
            *(f"{sum(row[arm]['spread']) / len(row[arm]['spread']):.3g}" for arm in arms),
        ]
        for row in rows
    ]
    one = markdown_table(["R@1 on unseen classes: data, rate of Adam", *arms], cells)
    return one + "\n\n" + markdown_table(["spread at the end: data, rate of Adam", *arms], spreads)


def floored_table(rows):
    """Hard mining with and without a floor under the spread."""
    return softened_table(rows, ("hard", "hard, floor", "hard, annealed", "semihard"))


def prevented_table(rows):
    """The settings in which plain hard mining collapses."""
    cells = [
        [
            row["setting"],
            row["arm"],
            f"{row['collapsed']} of {len(row['test'])}",
            format_share(row["start"]),
            format_share(row["held-out"]),
            format_share(row["test"]),
        ]
        for row in rows
    ]
    return markdown_table(["setting", "mining", "collapsed", "R@1 untrained", "R@1", "unseen classes"], cells)


def mining_table(rows):
    """The mining study, one row per number of rows, width and margin."""
    order = sorted(rows, key=lambda row: (row["mining"], row["rows"], row["margin"], row["width"]))
    cells = [
        [
            row["mining"],
            row["rows"],
            f"{row['margin']:g}",
            row["width"],
            len(row["test"]),
            f"{statistics.fmean(row['spread']):.3g}",
            f"{statistics.fmean(row['spread']) / statistics.fmean(row['start spread']):.3g}",
            f"{statistics.fmean(row['rank']):.1f}",
            f"{100 * statistics.fmean(row['start']):.1f}",
            f"{100 * statistics.fmean(row['R@1']):.1f}",
            f"{100 * statistics.fmean(row['test']):.1f}",
        ]
        for row in order
    ]
    head = ["mining", "N", "margin", "n", "seeds", "spread", "of its start", "rank", "R@1 untrained", "R@1"]
    return markdown_table([*head, "unseen"], cells)


def every_run_table(runs):
    """All runs of the calibration."""
    order = sorted(runs, key=lambda run: (run["truth"], run["run"]))
    cells = [
        [
            run["run"],
            run["truth"],
            run["half"],
            _or(run["onset"]),
            _or(run["named"]),
            ", ".join(run["as"]) or "-",
            f"{100 * run['R@1 start']:.0f}",
            f"{100 * run['R@1 end']:.0f}",
            run["rank end"],
            run["spread end"],
        ]
        for run in order
    ]
    head = ["run", "truth", "half", "onset", "named at", "as", "R@1 untrained", "R@1 at the end", "rank", "spread"]
    return markdown_table(head, cells)


def _or(value):
    return "-" if value is None else value


def page(found):
    """The text of results/doctor.md."""
    calibration = found["calibration"]
    runs = calibration["runs"]
    return (
        "\n\n".join(
            [
                "# The doctor: calibration, rescue, prevention, and mining in trained networks",
                f"{len(runs)} runs of {found['steps']} steps for the calibration. {found['machine']} Intervals are "
                "95%, Student's t over three seeds. R@1 is that of held-out samples of the training classes, unless "
                "unseen classes are named.",
                "## Confusion",
                confusion_table(calibration),
                "## The lines",
                chosen_table(calibration),
                "## Rescue",
                rescue_table(found["rescue"]),
                changes_table(found["rescue"]),
                "## Annealed hard mining",
                softened_table(found["softened"]),
                prevented_table(found["prevented"]),
                f"## A floor under the spread, {FLOORED} steps, CPU",
                floored_table(found["floored"]),
                "## Mining in trained networks, glyphs",
                mining_table(found["mining"]),
                "## Every run of the calibration",
                every_run_table(runs),
            ]
        )
        + "\n"
    )


def fill_page(text, found):
    """Replace the tables of a page, each between two marks."""
    parts = {
        "confusion": confusion_table(found["calibration"]),
        "lines": chosen_table(found["calibration"]),
        "rescue": rescue_table(found["rescue"]),
        "softened": softened_table(found["softened"]),
        "prevented": prevented_table(found["prevented"]),
        "floored": floored_table(found["floored"]),
        "mining": mining_table(found["mining"]),
    }
    for name, body in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = before + begin + "\n\n" + body + "\n\n" + end + rest.split(end)[1]
    return text


# ---------------------------------------------------------------- the commands

PARTS = {
    "calibration": calibration,
    "again": again,
    "mining": mining,
    "largest": largest,
    "softened": softened,
    "prevented": prevented,
    "floored": floored,
}
READ = {
    "calibration": ("calibration", "again"),
    "rescue": ("rescue",),
    "softened": ("softened",),
    "prevented": ("prevented",),
    "mining": ("mining", "largest"),
    "floored": ("floored",),
}


def ill_settings(file):
    """The first setting that collapsed, for each kind of collapse and each data set."""
    lines = {line["name"]: line for line in json.loads(file.read_text(encoding="utf-8")) if "truth" in line}
    chosen = {}
    for trial in calibration():
        line = lines.get(trial.name)
        if trial.kind in KINDS and line and onset(line["truth"]) is not None:
            chosen.setdefault((trial.kind, trial.data), trial.name)
    return set(chosen.values())


def trials_of(name, ill):
    """The trials of a part; `ill` is the file of the calibration, for the rescue."""
    if name == "rescue":
        return list(rescue(ill_settings(ill)))
    found = list(PARTS[name]())
    if name in ("calibration", "again"):
        random.Random(0).shuffle(found)  # a time limit then leaves out all kinds alike
    return found


def train(args):
    """Run the trials of `args.parts` and write their lines after each."""
    lines, begin = [], time.monotonic()
    trials = [(name, trial) for name in args.parts for trial in trials_of(name, args.ill)][: args.most]
    for line in run_all(
        [replace(trial, about={"part": name} | trial.about) for name, trial in trials], args.jobs, args.seconds
    ):
        lines.append(line)
        write_text(args.out, json.dumps(lines))
    print(f"{len(lines)} of {len(trials)} runs in {time.monotonic() - begin:.0f} s")


def write_pages(args):
    """Compute thresholds and tables from files of runs; write results/doctor.json, doctor.md and RESULTS-doctor.md."""
    lines = [line for file in args.made for line in json.loads(file.read_text(encoding="utf-8")) if "truth" in line]
    runs = {name: [line for line in lines if line["part"] in names] for name, names in READ.items()}
    make = {
        "rescue": summarize_rescue,
        "softened": summarize_softened,
        "prevented": summarize_prevented,
        "mining": summarize_mining,
        "floored": summarize_softened,
    }
    file = args.results / "doctor.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}  # parts without new runs stay
    found |= {name: make[name](runs[name]) for name in make if runs[name]}
    if runs["calibration"]:
        pooled = list(pool(runs["calibration"], runs["rescue"], runs["softened"]))
        found["calibration"] = summarize_calibration(pooled, runs["prevented"])
    found |= {"machine": args.machine or found["machine"], "steps": STEPS}
    write_text(file, json.dumps(found, indent=1) + "\n")
    write_text(args.results / "doctor.md", page(found))
    write_text(args.page, fill_page(args.page.read_text(encoding="utf-8"), found))
    print(confusion_table(found["calibration"]), found["calibration"]["thresholds"])


def seconds_per_step(steps, every):
    """Seconds per step of the demo's training; the first fifth is left out."""
    flags = {"training.steps": steps, "training.diagnose_every": every, "training.evaluate_every": steps,
             "training.checkpoint_every": steps, "training.explain_every": 0}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = load(ROOT / "configs" / "glyphs.yaml", [(name, str(value)) for name, value in flags.items()])
        fit(config, Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    times = {line["step"]: line["time"] for line in lines if "time" in line}
    return (times[steps] - times[steps // 5]) / (steps - steps // 5)


def time_looks(steps, every=20, rounds=3):
    """Print what a look costs, from the demo's training with and without looks in turns."""
    found = {each: [] for each in (0, every)}
    for _ in range(rounds):
        for each, times in found.items():
            times.append(seconds_per_step(steps, each))
    without, with_looks = (statistics.median(times) for times in found.values())
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    look = (with_looks - without) * every
    print(f"{where}: a step {1e3 * without:.2f} ms, with a look every {every} steps {1e3 * with_looks:.2f} ms "
          f"({with_looks / without - 1:+.1%}); a look {1e3 * look:.1f} ms")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["calibration"])
    parser.add_argument("--ill", type=Path, help="a JSON file of the calibration, for the rescue")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--most", type=int, help="so many runs at most")
    parser.add_argument("--out", type=Path, default=Path("nearfar-doctor.json"))
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files of runs: write the tables")
    parser.add_argument("--cost", type=int, metavar="STEPS", help="time the doctor's looks in runs of so many steps")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    page = ROOT / "benchmarks" / "RESULTS-doctor.md"
    parser.add_argument("--page", type=Path, default=page, help="the page that shows the tables")
    parser.add_argument("--machine", default="", help="a sentence on where the runs were made, for the tables")
    args = parser.parse_args()
    if args.cost:
        time_looks(args.cost)
    else:
        (write_pages if args.made else train)(args)


if __name__ == "__main__":
    main()

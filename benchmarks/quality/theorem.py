"""Separated metrics (docs/papers/beyond/theorem.md): searches for counter-examples, and bounds along training runs.

    python benchmarks/quality/theorem.py search --seconds 240
    python benchmarks/quality/theorem.py runs --path FOLDER          ten minutes on one core

`search` draws metrics of few points: rows on a grid, Gaussian rows, and shortest paths of random whole numbers; some
are improved by changing single distances. It compares the formula with the linear program, and keeps the largest ratio
d_iso/H of each kind. `runs` trains a linear head on frozen features (FOLDER has train.npz and test.npz) and measures 10
batches of 60 test rows, 12 classes of 5, at 11 steps; two of the ten by the linear program as well. They write
benchmarks/results/theorem-search.json and theorem-runs.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

from nearfar import geometry
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.batches import violations
from nearfar.data import open_data
from nearfar.evaluation import evaluate
from nearfar.geometry import metric_bounds as bounds
from nearfar.geometry.ladder import steps as rungs_of
from nearfar.studies import profs
from nearfar.studies._descent_rivals import interval
from nearfar.studies._training import open_study
from nearfar.train import fit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SETS = {
    "-1, 0, 1 | 0": ([-1, 0, 1, 0], [0, 0, 0, 1]),
    "-1, 1 | 0": ([-1, 1, 0], [0, 0, 1]),
    "0, 2 | 1 | 3, 5 | 4": ([0, 2, 1, 3, 5, 4], [0, 0, 1, 2, 2, 3]),
    "-1 | 1 || 0 ||| 0": ([-1, 1, 0, 0], [[3, 2, 1, 0], [2, 3, 1, 0], [1, 1, 3, 0], [0, 0, 0, 3]]),
}
"""The sets of one-dimensional rows of the page; the last one is a ladder of three rungs."""
LOSSES, RATE, STEPS, SOLVED = ("Triplet-hard", "Contrastive-hard"), 1e-3, 300, 2


def paths(weights: np.ndarray) -> np.ndarray:
    """The metric of shortest paths."""
    d = np.minimum(weights, weights.T).astype(float)
    np.fill_diagonal(d, 0)
    for k in range(len(d)):
        d = np.minimum(d, d[:, k, None] + d[None, k])
    return d


def draw_metric(noise: np.random.Generator, count: int) -> np.ndarray:
    kind = noise.integers(4)
    if kind == 0:
        return paths(noise.integers(0, 5, (count, count)))
    if kind == 1:  # nearly equal distances, for which no triangle inequality binds
        return paths(50 + noise.integers(0, 5, (count, count)))
    width = int(noise.integers(1, 4))
    x = noise.integers(-2, 3, (count, width)) if kind == 2 else noise.normal(size=(count, width))
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))


def draw_relevance(noise: np.random.Generator, count: int, rungs: int) -> np.ndarray:
    labels = [torch.from_numpy(noise.integers(0, 2 + (k > 0), count)) for k in range(rungs - 1)]
    return geometry.ladder(*labels).numpy()


def hardness(d: np.ndarray, relevance: np.ndarray) -> float:
    """H of a metric: the largest d(a, j) - d(a, k) with j on a nearer rung of a than k."""
    rung, worst = rungs_of(relevance), 0.0
    for a in range(len(d)):
        others = np.flatnonzero(rung[a] >= 0)
        more = rung[a, others][:, None] < rung[a, others][None]
        worst = max(worst, float(np.where(more, d[a, others][:, None] - d[a, others][None], 0.0).max(initial=0.0)))
    return worst


def program(d: np.ndarray, relevance: np.ndarray) -> float:
    return bounds._program(torch.from_numpy(d), torch.from_numpy(relevance), 0.0)[0]


def formula(d: np.ndarray, y: np.ndarray) -> float:
    same = y[:, None] == y[None]
    far, near = np.where(same, d, -np.inf).max(axis=1), np.where(same, np.inf, d).min(axis=1)
    far[same.sum(axis=1) == 1] = -np.inf
    return bounds._formula(torch.from_numpy(far), torch.from_numpy(near), torch.from_numpy(y), 0.0)


def climb(noise: np.random.Generator, d: np.ndarray, relevance: np.ndarray, trials: int) -> tuple[float, np.ndarray]:
    """The ratio d_iso/H of a metric, improved by changes of single distances by one."""
    h = hardness(d, relevance)
    best = program(d, relevance) / h if h else 0.0
    for _ in range(trials):
        w = d.copy()
        i, j = noise.choice(len(d), 2, replace=False)
        w[i, j] = w[j, i] = max(0.0, w[i, j] + noise.choice([-1, 1]))
        w = paths(w)
        h = hardness(w, relevance)
        ratio = program(w, relevance) / h if h else 0.0
        if ratio >= best:
            best, d = ratio, w
    return best, d


def search(seconds: float, seed: int = 0) -> dict[str, Any]:
    """Draw until the time is over; a third of it each for classes, ladders, and Euclidean maps."""
    noise, begun = np.random.default_rng(seed), time.monotonic()
    found: dict[str, Any] = {"classes": {"draws": 0, "formula_off": 0.0, "largest": 0.0, "above_half": 0}}
    while time.monotonic() - begun < seconds / 3:
        count = int(noise.integers(3, 10))
        d, y = draw_metric(noise, count), np.unique(noise.integers(0, 3, count), return_inverse=True)[1]
        same = (y[:, None] == y[None]).astype(int)
        h, value = hardness(d, same), program(d, same)
        one = found["classes"]
        one["draws"] += 1
        one["formula_off"] = max(one["formula_off"], abs(value - formula(d, y)))
        if h:
            one["largest"] = max(one["largest"], value / h)
            one["above_half"] += value > h / 2 + 1e-6
    found["ladders"] = {}
    while time.monotonic() - begun < seconds * 2 / 3:
        count, rungs = int(noise.integers(4, 10)), int(noise.integers(3, 6))
        relevance = draw_relevance(noise, count, rungs)
        rungs = len(np.unique(relevance[~np.eye(count, dtype=bool)]))
        ratio, d = climb(noise, draw_metric(noise, count), relevance, 3)
        one = found["ladders"].setdefault(str(rungs), {"draws": 0, "largest": 0.0})
        one["draws"] += 1
        if ratio > one["largest"] + 1e-9:
            one |= {"largest": ratio, "distances": d.tolist(), "relevance": relevance.tolist()}
    found["euclidean"] = search_maps(noise, begun + seconds)
    return found


def search_maps(noise: np.random.Generator, end: float) -> dict[str, Any]:
    """Euclidean maps into N - 1 dimensions, solved by SLSQP: the best found value is an upper bound of d_iso."""
    found: dict[str, Any] = {"draws": 0, "largest": 0.0, "lift_broken": 0, "largest_lift": 0.0}
    while time.monotonic() < end:
        count = int(noise.integers(4, 9))
        width = int(noise.integers(1, 4))
        grid = noise.random() < 0.7
        rows = noise.integers(-2, 3, (count, width)) if grid else noise.normal(size=(count, width))
        rows[noise.integers(count, size=2)] = rows[noise.integers(count, size=2)]  # rows that coincide
        x = torch.zeros(count, count - 1, dtype=torch.float64)
        x[:, : min(width, count - 1)] = torch.from_numpy(rows.astype(float))[:, : count - 1]
        y = torch.from_numpy(noise.integers(0, 3, count))
        h = geometry.hardness(x, y)
        if not h:
            continue
        found["draws"] += 1
        lifted = geometry.isometric_error_between(x, geometry.lift(x, y))
        widest = float(torch.cdist(x, x).max())
        found["lift_broken"] += lifted > math.sqrt(2 * h * widest) + 1e-9
        found["largest_lift"] = max(found["largest_lift"], lifted / math.sqrt(2 * h * widest))
        ratio = geometry.isometric_error(x, y, starts=6).upper / h
        if ratio > found["largest"]:
            found |= {"largest": ratio, "rows": x[:, :width].tolist(), "labels": y.tolist()}
    return found


def known_sets() -> dict[str, Any]:
    """H, the value, and the Euclidean bounds on a line and in N - 1 dimensions, for the sets of the page."""
    found = {}
    for name, (rows, labels) in SETS.items():
        x, y = torch.tensor(rows, dtype=torch.float64)[:, None], torch.tensor(labels)
        wide = torch.nn.functional.pad(x, (0, len(x) - 2))
        line, space = (geometry.isometric_error(each, y, starts=24) for each in (x, wide))
        found[name] = {
            "H": geometry.hardness(x, y),
            "metrics": geometry.isometric_bound(x, y),
            "line": [line.lower, line.upper],
            "space": [space.lower, space.upper],
            "lift": None if y.ndim == 2 else geometry.isometric_error_between(x, geometry.lift(x, y)),
        }
    return found


def measure(x: torch.Tensor, y: torch.Tensor, near: float, far: float, *, solve: bool) -> dict[str, float]:
    """The bounds of one batch of unit rows; with `solve` by the linear program, which knows nothing of the formula."""
    h, value = geometry.hardness(x, y), geometry.isometric_bound(x, y)
    solved = geometry.isometric_bound(x, (y[:, None] == y[None, :]).long()) if solve else value
    v = violations(x, y, max_positive_distance=near, min_negative_distance=far).largest
    lifted = geometry.isometric_error_between(x, geometry.lift(x, y))
    return {"H": h, "formula": value, "program": solved, "V": v, "lift": lifted}


def batches_of(labels: np.ndarray) -> list[np.ndarray]:
    """10 batches of 12 classes of 5 test rows, the same for all runs."""
    noise, found = np.random.default_rng(0), []
    for _ in range(10):
        chosen = noise.choice(np.unique(labels), 12, replace=False)
        found.append(np.concatenate([noise.choice(np.flatnonzero(labels == c), 5, replace=False) for c in chosen]))
    return found


def train(path: Path, name: str, seed: int) -> dict[str, Any]:
    changes = {"training": {"baselines": False}}
    with open_study("profs", RESULTS, data="vectors", path=path, changes=changes) as study:
        how = {"steps": STEPS, "rate": RATE, "seed": seed}
        config = study.config(profs.LOSSES[name], study.per_class(profs.BATCH, profs.SAMPLES), **how)
    data = open_data("vectors", path)
    rows, labels = batches_of(data.test.labels), torch.from_numpy(data.test.labels)
    near, far = config.training.max_positive_distance, config.training.min_negative_distance
    points: list[dict[str, Any]] = []

    def look(moment: Any) -> None:
        if moment.step > 1 and moment.step % (STEPS // 10):
            return
        model = moment.state.bare_model.eval()
        with torch.no_grad():
            x = torch.nn.functional.normalize(model(data.test.x).double())
        model.train()
        each = [measure(x[batch], labels[batch], near, far, solve=k < SOLVED) for k, batch in enumerate(rows)]
        point = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        point["off"] = max(abs(one["formula"] - one["program"]) for one in each)
        point["at_half"] = sum(one["formula"] <= one["H"] / 2 + 1e-9 for one in each)
        point["recall@1"] = 100 * evaluate(x.float(), labels, ks=(1,)).recall[1]
        points.append({"step": moment.step, **point})

    with tempfile.TemporaryDirectory() as folder:
        fit(config, Path(folder) / "run", data=data, callbacks=[look])
    return {"loss": name, "seed": seed, "points": points}


def table(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last measurement of each loss, with t-intervals over seeds."""
    found: dict[str, Any] = {}
    for name in LOSSES:
        mine = [run["points"] for run in runs if run["loss"] == name]
        for place, at in (("first", 0), ("last", -1)):
            keys = ("H", "formula", "V", "lift", "recall@1")
            found[f"{name}, {place}"] = {key: interval([points[at][key] for points in mine]) for key in keys}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("search", "runs"))
    parser.add_argument("--path", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "scipy": scipy.__version__}
    record: dict[str, Any] = {"device": "two cores, CPU", "versions": versions, "runs": []}
    start = time.monotonic()
    if given.part == "search":
        record |= {"sets": known_sets(), **search(given.seconds)}
    else:
        for name, seed in itertools.product(LOSSES, range(given.seeds)):
            record["runs"].append(train(given.path, name, seed))
        record["table"] = table(record["runs"])
    record["seconds"] = round(time.monotonic() - start)
    write_text(RESULTS / f"theorem-{given.part}.json", as_json(record, "runs", 5))


if __name__ == "__main__":
    main()

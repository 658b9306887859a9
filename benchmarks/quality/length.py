"""`training.steps: auto` against the usual length, tested once for each seed.

python benchmarks/quality/length.py --path DATA [--flowers FOLDER] [--only cub] [--seed 0]   the runs without a result
python benchmarks/quality/length.py --path DATA --lengths   fixed lengths, scored on held-out classes: for the doctor
python benchmarks/quality/length.py --table   the tables alone

The data are frozen features of CUB (cub200_lite0_train.npz, _test.npz) and of Flowers-102 (flowers_train.npz,
flowers_test.npz, made by `nearfar embed`) with the recipe for vectors, and Omniglot with the network `small` and the
plain defaults. The configuration of each method is written to length-chosen.json before its first test. A search is
counted in steps, and in seconds of the process beside those of the training after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ledger import Ledger

from nearfar._utils.console import Terminal
from nearfar._utils.files import write_text
from nearfar.data import DataSet, Tensors, open_data
from nearfar.runs._journal import read
from nearfar.runs._sections import Config
from nearfar.train import fit, parse
from nearfar.train._length import Choice
from nearfar.train._recipe import VECTORS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILE, LEDGER, CURVES = (RESULTS / f"length{name}.json" for name in ("", "-chosen", "-curves"))
SEEDS, USUAL = 3, 1000
SCORE = "validation map_at_r"
QUIET = {"diagnose_every": 0, "explain_every": 0, "threads": 1}
RECIPES: dict[str, dict[str, Any]] = {"cub": VECTORS, "flowers": VECTORS, "omniglot": {}}
LENGTHS = (125, 250, 500, 1000, 2000)
METHODS: dict[str, str | int] = {"auto": "auto", "usual": USUAL}


def config_of(data: str, method: str) -> Config:
    """The recipe of the data with the length of the method."""
    tree = RECIPES[data]
    return parse({**tree, "training": {**QUIET, "steps": METHODS[method]}})


def features(path: Path, name: str) -> Tensors:
    """Frozen features, with classes counted from 0."""
    found = np.load(path / name)
    labels = np.unique(found["y"].astype(np.int64), return_inverse=True)[1]
    return Tensors(torch.from_numpy(found["x"].astype(np.float32)), labels)


def open_(data: str, path: Path | None, flowers: Path | None) -> DataSet | None:
    """The data set, or None if its path was not given."""
    if data == "flowers":
        sides = None if flowers is None else [features(flowers, f"flowers_{side}.npz") for side in ("train", "test")]
    elif path is None:
        return None
    elif data == "omniglot":
        return open_data("omniglot", path)
    else:
        sides = [features(path, f"cub200_lite0_{side}.npz") for side in ("train", "test")]
    return None if sides is None else DataSet(data, *sides, ks=(1, 2, 4, 8))


def run(data: str, method: str, seed: int, opened: DataSet) -> dict[str, Any]:
    """Train and test once."""
    config = config_of(data, method)
    config = replace(config, training=replace(config.training, seed=seed))
    begun, first = time.process_time(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        mark = [lambda moment: first.append(time.process_time()) if moment.step == 1 else None]
        found = fit(config, place, data=opened, callbacks=mark, console=Terminal(quiet=True))
        choice = Choice.read(place)
    if found.test is None:
        raise RuntimeError("length: the run was interrupted; call the script again.")
    row = {
        "data": data,
        "method": method,
        "seed": seed,
        "steps": found.step,
        "recall": round(100 * found.test.recall[1], 2),
        "map_at_r": round(100 * found.test.map_at_r, 2),
        "seconds_before": round(first[0] - begun, 1),
        "seconds": round(time.process_time() - first[0], 1),
    }
    if choice is None:
        return row
    curve = [[step, round(100 * score, 2)] for step, score, *_ in choice.curve]
    return {**row, "searched": choice.curve[-1][0], "held_out": choice.held_out, "why": choice.why, "curve": curve}


def run_length(data: str, steps: int, opened: DataSet) -> dict[str, Any]:
    """Train a fixed number of steps; the held-out classes of the training side are scored eight times."""
    tree = RECIPES[data]
    plan = {**QUIET, "steps": steps, "evaluate_every": -(-steps // 8), "baselines": False}
    config = parse({**tree, "data": {"validation": 0.2}, "training": plan})
    with tempfile.TemporaryDirectory() as folder:
        unread = replace(opened, test=opened.train)  # the test classes have no part in this
        fit(config, Path(folder) / "run", data=unread, console=Terminal(quiet=True))
        lines = read(Path(folder) / "run" / "journal.jsonl")
    curve = [[line["step"], round(line[SCORE], 4)] for line in lines if SCORE in line]
    return {"data": data, "steps": steps, "curve": curve}


def table(rows: list[dict[str, Any]]) -> str:
    """The means over seeds, as Markdown."""
    lines = [
        "| data | length | steps of the training | of the search | R@1 | MAP@R | seeds |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for data in RECIPES:
        for method in METHODS:
            mine = [row for row in rows if (row["data"], row["method"]) == (data, method)]
            if not mine:
                continue
            steps, searched = ([row.get(key, 0) for row in mine] for key in ("steps", "searched"))
            recall, score = (statistics.fmean(row[key] for row in mine) for key in ("recall", "map_at_r"))
            words = ", ".join(f"{int(value):,}" for value in steps), ", ".join(f"{int(value):,}" for value in searched)
            lines.append(f"| {data} | {method} | {words[0]} | {words[1]} | {recall:.1f} | {score:.1f} | {len(mine)} |")
    return "\n".join(lines) + "\n"


def length_table(rows: list[dict[str, Any]]) -> str:
    """Held-out MAP@R at the end of each length, its gain in the last half, and its loss since the best, in points."""
    lines = [
        "| data | steps | MAP@R at the end | gained in the last half | lost since the best |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        values = dict(row["curve"])
        last = values[row["steps"]]
        half = max(value for step, value in values.items() if 2 * step <= row["steps"])
        numbers = (last, last - half, max(values.values()) - last)
        lines.append(
            f"| {row['data']} | {row['steps']:,} | " + " | ".join(f"{100 * each:.1f}" for each in numbers) + " |"
        )
    return "\n".join(lines) + "\n"


def saved(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--flowers", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seed", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    rows, curves = saved(FILE), saved(CURVES)
    for data in words.only if words.lengths else ():
        opened = open_(data, words.path, words.flowers)
        for steps in LENGTHS if opened is not None else ():
            if not any((row["data"], row["steps"]) == (data, steps) for row in curves):
                curves = [*saved(CURVES), run_length(data, steps, opened)]
                write_text(CURVES, json.dumps(curves) + "\n")
                print(curves[-1], flush=True)
    for data in () if words.table or words.lengths else words.only:
        opened = open_(data, words.path, words.flowers)
        for seed in words.seed if opened is not None else ():
            for method in words.methods:
                if any((row["data"], row["method"], row["seed"]) == (data, method, seed) for row in rows):
                    continue
                Ledger(LEDGER).fix(f"{data}, {method}", config_of(data, method), {})
                rows = [*saved(FILE), run(data, method, seed, opened)]
                write_text(FILE, json.dumps(rows, indent=1) + "\n")
                print({key: value for key, value in rows[-1].items() if key not in ("curve", "why")}, flush=True)
    print(table(rows), length_table(curves), sep="\n")


if __name__ == "__main__":
    main()

"""Hard mining with a floor under the spread (docs/papers/beyond/floor.md), where plain hard mining collapses.

    python benchmarks/quality/floor.py --seeds 3

Each setting is trained with its own mining, with a floor, annealed, and with semi-hard mining. V of each batch is
recorded, and R@1 on unseen classes. Runs are written as they end, to benchmarks/results/floor.json, and not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from doctor import HARD, HARDEST, MLP, SEMIHARD, USUAL, adam, data_path, open_split, sgd, tree
from rich.console import Console

from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.geometry import least_spread
from nearfar.losses.spread import spread
from nearfar.runs._journal import read
from nearfar.studies.grid import permute_labels
from nearfar.train import fit, parse

FILE = Path(__file__).parents[1] / "results" / "floor.json"
STEPS, FLOOR = 300, 0.5
SETTINGS: dict[str, tuple[Any, ...]] = {  # data, network, mining, optimizer, classes and samples, wrong labels
    "CUB, batches of 4, sgd 3": ("cub", USUAL["cub"], HARD, sgd(3.0), (2, 2), 0.0),
    "CUB, hardest triplet, sgd 3": ("cub", USUAL["cub"], HARDEST, sgd(3.0), (32, 4), 0.0),
    "CUB, half of the labels wrong": ("cub", MLP, HARD, adam(1e-3), (32, 4), 0.5),
    "glyphs, hardest triplet, adam .3": ("glyphs", USUAL["glyphs"], HARDEST, adam(0.3), (32, 4), 0.0),
    "Omniglot, adam .03": ("omniglot", USUAL["omniglot"], HARD, adam(0.03), (32, 4), 0.0),
    "Omniglot, adam .3": ("omniglot", USUAL["omniglot"], HARD, adam(0.3), (32, 4), 0.0),
}


def arms(loss: dict[str, Any]) -> dict[str, Any]:
    return {
        "plain": loss,
        "floor": loss | {"floor": FLOOR},
        "annealed": HARD | {"anneal": STEPS // 2},
        "semi-hard": SEMIHARD,
    }


def run(setting: str, arm: str, seed: int) -> dict[str, Any]:
    """Train once; V of each batch, the bound of its first value, and R@1 before and after."""
    name, model, loss, optimizer, batch, wrong = SETTINGS[setting]
    path = {"name": "vectors" if name == "cub" else name, "path": data_path(name), "validation": 0.0}
    once = {"evaluate_every": STEPS, "checkpoint_every": STEPS, "diagnose_every": 0, "explain_every": 0}
    config = tree(arms(loss)[arm], optimizer, model, batch=batch, seed=seed, steps=STEPS, data=path)
    config["training"] |= once | {"baselines": True}
    data, seen = open_split(name)[0], []
    if wrong:
        data = replace(data, train=permute_labels(data.train, wrong, seed=seed))

    def look(moment: Any) -> None:
        seen.append(float(spread(moment.embeddings.float())))

    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = fit(parse(config), Path(folder) / "run", data=data, callbacks=[look], console=Console(quiet=True))
        lines = read(Path(folder) / "run" / "journal.jsonl")
    values = [line["loss"] for line in lines if "loss" in line]
    before = next(line["baselines"]["untrained"] for line in lines if "baselines" in line)
    return {
        "setting": setting,
        "arm": arm,
        "seed": seed,
        "recall@1": round(100 * found.test.recall[1], 2),
        "untrained": round(100 * before, 2),
        "least V": round(min(seen), 5),
        "last V": round(sum(seen[-20:]) / 20, 4),
        "V": [round(v, 4) for v in seen[:: STEPS // 60]],
        "first F": round(values[0], 4),
        "largest F": round(max(values), 4),
        "bound": round(least_spread(values[0], floor=FLOOR), 4),
        "bound of the largest F": round(least_spread(max(values), floor=FLOOR), 4),
        "broken": sum(v < FLOOR * math.exp(-f) - 2e-6 for v, f in zip(seen, values, strict=True)),
        "seconds": round(time.process_time() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"steps": STEPS, "runs": []}
    done = {(each["setting"], each["arm"], each["seed"]) for each in record["runs"]}
    names = ("plain", "floor", "annealed", "semi-hard")
    for setting, seed, arm in itertools.product(given.settings, range(given.seeds), names):
        if (setting, arm, seed) in done:
            continue
        record["runs"].append(run(setting, arm, seed))
        last = record["runs"][-1]
        print(*(f"{key} {last[key]};" for key in last if key != "V"), flush=True)
        write_text(FILE, as_json(record, "runs", 5))


if __name__ == "__main__":
    main()

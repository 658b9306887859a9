"""The search for the demo's recipe, scored on scripts of the training side that are held out.

python benchmarks/quality/demo.py              run the trials that are not in benchmarks/results/demo.json yet
python benchmarks/quality/demo.py --only NAME  only these trials
python benchmarks/quality/demo.py --test       test configs/glyphs.yaml on the test scripts: once, with three seeds
python benchmarks/quality/demo.py --table      write the table, run nothing

A trial is the previous recipe (`START`) with some keys changed. Two blocks of Unicode replace the test classes; the
scripts of the real test (Greek, Cyrillic, Armenian, Georgian) are not in its data. A trial runs on one thread and takes
one to five minutes; results are written after each.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import nearfar as nf
from nearfar._utils.console import Terminal
from nearfar._utils.files import write_text
from nearfar.data import DataSet, classes_by_name, open_data, part, transforms
from nearfar.evaluation import evaluate
from nearfar.models import small as network
from nearfar.runs._config import to_tree
from nearfar.runs._journal import read
from nearfar.runs._sections import Config
from nearfar.train import fit, load, parse

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HELD_OUT = ("U+1E*", "U+02[5-9A]*")
"""Latin Extended Additional, whose letters differ by accents as those of polytonic Greek do, and IPA Extensions."""
SEEDS = 3
START: dict[str, Any] = {
    "data": {"name": "glyphs", "validation": 0},
    "model": {"name": "small", "embedding_dim": 128, "bn_neck": True},
    "loss": {"name": "DroTopK", "k": 160, "pair": {"name": "Logistic"}},
    "batches": {"name": "MPerClass", "classes": 32, "samples": 4},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4, "warmup": 50},
    "training": {"steps": 700, "threads": 1},
}
"""The recipe before the search, with a third of its steps."""


@dataclass(frozen=True)
class Trial:
    """A trial: keys that differ from `START`, and changes that no key describes.

    Attributes:
        name: as in the table.
        keys: such as {"optimizer.lr": 1e-3}; a key may name a whole section ("loss").
        moved: arguments of `transforms.Moved`.
        layers: `LAYERS` of the network `small`.
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[tuple[int, int], ...] | None = None

    def config(self) -> Config:
        """The configuration of the trial, which is scored only at the end."""
        tree = json.loads(json.dumps(START))
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                place = place[section]
            place[last] = value
        never = 10**6
        tree["training"] |= {"baselines": False, "diagnose_every": 0, "explain_every": 0}
        return parse({**tree, "training": {**tree["training"], "evaluate_every": never, "checkpoint_every": never}})


def supcon(temperature: float, classes: int = 64, samples: int = 2, **keys: Any) -> dict[str, Any]:
    """Keys of a trial with SupCon; other keys are given by their last part, such as lr."""
    sections = {
        "average": "training",
        "cross_batch_memory": "training",
        "cross_batch_memory_warmup": "training",
        "embedding_dim": "model",
        "lr": "optimizer",
        "move": "data",
        "steps": "training",
        "weight_decay": "optimizer",
    }
    loss = {"name": "SupCon", "temperature": temperature}
    batches = {"batches.classes": classes, "batches.samples": samples}
    return {"loss": loss, **batches, **{f"{sections[name]}.{name}": value for name, value in keys.items()}}


TRIALS = (
    Trial("DroTopK, K = 160, 32 x 4"),
    Trial("MultiSimilarity, 32 x 4", {"loss": {"name": "MultiSimilarity"}}),
    Trial("SupCon 0.1, 32 x 4", supcon(0.1, 32, 4)),
    Trial("NTXent 0.07, 32 x 4", {"loss": {"name": "NTXent"}}),
    Trial("ProxyAnchor, 32 x 4", {"loss": {"name": "ProxyAnchor"}}),
    Trial("SupCon 0.05, 32 x 4", supcon(0.05, 32, 4)),
    Trial("SupCon 0.1, 32 x 4, average 0.99", supcon(0.1, 32, 4, average=0.99)),
    Trial("SupCon 0.1, 64 x 2", supcon(0.1)),
    Trial(
        "SupCon 0.1, 32 x 4, turned and moved more",
        supcon(0.1, 32, 4),
        {"shift": 2, "scale": 0.15, "slant": 0.2, "turn": 5},
    ),
    Trial("SupCon 0.2, 64 x 2", supcon(0.2)),
    Trial("SupCon 0.2, 64 x 2, move 2", supcon(0.2, move=2.0)),
    Trial("SupCon 0.3, 64 x 2, move 2", supcon(0.3, move=2.0)),
    Trial("SupCon 0.3, 64 x 2", supcon(0.3)),
    Trial("SupCon 0.2, 64 x 2, dim 256", supcon(0.2, embedding_dim=256)),
    Trial("SupCon 0.2, 64 x 2, move 2, steps 1400", supcon(0.2, move=2.0, steps=1400)),
    Trial("SupCon 0.2, 64 x 2, steps 1400", supcon(0.2, steps=1400)),
    Trial("SupCon 0.2, 64 x 2, lr 0.006", supcon(0.2, lr=6e-3)),
    Trial("SupCon 0.2, 64 x 2, weight decay 0.01", supcon(0.2, weight_decay=0.01)),
    Trial("SupCon 0.2, 64 x 2, lr 0.012", supcon(0.2, lr=0.012)),
    Trial("SupCon 0.2, 64 x 2, lr 0.006, dim 256", supcon(0.2, lr=6e-3, embedding_dim=256)),
    Trial(
        "SupCon 0.2, 64 x 2, lr 0.006, memory 4096",
        supcon(0.2, lr=6e-3, cross_batch_memory=4096, cross_batch_memory_warmup=100),
    ),
    Trial("SupCon 0.2, 64 x 2, lr 0.006, weight decay 0.01", supcon(0.2, lr=6e-3, weight_decay=0.01)),
    Trial("SupCon 0.2, 128 x 2, lr 0.006, steps 350", supcon(0.2, 128, lr=6e-3, steps=350)),
    Trial("SupCon 0.2, 64 x 2, move 2, lr 0.012, steps 1400", supcon(0.2, move=2.0, lr=0.012, steps=1400)),
    Trial("SupCon 0.2, 64 x 2, move 2, lr 0.012, steps 2300", supcon(0.2, move=2.0, lr=0.012, steps=2300)),
    Trial("SupCon 0.2, 64 x 2, move 2, lr 0.012, steps 3000", supcon(0.2, move=2.0, lr=0.012, steps=3000)),
)
"""Trials in the order of the search: each group starts from the best trial before it."""


@contextmanager
def use_layers(trial: Trial) -> Iterator[None]:
    """Within the block, use the layers and the augmentation of a trial."""
    layers, usual = network.LAYERS, transforms.NAMED["glyphs"]
    network.LAYERS = trial.layers or layers
    if trial.moved:
        transforms.NAMED["glyphs"] = lambda train, mean, std, move: (
            transforms.Moved(**trial.moved, mean=mean, std=std) if train else usual(train, mean, std, move)
        )
    try:
        yield
    finally:
        network.LAYERS, transforms.NAMED["glyphs"] = layers, usual


def scored_data() -> DataSet:
    """The data of a trial: only the training side, with some of its blocks as test classes."""
    train = open_data("glyphs").train
    rest, held_out = classes_by_name(train, HELD_OUT)
    return DataSet("glyphs", part(train, rest), part(train, held_out))


def run(trial: Trial, data: DataSet) -> dict[str, Any]:
    """Train and score one trial."""
    begun = time.process_time()
    with use_layers(trial), tempfile.TemporaryDirectory() as folder:
        found = fit(trial.config(), Path(folder) / "run", data=data, console=Terminal(quiet=True))
    return {
        "name": trial.name,
        "keys": dict(trial.keys),
        "moved": dict(trial.moved),
        "layers": trial.layers,
        "recall": round(100 * found.test.recall[1], 2),
        "map_at_r": round(100 * found.test.map_at_r, 2),
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def test(config: Config, data: DataSet, seed: int) -> dict[str, Any]:
    """The chosen recipe on the test scripts, with one seed."""
    config = replace(config, training=replace(config.training, seed=seed))
    with tempfile.TemporaryDirectory() as folder:
        begun, clock = time.process_time(), time.monotonic()
        found = fit(config, Path(folder) / "run", data=data)
        spent = {"cpu_seconds": time.process_time() - begun, "seconds": time.monotonic() - clock}
        steps = [line["time"] for line in read(Path(folder) / "run" / "journal.jsonl") if "loss" in line]
    return {
        "seed": seed,
        "recall": {str(k): round(100 * share, 2) for k, share in found.test.recall.items()},
        "map_at_r": round(100 * found.test.map_at_r, 2),
        "training_seconds": round(steps[-1], 1),
        **{name: round(value, 1) for name, value in spent.items()},
    }


def table(found: dict[str, Any]) -> str:
    """The page of results."""
    held = found["held_out"]
    lines = [
        "# The demo's recipe, chosen on held-out scripts",
        "",
        f"Validation: {held['classes']} training classes, the blocks {', '.join(HELD_OUT)}; raw pixels find "
        f"{held['pixels']:.1f}% there (R@1). One thread; seconds are those of the process.",
        "",
        "| trial | R@1 | MAP@R | seconds |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['recall']:.1f} | {row['map_at_r']:.1f} | {row['cpu_seconds']:.0f} |"
        for row in found["trials"]
    ]
    rows = found.get("test", {}).get("runs", [])
    if rows:
        recalls = [row["recall"]["1"] for row in rows]
        seconds = ", ".join(f"{row['training_seconds']:.0f}" for row in rows)
        lines += [
            "",
            f"The chosen recipe on the test scripts, tested once with each of {len(rows)} seeds: R@1 "
            f"{statistics.fmean(recalls):.1f} on average ({', '.join(f'{value:.1f}' for value in recalls)}); "
            f"{seconds} s of training.",
        ]
    for before in found.get("tested_before", []):
        recalls = [row["recall"]["1"] for row in before["runs"]]
        lines += ["", f"Another recipe was tested before it: {statistics.fmean(recalls):.1f} on average."]
    return "\n".join(lines) + "\n"


def pixels(samples: Any) -> float:
    """R@1 of raw pixels."""
    return round(100 * evaluate(samples.x.flatten(1).float(), torch.as_tensor(samples.labels), ks=(1,)).recall[1], 2)


def keep(found: dict[str, Any]) -> None:
    write_text(RESULTS / "demo.json", json.dumps(found, indent=1) + "\n")
    write_text(RESULTS / "demo.md", table(found))


def search(found: dict[str, Any], only: list[str]) -> None:
    """Run the trials that have no result yet."""
    done, data = {row["name"] for row in found["trials"]}, scored_data()
    found["held_out"] = {"patterns": HELD_OUT, "classes": len(data.test.classes), "pixels": pixels(data.test)}
    for trial in TRIALS:
        if trial.name in (only or {trial.name} - done):
            row = run(trial, data)
            found["trials"] = [*(other for other in found["trials"] if other["name"] != trial.name), row]
            print(f"{row['recall']:5.1f}  {row['cpu_seconds']:4.0f} s  {trial.name}", flush=True)
            keep(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=[trial.name for trial in TRIALS], metavar="NAME")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    file = RESULTS / "demo.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"trials": []}
    if words.test:
        config = load(ROOT / "configs" / "glyphs.yaml")
        if "test" not in found or parse(found["test"]["config"]) != config:  # what was tested is not tested again
            found["tested_before"] = [*found.get("tested_before", []), *([found["test"]] if "test" in found else [])]
            found["test"] = {"config": to_tree(config), "runs": []}
        for seed in range(len(found["test"]["runs"]), SEEDS):
            found["test"]["runs"].append(test(config, open_data("glyphs"), seed))
            keep(found)
    elif not words.table:
        search(found, words.only)
    found["versions"] = {"torch": torch.__version__, "nearfar": nf.__version__, "python": platform.python_version()}
    keep(found)
    print(table(found))


if __name__ == "__main__":
    main()

"""The recipe for photographs: searched on held-out training classes of CUB, then tested once for each seed.

python benchmarks/quality/recipe.py --path CUB [--weights FILE] [--jobs 10]     the search; call it again to continue
python benchmarks/quality/recipe.py --path CUB --path-flowers FLOWERS --ladder  the second search
python benchmarks/quality/recipe.py --path CUB [--weights FILE] --test          the test of configs/cub_lite0.yaml
python benchmarks/quality/recipe.py --table                                     only the table

Classes 1 to 40 are held out: neighbors in the list are related (gulls, flycatchers), so they are as hard to tell apart
as the test classes. There are three rounds, each chosen by the results of the one before:

1. `START`, and each change of `CHANGES` alone;
2. the changes that gained, combined: the best one, the best two, the best three, ...; of changes to the same key only
   the best is used;
3. the winner with other rates and lengths.

Runs are compared by the mean of R@1 and MAP@R. Results are written after each run to benchmarks/results/recipe.jsonl.

The test score of the winner was low. A second search (benchmarks/results/recipe-explored.json) looked at what lies
between the trunk and the score: pool, head, the part of a picture that is looked at. `LADDER` has the changes that it
kept, each added to those before it, on held-out classes of CUB and of Flowers-102.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ledger import Ledger

from nearfar._utils.files import write_text
from nearfar.runs._config import to_tree
from nearfar.studies import grid
from nearfar.studies.grid import Line, Trial, Workers
from nearfar.train import load, parse

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECIPE = ROOT / "configs" / "cub_lite0.yaml"
HELD_OUT = ("00*", "01*", "02*", "03*", "040*")
HELD_FLOWERS = ("00*", "01*", "020*")
SEEDS = 3
KS = (1, 2, 4, 8)
Keys = Mapping[str, Any]

START: Keys = {
    "data.name": "cub",
    "data.size": 288,
    "data.train_size": 224,
    "data.cache": "device",
    "data.validation": 0.0,
    "model.name": "lite0",
    "model.embedding_dim": 1024,
    "model.pool": "both",
    "model.freeze_norms": True,
    "loss": {"name": "ArcFace", "scale": 10.0},
    "batches": {"name": "MPerClass", "classes": 16, "samples": 5},
    "optimizer.lr": 5e-5,
    "optimizer.head_lr_mult": 10.0,
    "optimizer.loss_lr_mult": 100.0,
    "optimizer.warmup": 50,
    "training.steps": 600,
    "training.precision": "bf16",
    "training.compile": "kernels",
}
"""The start, chosen from earlier trials and the study: large pictures, both pools, proxies, a low learning rate."""

CHANGES: Mapping[str, Keys] = {
    "224 pixels": {"data.size": 224},
    "256 pixels": {"data.size": 256},
    "320 pixels": {"data.size": 320},
    "average pool": {"model.pool": "avg"},
    "max pool": {"model.pool": "max"},
    "512 dimensions": {"model.embedding_dim": 512},
    "2,048 dimensions": {"model.embedding_dim": 2048},
    "batch norm neck": {"model.bn_neck": True},
    "average .99": {"training.average": 0.99},
    "average .995": {"training.average": 0.995},
    "weight decay .01": {"optimizer.name": "adamw", "optimizer.weight_decay": 0.01},
    "crops of a third": {"data.min_area": 0.33},
    "color .2": {"data.color": 0.2},
    "rate 2.5e-5": {"optimizer.lr": 2.5e-5},
    "rate 1e-4": {"optimizer.lr": 1e-4},
    "1,200 steps": {"training.steps": 1200},
    "MultiSimilarity .7": {"loss": {"name": "MultiSimilarity", "threshold": 0.7}},
    "NTXent .05": {"loss": {"name": "NTXent", "temperature": 0.05}},
    "ProxyAnchor 8": {"loss": {"name": "ProxyAnchor", "scale": 8.0}},
    "ProxyNCA 3": {"loss": {"name": "ProxyNCA", "scale": 3.0}},
    "DroKL binomial .3": {"loss": {"name": "DroKL", "gamma": 0.3, "pair": "Logistic"}},
    "Contrastive": {"loss": {"name": "Contrastive"}},
}


WINNER: Keys = {**START, "optimizer.lr": 2.5e-5, "loss": {"name": "ProxyAnchor", "scale": 8.0}}
"""The choice of the first search."""

LADDER: Mapping[str, Keys] = {
    "winner of the first search": {},
    "generalized mean pool": {"model.pool": "gem"},
    "head that begins as the identity": {"model.embedding_dim": None},
    "Proxy-Anchor with scale 16": {"loss": {"name": "ProxyAnchor", "scale": 16.0}},
    "crops of a third at least": {"data.min_area": 0.33},
    "whole pictures of 320 pixels": {"data.size": 320, "data.crop_pct": 1.0},
    "mean with the mirror image": {"model.flip": True},
}
"""The keys that each rung adds to those above it."""

SEEDED: Mapping[str, Keys] = {"seed 1": {"training.seed": 1}, "seed 2": {"training.seed": 2}}
LENGTHS: Mapping[str, Keys] = {"half the steps": {"training.steps": 300}, "twice the steps": {"training.steps": 1200}}
"""Changes of the last rung on CUB, and on Flowers-102."""

SHORT = ("winner of the first search", "head that begins as the identity", "mean with the mirror image")
"""Rungs that are also run on Flowers-102."""


def rungs(beside: Mapping[str, Keys]) -> dict[str, Keys]:
    """Names and keys of the ladder, and of its last rung changed."""
    rows: dict[str, Keys] = {}
    keys: Keys = WINNER
    for name, change in LADDER.items():
        keys = {**keys, **change}
        rows[name] = keys
    return rows | {f"the last; {name}": {**keys, **change} for name, change in beside.items()}


def trial(keys: Keys, where: Keys, held_out: tuple[str, ...] = HELD_OUT) -> Trial:
    """A run whose test classes are the held-out training classes."""
    tree: dict[str, Any] = {"training": {"baselines": False, "explain_every": 0}}
    for key, value in {**keys, **where}.items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    steps = tree["training"]["steps"]
    tree["training"] |= {"evaluate_every": steps, "checkpoint_every": steps}
    return Trial(parse(tree), ks=(1,), held_classes=held_out)


def ladder(where: Keys, flowers: str | None) -> dict[tuple[str, str], Trial]:
    """The trials of the ladder by data set and name."""
    found = {("cub", name): trial(keys, where) for name, keys in rungs(SEEDED).items()}
    there = {**where, "data.name": "flowers", "data.path": flowers}
    for name, keys in rungs(LENGTHS).items():
        if name in SHORT or name not in LADDER:
            found["flowers", name] = trial(keys, there, HELD_FLOWERS)
    return found


def weights(folder: Path) -> str | None:
    """The weights of earlier trials; the file's name is part of a run's key."""
    lines = list(grid.lines(folder / "recipe.jsonl").values())
    name: str | None = lines[0]["config"]["model"]["weights"] if lines else None
    return name


def flags_of_test(where: Keys) -> list[tuple[str, str]]:
    """Flags for a test run, which is scored once, at its end."""
    steps = load(RECIPE).training.steps
    quiet = {"training.baselines": False, "training.explain_every": 0, "training.compile": "kernels"}
    keys = {**where, **quiet, "training.evaluate_every": steps, "training.checkpoint_every": steps}
    return [(name, json.dumps(value)) for name, value in keys.items()]


def score_of(line: Line | None) -> float | None:
    """The mean of R@1 and MAP@R in points; None if the run failed or is missing."""
    if line is None or line["error"] is not None:
        return None
    return 50 * (line["scores"]["recall@1"] + line["scores"]["map_at_r"])


def gains(known: Mapping[str, Line], where: Keys) -> list[tuple[float, str]]:
    """The changes that are better than `START`, best first; of changes to the same keys only the best one."""
    base = score_of(known.get(trial(START, where).key))
    if base is None:
        return []
    found: list[tuple[float, str]] = []
    for name, change in CHANGES.items():
        score = score_of(known.get(trial({**START, **change}, where).key))
        if score is not None and score > base:
            found.append((score - base, name))
    found.sort(reverse=True)
    taken, best = set[str](), []
    for gain, name in found:
        if not taken & CHANGES[name].keys():
            best.append((gain, name))
            taken |= CHANGES[name].keys()
    return best


def first() -> dict[str, Keys]:
    """Names and keys of the first round."""
    return {"start": START} | {name: {**START, **change} for name, change in CHANGES.items()}


def second(known: Mapping[str, Line], where: Keys) -> dict[str, Keys]:
    """The changes that gained, together."""
    rows: dict[str, Keys] = {}
    keys: Keys = START
    names: list[str] = []
    for _, name in gains(known, where):
        names.append(name)
        keys = {**keys, **CHANGES[name]}
        if len(names) > 1:
            rows[" + ".join(names)] = keys
    return rows


def third(known: Mapping[str, Line], rows: Mapping[str, Keys], where: Keys) -> dict[str, Keys]:
    """The winner so far with other rates and lengths."""
    name = winner(known, rows, where)
    if name is None:
        return {}
    keys = rows[name]
    rate, steps = keys["optimizer.lr"], keys["training.steps"]
    return {
        f"{name}; {words}": {**keys, **change}
        for words, change in {
            "half the rate": {"optimizer.lr": rate / 2},
            "twice the rate": {"optimizer.lr": rate * 2},
            "twice the steps": {"training.steps": 2 * steps},
            "twice the steps, half the rate": {"training.steps": 2 * steps, "optimizer.lr": rate / 2},
            "32 x 5": {"batches": {"name": "MPerClass", "classes": 32, "samples": 5}},
        }.items()
    }


def winner(known: Mapping[str, Line], rows: Mapping[str, Keys], where: Keys) -> str | None:
    """The best trial."""
    scores = {name: score_of(known.get(trial(keys, where).key)) for name, keys in rows.items()}
    there = {name: score for name, score in scores.items() if score is not None}
    return max(there, key=lambda name: there[name]) if there else None


def every(known: Mapping[str, Line], where: Keys) -> dict[str, Keys]:
    """All trials whose round is known, in the order in which they are run."""
    rows = first() | second(known, where)
    return rows | third(known, rows, where)


def search(folder: Path, where: Keys, workers: Workers, seconds: float | None = None, rounds: int = 3) -> None:
    """Run what is missing, round after round."""
    file = folder / "recipe.jsonl"
    for count in range(1, rounds + 1):
        known = grid.lines(file)
        rows = (first(), first() | second(known, where), every(known, where))[count - 1]
        grid.run([trial(keys, where) for keys in rows.values()], file, workers=workers, seconds=seconds)


CHOSEN = "recipe of the second search"
"""The name in the ledger; "recipe" is the choice of the first search, which was tested before."""


def test(config: Any, folder: Path, workers: Workers) -> None:
    """Test the chosen recipe with several seeds; the ledger refuses any other one afterwards."""
    tree = to_tree(config)
    seeds = [{**tree, "training": {**tree["training"], "seed": seed}} for seed in range(SEEDS)]
    trials = [Trial(parse(each), ks=KS, clustering=10_000) for each in seeds]
    Ledger(folder / "recipe-chosen.json").fix(CHOSEN, trials[0].config, {})
    grid.run(trials, folder / "recipe-test.jsonl", workers=workers)


def table(folder: Path, where: Keys) -> str:
    """The page of results."""
    known = grid.lines(folder / "recipe.jsonl")
    lines = [
        "# The recipe for photographs",
        "",
        f"CUB, EfficientNet-Lite0. Held out: {', '.join(HELD_OUT)} (40 of the 100 training classes, which no trial "
        "learns from); one seed. Judged by the mean of R@1 and MAP@R.",
        "",
        "| trial | R@1 | MAP@R | mean |",
        "|---|---:|---:|---:|",
    ]
    for name, keys in every(known, where).items():
        lines.append(f"| {name} | {' | '.join(_cells(known.get(trial(keys, where).key)))} |")
    lines += _ladder_table(folder, where)
    for file, which in (("recipe-test-before.jsonl", "first"), ("recipe-test.jsonl", "second")):
        tested = [line for line in grid.lines(folder / file).values() if line["error"] is None]
        if not tested:
            continue
        recalls = [100 * line["scores"]["recall@1"] for line in tested]
        lines += [
            "",
            f"The choice of the {which} search on classes 101-200, tested once with each of {len(tested)} seeds: R@1 "
            f"{statistics.fmean(recalls):.1f} on average ({', '.join(f'{each:.1f}' for each in recalls)}). "
            f"{tested[0]['device']}.",
            "",
            "| seed | R@1 | R@2 | R@4 | R@8 | MAP@R | NMI | F1 | seconds |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        names = (*(f"recall@{k}" for k in KS), "map_at_r", "nmi", "f1")
        for line in tested:
            cells = [f"{100 * line['scores'][name]:.1f}" for name in names]
            lines.append(f"| {line['config']['training']['seed']} | {' | '.join(cells)} | {line['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def _cells(line: Line | None) -> list[str]:
    """R@1, MAP@R and their mean, for a table."""
    score = score_of(line)
    if line is None or score is None:
        return ["-", "-", "-"]
    return [f"{value:.1f}" for value in (*(100 * line["scores"][each] for each in ("recall@1", "map_at_r")), score)]


def _ladder_table(folder: Path, where: Keys) -> list[str]:
    """Lines of the table of the second search; empty before it was run."""
    known, trials = grid.lines(folder / "recipe-ladder.jsonl"), ladder(where, None)
    if not known:
        return []
    found = [
        "",
        f"The second search, rung upon rung, on the same classes and on {', '.join(HELD_FLOWERS)} (20 classes) of "
        "Flowers-102.",
        "",
        "| rung | CUB, R@1 | MAP@R | mean | Flowers-102, R@1 | MAP@R | mean |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in rungs({**SEEDED, **LENGTHS}):
        cells = []
        for data in ("cub", "flowers"):
            cells += _cells(known.get(trials[data, name].key) if (data, name) in trials else None)
        found.append(f"| {name} | {' | '.join(cells)} |")
    return found


def main() -> None:
    """Search, test or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="the folder of CUB-200-2011")
    parser.add_argument("--weights", help="a file of weights of EfficientNet-Lite0")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no run after so many; call again to go on")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--path-flowers", help="the folder of Flowers-102")
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table and args.path is None:
        parser.error("--path is needed")
    if args.ladder and args.path_flowers is None:
        parser.error("--path-flowers is needed")
    where = {"data.path": str(args.path), "model.weights": args.weights or weights(args.folder)}
    with Workers(args.jobs) as workers:
        if args.test:
            test(load(RECIPE, flags_of_test(where)), args.folder, workers)
        elif args.ladder:
            trials = ladder(where, args.path_flowers).values()
            grid.run(trials, args.folder / "recipe-ladder.jsonl", workers=workers, seconds=args.seconds)
        elif not args.table:
            search(args.folder, where, workers, args.seconds)
    write_text(args.folder / "recipe.md", table(args.folder, where))
    print(table(args.folder, where))


if __name__ == "__main__":
    main()

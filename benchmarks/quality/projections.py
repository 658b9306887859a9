"""Projections that end when the largest violation stops falling, against projections of M steps.

    python benchmarks/quality/projections.py --data vectors --path FOLDER --steps 300     20 minutes on one core
    python benchmarks/quality/projections.py --data glyphs --steps 600 --losses Contrastive-hard --lengths 1 26 152

Losses, batches, rates and the proximal term are those of `nearfar reproduce profs`; FOLDER has train.npz and test.npz
of frozen features. A run of `converged:R` has steps="converged" with ρ = R. A finished run is kept in --runs, and the
next call continues. Writes benchmarks/results/projections-DATA.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.batches import violations
from nearfar.data import open_data
from nearfar.studies import profs
from nearfar.studies._training import TrainingStudy, open_study, spread, verdict
from nearfar.train import fit

RESULTS = Path(__file__).parents[1] / "results"
RATE = {"vectors": 1e-3, "glyphs": 3e-3}
"""Chosen by `nearfar reproduce profs` on held-out classes (benchmarks/RESULTS-profs.md)."""


def batches_of(variant: str) -> dict[str, Any]:
    kind, _, number = variant.partition(":")
    how = {"rho": float(number), "steps": "converged"} if kind == "converged" else {"steps": int(number)}
    return {"name": "Representatives", "batch_size": profs.BATCH, "samples": profs.SAMPLES, **how}


def train(study: TrainingStudy, name: str, variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; return R@1 on the test classes, the first step of each projection, and V over the run."""
    how = {"steps": steps, "rate": RATE[study.data], "proximal": profs.PROXIMAL, "seed": seed}
    config = study.config(profs.LOSSES[name], batches_of(variant), **how)
    starts: list[int] = []
    largest: list[float] = []

    def watch(moment: Any) -> None:
        sampler, plan = moment.state.sampler, config.training
        if sampler.is_new_projection(moment.step - 1):
            starts.append(moment.step - 1)
        near, far = plan.max_positive_distance, plan.min_negative_distance
        found = violations(moment.embeddings, moment.target, max_positive_distance=near, min_negative_distance=far)
        largest.append(found.largest)

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = fit(config, Path(folder) / "run", data=open_data(study.data, study.path), callbacks=[watch])
    assert found.test is not None  # noqa: S101 - the run was not interrupted
    every = max(1, steps // 30)
    means = [float(np.mean(largest[i : i + every])) for i in range(0, steps, every)]
    return {
        "loss": name,
        "variant": variant,
        "seed": seed,
        "steps": steps,
        "recall@1": 100 * found.test.recall[1],
        "starts": starts,
        "V": means,
        "seconds": round(time.monotonic() - start, 1),
    }


def summarize(runs: list[dict[str, Any]], variants: list[str]) -> dict[str, Any]:
    """R@1 of each loss and variant, and its paired difference from each fixed M."""
    table: dict[str, Any] = {}
    for name in dict.fromkeys(run["loss"] for run in runs):
        cells = {v: {r["seed"]: r for r in runs if (r["loss"], r["variant"]) == (name, v)} for v in variants}
        row: dict[str, Any] = {}
        for variant, cell in cells.items():
            if not cell:
                continue
            lengths = [b - a for r in cell.values() for a, b in itertools.pairwise(r["starts"])]
            row[variant] = {
                "recall@1": spread([r["recall@1"] for r in cell.values()]),
                "projections": float(np.mean([len(r["starts"]) for r in cell.values()])),
                "median_length": float(np.median(lengths)) if lengths else None,
                "longest": max(lengths, default=None),
            }
            for other, those in cells.items():
                seeds = sorted(set(cell) & set(those))
                if variant.startswith("converged") and not other.startswith("converged") and seeds:
                    less = spread([cell[s]["recall@1"] - those[s]["recall@1"] for s in seeds])
                    row[variant][f"less {other}"] = {**less, "verdict": verdict(less)}
        table[name] = row
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=RATE, default="vectors")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="+", default=list(profs.FIGURE))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--rho", nargs="+", type=float, default=[6, 2])
    parser.add_argument("--runs", type=Path, default=Path("projections-runs"))
    given = parser.parse_args()
    variants = [*(f"M:{length}" for length in given.lengths), *(f"converged:{rho:g}" for rho in given.rho)]
    given.runs.mkdir(parents=True, exist_ok=True)
    lines = given.runs / f"{given.data}-{given.steps}.jsonl"
    runs = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    done = {(run["loss"], run["variant"], run["seed"]) for run in runs}
    changes = {"training": {"baselines": False}}
    with open_study("profs", given.runs, data=given.data, path=given.path, changes=changes) as study:
        for seed, name, variant in itertools.product(range(given.seeds), given.losses, variants):
            if (name, variant, seed) in done:
                continue
            runs.append(train(study, name, variant, seed, given.steps))
            with lines.open("a", encoding="utf-8") as out:
                out.write(json.dumps(runs[-1]) + "\n")
            print({key: value for key, value in runs[-1].items() if key != "V"}, flush=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    record = {"data": given.data, "steps": given.steps, "device": "two cores, CPU", "versions": versions}
    record |= {"rate": RATE[given.data], "variants": variants, "table": summarize(runs, variants), "runs": runs}
    write_text(RESULTS / f"projections-{given.data}.json", as_json(record, "runs", 5))


if __name__ == "__main__":
    main()

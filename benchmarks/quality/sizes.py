"""One size for all sets: MAP@R against effective pairs a row, and a fixed size against a tuned one.

    python benchmarks/quality/sizes.py --path FOLDER                                            5 minutes on one core

FOLDER has frozen features, *train.npz and *test.npz with x and y. A linear head is trained by hinge losses with 16
classes of 5 samples. `curves` are MAP@R on 20 held-out training classes; `test` is MAP@R on the test classes, with
right or wrong training labels, for e = 8, the size that was best on the held-out classes, and the mean of all pairs;
`confidence` are the sizes that batches ask for at 95%. Finished runs are kept in --runs. Writes
benchmarks/results/sizes.json; beyond_page.py draws it.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import Features, Ledger, batches, load, scores, train

import nearfar as nf
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.studies._training import spread, verdict

RESULTS = Path(__file__).parents[1] / "results"
L = nf.losses
SETS = {"TopK": L.DroTopK, "chi-square": L.DroChiSquare, "KL": L.DroKL}
SIZES = (0.25, 1, 4, 8, 16, 40, 64, 79)
"""79 pairs a row are all, the mean."""
WRONG, RATE, SEEDS = (0.0, 0.4, 0.2), 1e-3, 3


def run(seen: Features, other: Features, name: str, size: float, wrong: float, seed: int) -> dict[str, Any]:
    """MAP@R of other classes after training with a set of this size."""
    loss = SETS[name](effective=size, zero="keep")
    return scores(train(seen.permuted(wrong, seed), lambda x, y, _: loss(x, y), RATE, seed), other)


def curve(ledger: Ledger, data: Features) -> dict[str, Any]:
    """MAP@R on held-out classes of each set and size."""
    classes, found = data.y.unique(), dict[str, Any]()
    seen, others = data.of(classes[:80]), data.of(classes[80:])
    for name, size in itertools.product(SETS, SIZES):
        kind = "mean" if size == SIZES[-1] else name  # all sets are the mean there
        lines = [
            ledger.run(f"curve {kind} {size:g} 0 {seed}", lambda n=name, e=size, s=seed: run(seen, others, n, e, 0, s))
            for seed in range(SEEDS)
        ]
        found.setdefault(name, {})[f"{size:g}"] = spread([line["map_at_r"] for line in lines])
    return found


def test(ledger: Ledger, data: Features, other: Features, wrong: float, tuned: dict[str, float]) -> dict[str, Any]:
    """MAP@R on the test classes of each set and size, and its difference from the tuned size by seed."""
    found: dict[str, Any] = {}
    for name in SETS:
        values: dict[str, list[float]] = {}
        sizes = {"tuned": tuned[name], "8": 8, "mean": SIZES[-1]}
        for (rule, size), seed in itertools.product(sizes.items(), range(SEEDS)):
            kind = "mean" if size == SIZES[-1] else name
            work = lambda n=name, e=size, s=seed: run(data, other, n, e, wrong, s)  # noqa: E731
            values.setdefault(rule, []).append(ledger.run(f"test {kind} {size:g} {wrong:g} {seed}", work)["map_at_r"])
        row: dict[str, Any] = {"size": tuned[name], "tuned": spread(values["tuned"])}
        for rule in ("8", "mean"):
            less = spread([a - b for a, b in zip(values[rule], values["tuned"], strict=True)])
            row[rule] = {**less, "verdict": verdict(less)}
        found[name] = row
    return found


def sizes_of_defaults(data: Features) -> dict[str, float]:
    """Effective pairs a row of the default K, rho and gamma, at the start, over ten batches."""
    made = {name: of(zero="keep") for name, of in SETS.items()}
    rows = list(itertools.islice(batches(data, 16, 0), 10))
    return {
        name: float(np.mean([loss.explain(data.x[r], data.y[r]).effective_pairs / len(r) for r in rows]))
        for name, loss in made.items()
    }


def sizes_of_gammas(data: Features) -> list[list[float]]:
    """Values of gamma, and the effective pairs a row that each gives before training."""
    rows, gammas = next(batches(data, 16, 0)), [0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
    losses = [L.DroKL(gamma=gamma, zero="keep") for gamma in gammas]
    return [gammas, [loss.explain(data.x[rows], data.y[rows]).effective_pairs / len(rows) for loss in losses]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("sizes-runs"))
    parser.add_argument("--wrong", type=float, nargs="*", default=WRONG)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ledger, (data, other) = Ledger(given.runs / "runs.jsonl"), load(given.path)
    curves = curve(ledger, data)
    tuned = {name: float(max(row, key=lambda size: row[size]["mean"])) for name, row in curves.items()}
    drawn = itertools.islice(batches(data, 16, 0), 10)
    sizes = [L.DroChiSquare().explain(data.x[at], data.y[at]).confident_pairs() for at in drawn]
    record = {
        "device": "one core, CPU",
        "curves": curves,
        "test": {f"{wrong:g}": test(ledger, data, other, wrong, tuned) for wrong in given.wrong},
        "defaults": sizes_of_defaults(data),
        "gamma": sizes_of_gammas(data),
        "confidence": [min(sizes), max(sizes)],
        "seconds": round(sum(line["seconds"] for line in ledger.runs.values())),
        "runs": list(ledger.runs.values()),
    }
    write_text(RESULTS / "sizes.json", as_json(record, "runs", 5))


if __name__ == "__main__":
    main()

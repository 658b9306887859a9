"""Duals kept between batches (`nf.sets.Remembered`): bias and variance without training, and training with them.

    python benchmarks/quality/memory.py static --path FOLDER        a minute on one core
    python benchmarks/quality/memory.py train --path FOLDER         2 minutes
    python benchmarks/quality/memory.py libauc                      seconds; needs LibAUC (pip install libauc)

FOLDER has frozen features, *train.npz and *test.npz with x and y. `static` holds a linear head fixed and compares value
and gradient of batches of B rows with those of all training rows, within the batch and with duals kept over passes.
`train` trains the head, with as many samples in every run. `libauc` compares gradients with SogCLR's. Finished runs are
kept in --runs. Writes benchmarks/results/memory-PART.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import SAMPLES, Features, Ledger, batches, directions, load, scores, train
from torch import Tensor

import nearfar as nf
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.studies._training import spread, verdict

RESULTS = Path(__file__).parents[1] / "results"
S = nf.sets
SIZES = (40, 80, 160, 500)
"""Rows of a batch; 500 are five of each class."""
PASSES = (3, 11)
"""After how many passes over the samples the kept duals are measured; in the batch at once."""
DRAWS, TRAINED, SEEDS, RATE = 200, 6, 3, 1e-3
"""Batches that are compared; passes, seeds and rate of a training run."""
LOSSES = {"grouped KL, gamma = .01": 0.01, "NT-Xent, temperature .05": None}


def loss_of(name: str, samples: int = 0, momentum: float | None = None) -> nf.RobustLoss:
    """Grouped KL with hinge losses, or NT-Xent; with duals of `samples` samples if there is a momentum."""

    def of(over: S.UncertaintySet) -> S.UncertaintySet:
        return over if momentum is None else S.Remembered(over, samples=samples, momentum=momentum)

    gamma = LOSSES[name]
    if gamma is not None:
        return nf.RobustLoss(pair=nf.pairs.Hinge(), over=of(S.KL(gamma)), groups="anchor_sign")
    parts = nf.losses.NTXent(temperature=0.05).product
    over = S.Mean(), of(S.KL(1.0, normalized=False))
    return nf.RobustLoss(pair=(parts.positive, parts.negative), over=over, groups="anchor_sign", link=parts.link)


def gradients(
    loss: nf.RobustLoss, data: Features, rows: Iterator[Tensor], weight: Tensor
) -> Iterator[tuple[float, Tensor]]:
    for at in rows:
        value = loss(data.x[at] @ weight.T, data.y[at], ids=at)
        (slope,) = torch.autograd.grad(value, weight)
        yield float(value.detach()), slope.flatten()


def compare(found: list[tuple[float, Tensor]], value: float, slope: Tensor) -> dict[str, float]:
    """Bias of value and gradient, variance and direction, relative to the exact gradient."""
    values, slopes = np.array([v for v, _ in found]), torch.stack([g for _, g in found])
    mean, length = slopes.mean(dim=0), float(slope.norm())
    variance = float((slopes - mean).square().sum() / (len(slopes) - 1))
    bias = float((mean - slope).square().sum()) - variance / len(slopes)  # without the noise of the mean
    return {
        "value": float(values.mean()) - value,
        "length": float(mean.norm()) / length,
        "bias": max(0.0, bias) / length**2,
        "variance": variance / length**2,
        "cosine": float(torch.nn.functional.cosine_similarity(slopes, slope[None]).mean()),
    }


def static(ledger: Ledger, data: Features) -> dict[str, Any]:
    name, weight = "grouped KL, gamma = .01", directions(data.x).clone().requires_grad_()
    ((value, slope),) = gradients(loss_of(name), data, iter([torch.arange(len(data.x))]), weight)
    rows: dict[str, Any] = {}
    for size, momentum in itertools.product(SIZES, (None, 0.9, 0.5)):
        if size == SIZES[-1] and momentum is not None:
            continue  # the batch needs no memory

        def work(size: int = size, momentum: float | None = momentum) -> dict[str, Any]:
            loss, drawn, found = loss_of(name, len(data.x), momentum), batches(data, size // SAMPLES, 0), {}
            each = len(data.x) // size
            for before, after in itertools.pairwise((0, *PASSES)) if momentum is not None else ((0, 0),):
                with torch.no_grad():
                    for at in itertools.islice(drawn, (after - before) * each):
                        loss(data.x[at] @ weight.T, data.y[at], ids=at)
                draws = list(gradients(loss, data, itertools.islice(drawn, DRAWS), weight))
                key = "in the batch" if momentum is None else f"m = {momentum:g}, after {after} passes"
                found[key] = compare(draws, value, slope)
            return found

        line = ledger.run(f"static {name} {size} {momentum}", work)
        rows.setdefault(str(size), {}).update({k: x for k, x in line.items() if k not in ("key", "seconds")})
    return {"table": {name: {"exact": value, "rows": rows}}, "draws": DRAWS}


def run(data: Features, other: Features, name: str, size: int, momentum: float | None, seed: int) -> dict[str, Any]:
    """MAP@R of other classes after six passes over the training samples."""
    loss, steps = loss_of(name, len(data.x), momentum), TRAINED * len(data.x) // size
    objective = lambda x, y, at: loss(x, y, ids=at)  # noqa: E731
    return scores(train(data, objective, RATE, seed, classes=size // SAMPLES, steps=steps), other)


def trained(ledger: Ledger, data: Features, other: Features, names: list[str]) -> dict[str, Any]:
    cells = [(40, None), (40, 0.9), (500, None)]
    table: dict[str, Any] = {}
    for name in names:
        values: dict[str, list[float]] = {}
        for (size, momentum), seed in itertools.product(cells, range(SEEDS)):
            cell = f"B = {size}" + ("" if momentum is None else f", m = {momentum:g}")
            work = lambda n=size, m=momentum, s=seed: run(data, other, name, n, m, s)  # noqa: B023, E731
            values.setdefault(cell, []).append(ledger.run(f"train {name} {cell} {seed}", work)["map_at_r"])
        row: dict[str, Any] = {cell: dict(spread(each) or {}) for cell, each in values.items()}
        for size in (40,):
            cell = f"B = {size}, m = 0.9"
            for against in (f"B = {size}", "B = 500"):
                less = spread([a - b for a, b in zip(values[cell], values[against], strict=True)])
                row[cell][f"less {against}"] = {**less, "verdict": verdict(less)}
            less = spread([a - b for a, b in zip(values[f"B = {size}"], values["B = 500"], strict=True)])
            row[f"B = {size}"]["less B = 500"] = {**less, "verdict": verdict(less)}
        table[name] = row
    return {"table": table, "passes": TRAINED}


def libauc(steps: int = 6, rows: int = 16, tau: float = 0.1) -> dict[str, Any]:
    """The largest relative difference from LibAUC's gradient, when both views of a sample are equal, and at step 1."""
    from libauc.losses import GCLoss_v1

    noise = torch.Generator().manual_seed(0)
    found = {}
    for views in ("equal", "different"):
        theirs = GCLoss_v1(N=rows, tau=tau, gamma=0.9)
        over = S.Mean(), S.Remembered(S.KL(tau), samples=2 * rows, momentum=0.1)
        ours = nf.RobustLoss(pair=nf.pairs.Linear(), over=over, groups="anchor_sign").double()
        off = []
        for _ in range(steps):
            first = torch.randn(rows, 8, generator=noise, dtype=torch.float64)
            second = first.clone() if views == "equal" else torch.randn(rows, 8, generator=noise, dtype=torch.float64)
            x = torch.cat([first, second]).requires_grad_()
            index = torch.arange(rows)
            theirs.u = theirs.u.double()
            wanted = torch.autograd.grad(theirs(x[:rows], x[rows:], index) / 2, x)[0]
            mine = torch.autograd.grad(ours(x, index.repeat(2), ids=torch.arange(2 * rows)), x)[0]
            off.append(float((mine - wanted).norm() / wanted.norm()))
        found[views] = off
    return {"relative": found, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("static", "train", "libauc"))
    parser.add_argument("--path", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("memory-runs"))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"device": "one core, CPU"}
    if given.part == "libauc":
        record |= libauc()
    else:
        ledger, (data, other) = Ledger(given.runs / f"{given.part}.jsonl"), load(given.path)
        record |= static(ledger, data) if given.part == "static" else trained(ledger, data, other, given.losses)
        record["seconds"] = round(sum(line["seconds"] for line in ledger.runs.values()))
    write_text(RESULTS / f"memory-{given.part}.json", as_json({"runs": [], **record}, "runs", 5))


if __name__ == "__main__":
    main()

"""Label noise: R@1 of ten losses when a share of the training labels is permuted at random.

`reproduce(folder)` trains each loss at 0, 10, 20 and 40 per cent of wrong labels (permuted among the chosen samples, so
that classes keep their sizes; the test labels stay right), several seeds each. A worst case over pairs trusts a wrong
pair most of all; a mean hardly notices it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar.studies import _figures as figures
from nearfar.studies._desk import Desk, Method, cell, difference, in_rounds, open_desk, setting, shown, table
from nearfar.studies.grid import Trial, Workers

__all__ = ["draw", "markdown", "reproduce"]

STEPS = 1000
SHARES = (0.0, 0.1, 0.2, 0.4)
BATCH, SAMPLES = 128, 4
SCORES = ("recall@1", "recall@10", "map_at_r")
LOSSES = {
    "Contrastive": Method({"name": "Contrastive"}),
    "BinomialDeviance": Method({"name": "BinomialDeviance"}),
    "Triplet, semi-hard": Method({"name": "Triplet", "mining": "semihard", "margin": 0.2}),
    "Triplet, hard": Method({"name": "Triplet", "mining": "hard", "margin": 0.2}),
    "MultiSimilarity": Method({"name": "MultiSimilarity"}),
    "SupCon": Method({"name": "SupCon"}),
    "ProxyAnchor": Method({"name": "ProxyAnchor"}),
    "DroTopK": Method({"name": "DroTopK", "k": 160, "pair": "Logistic"}),
    "DroKL": Method({"name": "DroKL", "gamma": 0.1}),
    "DroWorst": Method({"name": "DroWorst"}),
}
CHOOSERS = ("Contrastive", "MultiSimilarity")


def reproduce(
    folder: str | Path,
    *,
    data: str = "glyphs",
    path: str | Path | None = None,
    seeds: int = 3,
    steps: int | None = None,
    jobs: int | Workers = 1,
    quick: bool = False,
    seconds: float | None = None,
    precision: str | None = None,
    weights: str | Path | None = None,
) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    Args:
        folder: the folder for noise-DATA.json, noise-DATA.png and the lines of all runs.
        data: glyphs, omniglot, cub, vectors, ...
        path: path of the data.
        seeds: runs of each configuration; each seed has wrong labels of its own, the same for every loss.
        steps: steps of each run; None: 1000.
        jobs: number of processes, or `Workers` that are running already.
        quick: a smoke test: 30 steps, three losses, two shares, one learning rate.
        seconds: begin no run after this time; what is missing stays empty, and the next call continues.
        precision: float32, bf16, fp16 or float64; None: bf16 for photographs on a GPU, else float32.
        weights: a file of weights for the network's trunk; None: the published ones, where it has some.

    Returns:
        The content of noise-DATA.json.
    """
    how: dict[str, Any] = {"data": data, "path": path, "seeds": seeds, "jobs": jobs, "quick": quick, "seconds": seconds}
    how |= {"precision": precision, "weights": weights}
    with open_desk("noise", folder, **how) as desk:
        return _study(desk, steps)


def _study(desk: Desk, steps: int | None) -> dict[str, Any]:
    steps = steps or (30 if desk.quick else STEPS)
    shares = SHARES[::3] if desk.quick else SHARES
    losses = dict(list(LOSSES.items())[::4]) if desk.quick else LOSSES
    batches = desk.per_class(BATCH, SAMPLES)
    rate = desk.choose_rate([LOSSES[name] for name in CHOOSERS], batches, steps=steps)
    cells = {
        (name, share): [
            Trial(desk.config(method, batches, steps=steps, rate=rate["rate"], seed=seed), wrong=share)
            for seed in range(desk.seeds)
        ]
        for share in shares
        for name, method in losses.items()
    }
    known = desk.run(in_rounds(cells.values()))
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "shares": list(shares),
        "wrong": _really_wrong(known.values()),
        "table": {name: {f"{share:g}": cell(known, cells[name, share], SCORES) for share in shares} for name in losses},
        "loss_of_recall": {
            name: difference(known, cells[name, shares[0]], cells[name, shares[-1]], "recall@1") for name in losses
        },
    }
    whole = desk.write(found, known)
    draw(whole, desk.folder)
    return whole


def _really_wrong(lines: Any) -> dict[str, float]:
    """The share of labels that changed: a permutation may keep a label."""
    return {f"{line['wrong']:g}": line["wrong_share"] for line in lines}


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the figure from the content of noise-DATA.json."""
    places = [100 * share for share in found["shares"]]
    series = {name: [each["recall@1"] for each in row.values()] for name, row in found["table"].items()}
    data = found["data"]
    panel = figures.Panel(f"{data}: wrong training labels", places, series, "wrong labels, %")
    figures.curves(folder / f"noise-{data}.png", panel)


def markdown(found: Mapping[str, Any]) -> str:
    """How the runs were made, and R@1 against the share of wrong labels."""
    rows = [
        (
            name,
            *(shown(each["recall@1"]) for each in row.values()),
            shown(found["loss_of_recall"][name], sign=True),
            "; ".join(sorted({error for each in row.values() for error in each["errors"]})) or "-",
        )
        for name, row in found["table"].items()
    ]
    heads = [f"R@1, {100 * share:g}% wrong" for share in found["shares"]]
    last = f"{100 * found['shares'][-1]:g}% less {100 * found['shares'][0]:g}%"
    return "\n\n".join([setting(found), table(("loss", *heads, last, "failed"), rows)]) + "\n"

"""Alternating projections (PROFS, Can et al. 2019): every loss plain, with PROFS, and with hard classes.

`reproduce(folder)` trains the baselines of Table 1 of Can et al. 2019 plain (`MPerClass`, B = 128, I = 2), with PROFS
(`Representatives`, only pairs with a representative, the proximal term) and with hard negative classes (HNCM) too,
several seeds each, the same number of steps for all; then its Figure 1: recall against the steps of a projection, M.
Two baselines are run without PROFS, as in the paper: semi-hard triplets (PROFS uses the hard ones), and Proxy-NCA,
whose proxies are representatives already, so that there are no pairs of samples to restrict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.checks import check_choice
from nearfar.batches import Representatives
from nearfar.studies import _figures as figures
from nearfar.studies._desk import (
    Desk,
    Method,
    cell,
    difference,
    in_rounds,
    judged,
    less,
    open_desk,
    setting,
    shown,
    spread,
    table,
)
from nearfar.studies.grid import Line, Trial, Workers

__all__ = ["Cells", "draw", "markdown", "reproduce", "rule_of"]

BATCH, SAMPLES, PROXIMAL = 128, 2, 1e-3
SQUARED = {"margin": 0.2, "similarity": "NegSquaredEuclidean"}
LOSSES = {
    "Contrastive-hard": Method({"name": "Contrastive", "miner": "BalancedHard"}),
    "Triplet-hard": Method({"name": "Triplet", "mining": "balanced", **SQUARED}),
    "Lifted": Method({"name": "LiftedStructure"}),
    "N-pair": Method({"name": "NPair"}, normalize=False),
    "Angular": Method({"name": "Angular"}),
    "Margin-hard": Method({"name": "Margin", "miner": "BalancedHard"}),
}
ALONE = {
    "Triplet-semi": Method({"name": "Triplet", "mining": "semihard", **SQUARED}),
    # vectors and proxies of length 3, as is usual for it: squared distances times 9
    "Proxy-NCA": Method({"name": "ProxyNCA", "scale": 9.0}),
}
VARIANTS = ("plain", "PROFS", "PROFS + HNCM")
PARTS = ("table", "lengths")
CHOOSERS = (
    "Contrastive-hard",
    "Triplet-hard",
    "Margin-hard",
)  # choose the rate: those that Can et al.'s formulation fits
FIGURE = ("Contrastive-hard", "Triplet-hard", "N-pair", "Margin-hard")  # the four of Can et al.'s Figure 1
TIMES = (0.1, 0.3, 1.0, 3.0, 10.0)  # M over the rule's, besides M = 1
SCORES = ("recall@1", "recall@10", "map_at_r", "nmi", "f1")
CLUSTERED = 3000
COMPARED = (("plain", "PROFS"), ("PROFS", "PROFS + HNCM"), ("plain", "PROFS + HNCM"))

Cells = dict[tuple[str, str], list[Trial]]


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
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    Args:
        folder: the folder for profs-DATA.json, profs-DATA-*.png and the lines of all runs.
        data: glyphs, omniglot, cub, cars, sop, vectors, ...
        path: path of the data.
        seeds: runs of each configuration.
        steps: steps of each run; None: two whole cycles, in which every sample is a representative at least twice.
        jobs: number of processes, or `Workers` that are running already.
        quick: a smoke test: 40 steps, two losses, one learning rate.
        seconds: begin no run after this time; what is missing stays empty, and the next call continues.
        precision: float32, bf16, fp16 or float64; None: bf16 for photographs on a GPU, else float32.
        weights: a file of weights for the network's trunk; None: the published ones, where it has some.
        parts: "table" (Table 1) and "lengths" (Figure 1), or one of them.

    Returns:
        The content of profs-DATA.json.
    """
    for part in parts:
        check_choice("profs", "parts", part, PARTS)
    how: dict[str, Any] = {"data": data, "path": path, "seeds": seeds, "jobs": jobs, "quick": quick, "seconds": seconds}
    how |= {"precision": precision, "weights": weights}
    with open_desk("profs", folder, **how) as desk:
        return _study(desk, steps, parts)


def _study(desk: Desk, steps: int | None, parts: Sequence[str]) -> dict[str, Any]:
    rule, cycle = rule_of(desk.labels)
    steps = steps or (40 if desk.quick else 2 * cycle)
    losses = dict(list(LOSSES.items())[:2]) if desk.quick else LOSSES
    choosers = [losses[name] for name in CHOOSERS if name in losses]
    rate = desk.choose_rate(choosers, desk.per_class(BATCH, SAMPLES), steps=steps)
    cells = _table_cells(desk, losses, steps, rate["rate"]) if "table" in parts else {}
    lengths = sorted({1, *(max(1, round(rule * times)) for times in TIMES)})
    by_length = {
        (name, str(length)): _seeds(desk, losses[name], _batches(desk, "PROFS", length, rule), steps, rate["rate"])
        for name in FIGURE
        for length in lengths
        if name in losses and "lengths" in parts
    }
    known = desk.run([*in_rounds(cells.values()), *in_rounds(by_length.values())])
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "rule": {"M": rule, "cycle": cycle, "rho": 6, "batch": BATCH, "samples": SAMPLES, "proximal": PROXIMAL},
        "clustered": CLUSTERED,
        "table": _nested(known, cells),
        "differences": _differences(known, cells, losses) if cells else {},
        "lengths": lengths,
        "by_length": _nested(known, by_length),
    }
    found["overall"] = _overall(found["differences"])
    whole = desk.write(found, known)
    draw(whole, desk.folder)
    return whole


def rule_of(labels: np.ndarray) -> tuple[int, int]:
    """The steps M of a projection by the rule (ρ = 6), and of a whole cycle: M times the size of the largest class."""
    rule = Representatives(labels, batch_size=BATCH, samples=SAMPLES).steps_per_projection
    return rule, rule * int(np.bincount(labels).max())


def _batches(desk: Desk, variant: str, length: int | None = None, rule: int | None = None) -> Mapping[str, Any]:
    if variant == "plain":
        return desk.per_class(BATCH, SAMPLES)
    options: dict[str, Any] = {"name": "Representatives", "batch_size": BATCH, "samples": SAMPLES}
    if variant == "PROFS + HNCM":
        options["hard_classes"] = True
    # the rule's own length is not written out, so that it is the same run as in the table
    return options if length is None or length == rule else {**options, "steps": length}


def _seeds(desk: Desk, method: Method, batches: Mapping[str, Any], steps: int, rate: float) -> list[Trial]:
    proximal = PROXIMAL if batches["name"] == "Representatives" else 0.0
    return [
        Trial(desk.config(method, batches, steps=steps, rate=rate, seed=seed, proximal=proximal), clustering=CLUSTERED)
        for seed in range(desk.seeds)
    ]


def _table_cells(desk: Desk, losses: Mapping[str, Method], steps: int, rate: float) -> Cells:
    cells = {
        (name, variant): _seeds(desk, method, _batches(desk, variant), steps, rate)
        for name, method in losses.items()
        for variant in VARIANTS
    }
    alone = {} if desk.quick else ALONE
    return cells | {(name, "plain"): _seeds(desk, m, _batches(desk, "plain"), steps, rate) for name, m in alone.items()}


def _nested(known: Mapping[str, Line], cells: Cells) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, column), trials in cells.items():
        found.setdefault(name, {})[column] = cell(known, trials, SCORES)
    return found


def _differences(known: Mapping[str, Line], cells: Cells, losses: Mapping[str, Method]) -> dict[str, Any]:
    """For each loss and score: PROFS - plain, HNCM - PROFS, HNCM - plain, paired by seed."""
    return {
        name: {
            f"{after} less {before}": {
                score: difference(known, cells[name, before], cells[name, after], score) for score in SCORES
            }
            for before, after in COMPARED
        }
        for name in losses
    }


def _overall(differences: Mapping[str, Any]) -> dict[str, Any]:
    """The mean difference over losses, with a t-interval over losses: would another loss gain too?"""
    found: dict[str, Any] = {}
    for before, after in COMPARED:
        name = f"{after} less {before}"
        for score in SCORES:
            there = [each[name][score] for each in differences.values() if each[name][score] is not None]
            found.setdefault(name, {})[score] = spread([each["mean"] for each in there])
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the two figures from the content of profs-DATA.json."""
    rows = {name: {variant: each["recall@1"] for variant, each in row.items()} for name, row in found["table"].items()}
    data, rule = found["data"], found["rule"]["M"]
    if rows:
        figures.dots(folder / f"profs-{data}-table.png", rows, VARIANTS, f"R@1 on unseen classes of {data}, %")
    series = {
        name: [row[str(length)]["recall@1"] for length in found["lengths"]] for name, row in found["by_length"].items()
    }
    panel = figures.Panel(
        f"{data}: PROFS against the length of a projection",
        found["lengths"],
        series,
        "M, steps of a projection",
        log=True,
        mark=(rule, f"M by the rule: {rule}"),
    )
    if series:
        figures.curves(folder / f"profs-{data}-projection.png", panel)


def markdown(found: Mapping[str, Any]) -> str:
    """How the runs were made, the table, the paired differences and recall against M."""
    rule = found["rule"]
    parts = [
        setting(found),
        f"Plain: {rule['batch'] // rule['samples']} classes x {rule['samples']}. PROFS: M = {rule['M']} steps a "
        f"projection (ρ = {rule['rho']}), a whole cycle is {rule['cycle']} steps, λ = {rule['proximal']:g}. NMI and "
        f"F1: k-means on whole test classes of at most {found['clustered']} samples.",
    ]
    if found["table"]:
        parts += [_score_table(found), "Differences, paired by seed:", _difference_table(found)]
    if found["by_length"]:
        parts += ["R@1 against M:", _length_table(found)]
        parts += [f"The same less M = {rule['M']}, paired by seed:", _length_differences(found)]
    return "\n\n".join(parts) + "\n"


def _length_table(found: Mapping[str, Any]) -> str:
    lengths = found["lengths"]
    rows = [
        (name, *(shown(row[str(length)]["recall@1"]) for length in lengths)) for name, row in found["by_length"].items()
    ]
    return table(("loss", *(f"M = {length}" for length in lengths)), rows)


def _length_differences(found: Mapping[str, Any]) -> str:
    lengths, rule = list(map(str, found["lengths"])), str(found["rule"]["M"])
    paired = {name: less(row, rule, "recall@1") for name, row in found["by_length"].items()}
    others = [length for length in lengths if length != rule]
    rows = [(name, *(each[length] for length in others)) for name, each in paired.items()]
    return table(("loss", *(f"M = {length}" for length in others)), rows)


def _score_table(found: Mapping[str, Any]) -> str:
    rows = [
        (name, variant, *(shown(each[score]) for score in SCORES), "; ".join(each["errors"]) or "-")
        for name, row in found["table"].items()
        for variant, each in row.items()
    ]
    return table(("loss", "batches", "R@1", "R@10", "MAP@R", "NMI", "F1", "failed"), rows)


def _difference_table(found: Mapping[str, Any]) -> str:
    names = [f"{after} less {before}" for before, after in COMPARED]
    rows = [
        (loss, *(judged(row[name]["recall@1"]) for name in names), shown(row[names[2]]["nmi"], sign=True))
        for loss, row in found["differences"].items()
    ]
    overall = found["overall"]
    cells = (shown(overall[name]["recall@1"], sign=True) for name in names)
    rows.append(("mean over losses", *cells, shown(overall[names[2]]["nmi"], sign=True)))
    return table(("loss", *(f"R@1, {name}" for name in names), f"NMI, {names[2]}"), rows)

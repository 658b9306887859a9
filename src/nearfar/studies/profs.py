"""Alternating projections (PROFS, Can et al. 2019): every loss plain, with PROFS, and with hard classes.

`reproduce(folder)` trains the baselines of Table 1 of Can et al. 2019 plain (`MPerClass`, B = 128, I = 2), with PROFS
(`Representatives`, only pairs with a representative, the proximal term) and with hard negative classes (HNCM) too,
several seeds each, the same number of steps for all; then its Figure 1: recall against the steps of a projection, M.
Two baselines run with plain batches only, as in the paper: semi-hard triplets, because PROFS uses hard ones, and
Proxy-NCA, because its proxies are representatives already. On request each part of the method runs alone: hard classes
without projections, and projections without the proximal term.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from nearfar._utils.checks import check_choice
from nearfar.batches import Representatives
from nearfar.studies import _training_figures as figures
from nearfar.studies._training import (
    Method,
    Options,
    TrainingStudy,
    difference,
    open_study,
    order_by_seed,
    spread,
    tabulate,
)
from nearfar.studies.grid import Line, Trial

__all__ = ["Cells", "draw", "reproduce", "rule_of"]

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
    # vectors and proxies have length 3, as is usual for this loss: squared distances times 9
    "Proxy-NCA": Method({"name": "ProxyNCA", "scale": 9.0}),
    "Proxy-NCA, own proxy left out": Method({"name": "ProxyNCA", "scale": 9.0, "own": False}),
}
VARIANTS = ("plain", "PROFS", "PROFS + HNCM")
ABLATION = ("plain", "HNCM", "projections", "PROFS", "PROFS + HNCM")
FIRST = {  # losses whose ablation is complete before that of the others begins; the paper does not have the third
    "Contrastive-hard": LOSSES["Contrastive-hard"],
    "Triplet-hard": LOSSES["Triplet-hard"],
    "Multi-similarity": Method({"name": "MultiSimilarity"}),
}
PARTS = ("table", "lengths", "first", "ablation")
# losses that choose the learning rate: they fit the formulation of Can et al.
CHOOSERS = ("Contrastive-hard", "Triplet-hard", "Margin-hard")
FIGURE = ("Contrastive-hard", "Triplet-hard", "N-pair", "Margin-hard")  # the four of Can et al.'s Figure 1
TIMES = (0.1, 0.3, 1.0, 3.0, 10.0)  # M over the rule's, besides M = 1
RECALLS = (1, 2, 4, 8, 10)
CLUSTERED = 3000
COMPARED = (("plain", "PROFS"), ("PROFS", "PROFS + HNCM"), ("plain", "PROFS + HNCM"))
COMPARED_ALONE = (*COMPARED, ("plain", "HNCM"), ("plain", "projections"), ("projections", "PROFS"))

Cells = dict[tuple[str, str], list[Trial]]


def reproduce(
    folder: str | Path, *, steps: int | None = None, parts: Sequence[str] = PARTS[:2], **options: Unpack[Options]
) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    Args:
        folder: the folder for profs-DATA.json, profs-DATA-*.png and the lines of all runs.
        steps: steps of each run; None: two whole cycles, in which every sample is a representative at least twice.
        parts: some of "table" (Table 1), "lengths" (Figure 1), "first": Table 1 with each part of the method alone, for
            contrastive, triplets and multi-similarity, and "ablation": the same for all losses, the first three first.
        **options: `data`, `path`, `seeds`, `jobs`, `quick`, `seconds`, `precision`, `weights`, `network`, `width`,
            `checkpoints` and `changes`, as in `nearfar reproduce`; changes are sections of the configuration that
            replace the usual keys.

    Returns:
        The content of profs-DATA.json.
    """
    for part in parts:
        check_choice("profs", "parts", part, PARTS)
    with open_study("profs", folder, **options) as study:
        return _run(study, steps, parts)


def _run(study: TrainingStudy, steps: int | None, parts: Sequence[str]) -> dict[str, Any]:
    rule, cycle = rule_of(study.labels)
    steps = steps or (40 if study.quick else 2 * cycle)
    alone = bool({"first", "ablation"} & {*parts})
    variants, losses = (ABLATION, FIRST | LOSSES) if alone else (VARIANTS, LOSSES)
    losses = losses if "ablation" in parts or not alone else FIRST
    losses = dict(list(losses.items())[:2]) if study.quick else losses
    choosers = [losses[name] for name in CHOOSERS if name in losses]
    rate = study.choose_rate(choosers, study.per_class(BATCH, SAMPLES), steps=steps)
    cells = _table_cells(study, losses, steps, rate["rate"], variants) if alone or "table" in parts else {}
    first = [trials for (name, _), trials in cells.items() if name in FIRST] if alone else []
    # a projection longer than the run is the run
    lengths = sorted({min(steps, length) for length in (1, *(max(1, round(rule * times)) for times in TIMES))})
    by_length = {
        (name, str(length)): _trials(study, losses[name], "PROFS", steps, rate["rate"], length)
        for name in FIGURE
        for length in lengths
        if name in losses and "lengths" in parts
    }
    known = study.run([*order_by_seed(first), *order_by_seed(cells.values()), *order_by_seed(by_length.values())])
    scores = study.scores(RECALLS, "map_at_r", "nmi", "f1")
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "rule": {"M": rule, "cycle": cycle, "rho": 6, "batch": BATCH, "samples": SAMPLES, "proximal": PROXIMAL},
        "clustered": CLUSTERED,
        "scores": scores,
        "variants": variants,
        "table": tabulate(known, cells, scores),
        "differences": _differences(known, cells, losses, scores) if cells else {},
        "lengths": lengths,
        "by_length": tabulate(known, by_length, scores),
    }
    found["overall"] = _overall(found["differences"])
    return study.write(found, known, draw)


def rule_of(labels: np.ndarray) -> tuple[int, int]:
    """The steps M of a projection by the rule (ρ = 6), and of a whole cycle: M times the size of the largest class."""
    rule = Representatives(labels, batch_size=BATCH, samples=SAMPLES).steps_per_projection
    return rule, rule * int(np.bincount(labels).max())


def _batches(study: TrainingStudy, variant: str, steps: int, length: int) -> Mapping[str, Any]:
    if variant == "plain":
        return study.per_class(BATCH, SAMPLES)
    options: dict[str, Any] = {"name": "Representatives", "batch_size": BATCH, "samples": SAMPLES}
    if "HNCM" in variant:
        options["hard_classes"] = True
    if variant == "HNCM":  # every step has new representatives, which only the table of classes knows
        return {**options, "steps": 1, "all_pairs": True}
    # the rule's own length is left out, so that the run is the same as in the table
    rule, _ = rule_of(study.labels)
    return options if length == min(rule, steps) else {**options, "steps": length}


def _trials(
    study: TrainingStudy, method: Method, variant: str, steps: int, rate: float, length: int | None = None
) -> list[Trial]:
    """The runs of a variant; `length` steps a projection, by default those of the rule."""
    batches = _batches(study, variant, steps, length or min(rule_of(study.labels)[0], steps))
    proximal = PROXIMAL if variant.startswith("PROFS") else 0.0
    return study.trials(
        method, batches, steps=steps, rate=rate, proximal=proximal, score={"clustering": CLUSTERED, "ks": RECALLS}
    )


def _table_cells(
    study: TrainingStudy, losses: Mapping[str, Method], steps: int, rate: float, variants: Sequence[str] = VARIANTS
) -> Cells:
    cells = {
        (name, variant): _trials(study, method, variant, steps, rate)
        for name, method in losses.items()
        for variant in variants
    }
    baselines = {} if study.quick or losses is FIRST else ALONE
    return cells | {(name, "plain"): _trials(study, each, "plain", steps, rate) for name, each in baselines.items()}


def _differences(
    known: Mapping[str, Line], cells: Cells, losses: Mapping[str, Method], scores: Sequence[str]
) -> dict[str, Any]:
    """For each loss and score: the differences of the variants that are compared, paired by seed."""
    return {
        name: {
            f"{after} less {before}": {
                score: difference(known, cells[name, before], cells[name, after], score) for score in scores
            }
            for before, after in COMPARED_ALONE
            if {(name, before), (name, after)} <= cells.keys()
        }
        for name in losses
    }


def _overall(differences: Mapping[str, Any]) -> dict[str, Any]:
    """The mean difference over losses, with a t-interval over losses."""
    found: dict[str, Any] = {}
    for name, scores in next(iter(differences.values()), {}).items():
        for score in scores:
            there = [each[name][score] for each in differences.values() if each[name][score] is not None]
            found.setdefault(name, {})[score] = spread([each["mean"] for each in there])
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the two figures from the content of profs-DATA.json."""
    rows = {name: {variant: each["recall@1"] for variant, each in row.items()} for name, row in found["table"].items()}
    rows = {name: row for name, row in rows.items() if any(row.values())}
    data, stem, rule = found["data"], figures.stem(found), found["rule"]["M"]
    if rows:
        variants = found.get("variants", VARIANTS)
        figures.dots(folder / f"{stem}-table.png", rows, variants, f"R@1 on unseen classes of {data}, %")
    series = {
        name: [row[str(length)]["recall@1"] for length in found["lengths"]] for name, row in found["by_length"].items()
    }
    panel = figures.Panel(
        f"{data}: PROFS against the length of a projection",
        found["lengths"],
        series,
        "M, steps of a projection",
        log=True,
        mark=(rule, f"M by the rule: {rule}") if rule <= found["steps"] else None,
    )
    if series:
        figures.curves(folder / f"{stem}-projection.png", panel)

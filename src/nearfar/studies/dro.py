"""Distributionally robust losses (Qi et al. 2020): recall against pair imbalance, against K, and grouped KL.

`reproduce(folder)` runs Figure 1 of Qi et al. 2020 (batches of 80 to 640 with 5 samples per class, in which positive
pairs become rarer), its Figure 2 (K of DRO-TopK at B = 640), and its Table 2 (grouped KL with γ from 1 to
.001 beside lifted structure and multi-similarity, B = 80, 64 dimensions). All losses except these two use the
hinge [m ± (λ - s)]₊ with m = .2 and λ = .5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from nearfar.studies import _training_figures as figures
from nearfar.studies._training import (
    Method,
    Options,
    TrainingStudy,
    difference,
    open_study,
    order_by_seed,
    summarize,
    tabulate,
)
from nearfar.studies.grid import Line, Trial

__all__ = ["draw", "grouped_methods", "imbalance_methods", "reproduce"]

STEPS = 1000
SAMPLES = 5
SIZES = (80, 160, 320, 640)
KS = (80, 320, 640, 960, 1280, 1600, 1920, 2560, 20480)  # the paper's six from 640 on, and three others
GAMMAS = (1.0, 0.1, 0.01, 0.001)
SMALL, NARROW = 80, 64  # the batch and the width of Table 2
RECALLS = (1, 2, 4, 8, 16, 32)
SCORES = (*(f"recall@{k}" for k in RECALLS), "map_at_r")
HINGE = {"pair": "Hinge", "similarity": "Cosine"}
MS = Method({"name": "MultiSimilarity"})
LIFTED = Method({"name": "GeneralizedLifted", "margin": 0.0, "similarity": "Cosine"})


def imbalance_methods(size: int) -> dict[str, Method]:
    """The five methods of Figure 1 for a batch size; K = 2B."""
    return {
        "DRO-TopK": Method({"name": "DroTopK", "k": 2 * size}),
        "DRO-TopK-PN": Method({"name": "DroTopKPN", "k": 2 * size}),
        "DRO-KL": Method({"name": "DroKL", "gamma": 0.1}),
        # the mean of the hinge over the pairs that the miner keeps
        "semi-hard": Method({"name": "BinomialDeviance", **HINGE, "miner": "SemiHard"}),
        "distance-weighted": Method({"name": "BinomialDeviance", **HINGE, "miner": "DistanceWeighted"}),
    }


def grouped_methods() -> dict[str, Method]:
    """The rows of Table 2."""
    grouped = {f"DRO-KL-G, γ = {gamma:g}": Method({"name": "DroKLGrouped", "gamma": gamma}) for gamma in GAMMAS}
    return {"MS": MS, "LS": LIFTED} | grouped


def reproduce(folder: str | Path, *, steps: int | None = None, **options: Unpack[Options]) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    Args:
        folder: the folder for dro-DATA.json, dro-DATA-*.png and the lines of all runs.
        steps: steps of each run; None: 1000. Larger batches thus see more samples.
        **options: `data`, `path`, `seeds`, `jobs`, `quick`, `seconds`, `precision`, `weights` and `changes`, as in
            `nearfar reproduce`; changes are sections of the configuration that replace the usual keys.

    Returns:
        The content of dro-DATA.json.
    """
    with open_study("dro", folder, **options) as study:
        return _run(study, steps)


def _run(study: TrainingStudy, steps: int | None) -> dict[str, Any]:
    steps = steps or (30 if study.quick else STEPS)
    rate = study.choose_rate([MS, LIFTED], study.per_class(SMALL, SAMPLES), steps=steps)
    sizes, ks = (SIZES[:2], KS[:3]) if study.quick else (SIZES, KS)
    ratios = {str(size): _ratio(study, size) for size in sizes}
    imbalance = {
        (name, str(size)): _trials(study, method, size, steps, rate["rate"])
        for size in sizes
        for name, method in imbalance_methods(size).items()
    }
    by_k = {str(k): _trials(study, Method({"name": "DroTopK", "k": k}), sizes[-1], steps, rate["rate"]) for k in ks}
    grouped = {
        name: _trials(study, method, SMALL, steps, rate["rate"], width=NARROW)
        for name, method in list(grouped_methods().items())[: 4 if study.quick else None]
    }
    known = study.run(order_by_seed([*imbalance.values(), *by_k.values(), *grouped.values()]))
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "sizes": list(sizes),
        "ratios": ratios,
        "imbalance": tabulate(known, imbalance, SCORES),
        "ks": list(ks),
        "by_k": {k: summarize(known, trials, SCORES) for k, trials in by_k.items()},
        "grouped": {name: summarize(known, trials, SCORES) for name, trials in grouped.items()},
        "claims": _claims(known, imbalance, grouped, sizes),
    }
    whole = study.write(found, known)
    draw(whole, study.folder)
    return whole


def _trials(
    study: TrainingStudy, method: Method, size: int, steps: int, rate: float, width: int | None = None
) -> list[Trial]:
    batches = study.per_class(size, SAMPLES)
    return study.trials(method, batches, steps=steps, rate=rate, width=width, score={"ks": RECALLS})


def _ratio(study: TrainingStudy, size: int) -> float:
    """The ratio of positive to negative pairs of a batch."""
    rows = study.per_class(size, SAMPLES)["classes"] * SAMPLES
    return (SAMPLES - 1) / float(rows - SAMPLES)


def _claims(
    known: Mapping[str, Line],
    imbalance: Mapping[tuple[str, str], list[Trial]],
    grouped: Mapping[str, list[Trial]],
    sizes: tuple[int, ...],
) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020, each as a paired difference of R@1 that should be above zero."""

    def claim(words: str, better: list[Trial], worse: list[Trial]) -> dict[str, Any]:
        return {"claim": words, "difference": difference(known, worse, better, "recall@1")}

    small, large = str(sizes[0]), str(sizes[-1])
    methods = list(imbalance_methods(sizes[0]))
    found = [
        claim(
            f"{name} gains from larger batches ({large} less {small})", imbalance[name, large], imbalance[name, small]
        )
        for name in methods
    ]
    found += [
        claim(f"TopK-PN beats {name} at B = {large}", imbalance["DRO-TopK-PN", large], imbalance[name, large])
        for name in methods
        if name != "DRO-TopK-PN"
    ]
    if "MS" in grouped:
        found.append(claim("MS beats LS", grouped["MS"], grouped["LS"]))
    for name in (name for name in grouped if name not in ("MS", "LS")):
        found.append(claim(f"{name} beats LS", grouped[name], grouped["LS"]))
        found.append(claim(f"{name} beats MS", grouped[name], grouped["MS"]))
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the figures from the content of dro-DATA.json."""
    data, sizes = found["data"], found["sizes"]
    series = {name: [row[str(size)]["recall@1"] for size in sizes] for name, row in found["imbalance"].items()}
    first = figures.Panel(
        f"{data}: positive pairs become rarer to the right",
        sizes,
        series,
        "B, 5 samples a class (positive : negative pairs)",
        log=True,
        names=[f"{size}\n(1 : {1 / found['ratios'][str(size)]:.0f})" for size in sizes],
    )
    second = figures.Panel(
        f"{data}: DRO-TopK at B = {sizes[-1]}",
        found["ks"],
        {f"R@{k}": [found["by_k"][str(size)][f"recall@{k}"] for size in found["ks"]] for k in (1, 2, 4)},
        "K",
        log=True,
        ylabel="R@k, %",
    )
    figures.curves(folder / f"dro-{data}-imbalance.png", first)
    figures.curves(folder / f"dro-{data}-k.png", second)

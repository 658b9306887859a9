"""Distributionally robust losses (Qi et al. 2020): recall against pair imbalance, against K, and beside other losses.

`reproduce(folder)` runs Figure 1 of Qi et al. 2020 (batches of 80 to 640 with 5 samples per class, in which positive
pairs become rarer), its Figure 2 (K of DRO-TopK at B = 640), its Tables 2 and 4 (grouped KL with γ from 1 to .001
beside lifted structure and multi-similarity, B = 80, 64 dimensions), and its Tables 1 and 3 (all variants); on request
its Figure 3, the time of a step. Figure 5 is Figure 1 with `width=512`, Figure 4 is Table 1 with `seeds=5`. K is the
paper's 2B, with 8B beside it. All losses but LS, MS and HAP2S use the hinge [m ± (λ - s)]₊ with m = .2 and λ = .5, or
the binomial deviance where it is named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from nearfar._utils.checks import check_choice
from nearfar.studies import _step_time as step_time
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

__all__ = ["PARTS", "draw", "grouped_methods", "imbalance_methods", "reproduce", "variants"]

STEPS = 1000
SAMPLES = 5
SIZES = (80, 160, 320, 480, 640)
KS = (80, 320, 640, 960, 1280, 1600, 1920, 2560, 5120, 20480)  # the paper's six from 640 on, 8B, and three others
GAMMAS = (1.0, 0.1, 0.01, 0.001)
SMALL, NARROW = 80, 64  # the batch and the width of Table 2
RECALLS = (1, 2, 4, 8, 16, 32)
PARTS = ("imbalance", "k", "grouped", "variants", "time")
HINGE = {"pair": "Hinge", "similarity": "Cosine"}
MS = Method({"name": "MultiSimilarity"})
LIFTED = Method({"name": "GeneralizedLifted", "margin": 0.0, "similarity": "Cosine"})  # eq. (3)
HAP2S = Method({"name": "HAP2S"})


def sampled(size: int) -> Method:
    """DRO-KL as the authors ran it: 4B ordered pairs drawn from p*."""
    return Method({"name": "DroKL", "gamma": 0.1, "samples": 4 * size})


def imbalance_methods(size: int) -> dict[str, Method]:
    """The methods of Figure 1 for a batch size; K = 2B, as in the paper, and 8B."""
    return {
        "DRO-TopK": Method({"name": "DroTopK", "k": 2 * size}),
        "DRO-TopK-PN": Method({"name": "DroTopKPN", "k": 2 * size}),
        "DRO-KL": Method({"name": "DroKL", "gamma": 0.1}),
        # the mean of the hinge over the pairs that the miner keeps
        "semi-hard": Method({"name": "BinomialDeviance", **HINGE, "miner": "SemiHard"}),
        "distance-weighted": Method({"name": "BinomialDeviance", **HINGE, "miner": "DistanceWeighted"}),
        "DRO-KL, sampled": sampled(size),
        "DRO-TopK, K = 8B": Method({"name": "DroTopK", "k": 8 * size}),
        "DRO-TopK-PN, K = 8B": Method({"name": "DroTopKPN", "k": 8 * size}),
    }


def grouped_methods() -> dict[str, Method]:
    """The rows of Table 2."""
    grouped = {f"DRO-KL-G, γ = {gamma:g}": Method({"name": "DroKLGrouped", "gamma": gamma}) for gamma in GAMMAS}
    return {"MS": MS, "LS": LIFTED} | grouped


def variants(size: int) -> dict[str, Method]:
    """The rows of Tables 1 and 3 that share a network: MS, HAP2S, and the variants of DRO."""
    found = {"MS": MS, "HAP2S": HAP2S, "DRO-KL, sampled": sampled(size)}
    for times in (2, 8):
        for name in ("TopK", "TopKPN"):
            for pair in ("hinge", "binomial"):
                loss = {"name": f"Dro{name}", "k": times * size} | ({"pair": "Logistic"} if pair == "binomial" else {})
                found[f"DRO-{name.replace('KPN', 'K-PN')}, {pair}, K = {times}B"] = Method(loss)
    return found


def reproduce(
    folder: str | Path, *, steps: int | None = None, parts: Sequence[str] = PARTS[:-1], **options: Unpack[Options]
) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    Args:
        folder: the folder for dro-DATA.json, dro-DATA-*.png and the lines of all runs.
        steps: steps of each run; None: 1000. Larger batches thus see more samples.
        parts: some of "imbalance" (Figure 1), "k" (Figure 2), "grouped" (Tables 2 and 4), "variants" (Tables 1 and 3)
            and "time" (Figure 3: dro-DATA-time.png).
        **options: `data`, `path`, `seeds`, `jobs`, `quick`, `seconds`, `precision`, `weights`, `network`, `width`,
            `checkpoints` and `changes`, as in `nearfar reproduce`; changes are sections of the configuration that
            replace the usual keys.

    Returns:
        The content of dro-DATA.json.
    """
    for part in parts:
        check_choice("dro", "parts", part, PARTS)
    with open_study("dro", folder, **options) as study:
        return _run(study, steps, parts)


def _run(study: TrainingStudy, steps: int | None, parts: Sequence[str]) -> dict[str, Any]:
    steps = steps or (30 if study.quick else STEPS)
    trained = any(part != "time" for part in parts)
    rate = study.choose_rate([MS, LIFTED], study.per_class(SMALL, SAMPLES), steps=steps) if trained else {"rate": 0.0}
    sizes, ks = (SIZES[:2], KS[:3]) if study.quick else (SIZES, KS)
    large = 640 if study.data == "inshop" and not study.quick else SMALL
    few = 4 if study.quick else None

    def cells(part: str, methods: Mapping[str, Method], size: int, **how: Any) -> dict[str, list[Trial]]:
        chosen = list(methods.items())[:few] if part in parts else []
        return {name: _trials(study, method, size, steps, rate["rate"], **how) for name, method in chosen}

    by_size = {size: cells("imbalance", imbalance_methods(size), size) for size in sizes}
    imbalance = {(name, str(size)): row[name] for size, row in by_size.items() for name in row}
    top = {str(k): Method({"name": "DroTopK", "k": k}) for k in ks}
    by_k = cells("k", top, sizes[-1])
    grouped = cells("grouped", grouped_methods(), SMALL, width=NARROW)
    table = cells("variants", variants(large), large)
    known = study.run(order_by_seed([*imbalance.values(), *by_k.values(), *grouped.values(), *table.values()]))
    scores = study.scores(RECALLS, "map_at_r")
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "recalls": study.recalls(RECALLS),
        "scores": scores,
        "sizes": list(sizes) if imbalance else [],
        "ratios": {str(size): _ratio(study, size) for size in sizes},
        "imbalance": tabulate(known, imbalance, scores),
        "ks": [int(k) for k in by_k],
        "batch": {"k": sizes[-1], "variants": large},
        "by_k": {k: summarize(known, trials, scores) for k, trials in by_k.items()},
        "grouped": {name: summarize(known, trials, scores) for name, trials in grouped.items()},
        "variants": {name: summarize(known, trials, scores) for name, trials in table.items()},
        "claims": _claims(known, imbalance, grouped, table, sizes),
        "time": step_time.measure(SIZES[: 2 if study.quick else None]) if "time" in parts else [],
    }
    return study.write(found, known, draw)


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
    table: Mapping[str, list[Trial]],
    sizes: tuple[int, ...],
) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020, each as a paired difference of R@1 that should be above zero."""

    def claim(words: str, better: list[Trial], worse: list[Trial]) -> dict[str, Any]:
        return {"claim": words, "difference": difference(known, worse, better, "recall@1")}

    small, large = str(sizes[0]), str(sizes[-1])
    methods = list(dict.fromkeys(name for name, _ in imbalance))
    found = [
        claim(
            f"{name} gains from larger batches ({large} less {small})", imbalance[name, large], imbalance[name, small]
        )
        for name in methods
    ]
    found += [
        claim(f"TopK-PN beats {name} at B = {large}", imbalance["DRO-TopK-PN", large], imbalance[name, large])
        for name in methods
        if not name.startswith("DRO-TopK-PN")
    ]
    found += [claim(f"{name} beats MS", table[name], table["MS"]) for name in table if name.startswith("DRO")]
    if "MS" in grouped:
        found.append(claim("MS beats LS", grouped["MS"], grouped["LS"]))
    for name in (name for name in grouped if name not in ("MS", "LS")):
        found.append(claim(f"{name} beats LS", grouped[name], grouped["LS"]))
        found.append(claim(f"{name} beats MS", grouped[name], grouped["MS"]))
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the figures from the content of dro-DATA.json."""
    data, stem, sizes = found["data"], figures.stem(found), found["sizes"]
    if found["imbalance"]:
        series = {name: [row[str(size)]["recall@1"] for size in sizes] for name, row in found["imbalance"].items()}
        first = figures.Panel(
            f"{data}: positive pairs become rarer to the right",
            sizes,
            series,
            "B, 5 samples a class (positive : negative pairs)",
            log=True,
            names=[f"{size}\n(1 : {1 / found['ratios'][str(size)]:.0f})" for size in sizes],
        )
        figures.curves(folder / f"{stem}-imbalance.png", first)
    if found["by_k"]:
        second = figures.Panel(
            f"{data}: DRO-TopK at B = {batch_of(found, 'k')}",
            found["ks"],
            {
                f"R@{k}": [found["by_k"][str(size)][f"recall@{k}"] for size in found["ks"]]
                for k in found.get("recalls", RECALLS)[:3]
            },
            "K",
            log=True,
            ylabel="R@k, %",
        )
        figures.curves(folder / f"{stem}-k.png", second)
    if found.get("time"):
        step_time.draw(found["time"], folder / f"{stem}-time.png")


def batch_of(found: Mapping[str, Any], part: str) -> int:
    """The batch size of a part of the results."""
    return int(found["batch"][part] if "batch" in found else found["sizes"][-1])

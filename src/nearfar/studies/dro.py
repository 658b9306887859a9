"""Distributionally robust losses (Qi et al. 2020): recall against pair imbalance, against K, and grouped KL.

`reproduce(folder)` runs Figure 1 of Qi et al. 2020 (batches of 80 to 640 with 5 samples per class: which loss is robust
as positive pairs become rarer?), its Figure 2 (K of DRO-TopK at B = 640), and its Table 2 (grouped KL with γ from 1 to
.001 beside lifted structure and multi-similarity, B = 80, 64 dimensions). The pair loss of all but these two is the
hinge [m ± (λ - s)]₊ with m = .2 and λ = .5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar.studies import _figures as figures
from nearfar.studies._desk import Desk, Method, cell, difference, in_rounds, less, open_desk, setting, shown, table
from nearfar.studies.grid import Line, Trial, Workers

__all__ = ["Cells", "draw", "grouped_methods", "imbalance_methods", "markdown", "reproduce"]

STEPS = 1000
SAMPLES = 5
SIZES = (80, 160, 320, 640)
LARGEST = SIZES[-1]
KS = (80, 320, 640, 960, 1280, 1600, 1920, 2560, 20480)  # the paper's six from 640 on, and what lies beyond
GAMMAS = (1.0, 0.1, 0.01, 0.001)
SMALL, NARROW = 80, 64  # the batch and the width of Table 2
RECALLS = (1, 2, 4, 8, 16, 32)
SCORES = (*(f"recall@{k}" for k in RECALLS), "map_at_r")
HINGE = {"pair": "Hinge", "similarity": "Cosine"}
MS = Method({"name": "MultiSimilarity"})
LIFTED = Method({"name": "GeneralizedLifted", "margin": 0.0, "similarity": "Cosine"})

Cells = dict[str, list[Trial]]


def imbalance_methods(size: int) -> dict[str, Method]:
    """The five methods of Figure 1 for a batch size; K = 2B."""
    return {
        "DRO-TopK": Method({"name": "DroTopK", "k": 2 * size}),
        "DRO-TopK-PN": Method({"name": "DroTopKPN", "k": 2 * size}),
        "DRO-KL": Method({"name": "DroKL", "gamma": 0.1}),
        # the mean of the hinge over what the miner leaves
        "semi-hard": Method({"name": "BinomialDeviance", **HINGE, "miner": "SemiHard"}),
        "distance-weighted": Method({"name": "BinomialDeviance", **HINGE, "miner": "DistanceWeighted"}),
    }


def grouped_methods() -> dict[str, Method]:
    """The rows of Table 2."""
    grouped = {f"DRO-KL-G, γ = {gamma:g}": Method({"name": "DroKLGrouped", "gamma": gamma}) for gamma in GAMMAS}
    return {"MS": MS, "LS": LIFTED} | grouped


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
        folder: the folder for dro-DATA.json, dro-DATA-*.png and the lines of all runs.
        data: glyphs, omniglot, cub, cars, inshop, vectors, ...
        path: path of the data.
        seeds: runs of each configuration.
        steps: steps of each run; None: 1000. Larger batches thus see more samples.
        jobs: number of processes, or `Workers` that are running already.
        quick: a smoke test: 30 steps, two batch sizes, three K, two γ, one learning rate.
        seconds: begin no run after this time; what is missing stays empty, and the next call continues.
        precision: float32, bf16, fp16 or float64; None: bf16 for photographs on a GPU, else float32.
        weights: a file of weights for the network's trunk; None: the published ones, where it has some.

    Returns:
        The content of dro-DATA.json.
    """
    how: dict[str, Any] = {"data": data, "path": path, "seeds": seeds, "jobs": jobs, "quick": quick, "seconds": seconds}
    how |= {"precision": precision, "weights": weights}
    with open_desk("dro", folder, **how) as desk:
        return _study(desk, steps)


def _study(desk: Desk, steps: int | None) -> dict[str, Any]:
    steps = steps or (30 if desk.quick else STEPS)
    rate = desk.choose_rate([MS, LIFTED], desk.per_class(SMALL, SAMPLES), steps=steps)
    sizes, ks = (SIZES[:2], KS[:3]) if desk.quick else (SIZES, KS)
    ratios = {str(size): _ratio(desk, size) for size in sizes}
    imbalance = {
        f"{name}|{size}": _seeds(desk, method, size, steps, rate["rate"])
        for size in sizes
        for name, method in imbalance_methods(size).items()
    }
    by_k = {str(k): _seeds(desk, Method({"name": "DroTopK", "k": k}), sizes[-1], steps, rate["rate"]) for k in ks}
    grouped = {
        name: _seeds(desk, method, SMALL, steps, rate["rate"], width=NARROW)
        for name, method in list(grouped_methods().items())[: 4 if desk.quick else None]
    }
    known = desk.run(in_rounds([*imbalance.values(), *by_k.values(), *grouped.values()]))
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "sizes": list(sizes),
        "ratios": ratios,
        "imbalance": _by_name(known, imbalance),
        "ks": list(ks),
        "by_k": {k: cell(known, trials, SCORES) for k, trials in by_k.items()},
        "grouped": {name: cell(known, trials, SCORES) for name, trials in grouped.items()},
        "claims": _claims(known, imbalance, grouped, sizes),
    }
    whole = desk.write(found, known)
    draw(whole, desk.folder)
    return whole


def _seeds(desk: Desk, method: Method, size: int, steps: int, rate: float, width: int | None = None) -> list[Trial]:
    batches = desk.per_class(size, SAMPLES)
    return [
        Trial(desk.config(method, batches, steps=steps, rate=rate, seed=seed, width=width), ks=RECALLS)
        for seed in range(desk.seeds)
    ]


def _ratio(desk: Desk, size: int) -> float:
    """The ratio of positive to negative pairs of a batch."""
    rows = desk.per_class(size, SAMPLES)["classes"] * SAMPLES
    return (SAMPLES - 1) / float(rows - SAMPLES)


def _by_name(known: Mapping[str, Line], cells: Cells) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, trials in cells.items():
        name, size = key.split("|")
        found.setdefault(name, {})[size] = cell(known, trials, SCORES)
    return found


def _claims(
    known: Mapping[str, Line], imbalance: Cells, grouped: Cells, sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020, each as a paired difference of R@1 that should be above zero."""

    def claim(words: str, cells: Cells, better: str, worse: str) -> dict[str, Any]:
        found = difference(known, cells[worse], cells[better], "recall@1")
        return {"claim": words, "difference": found}

    small, large = str(sizes[0]), str(sizes[-1])
    methods = list(imbalance_methods(sizes[0]))
    found = [
        claim(
            f"{name} gains from larger batches ({large} less {small})", imbalance, f"{name}|{large}", f"{name}|{small}"
        )
        for name in methods
    ]
    found += [
        claim(f"TopK-PN beats {name} at B = {large}", imbalance, f"DRO-TopK-PN|{large}", f"{name}|{large}")
        for name in methods
        if name != "DRO-TopK-PN"
    ]
    if "MS" in grouped:
        found.append(claim("MS beats LS", grouped, "MS", "LS"))
    for name in (name for name in grouped if name not in ("MS", "LS")):
        found.append(claim(f"{name} beats LS", grouped, name, "LS"))
        found.append(claim(f"{name} beats MS", grouped, name, "MS"))
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the figures from the content of dro-DATA.json."""
    data, sizes = found["data"], found["sizes"]
    series = {name: [row[str(size)]["recall@1"] for size in sizes] for name, row in found["imbalance"].items()}
    first = figures.Panel(
        f"{data}: positive pairs grow rarer to the right",
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


def markdown(found: Mapping[str, Any]) -> str:
    """How the runs were made, the three tables, and the paper's claims as paired differences."""
    sizes, head = found["sizes"], ("method", *(f"R@{k}" for k in RECALLS), "MAP@R", "failed")

    def row(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
        return (name, *(shown(each[score]) for score in SCORES), "; ".join(each["errors"]) or "-")

    parts = [
        setting(found),
        "R@1 against the imbalance, 5 samples a class, K = 2B:",
        table(
            ("method", *(f"B = {size} (1 : {1 / found['ratios'][str(size)]:.0f})" for size in sizes)),
            [
                (name, *(shown(each[str(size)]["recall@1"]) for size in sizes))
                for name, each in found["imbalance"].items()
            ],
        ),
        f"DRO-TopK against K at B = {sizes[-1]}:",
        table(("K", *head[1:]), [row(k, each) for k, each in found["by_k"].items()]),
        f"R@1 less that of K = 2B = {2 * sizes[-1]}, paired by seed:",
        _k_differences(found["by_k"], str(2 * sizes[-1])),
        f"Grouped KL beside its kin, B = {SMALL}, width {NARROW}:",
        table(head, [row(name, each) for name, each in found["grouped"].items()]),
        "What the paper says, as paired differences of R@1 (above zero: it holds here):",
        table(("claim", "difference", "verdict"), [_claim(each) for each in found["claims"]]),
    ]
    return "\n\n".join(parts) + "\n"


def _k_differences(by_k: Mapping[str, Any], base: str) -> str:
    found = {k: text for k, text in less(by_k, base, "recall@1").items() if k != base}
    return table([f"K = {k}" for k in found], [list(found.values())])


def _claim(each: Mapping[str, Any]) -> tuple[str, str, str]:
    words = {"better": "holds", "worse": "the opposite", "cannot tell": "cannot tell"}
    found = each["difference"]
    return each["claim"], shown(found, sign=True), "-" if found is None else words[found["verdict"]]

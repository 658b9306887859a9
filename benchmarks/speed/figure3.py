"""Qi et al.'s Figure 3: time of a step at d = 1024, B = 80 ... 640, of DRO and the usual ways to mine, ours and PML's.

    python benchmarks/speed/figure3.py                 a minute or two on one core

The contestants of one size take turns; medians of nine. Five rows a class, as the paper draws them, and its losses:
the margin loss on pairs, K = 2B, DRO-KL sampled, LS of eq. (3) (`nearfar reproduce dro --parts time` draws ours alone).
pytorch-metric-learning (PML) has no DRO losses; theirs is the time of the loss that DRO is meant to replace.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar._utils.files import atomic_write, write_text
from nearfar.bench import PEER, Limits, Patience, Plan, Task, peak
from nearfar.bench._pages import as_json, markdown
from nearfar.bench._study import about
from nearfar.bench._subjects import Step
from nearfar.bench._timing import LIMIT, threads, time_in_turns
from nearfar.studies._step_time import WIDTH, batch, losses_of

RESULTS = Path(__file__).parents[1] / "results"
SIZES = (80, 160, 320, 480, 640)
PEERS = {
    "PML semi-hard": "Triplet semihard",
    "PML distance-weighted": "miner DistanceWeighted",
    "PML MS": "MultiSimilarity + miner",
    "PML LS": "GeneralizedLifted",
}
BARS = {"PML MS": 1.3, "PML semi-hard": 2.0, "PML distance-weighted": 5.0}
"""How many times as long PML takes as DRO-TopK, at least."""


def theirs(size: int) -> tuple[dict[str, Step], dict[str, str]]:
    """PML's, and why some of them cannot take a step."""
    tasks = {name: Task(subject, PEER, size, WIDTH) for name, subject in PEERS.items()}
    failed = {name: peak(task, Limits(4096, 20)).failed for name, task in tasks.items()}
    return {name: tasks[name].step() for name, why in failed.items() if not why}, {k: v for k, v in failed.items() if v}


def measure(sizes: tuple[int, ...], patience: Patience) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        peers, failed = theirs(size)
        timed = time_in_turns({**losses_of(size), **peers}, *batch(size), patience)
        ms = {name: 1e3 * seconds for name, seconds in timed.seconds.items()}
        ratios = {name: ms[name] / ms["DRO-TopK"] for name in ms if name != LIMIT}
        found.append({"rows": size, "rounds": timed.rounds, "ms": ms, "over_dro_topk": ratios, "failed": failed})
        print(size, {name: round(value, 2) for name, value in ms.items()}, flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    names = [name for name in (*losses_of(8), *PEERS) if name in found[0]["ms"]]
    lines = [
        [name, *(_ms(each["ms"].get(name), each["failed"].get(name)) for each in found)] for name in (LIMIT, *names)
    ]
    head = ["ms", *(f"B = {each['rows']}" for each in found)]
    ratios = [
        [f"{name} / DRO-TopK", *(_times(each["over_dro_topk"].get(name)) for each in found),
         f">= {BARS[name]}" if name in BARS else "", _verdict(found, name)]
        for name in names if name.startswith("PML")
    ]  # fmt: skip
    return markdown(head, lines) + "\n\n" + markdown(["time over DRO-TopK's", *head[1:], "goal", ""], ratios)


def _verdict(found: list[dict[str, Any]], name: str) -> str:
    if name not in BARS:
        return ""
    short = [str(each["rows"]) for each in found if each["over_dro_topk"].get(name, 1e9) < BARS[name]]
    return f"missed at {', '.join(short)}" if short else "met"


def _ms(value: float | None, failed: str | None) -> str:
    return failed or "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def draw(file: Path, found: list[dict[str, Any]], known: Mapping[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = {"DRO-TopK": "#0f6b66", "DRO-TopK-PN": "#3f7fbf", "DRO-KL": "#5a4a9c", "semi-hard": "#c79a1e",
               "distance-weighted": "#a83a6c", "MS": "#b4532a", "LS": "#6b4a2a"}  # fmt: skip
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ends = {}
    for name in dict.fromkeys(name for each in found for name in each["ms"] if name != LIMIT):
        points = [(each["rows"], each["ms"][name]) for each in found if name in each["ms"]]
        peer = name.startswith("PML")
        ax.plot(*zip(*points, strict=True), color=colors[name.removeprefix("PML ")], marker="s" if peer else "o",
                linestyle="--" if peer else "-", markersize=4, linewidth=1.4, label=name)  # fmt: skip
        ends[name] = points[-1][1]
        failed = next((each for each in found if name in each["failed"]), None)
        if failed is not None:
            place, why = (failed["rows"], 2 * ends[name]), failed["failed"][name]
            ax.plot(*place, color="#a3122a", marker="x", markersize=8, markeredgewidth=2)
            ax.annotate(f"{name}: {why}, no number", place, xytext=(7, -3), textcoords="offset points", fontsize=8,
                        color="#a3122a")  # fmt: skip
    ax.plot([each["rows"] for each in found], [each["ms"][LIMIT] for each in found], color="#8a8f94", linestyle=":",
            label="two products")  # fmt: skip
    ends["two products"] = 0.0
    ax.set_yscale("log")
    ax.set_xticks([each["rows"] for each in found])
    ax.set_xlabel("rows of a batch")
    ax.set_ylabel("ms, forward + backward")
    ax.spines[["top", "right"]].set_visible(False)
    drawn = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    order = sorted(drawn, key=lambda name: -ends[name])
    ax.legend([drawn[name] for name in order], order, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
              fontsize=8)  # fmt: skip
    software = ", ".join(f"{name} {word}" for name, word in known["versions"].items() if word)
    ax.set_title(f"One thread, d = {WIDTH}, five rows a class; {software}", fontsize=8, color="#8a8f94")
    with atomic_write(file) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    plan = Plan(
        losses=tuple(PEERS.values()), sizes=tuple(given.sizes), width=WIDTH, patience=Patience(given.rounds, 60)
    )
    with threads(1):
        found = measure(plan.sizes, plan.patience)
    file = RESULTS / "figure3_cpu.json"
    write_text(file, as_json({**about(plan), "results": found}))
    text = f"# Qi et al. 2020, Figure 3: time of a step, one thread, d = {WIDTH}, CPU s, medians of {given.rounds}\n\n"
    write_text(file.with_suffix(".md"), text + table(found) + "\n")
    draw(file.with_suffix(".png"), found, about(plan))
    print(table(found))


if __name__ == "__main__":
    main()

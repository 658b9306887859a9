"""Small matplotlib figures for notebooks; each returns a `Figure` that a notebook shows by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nearfar._utils.extras import need
from nearfar.evaluation.summary import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["classes_figure", "recall_figure"]

ACCENT, RUST, GREY = "#0f6b66", "#b4532a", "#8a8f94"


def recall_figure(evaluation: Evaluation) -> Figure:
    """Plot recall@K against K, with the confidence intervals as error bars.

    >>> import torch, nearfar as nf
    >>> e = nf.evaluate(torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2), ks=(1, 2))
    >>> recall_figure(e).axes[0].get_ylabel()
    'recall@K, %'
    """
    need("matplotlib", "recall_figure", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    ks = list(evaluation.recall)
    values = [100 * evaluation.recall[k] for k in ks]
    bars = [evaluation.intervals.get(f"recall@{k}") for k in ks]
    places = range(len(ks))
    for place, bar in zip(places, bars, strict=True):
        if bar is not None:
            axes.bar(place, 100 * (bar.high - bar.low), 0.16, 100 * bar.low, color=ACCENT, alpha=0.3)
    axes.plot(places, values, color=ACCENT, marker="o", markersize=4, linewidth=1.2)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1f}", (place, value), xytext=(7, -3), textcoords="offset points", fontsize=8)
    axes.set_xticks(places, [str(k) for k in ks])
    axes.set_xlim(-0.4, len(ks) - 0.4)
    axes.use_sticky_edges = False  # else the axis cuts the lowest interval off
    axes.autoscale(axis="y")
    axes.set_xlabel("K")
    axes.set_ylabel("recall@K, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def classes_figure(evaluation: Evaluation, names: Mapping[int, str] | None = None) -> Figure:
    """Plot recall@1 of all classes in ascending order, with the names of the worst ten.

    Args:
        evaluation: the result of `nearfar.evaluate`.
        names: label -> name of the class.
    """
    need("matplotlib", "classes_figure", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    rows = evaluation.per_class
    left.plot([100 * row.recall_at_1 for row in rows], color=ACCENT, linewidth=1.4)
    left.axhline(100 * evaluation.precision_at_1, color=GREY, linewidth=0.8, linestyle="--")
    left.set_xlabel("classes, worst first")
    left.set_ylabel("recall@1, %")
    worst = evaluation.worst[::-1]
    # a dollar sign would start a formula
    labels = [str((names or {}).get(row.label, f"class {row.label}"))[:28].replace("$", r"\$") for row in worst]
    right.barh(range(len(worst)), [100 * row.recall_at_1 for row in worst], color=RUST, height=0.62)
    for place, row in enumerate(worst):
        right.annotate(
            f"{100 * row.recall_at_1:.1f}% of {row.queries}",
            (100 * row.recall_at_1, place),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7,
            va="center",
        )
    right.set_yticks(range(len(worst)), labels, fontsize=7)
    right.set_xlim(0, 100)
    right.set_title("the ten worst, recall@1 in %" if len(worst) == 10 else "recall@1, %", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure

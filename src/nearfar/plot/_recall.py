"""A figure of recall@K against K, with bootstrap intervals as a band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nearfar.evaluation._evaluate import Evaluation
from nearfar.plot.style import COLORS, MARKS, axis, by_name, key, plain, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def recall_curve(
    evaluation: Evaluation | Mapping[str, Evaluation], *, legend: bool = True, ax: Axes | None = None
) -> Axes:
    """Plot recall@K of one evaluation, or of several by name, each with its 95% interval as a band.

    Args:
        evaluation: the result of `nearfar.evaluate`, or {name: evaluation}.
        legend: show a legend beside the axis, if there are names.
        ax: the axis to draw on; a new figure if None.

    >>> import torch, nearfar as nf
    >>> from matplotlib.figure import Figure
    >>> e = nf.evaluate(torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2), ks=(1, 2))
    >>> nf.plot.recall_curve({"trained": e}, ax=Figure().subplots()).get_ylabel()
    'recall@K, %'
    """
    several = by_name("recall_curve", evaluation, Evaluation)
    ks = sorted({k for each in several.values() for k in each.recall})
    ax = axis(ax, (4.6, 3.2))
    for number, (name, each) in enumerate(several.items()):
        color = COLORS[number % len(COLORS)]
        here = sorted(each.recall)
        places = [ks.index(k) for k in here]
        bars = [each.intervals.get(f"recall@{k}") for k in here]
        known = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar is not None]
        if known:
            low, high = ([100 * end for end in ends] for ends in zip(*((b.low, b.high) for _, b in known), strict=True))
            ax.fill_between([place for place, _ in known], low, high, color=color, alpha=0.18, linewidth=0)
        values = [100 * each.recall[k] for k in here]
        mark = MARKS[number % len(MARKS)]
        ax.plot(places, values, color=color, marker=mark, markersize=5, linewidth=1.4, label=words(name, 40))
        if len(several) == 1:
            for place, value in zip(places, values, strict=True):
                ax.annotate(f"{value:.1f}", (place, value), xytext=(6, -11), textcoords="offset points", fontsize=8)
    ax.set_xticks(range(len(ks)), [str(k) for k in ks])
    ax.set_xlim(-0.3, len(ks) - 0.55)
    ax.use_sticky_edges = False  # otherwise the axis cuts off the lowest interval
    ax.autoscale(axis="y")
    ax.set_xlabel("K")
    ax.set_ylabel("recall@K, %")
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)
    plain(ax)
    if legend and "" not in several:
        key(ax)
    return ax

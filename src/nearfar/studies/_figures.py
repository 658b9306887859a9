"""The figures of the training studies: curves with intervals, and dot plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.extras import need
from nearfar._utils.files import atomic_write

Spread = Mapping[str, Any] | None
COLORS = ("#0f6b66", "#b4532a", "#5a4a9c", "#c79a1e", "#3f7fbf", "#8a8f94", "#a83a6c", "#4b8b3b", "#6b4a2a", "#222222")
MARKS = "osD^vPX*<>"
BESIDE: Mapping[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}


@dataclass(frozen=True)
class Panel:
    """Curves over the same x values.

    Attributes:
        title: title of the panel.
        x: the x values.
        series: name -> a spread (or None) for each x value.
        xlabel: label of the x axis.
        log: logarithmic x axis.
        ylabel: label of the y axis.
        names: tick labels of the x values; the numbers if None.
        mark: an x value with a dashed line, and its label.
    """

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[Spread]]
    xlabel: str
    log: bool = False
    ylabel: str = "R@1, %"
    names: Sequence[str] | None = None
    mark: tuple[float, str] | None = None


@contextmanager
def sheet(file: Path, size: tuple[float, float], *, widths: Sequence[float] = (1,)) -> Iterator[Any]:
    """A row of axes, written as a PNG, completely or not at all."""
    need("matplotlib", "the figures of a study", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    yield axes
    with atomic_write(file) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def curves(file: Path, panel: Panel) -> None:
    """Plot means with their intervals, and small dots for the seeds; the legend is in the order of the curves' ends."""
    there = {name: points for name, points in _points(panel).items() if points}
    with sheet(file, (7.2, 4.0)) as (ax,):
        if panel.mark is not None:
            ax.axvline(panel.mark[0], color="#8a8f94", linewidth=0.9, linestyle="--", label=panel.mark[1])
        for number, (name, points) in enumerate(there.items()):
            _curve(ax, points, name, number)
        _frame(ax, panel)
        if there:
            ax.set_ylim(*_height([each for points in there.values() for _, each in points]))
        ends = {name: points[-1][1]["mean"] for name, points in there.items()}
        drawn = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        order = sorted(drawn, key=lambda name: ends.get(name, math.inf), reverse=True)
        if order:
            ax.legend([drawn[name] for name in order], order, fontsize=8, frameon=False, **BESIDE)


def _points(panel: Panel) -> dict[str, list[tuple[float, Mapping[str, Any]]]]:
    """The x positions of each curve's means, shifted a little so that intervals do not overlap."""
    found = {}
    for number, (name, spreads) in enumerate(panel.series.items()):
        shift = (number - (len(panel.series) - 1) / 2) * 0.012
        wide = shift * (max(panel.x) - min(panel.x))
        found[name] = [
            (x * (1 + 2 * shift) if panel.log else x + wide, each)
            for x, each in zip(panel.x, spreads, strict=True)
            if each is not None
        ]
    return found


def _curve(ax: Any, points: Sequence[tuple[float, Mapping[str, Any]]], name: str, number: int) -> None:
    color = COLORS[number % len(COLORS)]
    ax.errorbar(
        [x for x, _ in points],
        [each["mean"] for _, each in points],
        yerr=[each["half"] or 0.0 for _, each in points],
        color=color,
        marker=MARKS[number % len(MARKS)],
        markersize=4.5,
        linewidth=1.2,
        elinewidth=0.9,
        label=name,
    )
    for x, each in points:
        ax.plot([x] * len(each["values"]), each["values"], ".", color=color, markersize=3, alpha=0.6)


def _frame(ax: Any, panel: Panel) -> None:
    if panel.log:
        ax.set_xscale("log")
        ax.minorticks_off()
    names = panel.names or [f"{x:g}" for x in panel.x]
    ax.set_xticks(panel.x, names, fontsize=8, rotation=90 if len(panel.x) > 6 else 0)
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.xlabel)
    ax.set_ylabel(panel.ylabel)
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)


def _height(spreads: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Limits from the lowest to the highest interval; intervals much wider than the seeds' range are clipped."""
    lows, highs = zip(*map(_ends, spreads), strict=True)
    seeds = [value for each in spreads for value in each["values"]]
    room = 0.25 * (max(seeds) - min(seeds)) or 1.0
    low, high = max(min(lows), min(seeds) - room), min(max(highs), max(seeds) + room)
    return low - room / 8, high + room / 8


def _ends(spread: Mapping[str, Any]) -> tuple[float, float]:
    half = spread["half"] or 0.0
    return spread["mean"] - half, spread["mean"] + half


def dots(file: Path, rows: Mapping[str, Mapping[str, Spread]], variants: Sequence[str], xlabel: str) -> None:
    """Plot a row for each name, with a dot for the mean of each variant, its interval, and small dots for the seeds.

    An axis with a wide empty part is broken there, so that small differences are visible.
    """
    parts = _parts([each for row in rows.values() for each in row.values() if each is not None])
    widths = [0.3, 0.7] if len(parts) == 2 else [1.0]
    with sheet(file, (7.6, 1.2 + 0.24 * sum(map(len, rows.values()))), widths=widths) as axes:
        for ax, limits in zip(axes, parts, strict=True):
            ticks = _rows(ax, rows, variants)
            ax.set_yticks(ticks, list(rows) if ax is axes[0] else [""] * len(ticks))
            ax.invert_yaxis()
            ax.set_xlim(*limits)
            ax.grid(axis="x", linewidth=0.4, alpha=0.5)
        for ax in axes[1:]:
            ax.spines["left"].set_linestyle((0, (1, 4)))
            ax.tick_params(axis="y", length=0)
        for number, variant in enumerate(variants):
            axes[0].plot([], [], "o", color=COLORS[number], label=variant)
        figure = axes[0].figure
        figure.supxlabel(xlabel + (" (the axis is broken)" if len(parts) > 1 else ""), fontsize=10)
        figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=len(variants))


def _parts(spreads: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The range of the intervals, or two ranges if a fifth of it or more is empty."""
    ends = sorted(map(_ends, spreads)) or [(0.0, 100.0)]
    low, high = ends[0][0], max(end for _, end in ends)
    room = (high - low or 1.0) / 40
    gaps, reach = [], low
    for begin, end in ends:
        gaps.append((begin - reach, reach, begin))
        reach = max(reach, end)
    gap, before, after = max(gaps)
    if gap < (high - low) / 5 or gap == 0:
        return [(low - room, high + room)]
    return [(low - room, before + room), (after - room, high + room)]


def _rows(ax: Any, rows: Mapping[str, Mapping[str, Spread]], variants: Sequence[str]) -> list[float]:
    """Draw all dots, and return the height of each row."""
    place, ticks = 0.0, []
    for row in rows.values():
        begin = place
        for variant in (v for v in variants if row.get(v) is not None):
            _dot(ax, row[variant], place, COLORS[variants.index(variant)])
            place += 1
        ticks.append((begin + place - 1) / 2)
        place += 0.8
    return ticks


def _dot(ax: Any, found: Spread, place: float, color: str) -> None:
    assert found is not None  # noqa: S101 - asked by the caller
    ax.errorbar(found["mean"], place, xerr=found["half"] or 0.0, color=color, marker="o", markersize=5, elinewidth=1.2)
    ax.plot(found["values"], [place] * len(found["values"]), ".", color=color, markersize=3, alpha=0.6)

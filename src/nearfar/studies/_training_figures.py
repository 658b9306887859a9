"""The figures of the studies that train networks: curves with intervals, and dot plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.figure import figure_file
from nearfar.plot import style

Spread = Mapping[str, Any] | None


@dataclass(frozen=True)
class Panel:
    """Curves over the same x values."""

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[Spread]]  # name -> a spread (or None) for each x value
    xlabel: str
    log: bool = False  # logarithmic x axis
    ylabel: str = "R@1, %"
    names: Sequence[str] | None = None  # tick labels of the x values; the numbers if None
    mark: tuple[float, str] | None = None  # an x value with a dashed line, and its label


def stem(found: Mapping[str, Any]) -> str:
    """How the names of a study's files begin."""
    return str(found.get("stem") or f"{found['study']}-{found['data']}")


def curves(file: Path, panel: Panel) -> None:
    """Plot means with their intervals, and small dots for the seeds; the legend is in the order of the curves' ends."""
    drawn = {name: points for name, points in _points(panel).items() if points}
    with figure_file(file, (7.2, 4.0)) as ((ax,),):
        style.plain(ax)
        if panel.mark is not None:
            ax.axvline(panel.mark[0], color=style.GRAY, linewidth=0.9, linestyle="--", label=panel.mark[1])
        for number, (name, points) in enumerate(drawn.items()):
            _curve(ax, points, name, number)
        _frame(ax, panel)
        if drawn:
            ax.set_ylim(*_height([each for points in drawn.values() for _, each in points]))
        ends = {name: points[-1][1]["mean"] for name, points in drawn.items()}
        handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        order = sorted(handles, key=lambda name: ends.get(name, math.inf), reverse=True)
        if order:
            beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
            ax.legend([handles[name] for name in order], order, fontsize=8, frameon=False, **beside)


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
    colors, marks = style.COLORS, style.MARKS
    color = colors[number % len(colors)]
    ax.errorbar(
        [x for x, _ in points],
        [each["mean"] for _, each in points],
        yerr=[each["half"] or 0.0 for _, each in points],
        color=color,
        # when colors repeat, markers are shifted, so that two curves never look the same
        marker=marks[(number + number // len(colors)) % len(marks)],
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

    If a fifth of the axis or more is empty, it is broken there, so that small differences are visible.
    """
    parts = _parts([each for row in rows.values() for each in row.values() if each is not None])
    widths = [0.3, 0.7] if len(parts) == 2 else [1.0]
    size = 7.6, 1.2 + 0.24 * sum(map(len, rows.values()))
    with figure_file(file, size, columns=len(widths), width_ratios=widths) as (axes,):
        for ax, limits in zip(axes, parts, strict=True):
            style.plain(ax)
            ticks = _rows(ax, rows, variants)
            ax.set_yticks(ticks, list(rows) if ax is axes[0] else [""] * len(ticks))
            ax.invert_yaxis()
            ax.set_xlim(*limits)
            ax.ticklabel_format(axis="x", useOffset=False)
            ax.locator_params(axis="x", nbins=3 if len(parts) == 2 and ax is axes[0] else 7, prune="both")
            ax.grid(axis="x", linewidth=0.4, alpha=0.5)
        for ax in axes[1:]:
            ax.spines["left"].set_linestyle((0, (1, 4)))
            ax.tick_params(axis="y", length=0)
        for number, variant in enumerate(variants):
            axes[0].plot([], [], "o", color=style.COLORS[number], label=variant)
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
        for number, variant in enumerate(variants):
            if (found := row.get(variant)) is not None:
                _dot(ax, found, place, style.COLORS[number])
                place += 1
        ticks.append((begin + place - 1) / 2)
        place += 0.8
    return ticks


def _dot(ax: Any, found: Mapping[str, Any], place: float, color: str) -> None:
    ax.errorbar(found["mean"], place, xerr=found["half"] or 0.0, color=color, marker="o", markersize=5, elinewidth=1.2)
    ax.plot(found["values"], [place] * len(found["values"]), ".", color=color, markersize=3, alpha=0.6)

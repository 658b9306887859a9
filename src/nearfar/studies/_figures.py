"""The pictures of the studies of training: curves with intervals, and rows of dots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._files import whole

Spread = Mapping[str, Any] | None
COLOURS = ("#0f6b66", "#b4532a", "#5a4a9c", "#c79a1e", "#3f7fbf", "#8a8f94", "#a83a6c", "#4b8b3b", "#6b4a2a", "#222222")
MARKS = "osD^vPX*<>"


@dataclass(frozen=True)
class Panel:
    """Curves over the same places.

    Attributes:
        title: above it.
        x: the places.
        series: name -> a spread (or None) for each place.
        xlabel: below it.
        log: places on a logarithmic axis.
    """

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[Spread]]
    xlabel: str
    log: bool = False
    ylabel: str = "R@1, %"


@contextmanager
def sheet(file: Path, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """A row of axes, written as a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    yield axes
    with whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def curves(file: Path, panels: Sequence[Panel]) -> None:
    """Means with their intervals, one panel beside the other."""
    with sheet(file, len(panels), (5.4 * len(panels), 4.0)) as axes:
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel)


def _draw(ax: Any, panel: Panel) -> None:
    for number, (name, spreads) in enumerate(panel.series.items()):
        there = [(x, each) for x, each in zip(panel.x, spreads, strict=True) if each is not None]
        if not there:
            continue
        # curves stand a little beside each other, so that their intervals can be told apart
        shift = (number - (len(panel.series) - 1) / 2) * 0.012
        places = [x * (1 + 2 * shift) if panel.log else x + shift * (max(panel.x) - min(panel.x)) for x, _ in there]
        ax.errorbar(
            places,
            [each["mean"] for _, each in there],
            yerr=[each["half"] or 0.0 for _, each in there],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKS[number % len(MARKS)],
            markersize=4.5,
            linewidth=1.2,
            elinewidth=0.9,
            label=name,
        )
    if panel.log:
        ax.set_xscale("log")
        ax.minorticks_off()
    many = len(panel.x) > 6
    ax.set_xticks(panel.x, [f"{x:g}" for x in panel.x], fontsize=8, rotation=60 if many else 0)
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.xlabel)
    ax.set_ylabel(panel.ylabel)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7, frameon=False)


def dots(file: Path, rows: Mapping[str, Mapping[str, Spread]], variants: Sequence[str], xlabel: str) -> None:
    """A row for each name; in it a dot for the mean of each variant, its interval, and small dots for the seeds."""
    height = 1.2 + 0.24 * sum(len(row) for row in rows.values())
    with sheet(file, 1, (7.6, height)) as (ax,):
        place, ticks = 0.0, []
        for row in rows.values():
            begin = place
            for variant in (v for v in variants if row.get(v) is not None):
                _dot(ax, row[variant], place, COLOURS[variants.index(variant)])
                place += 1
            ticks.append((begin + place - 1) / 2)
            place += 0.8
        ax.set_yticks(ticks, list(rows))
        ax.invert_yaxis()
        ax.set_xlabel(xlabel)
        for number, variant in enumerate(variants):
            ax.plot([], [], "o", color=COLOURS[number], label=variant)
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=len(variants))
        ax.grid(axis="x", linewidth=0.4, alpha=0.5)


def _dot(ax: Any, found: Spread, place: float, colour: str) -> None:
    assert found is not None  # noqa: S101 - asked by the caller
    ax.errorbar(found["mean"], place, xerr=found["half"] or 0.0, color=colour, marker="o", markersize=5, elinewidth=1.2)
    ax.plot(found["values"], [place] * len(found["values"]), ".", color=colour, markersize=3, alpha=0.6)

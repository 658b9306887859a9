"""The figure of a benchmark: time and memory of each loss against the number of rows, with PML's failures marked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar._utils.figure import figure_file
from nearfar.bench._results import Row
from nearfar.bench._subjects import PEER, SUBJECTS
from nearfar.plot import style

OURS, THEIRS, FAILURE = style.COLORS[0], style.COLORS[1], "#a3122a"
COLUMNS = 5  # losses side by side


def draw(file: Path, rows: Sequence[Row], who: str, *, setting: Mapping[str, Any]) -> None:
    """Write the PNG: for each loss a panel of time above a panel of memory, on logarithmic axes."""
    by_loss: dict[str, list[Row]] = {}
    for row in rows:
        by_loss.setdefault(row.loss, []).append(row)
    columns = min(COLUMNS, len(by_loss))
    blocks = -(-len(by_loss) // columns)
    size = 0.6 + 2.7 * max(columns, 2), 0.9 + 4.1 * blocks
    with figure_file(file, size, 2 * blocks, columns, sharex=True) as axes:
        panels = [(axes[2 * block][column], axes[2 * block + 1][column], column == 0)
                  for block in range(blocks) for column in range(columns)]  # fmt: skip
        for (above, below, first), some in zip(panels, by_loss.values(), strict=False):
            _time(above, some, who, first=first)
            _memory(below, some, who, first=first)
        for above, below, _ in panels[len(by_loss) :]:
            above.set_visible(False)
            below.set_visible(False)
        _share_limits(axes, rows)
        labels = {
            label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure = axes[0][0].figure
        figure.legend(labels.values(), labels, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
        figure.supxlabel(_describe(setting), fontsize=8, color=style.GRAY)


def _time(ax: Any, rows: Sequence[Row], who: str, *, first: bool) -> None:
    look = {"color": style.GRAY, "linestyle": "--", "linewidth": 1, "label": "two products"}
    for precision, some in _by_precision(rows).items():
        _line(ax, [(row.rows, 1e3 * row.limit) for row in some if row.limit], look, precision, rows)
    _contestants(ax, rows, who, "seconds", 1e3)
    if SUBJECTS[rows[0].loss].peer is None:
        ax.text(0.04, 0.94, "not in PML", transform=ax.transAxes, fontsize=8, color=THEIRS, va="top")
    ax.set_title(rows[0].loss, fontsize=10)
    _frame(ax, "ms, forward + backward" if first else "")


def _memory(ax: Any, rows: Sequence[Row], who: str, *, first: bool) -> None:
    sizes = sorted({row.rows for row in rows})
    look = {"color": style.GRAY, "linestyle": ":", "linewidth": 1, "label": "one B x B matrix"}
    ax.plot(sizes, [4 * n * n / 2**20 for n in sizes], **look)
    _contestants(ax, rows, who, "megabytes", 1.0)
    _frame(ax, "MB at the peak" if first else "")
    ax.set_xlabel("rows, B", fontsize=8)


def _contestants(ax: Any, rows: Sequence[Row], who: str, what: str, scale: float) -> None:
    """Draw our curve in each precision, PML's in the first one, and a cross where PML failed."""
    look = {"markersize": 3.5, "linewidth": 1.4}
    for precision, some in _by_precision(rows).items():
        ours = {**look, "color": OURS, "marker": "o", "label": "nearfar"}
        _line(ax, _points(some, who, what, scale), ours, precision, rows)
    rows = [row for row in rows if row.precision == rows[0].precision]
    theirs = _points(rows, PEER, what, scale)
    _line(ax, theirs, {**look, "color": THEIRS, "marker": "s", "label": "PML"}, rows[0].precision, rows)
    _failure(ax, rows, theirs)


def _points(rows: Sequence[Row], who: str, what: str, scale: float) -> list[tuple[int, float]]:
    found = ((row.rows, getattr(row.cells[who], what)) for row in rows if who in row.cells)
    return [(size, scale * value) for size, value in found if value is not None and value > 0]


def _by_precision(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.precision, []).append(row)
    return found


def _line(
    ax: Any, points: Sequence[tuple[float, float]], style: dict[str, Any], precision: str, rows: Sequence[Row]
) -> None:
    """Draw a curve; precisions after the first are paler, and named in the legend."""
    if precision != rows[0].precision:
        style = {**style, "alpha": 0.45, "label": f"{style['label']}, {precision}"}
    if points:
        ax.plot(*zip(*points, strict=True), **style)


def _failure(ax: Any, rows: Sequence[Row], before: Sequence[tuple[float, float]]) -> None:
    """Draw a cross at the size where PML failed first, with the reason."""
    failed = next((row for row in rows if PEER in row.cells and row.cells[PEER].failed), None)
    if failed is None:
        return
    why = failed.cells[PEER].failed.split(" at ")[0].split(":")[0]
    # there is no measurement at this size: the height extrapolates the last point by the square of the rows
    height = before[-1][1] * (failed.rows / before[-1][0]) ** 2 if before else 1.0
    ax.plot(
        failed.rows, height, color=FAILURE, marker="x", markersize=8, markeredgewidth=2, linestyle="", label="PML fails"
    )
    ax.annotate(why, (failed.rows, height), xytext=(6, -3), textcoords="offset points", fontsize=8, color=FAILURE)


def _frame(ax: Any, ylabel: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylabel(ylabel, fontsize=8)
    ax.tick_params(labelsize=7, labelbottom=True)
    style.plain(ax)
    ax.grid(visible=True, which="major", color="#e6e8ea", linewidth=0.6)


def _share_limits(axes: Any, rows: Sequence[Row]) -> None:
    """Use the same limits for all panels of time and for all of memory, so that losses can be compared."""
    for kind in (0, 1):
        panels = [ax for line in axes[kind::2] for ax in line if ax.get_visible()]
        low = min(ax.get_ylim()[0] for ax in panels)
        high = max(ax.get_ylim()[1] for ax in panels)
        for ax in panels:
            ax.set_ylim(low, high)
    sizes = sorted({row.rows for row in rows})
    shown = sizes[:: max(1, -(-len(sizes) // 5))]
    for ax in (ax for line in axes for ax in line):
        ax.set_xticks(shown, [str(size) if size < 1024 else f"{size / 1024:g}k" for size in shown])
        ax.minorticks_off()


def _describe(setting: Mapping[str, Any]) -> str:
    config, versions = setting["config"], setting["versions"]
    software = ", ".join(f"{name} {word}" for name, word in versions.items() if word)
    threads = f", {config['threads']} thread(s)" if config.get("device", "cpu") == "cpu" else ""
    return f"{setting['device']}{threads}, d = {config['width']}; {software}"

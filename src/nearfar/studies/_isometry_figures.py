"""The figures of the study of hard negative mining (Xu et al. 2022), from the results of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.figure import figure_file

Numbers = dict[str, Any]
COLORS = ("tab:red", "tab:blue")


def _rows(ax: Any, x: Any, labels: Any, marker: str = "o", **how: Any) -> None:
    for label, color in enumerate(COLORS):
        mine = x[labels == label]
        ax.scatter(mine[:, 0], mine[:, 1], c=color, marker=marker, zorder=3, **how)


def _boundary(ax: Any, x: Any, labels: Any, label: int) -> None:
    """The boundary for rows of other classes: outside every ball around an anchor through its farthest positive."""
    mine = x[labels == label]
    radii = np.linalg.norm(mine[:, None] - mine[None], axis=2).max(axis=1)
    low, high = x.min(axis=0) - 2.5, x.max(axis=0) + 2.5
    grid = np.stack(np.meshgrid(np.linspace(low[0], high[0], 200), np.linspace(low[1], high[1], 200)), axis=2)
    apart = np.linalg.norm(grid[:, :, None] - mine[None, None], axis=3)
    ax.contour(*grid.transpose(2, 0, 1), (radii - apart).max(axis=2), [0], colors=COLORS[label], linestyles="dashed")


def triplet(found: Numbers, file: Path) -> None:
    """Draw Figure 1: separated classes, and the boundary of one."""
    x, labels = np.array(found["f"]), np.array(found["labels"])
    with figure_file(file, (5.0, 4.0), 1, 1) as axes:
        ax = axes[0][0]
        _rows(ax, x, labels)
        _boundary(ax, x, labels, 0)
        ax.set_aspect("equal")
        ax.set_title("Figure 1: H = 0, the other class is outside")


def toy(found: Numbers, file: Path) -> None:
    """Draw Figures 2 to 5."""
    x, labels = np.array(found["f"]), np.array(found["labels"])
    with figure_file(file, (18.0, 4.4), 1, 4) as axes:
        points, haus, iso, hard = axes[0]
        _rows(points, x, labels)
        for label in (0, 1):
            _boundary(points, x, labels, label)
        points.set_title("Figure 2: five points and their boundaries")
        _arrows(haus, x, np.array(found["haus_map"]), labels)
        for label in (0, 1):
            _boundary(haus, np.array(found["haus_map"]), labels, label)
        haus.set_title(f"Figure 3: d_haus = {found['d_haus']:.4f}")
        gaps = found["gaps"]
        worst = max(abs(gap) for gap in gaps.values())
        iso.bar(list(gaps), list(gaps.values()), color=["k" if abs(g) > worst - 1e-3 else "0.7" for g in gaps.values()])
        iso.set_xlabel("pair")
        iso.set_ylabel("distance in f less distance in f*")
        iso.set_title(f"Figure 4: d_iso = {found['d_iso']:.4f}")
        a, p, n = found["triplet"]
        _rows(hard, x, labels)
        hard.plot(*x[[a, p]].T, "k-", label="positive")
        hard.plot(*x[[a, n]].T, "k:", label="negative")
        hard.legend()
        hard.set_title(f"Figure 5: H = {found['hardness']:.4f}")
        for ax in (points, haus, hard):
            ax.set_aspect("equal")


def collapse(found: Numbers, file: Path) -> None:
    """Draw Figure 6: where random rows go."""
    x, g, labels = (np.array(found[key]) for key in ("f", "map", "labels"))
    with figure_file(file, (6.0, 5.5), 1, 1) as axes:
        ax = axes[0][0]
        _arrows(ax, x, g, labels)
        ax.set_aspect("equal")
        kept = f"{found['total']:.0%} of the spread is kept, {found['within']:.0%} within classes"
        ax.set_title(f"Figure 6: N = {len(x)}, n = 2\n{kept}")


def _arrows(ax: Any, x: Any, g: Any, labels: Any) -> None:
    _rows(ax, x, labels, alpha=0.5)
    _rows(ax, g, labels, "*", s=90)
    for a, b in zip(x, g, strict=True):
        ax.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": "0.5"})


def shrink(found: Numbers, file: Path) -> None:
    """Plot s* and H / diameter against the dimension."""
    with figure_file(file, (10.0, 4.0), 1, 2) as axes:
        for ax, key, title in zip(axes[0], ("shrink", "hardness"), ("s*", "H / diameter"), strict=True):
            for rows, line in found["table"].items():
                ax.plot([int(w) for w in line], [cell[key] for cell in line.values()], "o-", label=f"N = {rows}")
            ax.set_xscale("log", base=2)
            ax.set_xlabel("n")
            ax.set_title(title)
            ax.legend()


def descent(found: Numbers, file: Path) -> None:
    """Plot the spread at the end relative to the start, for each loss."""
    with figure_file(file, (13.0, 4.0), 1, len(found["table"]), sharey=True) as axes:
        for ax, (name, table) in zip(axes[0], found["table"].items(), strict=True):
            for rows, line in table.items():
                ax.plot([int(w) for w in line], [cell["total"] for cell in line.values()], "o-", label=f"N = {rows}")
            ax.set_xscale("log", base=2)
            ax.set_xlabel("n")
            ax.set_title(name)
            ax.legend()

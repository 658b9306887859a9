"""The figures of the study of hard negative mining (Xu et al. 2022), from the results of its runs."""

from collections.abc import Sequence
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
    low, high = x.min(axis=0) - radii.max() - 0.2, x.max(axis=0) + radii.max() + 0.2
    grid = np.stack(np.meshgrid(np.linspace(low[0], high[0], 200), np.linspace(low[1], high[1], 200)), axis=2)
    apart = np.linalg.norm(grid[:, :, None] - mine[None, None], axis=3)
    ax.contour(*grid.transpose(2, 0, 1), (radii - apart).max(axis=2), [0], colors=COLORS[label], linestyles="dashed")


def toy(found: Numbers, file: Path) -> None:
    """Draw Figures 1 to 5."""
    x, labels, moved = (np.array(found[key]) for key in ("f", "labels", "haus_map"))
    with figure_file(file, (15.0, 9.0), 2, 3) as axes:
        separated, points, haus, iso, bars, hard = axes.ravel()
        _separated(separated, found["separated"])
        _rows(points, x, labels)
        for label in (0, 1):
            _boundary(points, x, labels, label)
            _boundary(haus, moved, labels, label)
        points.set_title("Figure 2: five points and their boundaries")
        _arrows(haus, x, moved, labels, black=found["longest"])
        haus.set_title(f"Figure 3: d_haus = {found['d_haus']:.4f}, the black arrows")
        _differences(iso, bars, found)
        a, p, n = found["triplet"]
        _rows(hard, x, labels)
        hard.plot(*x[[a, p]].T, "k-", label="positive")
        hard.plot(*x[[a, n]].T, "k:", label="negative")
        hard.legend()
        hard.set_title(f"Figure 5: H = {found['hardness']:.4f}")
        for ax in (points, haus, iso, hard):
            _name(ax, x, "01234")
            ax.set_aspect("equal", "datalim")


def _separated(ax: Any, found: Numbers) -> None:
    """Draw Figure 1: separated classes, the boundary of one, and a triplet."""
    x, labels = np.array(found["f"]), np.array(found["labels"])
    _rows(ax, x, labels)
    _boundary(ax, x, labels, 0)
    _name(ax, x[found["triplet"]], "APN")
    ax.set_aspect("equal", "datalim")
    ax.set_title("Figure 1: anchor, positive, negative; H = 0")


def _differences(plane: Any, bars: Any, found: Numbers) -> None:
    """Draw Figure 4: circles f, stars f*, and the difference of each distance; black binds in every nearest map."""
    x, moved, labels = (np.array(found[key]) for key in ("f", "iso_map", "labels"))
    for pair in found["binding"]:
        i, j = map(int, pair)
        plane.plot(*x[[i, j]].T, color="0.7", linewidth=1)
        plane.plot(*moved[[i, j]].T, color="black", linewidth=1)
    _rows(plane, x, labels, alpha=0.5)
    _rows(plane, moved, labels, "*", s=90)
    plane.set_title("Figure 4: circles f, stars f*, pairs that bind")
    gaps = found["gaps"]
    bars.bar(list(gaps), list(gaps.values()), color=["k" if pair in found["binding"] else "0.7" for pair in gaps])
    bars.set_xlabel("pair")
    bars.set_ylabel("distance in f less distance in f*")
    bars.set_title(f"d_iso = {found['d_iso']:.4f}, the black bars")


def _name(ax: Any, x: Any, names: str) -> None:
    for name, place in zip(names, x, strict=True):
        ax.annotate(name, place, xytext=(6, 6), textcoords="offset points", fontsize=11)


def collapse(found: Numbers, file: Path) -> None:
    """Draw Figure 6: where random rows go, in the nearest maps with the least and with the largest spread."""
    x, labels = np.array(found["f"]), np.array(found["labels"])
    with figure_file(file, (11.0, 5.5), 1, 2, sharex=True, sharey=True) as axes:
        for ax, name in zip(axes[0], ("least", "largest"), strict=True):
            end = found[name]
            g = np.array(end["map"])
            _arrows(ax, x, g, labels)
            _ellipse(ax, g)
            ax.set_aspect("equal")
            ax.set_title(f"{name} spread: {end['total']:.0%} is kept, {end['within']:.0%} within classes", fontsize=10)


def _ellipse(ax: Any, g: Any) -> None:
    """Draw the smallest ellipse around the rows, by Khachiyan's steps towards the farthest row."""
    weights, lifted = np.full(len(g), 1 / len(g)), np.c_[g, np.ones(len(g))]
    for _ in range(2000):
        far = ((lifted @ np.linalg.inv(lifted.T * weights @ lifted)) * lifted).sum(axis=1)
        step = (far.max() - 3) / (3 * (far.max() - 1))
        weights = (1 - step) * weights + step * np.eye(len(g))[far.argmax()]
    center = weights @ g
    lengths, axes = np.linalg.eigh(2 * ((g - center).T * weights @ (g - center)))
    turn = np.linspace(0, 2 * np.pi, 200)
    ax.plot(*(center + np.stack([np.cos(turn), np.sin(turn)], axis=1) * np.sqrt(lengths) @ axes.T).T, color="tab:green")


def _arrows(ax: Any, x: Any, g: Any, labels: Any, black: Sequence[int] = ()) -> None:
    """Draw circles x, stars g and the arrows between them, some of them black."""
    _rows(ax, x, labels, alpha=0.5)
    _rows(ax, g, labels, "*", s=90)
    for row, (a, b) in enumerate(zip(x, g, strict=True)):
        color, width = ("black", 1.8) if row in black else ("0.5", 1.0)
        ax.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": color, "linewidth": width})


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

"""The table of losses on docs/guides/losses.md, and a picture of the weights that each loss gives to pairs.

    python scripts/losses_page.py     write the table, and docs/images/losses.svg with the pictures of all losses

Names, first sentences and parameters are read from the classes, so that a new loss needs no row of its own. The site
shows each picture beside its loss (`scripts/site_hooks.py`). `tests/losses/test_oracle_values.py` compares the page
with this script.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nearfar as nf
from nearfar._utils.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE, SHEET = ROOT / "docs" / "guides" / "losses.md", ROOT / "docs" / "images" / "losses.svg"
SHARED = ("pair", "miner", "similarity", "engine")
"""Parameters that all losses share; `miner` stands in the table where it has a default."""
ANGLES = (0, 20, 75, 60, 95, 110, 200, 230, 150)
"""The batch of the pictures: nine points on the circle, in degrees, three of each class."""
CLASSES = 3
CHOSEN: dict[str, Any] = {"classes": CLASSES, "dim": 2, "k": "B", "top": "B/3", "rho": "B", "wrong": 0.2, "centers": 2}
CHOSEN |= {"loss": nf.losses.SupCon(), "dims": (2,)}
"""Parameters of the pictures that have no default, or whose default is meant for large batches."""
SHADES = 9.87
"""Not a round number, so that no simple fraction lies between two shades."""
CELL, COLUMNS = 9, 7
BLUE, ORANGE, GRAY, GREEN, PURPLE = "#2f74b5", "#d9731a", "#8a929a", "#3d8b5f", "#7b5ea7"


def names() -> list[str]:
    """All losses, in the order of the alphabet."""
    return sorted(nf.losses.__all__)


def parameters(kind: type) -> list[str]:
    """The parameters of a loss as its signature has them, those without a default first."""
    found = []
    for name, each in inspect.signature(kind).parameters.items():
        if each.default is each.empty:
            found.append(name)
        elif name not in SHARED or (name == "miner" and each.default is not None):
            found.append(f"{name}={_short(each.default)}")
    return found


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def table() -> str:
    """A row for each loss: what it does, its parameters with their defaults."""
    rows = ["| loss | what it does | parameters and defaults |", "|---|---|---|"]
    for name in names():
        kind = getattr(nf.losses, name)
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        listed = ", ".join(f"`{each}`" for each in parameters(kind))
        rows.append(f"| `{name}` | {' '.join(first.split())} | {listed or '-'} |")
    return "\n".join(rows)


def batch() -> tuple[Tensor, Tensor]:
    """Return the points and labels of the pictures."""
    turned = torch.tensor(ANGLES, dtype=torch.float64) * math.pi / 180
    return torch.stack([turned.cos(), turned.sin()], dim=1), torch.arange(len(ANGLES)) // (len(ANGLES) // CLASSES)


def example(name: str) -> tuple[torch.nn.Module, dict[str, Any]] | None:
    """A loss as the pictures show it, with the arguments that it was given; None where others are needed."""
    kind = getattr(nf.losses, name)
    takes = inspect.signature(kind).parameters
    given = {key: value for key, value in CHOSEN.items() if key in takes}
    if any(each.default is each.empty and key not in given for key, each in takes.items()):
        return None
    loss = kind(**given).double()
    points, labels = batch()
    means = torch.stack([points[labels == each].mean(dim=0) for each in range(CLASSES)])
    with torch.no_grad():
        for each in loss.parameters():
            if each.ndim == 2:  # class vectors; several of a class lie beside each other
                each.copy_(torch.cat([means, means.roll(1, dims=1)], dim=1)[:, : each.shape[1]])
    return loss, given


def pull(name: str) -> Tensor | None:
    """The gradient [n, m] of a loss by the scores of its pairs, the largest of them 1; negative where it attracts."""
    made = example(name)
    if made is None:
        return None
    found = made[0].explain(*batch()).pull
    return found / found.abs().max()


def cells(values: Tensor, left: float, top: float) -> str:
    """A square for each pair that the gradient moves, the darker the more."""
    paths: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            shade = round(abs(value) * SHADES)
            if shade:
                place = f"M{left + j * CELL:g} {top + i * CELL:g}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
                paths.setdefault((BLUE if value < 0 else ORANGE, shade), []).append(place)
    width, height = values.shape[1] * CELL - 1, len(values) * CELL - 1
    frame = (
        f'<rect x="{left - 1:g}" y="{top - 1:g}" width="{width + 2}" height="{height + 2}" fill="none" stroke="{GRAY}"'
    )
    return f'{frame} stroke-width=".6"/>' + "".join(
        f'<path fill="{color}" fill-opacity="{shade / 10:g}" d="{"".join(path)}"/>'
        for (color, shade), path in sorted(paths.items())
    )


def points(left: float, top: float, size: float) -> str:
    """The batch itself: its rows, numbered, with a mark for each class."""
    radius, found = size / 2 - 9, []
    found.append(
        f'<circle cx="{left + size / 2:g}" cy="{top + size / 2:g}" r="{radius:g}" fill="none" stroke="{GRAY}"/>'
    )
    for number, angle in enumerate(ANGLES):
        x = left + size / 2 + radius * math.cos(math.radians(angle))
        y = top + size / 2 - radius * math.sin(math.radians(angle))
        color = (GREEN, PURPLE, GRAY)[number * CLASSES // len(ANGLES)]
        found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{color}"/>')
        found.append(
            f'<text x="{x:.1f}" y="{y + 3:.1f}" font-size="8" text-anchor="middle" fill="#fff">{number}</text>'
        )
    return "".join(found)


def drawing(width: float, height: float, inside: str, title: str) -> str:
    """An SVG file."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return f"{head}<title>{title}</title>{inside}</svg>\n"


def picture(name: str) -> str | None:
    """The picture of one loss: the batch, and the gradient of every pair."""
    values = pull(name)
    if values is None:
        return None
    size = len(ANGLES) * CELL
    inside = points(0, 0, size) + cells(values, size + 12, 1)
    return drawing(size + 14 + values.shape[1] * CELL, size + 1, inside, f"{name}: weights of the pairs of nine rows")


def sheet() -> str:
    """The pictures of all losses, the batch first."""
    step, high, size = 112, 112, len(ANGLES) * CELL
    inside = [f'<text x="1" y="10" font-size="10" fill="{GRAY}">the batch</text>{points(0, 15, size)}']
    shown = [(name, values) for name in names() if (values := pull(name)) is not None]
    for place, (name, values) in enumerate(shown, start=1):
        left, top = place % COLUMNS * step, place // COLUMNS * high
        inside.append(f'<text x="{left + 1}" y="{top + 10}" font-size="10" fill="{GRAY}">{name}</text>')
        inside.append(cells(values, left + 2, top + 16))
    rows = len(shown) // COLUMNS + 1
    return drawing(COLUMNS * step, rows * high, "".join(inside), "Weights of the pairs of nine rows under every loss")


def filled(text: str) -> str:
    """The page with the table as the classes have it."""
    before, _, rest = text.partition("<!-- table -->\n")
    return f"{before}<!-- table -->\n{table()}\n{rest[rest.index('<!-- /table -->') :]}"


def main() -> None:
    """Write the table and the sheet."""
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8")))
    write_text(SHEET, sheet())


if __name__ == "__main__":
    main()

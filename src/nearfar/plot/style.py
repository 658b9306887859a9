"""Common style of the figures: axes, colors, markers, and text that is safe for matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nearfar._utils.checks import printable
from nearfar._utils.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLORS",
    "GRAY",
    "MARKS",
    "NEGATIVE",
    "POSITIVE",
    "axis",
    "by_name",
    "class_words",
    "frame",
    "key",
    "plain",
    "words",
]

Thing = TypeVar("Thing")

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#333333")
"""The palette of Okabe and Ito, which is safe for color blindness, with a darker yellow."""
MARKS = "o^sDvPXh"
POSITIVE, NEGATIVE, GRAY = COLORS[0], COLORS[1], "#8a8f94"


def axis(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given axis, or that of a new pyplot figure."""
    pyplot = need("matplotlib.pyplot", "nf.plot", "plot")
    if ax is None:
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    return ax


def plain(ax: Axes) -> None:
    """Remove the frame on two sides."""
    ax.spines[["top", "right"]].set_visible(False)


def frame(x: float, y: float, side: float, **style: Any) -> Any:
    """The outline of a square centered at (x, y)."""
    from matplotlib.patches import Rectangle

    return Rectangle((x - side / 2, y - side / 2), side, side, fill=False, **style)


def words(text: object, most: int = 28) -> str:
    """Shorten and escape text for a label; a dollar sign would start a formula, a leading underscore hide the label."""
    short = printable(text)
    if len(short) > most:  # keep both ends: class names often differ at one end only
        short = f"{short[: most - most // 2 - 1]}…{short[-(most // 2) :]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def class_words(label: int, names: Mapping[int, str] | None, most: int = 28) -> str:
    """The name of a class, or "class 7"."""
    return words((names or {}).get(label, f"class {label}"), most)


def by_name(owner: str, given: Thing | Mapping[str, Thing], kind: type[Any]) -> dict[str, Thing]:
    """Objects by name; a single object gets an empty name."""
    if isinstance(given, kind):
        return {"": given}
    if isinstance(given, Mapping) and given and all(isinstance(each, kind) for each in given.values()):
        return {str(name): each for name, each in given.items()}
    came = type(given).__name__
    if isinstance(given, Mapping):
        came = f"a mapping to {', '.join(sorted({type(each).__name__ for each in given.values()})) or 'nothing'}"
    word = kind.__name__
    raise TypeError(f"plot.{owner}: {word.lower()} must be an {word} or {{name: {word}}}, but came as {came}.")


def key(ax: Axes) -> None:
    """Add a legend beside the axis, where it covers no data."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)

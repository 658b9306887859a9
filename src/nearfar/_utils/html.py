"""Small HTML tables for notebooks: no script or style sheet, all text escaped, readable on light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

# No color of our own: `inherit` and `currentColor` follow the notebook's theme.
TABLE = "border-collapse:collapse;color:inherit;background:transparent;margin:.3em 0"
CELL = "text-align:{};padding:.15em .9em .15em 0;color:inherit;background:transparent;vertical-align:top"
WORDS = ";white-space:normal;max-width:32em"


class Markup(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", words: Iterable[int] = (0,)
) -> str:
    """Format an HTML table of escaped cells (`Markup` is kept); the columns `words` are aligned left, numbers right.

    >>> "&lt;script&gt;" in table(["class"], [["<script>"]])
    True
    """
    left = set(words)
    lines = [_row("th", head, left), *(_row("td", row, left) for row in rows)]
    above = f"<div>{escape(caption)}</div>" if caption else ""  # a <caption> would be broken to the table's width
    return f'{above}<table style="{TABLE}"><thead>{lines[0]}</thead><tbody>{"".join(lines[1:])}</tbody></table>'


def details(title: str, inside: str) -> str:
    """A section that opens on a click, without a script."""
    return f'<details><summary style="cursor:pointer">{escape(title)}</summary>{inside}</details>'


def interval(low: float, value: float, high: float) -> Markup:
    """Draw a line from `low` to `high` with a dot at `value`, on a faint axis from 0 to 1."""
    a, b, c = (2 + 116 * min(max(each, 0.0), 1.0) for each in (low, value, high))
    return Markup(
        f'<svg width="120" height="10" role="img" aria-label="from {100 * low:.1f} to {100 * high:.1f}">'
        '<g stroke="currentColor"><line x1="2" x2="118" y1="5" y2="5" opacity=".25"/>'
        f'<line x1="{a:.1f}" x2="{c:.1f}" y1="5" y2="5" stroke-width="3" opacity=".6"/></g>'
        f'<circle cx="{b:.1f}" cy="5" r="3" fill="currentColor"/></svg>'
    )


def _row(tag: str, cells: Sequence[object], left: set[int]) -> str:
    styles = [CELL.format("left") + WORDS if place in left else CELL.format("right") for place in range(len(cells))]
    inside = [cell if isinstance(cell, Markup) else escape(str(cell)) for cell in cells]
    return "<tr>" + "".join(f'<{tag} style="{s}">{c}</{tag}>' for s, c in zip(styles, inside, strict=True)) + "</tr>"

"""Scatter plots as inline SVG: scores of trials by number, or by the value of a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Point", "figure"]

WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 14, 36
FOOT = 14
"""Pixels above the axis in which trials without a score are marked."""


@dataclass(frozen=True)
class Point:
    """A trial: its place, its score (None: it has none), whether it is the best, and what a pointer over it reads."""

    x: float
    y: float | None
    words: str
    best: bool = False


@dataclass(frozen=True)
class Axis:
    """A scale with ticks at round numbers.

    Attributes:
        low: the value at its beginning.
        high: the value at its end.
        log: whether it is logarithmic.
        names: the names of the places 0, 1, ... where those are choices.
        name: what it shows.
    """

    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()
    name: str = ""

    def at(self, start: float, end: float) -> Callable[[float], float]:
        """The map from values to pixels."""
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        high = high if high > low else low + 1
        return lambda value: start + ((math.log(value) if self.log else value) - low) / (high - low) * (end - start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Values and their words, about `count` of them.

        >>> [words for _, words in Axis(1e-4, 1e-2, log=True).ticks(5)]
        ['0.0001', '0.001', '0.01']
        """
        if self.names:
            long = min(12, max(3, 40 // len(self.names)))
            return [(float(place), name[:long]) for place, name in enumerate(self.names)]
        values = self._decades() if self.log else self._round(count)
        return [(value, f"{value:.4g}") for value in values]

    def _decades(self) -> list[float]:
        for within in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [part * 10.0**power for power in powers for part in within]
            found = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / 5)]
        return [self.low, self.high]

    def _round(self, count: int) -> list[float]:
        rough = (self.high - self.low or 1.0) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def figure(title: str, points: Sequence[Point], x: Axis, y: Axis, color: int, *, best_so_far: bool = False) -> str:
    """A figure: a dot for each score, a cross at the foot for a trial without one, the best with a ring.

    Args:
        title: the caption.
        points: the trials.
        x: the scale across.
        y: the scale of scores.
        color: which of the page's eight colors.
        best_so_far: draw the best score up to each point, in the order of `points`.
    """
    across, up = x.at(LEFT, WIDTH - RIGHT), y.at(HEIGHT - BOTTOM - FOOT, TOP)
    dots = "".join(_dot(point, across(point.x), None if point.y is None else up(point.y), color) for point in points)
    line = _record(points, across, up, color) if best_so_far else ""
    scored = [point.y for point in points if point.y is not None]
    label = f"{title}: {len(points)} trials" + (f", the best {max(scored):.1f}" if scored else ", none with a score")
    return (
        f'<figure class="curve"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{_grid(x, y, across, up)}{line}{dots}</svg></figure>"
    )


def _dot(point: Point, x: float, y: float | None, color: int) -> str:
    words = f"<title>{escape(point.words)}</title>"
    if y is None:
        foot = HEIGHT - BOTTOM - 4
        return f'<path class="none" d="M{x - 3:.1f} {foot - 3}l6 6m0 -6l-6 6">{words}</path>'
    ring = f'<circle class="ring s{color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="7"/>' if point.best else ""
    return f'{ring}<circle class="end dot s{color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{words}</circle>'


def _record(points: Sequence[Point], across: Callable[[float], float], up: Callable[[float], float], color: int) -> str:
    best, path = -math.inf, list[str]()
    for point in points:
        if point.y is not None and point.y > best:
            if path:
                path.append(f"{across(point.x):.1f},{up(best):.1f}")
            best = point.y
            path.append(f"{across(point.x):.1f},{up(best):.1f}")
    if not path:
        return ""
    path.append(f"{across(points[-1].x):.1f},{up(best):.1f}")
    return f'<polyline class="line s{color % 8}" points="{" ".join(path)}"/>'


def _grid(x: Axis, y: Axis, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    lines = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{up(value) + 4:.1f}" text-anchor="end">{words}</text>'
        for value, words in y.ticks(4)
    ]
    lines += [
        f'<text class="tick" x="{across(value):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{escape(words)}</text>'
        for value, words in x.ticks(4)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x.name)}</text>')
    return "".join(lines)

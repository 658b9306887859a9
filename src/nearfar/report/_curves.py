"""Training curves as small charts in inline SVG: a line of means in a band from lowest to highest, round ticks.

A chart is as wide as a telephone, so that its labels appear in their given size, and several fit side by side
on a larger screen.
"""

import math
from collections.abc import Sequence
from html import escape

from nearfar.report._journal import Panel, Series

WIDTH, HEIGHT = 320, 164
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 8, 28
DASHES = ("", "7 4", "2 3", "10 3 2 3")


def span(panels: Sequence[Panel]) -> tuple[float, float]:
    """The first and the last step of all panels: one scale for all charts."""
    steps = [point[0] for panel in panels for one in panel.series for point in one.points]
    return min(steps, default=0.0), max(steps, default=0.0)


def curve(panel: Panel, number: int, steps: tuple[float, float]) -> str:
    """Draw a figure: the quantity, its unit and last value, and its curve.

    Several curves have a legend with the last value of each, which distinguishes them by dashes as well as by color.
    """
    series = panel.series[:8]
    values = [value for one in series for point in one.points for value in point[2:]]
    x = Axis(*steps, LEFT, WIDTH - RIGHT, name="step")
    y = Axis(*_pad(min(values), max(values)), HEIGHT - BOTTOM, TOP)
    drawn = "".join(_draw(one, i, x, y) for i, one in enumerate(series))
    several = len(series) > 1
    head = f"{escape(panel.title)}<small>{escape(panel.unit)}</small>{'' if several else _last(series[0])}"
    legend = f'<ul class="legend">{"".join(_legend(one, i) for i, one in enumerate(series))}</ul>' if several else ""
    summary = "; ".join(f"{one.name} from {_short(one.points[0][1])} to {_short(one.points[-1][1])}" for one in series)
    label = escape(f"{panel.title} {panel.unit}, {_short(x.low)} to {_short(x.high)} steps: {summary}")
    return (
        f'<figure class="curve" data-curve="{number}"><figcaption>{head}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'{grid(x, y)}{drawn}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
        f"{legend}</figure>"
    )


def curve_data(panel: Panel, steps: tuple[float, float]) -> dict[str, object]:
    """The data for the cursor on a curve: the range of steps in pixels, and the points."""
    return {
        "low": steps[0],
        "high": steps[1],
        "left": LEFT / WIDTH,
        "right": (WIDTH - RIGHT) / WIDTH,
        "series": [[[point[0], float(f"{point[1]:.5g}")] for point in one.points] for one in panel.series[:8]],
    }


class Axis:
    """A map from values to pixels, linear or logarithmic, with ticks at round numbers.

    It maps `low` to the pixel `start`, and `high` to `end`. An axis of choices has the `names` of the places 0, 1, ...;
    an axis of x may have a short label `name`.
    """

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        *,
        log: bool = False,
        names: Sequence[str] = (),
        name: str = "",
    ) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._start, self._end, self._log, self._names, self.name = start, end, log, names, name

    def __call__(self, value: float) -> float:
        low, high, here = (math.log(v) if self._log else v for v in (self.low, self.high, value))
        return self._start + (here - low) / (high - low) * (self._end - self._start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """About `count` values with their labels.

        >>> [label for _, label in Axis(1e-4, 1e-2, 0, 100, log=True).ticks(5)]
        ['0.0001', '0.001', '0.01']
        """
        if self._names:
            longest = min(12, max(3, 40 // len(self._names)))
            return [(float(place), name[:longest]) for place, name in enumerate(self._names)]
        return [(value, _short(value)) for value in (self._decades() if self._log else self._round(count))]

    def _decades(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            found = [part * 10.0**power for power in powers for part in parts]
            found = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / 5)]
        return [self.low, self.high]

    def _round(self, count: int) -> list[float]:
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _pad(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < 0.35 * high else low - room), high + room


def grid(x: Axis, y: Axis) -> str:
    """Draw the horizontal lines of a chart, and the labels of both axes."""
    lines = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{label}</text>'
        for v, label in y.ticks(4)
    ]
    lines += [
        f'<text class="tick" x="{x(v):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
        for v, label in x.ticks(4)
    ]
    if x.name:
        lines.append(f'<text class="tick" x="0" y="{HEIGHT - 6}">{escape(x.name)}</text>')
    return "".join(lines)


def _draw(one: Series, place: int, x: Axis, y: Axis) -> str:
    line = " ".join(f"{x(step):.1f},{y(mean):.1f}" for step, mean, _, _ in one.points)
    upper = [f"{x(step):.1f},{y(high):.1f}" for step, _, _, high in one.points]
    lower = [f"{x(step):.1f},{y(low):.1f}" for step, _, low, _ in reversed(one.points)]
    step, mean = one.points[-1][:2]
    return (
        f'<polygon class="band s{place}" points="{" ".join(upper + lower)}"/>'
        f'<polyline class="line s{place}" points="{line}" stroke-dasharray="{DASHES[place % 4]}"/>'
        f'<circle class="end s{place}" cx="{x(step):.1f}" cy="{y(mean):.1f}" r="3"/>'
    )


def _legend(one: Series, place: int) -> str:
    sample = (
        f'<svg viewBox="0 0 26 8" aria-hidden="true"><line class="line s{place}" x1="0" x2="26" y1="4" y2="4" '
        f'stroke-dasharray="{DASHES[place % 4]}"/></svg>'
    )
    return f"<li>{sample}{escape(one.name)} {_last(one)}</li>"


def _last(one: Series) -> str:
    """The last value, which the cursor replaces by others."""
    last = _short(one.points[-1][1])
    return f'<output data-last="{last}">{last}</output>'


def _short(value: float) -> str:
    """Format a number in few characters: 0.034, 12.5, 12k, 3e-05."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"

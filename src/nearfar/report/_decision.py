"""The section of a threshold: what it accepts, what it costs, and the curve of all thresholds."""

import math
from html import escape

from nearfar._utils import html
from nearfar.evaluation._calibration import PROMISE, Calibration, percent
from nearfar.report import _sections as sections
from nearfar.report._curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid


def decision(found: Calibration) -> str:
    """The section of a calibration."""
    new = "" if found.rate is None else f"{found.rate.low:.2g} to {found.rate.high:.2g}"
    rows = [("threshold", f"{found.threshold:.4f}", percent(found.tar), f"{found.far:g}", new)]
    sure = "No threshold can be guaranteed: there are too few classes or pairs, or the classes are not known."
    if found.guaranteed is not None and found.guaranteed_tar is not None and math.isfinite(found.guaranteed):
        tar = percent(found.guaranteed_tar)
        rows.append(("guaranteed", f"{found.guaranteed:.4f}", tar, f"at most {found.far:g}", ""))
        sure = f"The guarantee ({found.confidence:.0%}) {PROMISE}."
    head = ("", "accept above", "true accepts", "false accepts", "on as many new classes")
    what = "pairs" if found.per == "pair" else "best answers of queries"
    lead = (
        f"{found.negative:,} negative and {found.positive:,} positive {what}; both errors are equal at "
        f"{100 * found.eer:.2f}%. {sure}"
    )
    table = f'<div class="scroll">{html.table(head, rows)}</div>'
    return sections.section("decision", "Threshold", lead, f'<div class="curves">{_curve(found)}</div>{table}')


def _curve(found: Calibration) -> str:
    """True accept rate by false accept rate, with a dot at each threshold."""
    points = [(far, tar) for _, far, tar in found.curve if far > 0] or [(found.far, found.tar.value)]
    x = Axis(min(far for far, _ in points), 1, LEFT, WIDTH - RIGHT, log=True, name="FAR")
    y = Axis(0, 1, HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x(far):.1f},{y(tar):.1f}" for far, tar in points)
    dots = "".join(
        f'<circle class="end s{place}" cx="{x(max(far, x.low)):.1f}" cy="{y(tar):.1f}" r="4">'
        f"<title>{name}</title></circle>"
        for place, (name, far, tar) in enumerate(_marks(found))
    )
    label = escape(f"True accept rate by false accept rate; at {found.far:g} it is {100 * found.tar.value:.0f}%")
    return (
        f'<figure class="curve"><figcaption>True accepts<small>by the false accept rate</small></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{grid(x, y)}'
        f'<polyline class="line s0" points="{line}"/>{dots}</svg></figure>'
    )


def _marks(found: Calibration) -> list[tuple[str, float, float]]:
    """Name, false and true accept rate of each threshold."""
    marks = [("threshold", found.far, found.tar.value)]
    if found.guaranteed is not None and found.guaranteed_tar is not None and math.isfinite(found.guaranteed):
        far = next((far for cut, far, _ in found.curve if cut >= found.guaranteed), 0.0)
        marks.append(("guaranteed", far, found.guaranteed_tar.value))
    return marks

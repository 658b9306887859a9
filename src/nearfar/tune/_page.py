"""`build`: one self-contained page about a search: history, losses, keys, trials, the best configuration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from nearfar._utils.page import FOOTER, allow, document, hash_of
from nearfar.report._curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid
from nearfar.report._sections import banner, opening, pairs, percent, section
from nearfar.runs._config import to_yaml
from nearfar.tune._results import STATES, Best, Tuned, short
from nearfar.tune._space import Choices
from nearfar.tune._trial import Trial

NAMES = {"recall@1": "Recall at 1", "map_at_r": "MAP@R"}
SHOWN = 1000  # the largest number of trials in the table
FOOT = 14  # height in pixels above the axis in which trials without a score are marked
SHARED = ("page.css", "theme.js")  # files of the report's page that this page uses too
STYLE = """
.ring { fill: none; stroke: var(--c); stroke-width: 1.5; } .dot { opacity: .8; }
.none { fill: none; stroke: var(--soft); stroke-width: 1.3; opacity: .7; }
.scores td { font-size: .875rem; } .scores .value { white-space: nowrap; } .scores .values { overflow-wrap: anywhere; }
.edge { color: var(--wrong); } details { margin-top: 1rem; } summary { cursor: pointer; margin-bottom: .8rem; }
.share { display: inline-block; width: 6rem; margin-right: .6rem; vertical-align: middle; }
.share i { left: 0; background: var(--accent); border-radius: 6px; }
"""
NAV = {"history": "History", "losses": "Best", "keys": "Keys", "trials": "Trials", "setup": "Configuration"}


@dataclass(frozen=True)
class Mark:
    """A trial in a chart: its place, its score or None, its tooltip, and whether it is the best."""

    x: float
    y: float | None
    words: str
    best: bool = False


def build(result: Tuned) -> str:
    """Build the page and return it as text; at least one trial must have ended with a score."""
    style, script = (files("nearfar.report").joinpath(name).read_text(encoding="utf-8") for name in SHARED)
    parts = (_headline, _history, _losses, _keys, _trials, _setup)
    written = "\n".join(part(result) for part in parts)
    nav = "".join(f'<a href="#{name}">{words}</a>' for name, words in NAV.items())
    inside = f"""{banner("results", nav)}
<main id="main">
{written}
</main>
{FOOTER}
<script>{script}</script>"""
    return document(
        f"{result.folder.name} · nearfar tune", inside, style=style + STYLE, head=allow(f"script-src {hash_of(script)}")
    )


def _headline(result: Tuned) -> str:
    counts = {state: sum(each.count(state) for each in result.losses.values()) for state in STATES}
    seconds = sum(each.outcome.seconds for each in result.trials)
    facts = [("Trials", f"{len(result.trials):,}", "" if result.finished else "stopped; the search can go on")]
    facts += [("Pruned", f"{counts['pruned']:,}", "stopped early, behind the median")]
    if counts["diverged"] + counts["failed"]:
        facts.append(("Without a score", f"{counts['diverged'] + counts['failed']:,}", "diverged or failed"))
    equal = len({len(each.trials) for each in result.losses.values()}) == 1
    facts += [("Losses", f"{len(result.losses):,}", "the same number of trials each" if equal else "")]
    facts += [("Training", f"{seconds / 60:,.1f} min", "of all trials together")]
    sentence = f"{result.best_loss} scores best on training classes that were held out. No test class was read."
    return opening(result.folder.name, f"{_name(result)}, best trial", result.score, sentence, facts)


def _name(result: Tuned) -> str:
    return NAMES.get(result.score_name, result.score_name)


def _history(result: Tuned) -> str:
    y, last = _score_axis(result), max(each.number for each in result.trials) + 1
    x = Axis(1, max(last, 2), LEFT, WIDTH - RIGHT, name="trial")
    drawn = []
    for color, (label, each) in enumerate(result.losses.items()):
        marks = [_mark(one, one.number + 1.0, each) for one in each.trials]
        title = label if each.score is None else f"{label}: {percent(each.score)}"
        drawn.append(scatter(title, marks, x, y, color, best_so_far=True))
    lead = (
        f"{_name(result)} of each trial in per cent, and the best so far as a line; a cross is a trial without a "
        "score: stopped because it was behind, diverged or failed. Point at a mark to read its values."
    )
    return section("history", "History", lead, f'<div class="curves">{"".join(drawn)}</div>')


def _score_axis(result: Tuned) -> Axis:
    """One axis of scores for all charts; diverged trials, which score 0, are left out and drawn at its foot."""
    found = [100 * each.outcome.score for each in result.trials if each.outcome.state == "done" and each.outcome.score]
    low, high = min(found, default=0.0), max(found, default=1.0)
    room = 0.06 * (high - low) or 1.0
    return Axis(max(0.0, low - room), high + room, HEIGHT - BOTTOM - FOOT, TOP)


def _mark(one: Trial, x: float, best: Best) -> Mark:
    outcome = one.outcome
    score = 100 * outcome.score if outcome.state == "done" and outcome.score is not None else None
    words = ", ".join(f"{key} {short(value)}" for key, value in one.values.items())
    what = outcome.state if score is None else f"{score:.1f}"
    return Mark(x, score, f"trial {one.number + 1}: {what}; {words}", best=one is best.trial)


def _losses(result: Tuned) -> str:
    rows = []
    for label, each in sorted(result.losses.items(), key=lambda item: -(item[1].score or 0.0)):
        values = {} if each.trial is None else each.trial.values
        shown = "<br>".join(_value(key, value, key in each.at_edge) for key, value in values.items())
        score = "–" if each.score is None else percent(each.score)
        counts = "".join(f"<td>{each.count(state):,}</td>" for state in STATES[:2])
        bad = each.count("diverged") + each.count("failed")
        rows.append(
            f'<tr><th scope="row">{escape(label)}</th><td class="value">{score}</td><td class="values">{shown}</td>'
            f"{counts}<td>{bad:,}</td></tr>"
        )
    edge = any(each.at_edge for each in result.losses.values())
    lead = "The best trial of each loss." + (
        " A value marked as at the edge lies at an end of its range: better ones may lie beyond." if edge else ""
    )
    head = _head("Loss", _name(result), "Values", "Finished", "Pruned", "Without a score")
    return section("losses", "Best", lead, _table(head, rows))


def _value(key: str, value: object, edge: bool) -> str:
    mark = ' <span class="edge">at the edge</span>' if edge else ""
    return f"<small>{escape(key)}</small> {escape(short(value))}{mark}"


def _head(*names: str) -> str:
    return "".join(f'<th scope="col">{escape(name)}</th>' for name in names)


def _table(head: str, rows: list[str]) -> str:
    return (
        f'<div class="scroll"><table class="scores"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _keys(result: Tuned) -> str:
    y, parts = _score_axis(result), []
    for color, (label, each) in enumerate(result.losses.items()):
        shares = each.importances()
        drawn = "".join(_key_chart(each, key, shares.get(key), y, color) for key in each.space.ranges)
        opened = " open" if label == result.best_loss else ""
        parts.append(f'<details{opened}><summary>{escape(label)}</summary><div class="curves">{drawn}</div></details>')
    lead = (
        "The score of every finished trial against the value of each key. Importance: the key's share in what sets the "
        "better trials apart (PED-ANOVA), from ten finished trials on."
    )
    return section("keys", "Keys", lead, "".join(parts))


def _key_chart(best: Best, key: str, share: float | None, y: Axis, color: int) -> str:
    values = best.space.ranges[key]
    if isinstance(values, Choices):
        names = tuple(short(each) for each in values.options)
        x = Axis(-0.5, len(names) - 0.5, LEFT, WIDTH - RIGHT, names=names)
    else:
        x = Axis(values.low, values.high, LEFT, WIDTH - RIGHT, log=values.log, name="log" if values.log else "")
    marks = [_mark(one, float(values.encode(one.values[key])), best) for one in best.trials]
    title = key if share is None else f"{key}: importance {100 * share:.0f}%"
    return scatter(title, [mark for mark in marks if mark.y is not None], x, y, color)


def scatter(title: str, marks: Sequence[Mark], x: Axis, y: Axis, color: int, *, best_so_far: bool = False) -> str:
    """Draw a figure: a dot for each score, a cross at the foot for a trial without one, a ring around the best.

    With `best_so_far`, a line shows the best score up to each mark, in the order of `marks`.
    """
    scored = [mark.y for mark in marks if mark.y is not None]
    label = f"{title}: {len(marks)} trials" + (f", the best {max(scored):.1f}" if scored else ", none with a score")
    line = _best_line(marks, x, y, color) if best_so_far and scored else ""
    dots = "".join(_dot(mark, x(mark.x), None if mark.y is None else y(mark.y), color) for mark in marks)
    return (
        f'<figure class="curve"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{grid(x, y)}{line}{dots}</svg></figure>"
    )


def _dot(mark: Mark, x: float, y: float | None, color: int) -> str:
    words = f"<title>{escape(mark.words)}</title>"
    if y is None:
        return f'<path class="none" d="M{x - 3:.1f} {HEIGHT - BOTTOM - 7}l6 6m0 -6l-6 6">{words}</path>'
    ring = f'<circle class="ring s{color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="7"/>' if mark.best else ""
    return f'{ring}<circle class="end dot s{color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{words}</circle>'


def _best_line(marks: Sequence[Mark], x: Axis, y: Axis, color: int) -> str:
    """A line of steps: the best score so far."""
    best, path = -math.inf, list[tuple[float, float]]()
    for mark in marks:
        if mark.y is not None and mark.y > best:
            path += [(mark.x, best)] * bool(path) + [(mark.x, mark.y)]
            best = mark.y
    path.append((marks[-1].x, best))
    points = " ".join(f"{x(place):.1f},{y(score):.1f}" for place, score in path)
    return f'<polyline class="line s{color % 8}" points="{points}"/>'


def _trials(result: Tuned) -> str:
    order = sorted(result.trials, key=lambda each: (each.outcome.state != "done", -(each.outcome.score or 0.0)))
    rows = []
    for each in order[:SHOWN]:
        outcome = each.outcome
        score = percent(outcome.score) if outcome.state == "done" and outcome.score is not None else outcome.state
        seeds = ", ".join(percent(one) for one in outcome.scores) if len(outcome.scores) > 1 else ""
        values = ", ".join(f"<small>{escape(key)}</small> {escape(short(v))}" for key, v in each.values.items())
        why = f"<small>{escape(outcome.error)}</small>" if outcome.error else ""
        rows.append(
            f'<tr><th scope="row">{escape(each.loss)}</th><td>{each.number + 1}</td><td class="value">{score}'
            f'<small class="note">{seeds}</small></td><td class="values">{values}{why}</td>'
            f"<td>{outcome.seconds:,.0f}</td></tr>"
        )
    lead = "The best first." + (f" {SHOWN:,} of {len(order):,}; trials.json has all." if len(order) > SHOWN else "")
    return section("trials", "Trials", lead, _table(_head("Loss", "Trial", _name(result), "Values", "Seconds"), rows))


def _setup(result: Tuned) -> str:
    best = result.losses[result.best_loss or ""]
    searched = pairs(f"Searched for {best.space.label}", best.space.ranges)
    lead = "best.yaml, a complete configuration: nearfar train takes it."
    return section("setup", "Configuration", lead, f"<pre>{escape(to_yaml(result.best))}</pre>{searched}")

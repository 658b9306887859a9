"""The static sections of the page: headline, scores, curves, findings, confusion, configuration. Text is escaped."""

import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nearfar._utils.extras import version_of
from nearfar.evaluation._bootstrap import Interval
from nearfar.evaluation._evaluate import Evaluation
from nearfar.report._confusion import Row
from nearfar.report._curves import curve, span
from nearfar.report._journal import Journal

MEANING = {
    "r_precision": ("R-precision", "share of right ones among the R nearest, R being all right answers there are"),
    "map_at_r": ("MAP@R", "the same, but early places count more"),
    "mrr": ("MRR", "mean of 1 / rank of the first right answer"),
    "nmi": ("NMI", "mutual information of k-means clusters and classes, normalized"),
    "ami": ("AMI", "the same, adjusted for chance"),
    "f1": ("F1", "pairs that share a cluster against pairs that share a class"),
}

BEFORE = {"input": "Input vectors", "untrained": "Untrained network"}
"""Titles of the baselines of recall@1, by their key in the journal."""


def banner(what: str, nav: str) -> str:
    """The top of a page: a link to the content, the name, links to the sections, and the switch of colors."""
    return f"""<a class="skip" href="#main">Skip to the {what}</a>
<header class="top">
<p class="brand"><svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="6" cy="12" r="3.4"/>\
<circle cx="9.5" cy="7.5" r="2.3"/><circle class="far" cx="16.5" cy="4" r="2"/></svg>nearfar</p>
<nav aria-label="Sections">{nav}</nav>
<button type="button" id="theme" aria-label="Switch between light and dark">\
<svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7.2"/>\
<path d="M10 2.8a7.2 7.2 0 0 1 0 14.4z"/></svg></button>
</header>"""


def section(name: str, title: str, lead: str, body: str) -> str:
    """A section with its heading; `lead` is text, `body` is HTML."""
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{intro}{body}</section>'


def headline(
    title: str, evaluation: Evaluation, width: int, similarity: str, before: Mapping[str, float] | None = None
) -> str:
    """The first section: recall@1 with its interval, the size of the data, and recall@1 before training if known."""
    value = evaluation.precision_at_1
    bar = evaluation.intervals.get("precision_at_1")
    unit = "classes" if evaluation.unit == "class" else "queries"
    sure = (
        f'<p class="sure"><b>{percent(bar.low)} to {percent(bar.high)}</b> '
        f"<span>95% interval, drawn over {unit}</span></p>"
        if bar
        else ""
    )
    facts = [
        ("Queries", f"{evaluation.queries:,}", ""),
        ("Classes", f"{evaluation.classes:,}", ""),
        ("Lone queries", f"{evaluation.lone:,}", "left out: no other sample of their class" if evaluation.lone else ""),
        ("Dimensions", f"{width:,}", f"{similarity} similarity"),
    ]
    facts += [(BEFORE.get(name, escape(name)), percent(value), "recall at 1") for name, value in (before or {}).items()]
    return opening(title, "Recall at 1", value, _in_words(value), facts, below=f"{_band(value, bar)}{sure}")


def opening(
    title: str, kicker: str, value: float, sentence: str, facts: Sequence[tuple[str, str, str]], below: str = ""
) -> str:
    """A first section: one large score, a sentence, and facts (name, number, note); `below` the score is HTML."""
    listed = "".join(
        f"<div><dt>{name}</dt><dd>{number}{f'<small>{note}</small>' if note else ''}</dd></div>"
        for name, number, note in facts
    )
    return (
        f'<section id="headline" aria-labelledby="headline-title"><h1 id="headline-title">{escape(title)}</h1>'
        f'<div class="headline"><div class="first"><p class="kicker">{escape(kicker)}</p>'
        f'<p class="big">{percent(value)}<span>%</span></p>{below}</div>'
        f'<div><p class="sentence">{escape(sentence)}</p><dl class="facts">{listed}</dl></div></div></section>'
    )


def _in_words(value: float) -> str:
    if value >= 1:
        return "Every query finds its own class first."
    return f"In {100 * value:.0f} of 100 queries the nearest neighbor is of the right class."


def percent(value: float) -> str:
    """Format a share in 0..1 in percent with one decimal."""
    return f"{100 * value:.1f}"


def _band(value: float, bar: Interval | None) -> str:
    """An interval as a band on 0..100 with a mark at the value."""
    band = ""
    if bar is not None:
        low, high = max(0.0, 100 * bar.low), min(100.0, 100 * bar.high)
        band = f'<i class="range" style="left:{low:.2f}%;width:{max(high - low, 0.0):.2f}%"></i>'
    return f'<div class="bar" aria-hidden="true">{band}<i class="mark" style="left:{100 * value:.2f}%"></i></div>'


def scores(evaluation: Evaluation) -> str:
    unit = "classes" if evaluation.unit == "class" else "queries"
    lines = []
    for name, value in evaluation.scores().items():
        if name == "precision_at_1" and 1 in evaluation.recall:
            continue  # the same number
        title, meaning = _meaning(name)
        bar = evaluation.intervals.get(name) or evaluation.intervals.get(f"{name} over starts")
        starts = name not in evaluation.intervals and bar is not None
        ends = f"{percent(bar.low)} – {percent(bar.high)}" if bar else "–"
        note = '<small class="note">spread over k-means starts</small>' if starts else ""
        lines.append(
            f'<tr><th scope="row">{title}<small>{meaning}</small></th><td class="value">{percent(value)}</td>'
            f'<td class="ends">{ends}{note}</td><td class="drawn">{_band(value, bar)}</td></tr>'
        )
    lead = f"In per cent. The bands are 95% intervals of a bootstrap over {unit}" + (
        ": how far the score would move with other classes of the same kind." if unit == "classes" else "."
    )
    head = (
        '<thead><tr><th scope="col">Score</th><th scope="col">Value</th><th scope="col">Interval</th>'
        '<th scope="col" class="scale"><span>0</span><span>50</span><span>100</span></th></tr></thead>'
    )
    return section("scores", "Scores", lead, f'<table class="scores">{head}<tbody>{"".join(lines)}</tbody></table>')


def _meaning(name: str) -> tuple[str, str]:
    k = re.fullmatch(r"recall@(\d+)", name)
    if k:
        many = int(k[1])
        return f"R@{many}", "the nearest is right" if many == 1 else f"a right answer among the {many} nearest"
    return MEANING.get(name, (escape(name), ""))


def curves(journal: Journal) -> str:
    steps = span(journal.panels)
    figures = "".join(curve(panel, number, steps) for number, panel in enumerate(journal.panels))
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in journal.notes)
    return section("curves", "Training", "", f'<div class="curves">{figures}</div>{notes}')


def findings(found: Sequence[Any]) -> str:
    """The doctor's findings, each with severity, evidence and remedy."""
    items = []
    for one in found:
        get = one.get if isinstance(one, Mapping) else lambda key, item=one: getattr(item, key, "")
        severity = str(get("severity") or "note")
        kind = "bad" if severity.lower() in ("alarm", "error", "critical", "severe", "high", "bad") else "mild"
        remedy = _evidence(get("remedy"))
        items.append(
            f'<li class="finding {kind}"><h3><span class="tag">{escape(severity)}</span>{escape(str(get("name")))}</h3>'
            f"<p>{_evidence(get('evidence'))}</p>{f'<p><b>Remedy.</b> {remedy}</p>' if remedy else ''}</li>"
        )
    body = f'<ul class="findings">{"".join(items)}</ul>' if items else '<p class="quiet">Nothing found: healthy.</p>'
    return section("findings", "The doctor’s findings", "", body)


def _evidence(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(key))}: {escape(_number(item))}" for key, item in value.items())
    return "" if value is None else escape(_number(value))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def confusion(table: Sequence[Row], classes: Mapping[int, str], everything: bool) -> str:
    """A heat map of the worst classes, with a count in each cell and a framed diagonal.

    If these are all classes (`everything`), there is no column for others.
    """
    heads = "".join(
        f'<th scope="col"><abbr title="{escape(classes[row.label])}">{place}</abbr>{_picture(row)}</th>'
        for place, row in enumerate(table, start=1)
    )
    other = "" if everything else '<th scope="col">other</th>'
    lines = "".join(_line(place, row, classes, everything) for place, row in enumerate(table))
    last = '<th scope="col">Most often taken for</th>'
    head = f'<thead><tr><th scope="col">True class</th>{heads}{other}{last}</tr></thead>'
    number = {1: "The class", 2: "Both classes"}.get(len(table), f"The {_word(len(table))} classes")
    lead = (
        f"{number} with the lowest recall, worst first. A row counts what was nearest to the queries of one class; "
        "the framed diagonal is right."
    )
    name = "Confusion" if everything else "Confusion between the worst classes"
    body = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Confusion table">'
        f'<table class="confusion">{head}<tbody>{lines}</tbody></table></div>'
    )
    return section("confusion", name, lead, body)


def _word(count: int) -> str:
    return (
        ("three", "four", "five", "six", "seven", "eight", "nine", "ten")[count - 3] if 3 <= count <= 10 else str(count)
    )


def _picture(row: Row) -> str:
    return f'<span class="pic" data-row="{row.example}"></span>'


def _line(place: int, row: Row, classes: Mapping[int, str], everything: bool) -> str:
    name = escape(classes[row.label])
    counts = row.counts[:-1] if everything else row.counts
    cells = "".join(
        f'<td class="{"cell right" if i == place else "cell"}" style="--share:{count / max(row.queries, 1):.3f}">'
        f"{count if count or i == place else '<span>·</span>'}</td>"
        for i, count in enumerate(counts)
    )
    mostly = (
        f"{escape(classes[row.mostly[0]])} <small>({row.mostly[1]} of {row.queries})</small>" if row.mostly else "–"
    )
    return (
        f'<tr><th scope="row"><span class="who"><b>{place + 1}</b>{_picture(row)}<span>'
        f'<button type="button" class="pick" data-class="{name}" title="Show it in the gallery">{name}</button>'
        f"<small>{percent(row.recall_at_1)}% right of {row.queries}</small></span></span></th>{cells}"
        f'<td class="mostly">{mostly}</td></tr>'
    )


def setup(config: str, settings: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Configuration, settings of the page, versions, and notes about what is missing."""
    written = f"<h3>config.yaml</h3><pre tabindex=0>{escape(config)}</pre>" if config.strip() else ""
    tables = "".join(f"<div>{pairs(*each)}</div>" for each in (("This page", settings), ("Versions", versions())))
    left = "".join(f"<li>{escape(note)}</li>" for note in notes)
    out = f'<div><h3>Not on this page</h3><ul class="quiet">{left}</ul></div>' if left else ""
    return section("setup", "Configuration", "", f'{written}<div class="columns">{tables}{out}</div>')


def pairs(title: str, values: Mapping[str, Any]) -> str:
    """A heading and a list of names with their values."""
    lines = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in values.items())
    return f'<h3>{escape(title)}</h3><dl class="pairs">{lines}</dl>'


def versions() -> dict[str, str]:
    """Versions of the software that computed the scores."""
    from nearfar import __version__

    names = ("torch", "numpy", "scikit-learn")  # the last is optional
    found = {"nearfar": __version__} | {name: version_of(name) or "unknown" for name in names}
    return found | {"python": platform.python_version()}

"""The page of an inspection: one HTML file with the findings of each kind and their pictures."""

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from nearfar._utils.files import write_text
from nearfar._utils.page import FOOTER, allow, document, hash_of
from nearfar.inspection._inspect import Finding, Inspection
from nearfar.report._pictures import Pictures, Thumbnails
from nearfar.report._sections import banner, section

ROOM = 12_000_000  # characters of the pictures at most
LEADS = {  # title and first sentence of each kind, in the order of the page
    "wrong label": (
        "Wrong labels",
        "The score is the probability that the label is wrong. Beside each sample: the neighbors that accuse it.",
    ),
    "copy with another label": ("One sample under two labels", "Copies whose classes differ; the first is accused."),
    "copy across sides": ("Copies across train and test", "The first would be left out, the other one stays."),
    "copy": ("Copies", "Of each pair the first would be left out."),
    "class like two": ("Classes that look like two", "Examples of both parts. 1: as far apart as neighboring classes."),
    "classes like one": ("Classes that look like one", "Examples of both classes. 1: they mix as by chance."),
    "stranger": ("Strangers", "Far from every other sample, here with the nearest ones."),
    "unreadable": ("Unreadable", "These pictures could not be read."),
}
STYLE = """
.counts { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin-top: 1rem; }
.counts div { display: flex; gap: .5rem; align-items: baseline; } .counts dt { color: var(--soft); }
.counts dd { order: -1; font-size: 1.5rem; font-weight: 600; }
h1 { font-size: 1.5rem; color: var(--ink); }
.query .says small { white-space: normal; overflow-wrap: anywhere; }
.wordy .query { display: block; } .wordy .strip { --side: 9rem; }
.wordy .strip .frame { height: auto; min-height: 2.7rem; }
"""


def write_page(path: str | os.PathLike[str], found: Inspection, *, title: str = "Inspection", most: int = 60) -> Path:
    """Write a self-contained HTML page with the pictures, at most `most` findings of each kind."""
    write_text(Path(path), _build(found, title, most))
    return Path(path)


def _build(found: Inspection, title: str, most: int) -> str:
    shown = {kind: found.of(kind)[:most] for kind in LEADS}
    rows = {row for each in shown.values() for finding in each for row in finding.rows}
    read = found.material.picture
    pictures = Thumbnails() if read is None else Pictures(read).thumbnails(rows, ROOM)
    body = [_headline(found, title)]
    for kind, findings in shown.items():
        if findings:
            heading, lead = LEADS[kind]
            every = len(found.of(kind))
            more = f" The first {len(findings)} of {every:,}." if every > len(findings) else ""
            cards = "".join(_card(found, finding, pictures) for finding in findings)
            look = "queries" + (" ink" if pictures.ink else "")
            body.append(section(_anchor(kind), heading, lead + more, f'<div class="{look}">{cards}</div>'))
    nav = "".join(f'<a href="#{_anchor(kind)}">{LEADS[kind][0]}</a>' for kind in shown if shown[kind])
    home = files("nearfar.report")
    script = home.joinpath("theme.js").read_text(encoding="utf-8")
    wordy = "" if pictures.data else ' class="wordy"'
    inside = f'{banner("findings", nav)}<main id="main"{wordy}>{"".join(body)}</main>{FOOTER}<script>{script}</script>'
    style = home.joinpath("page.css").read_text(encoding="utf-8") + STYLE
    rules = f"img-src data:; script-src {hash_of(script)}"
    return document(f"{title} · nearfar", inside, style=style, head=allow(rules))


def _anchor(kind: str) -> str:
    return kind.replace(" ", "-")


def _headline(found: Inspection, title: str) -> str:
    listed = "".join(f"<div><dt>{escape(kind)}</dt><dd>{count:,}</dd></div>" for kind, count in found.counts().items())
    first = escape(found.text().splitlines()[0])
    noise = f" Estimated share of wrong labels: {100 * found.noise:.1f}%." if len(found.material.classes) > 1 else ""
    return (
        f'<section id="headline"><h1>{escape(title)}</h1><p class="lead">{first}.{noise}</p>'
        f'<dl class="counts">{listed or "<div><dt>Nothing found.</dt></div>"}</dl></section>'
    )


def _card(found: Inspection, finding: Finding, pictures: Thumbnails) -> str:
    """One finding: the accused sample, what is said about it, and the evidence."""
    classes = finding.kind.startswith("class")
    rows = finding.rows if classes else finding.rows[1:]
    first = "" if classes or not finding.rows else _tile(found, finding.rows[0], pictures, "wrong")
    name = finding.label if classes else finding.name[0] if finding.name else found.material.names[finding.rows[0]]
    middle = len(rows) // 2 if classes else -1
    tiles = "".join(
        f'<div class="{"first-right" if place == middle else ""}">{_tile(found, row, pictures)}</div>'
        for place, row in enumerate(rows)
    )
    return (
        f'<article class="query">{first}<div class="says"><b title="{escape(name)}">{escape(name)}</b>'
        f'<small>{escape(_story(found, finding))}</small></div><div class="strip">{tiles}</div></article>'
    )


def _story(found: Inspection, finding: Finding) -> str:
    """What is said about a finding, in a line."""
    words = [f"score {finding.score:.2f}"]
    if finding.kind == "wrong label":
        words += [f"labeled {found.given(finding.rows[0])}", f"looks like {finding.label}"]
    elif finding.kind == "copy with another label":
        words += [" and ".join(found.given(row) for row in finding.rows)]
    elif finding.kind == "copy across sides":
        words += [" and ".join(found.material.sides[row] for row in finding.rows)]
    elif finding.rows and found.given(finding.rows[0]) and not finding.kind.startswith("class"):
        words += [found.given(finding.rows[0])]
    return " · ".join([*words, *([finding.note] if finding.note else [])])


def _tile(found: Inspection, row: int, pictures: Thumbnails, mark: str = "") -> str:
    """The picture of a row, or its name."""
    name = found.material.names[row]
    about = escape(f"{name} ({found.given(row)})" if found.given(row) else name)
    data = pictures.data.get(row)
    inside = (
        f'<img src="data:{pictures.mime};base64,{data}" alt="{about}">'
        if data is not None
        else f'<span class="words"><span>{escape(name)}</span></span>'
    )
    return f'<div class="tile {mark}" title="{about}"><span class="frame">{inside}</span></div>'

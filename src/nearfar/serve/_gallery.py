"""`write_gallery`: queries with their neighbors as one self-contained page without a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from nearfar._utils.files import write_text
from nearfar._utils.page import FOOTER, allow, document
from nearfar.serve._answers import Answer


@dataclass(frozen=True)
class Found:
    """One query with its neighbors.

    Attributes:
        name: name of the query.
        picture: picture of the query as a data URI, or None.
        answers: the neighbors, nearest first.
    """

    name: str
    picture: str | None
    answers: Sequence[Answer]


def write_gallery(
    path: Path, title: str, about: str, found: Sequence[Found], picture: Callable[[int], str | None]
) -> None:
    """Write the page, completely or not at all.

    Args:
        path: file of the page.
        title: heading of the page.
        about: one sentence below the heading.
        found: the queries with their neighbors.
        picture: maps a row to the picture of a neighbor as a data URI, or None.
    """
    style = files("nearfar.serve").joinpath("page.css").read_text(encoding="utf-8")
    title, sections = _encodable(title), "\n".join(_section(one, picture) for one in found)
    body = f"""<main>
<h1>{escape(title)}</h1>
<p class="quiet">{_text(about)}</p>
{sections}
</main>
{FOOTER}"""
    write_text(path, document(f"{title} · nearfar", body, style=style, head=allow("img-src data:")))


def _section(found: Found, picture: Callable[[int], str | None]) -> str:
    tiles = "".join(_tile(picture(answer.row), answer) for answer in found.answers)
    asked = _frame(found.picture, found.name)
    return (
        f'<section class="found"><figure class="query">{asked}<figcaption>{_text(found.name)}</figcaption></figure>'
        f'<ol class="answers">{tiles}</ol></section>'
    )


def _tile(picture: str | None, answer: Answer) -> str:
    label = "" if answer.label is None else f"<small>{_text(answer.label)}</small>"
    return f"<li>{_frame(picture, answer.name)}<b>{answer.score:.3f}</b><span>{_text(answer.name)}</span>{label}</li>"


def _frame(picture: str | None, name: str) -> str:
    if picture is None:
        return '<span class="frame none" aria-hidden="true"></span>'
    return f'<span class="frame"><img src="{escape(picture)}" alt="{_text(name)}"></span>'


def _text(words: str) -> str:
    return escape(_encodable(words))


def _encodable(words: str) -> str:
    """Replace lone surrogates, which names may hold and UTF-8 cannot encode."""
    return words.encode("utf-8", errors="replace").decode("utf-8")

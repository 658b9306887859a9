"""Output to the terminal: everything that a command prints passes through this module.

Names of classes and files are data. They may contain escape sequences, carriage returns, characters that reverse the
writing direction, rich's markup, or characters that the stream's encoding does not have. All of it is printed as
visible text, none of it is interpreted, and no print fails because of it.
"""

import sys
import unicodedata
import warnings
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

KEPT = "\n\t"
OBEYED = ("Cc", "Cs", "Zl", "Zp")  # control characters, surrogates, line and paragraph separators
TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # change the writing direction


def visible(text: str, encoding: str = "utf-8") -> str:
    r"""Escape control characters and what the encoding cannot represent; new lines and tabs stay.

    >>> print(visible("a\x1b[2Jb\rc \u2264 d", "ascii"))
    a\x1b[2Jb\x0dc \u2264 d
    """
    if not text.isprintable():
        text = "".join(_escape(char) for char in text)
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _escape(char: str) -> str:
    if char in KEPT or (unicodedata.category(char) not in OBEYED and char not in TURNS):
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def say(words: str, *, end: str = "\n", error: bool = False) -> None:
    """Print one line to standard output, or with `error` to standard error."""
    stream = sys.stderr if error else sys.stdout
    print(visible(words, getattr(stream, "encoding", None) or "utf-8"), end=end, file=stream)


class Terminal(Console):
    """A rich console that interprets no markup, emoji codes or highlights, and escapes control characters."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Escape strings, also those of cells and titles, before they are measured, so that tables stay aligned."""
        return super().render_str(visible(text, self.encoding), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape everything that is not a string, such as a `Text`, or the ellipsis with which rich shortens a cell."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, self.encoding))


def guard_streams() -> None:
    """Also escape the output of other code during a command: help, warnings, exit messages."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    plain = warnings.formatwarning

    def formatted(*given: Any, **how: Any) -> str:
        return visible(plain(*given, **how))

    warnings.formatwarning = formatted

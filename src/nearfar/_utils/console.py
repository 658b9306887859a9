"""The one way to the terminal: whatever a person is shown passes here.

Names of classes and files are data. They may hold what a terminal obeys (escape sequences, carriage returns, turned
writing directions), what rich would read as markup, or what the encoding of the stream cannot say. All of it is shown,
none of it is obeyed, and no print fails of it.
"""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

KEPT = "\n\t"
OBEYED = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of a pair, separators of lines and paragraphs
TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they turn the writing direction


def visible(text: str, encoding: str = "utf-8") -> str:
    r"""`text` with what a terminal would obey, and what the encoding cannot say, as escapes; new lines and tabs stay.

    >>> print(visible("a\x1b[2Jb\rc \u2264 d", "ascii"))
    a\x1b[2Jb\x0dc \u2264 d
    """
    if not text.isprintable():
        text = "".join(_escaped(char) for char in text)
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _escaped(char: str) -> str:
    if char in KEPT or (unicodedata.category(char) not in OBEYED and char not in TURNS):
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def say(words: str, *, end: str = "\n", error: bool = False) -> None:
    """A plain line on the output, or on the error stream."""
    stream = sys.stderr if error else sys.stdout
    print(visible(words, getattr(stream, "encoding", None) or "utf-8"), end=end, file=stream)


class Terminal(Console):
    """A console of rich that reads no markup, no emoji codes and no highlights, and shows what it would else obey."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Strings, of cells and titles too: escaped before anything is measured, so that tables stay straight."""
        return super().render_str(visible(text, self.encoding), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else, such as a `Text` or the dots with which rich shortens a cell."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, self.encoding))


def guard_streams() -> None:
    """For a command: what others print (help, warnings, the message of an exit) can neither fail nor be obeyed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    plain = warnings.formatwarning

    def formatted(*given: Any, **how: Any) -> str:
        return visible(plain(*given, **how))

    warnings.formatwarning = formatted

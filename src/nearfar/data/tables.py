"""Safe reading of text files that list images: they may come from a stranger, and one line may be huge."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from nearfar._utils.checks import printable

__all__ = ["table", "text_lines", "whole_number", "words"]

LONGEST = 1 << 20
"""Characters that a line may have."""


def text_lines(owner: str, path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends; a line longer than `LONGEST` is an error."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {path}; name the place of the unpacked data.")
    with path.open(newline="", encoding="utf-8-sig") as stream:
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(LONGEST + 1)
            except UnicodeDecodeError:
                raise ValueError(f"{owner}: {path} is no text in UTF-8 (from line {number} on); save it so.") from None
            if not line:
                return
            if len(line) > LONGEST:
                raise ValueError(
                    f"{owner}: line {number} of {path} has more than {LONGEST:,} characters; this is no list of files."
                )
            yield line


def words(owner: str, path: Path, columns: int, *, skip: int = 0) -> list[list[str]]:
    """The words of each line of an official text file, without the first `skip` lines (headings)."""
    rows = []
    for number, line in enumerate(text_lines(owner, path), start=1):
        if number <= skip or not line.strip():
            continue
        rows.append(line.split())
        if len(rows[-1]) != columns:
            raise ValueError(f"{owner}: line {number} of {path} must hold {columns} words, but holds {len(rows[-1])}.")
    if not rows:
        raise ValueError(f"{owner}: {path} holds no rows.")
    return rows


def table(owner: str, path: Path, needed: tuple[str, ...], more: tuple[str, ...] | None = ()) -> list[dict[str, str]]:
    """Read the rows of a CSV file as mappings from column names.

    Args:
        owner: whom messages name.
        path: the file.
        needed: required columns.
        more: optional columns; None allows any.
    """
    try:
        reader = csv.DictReader(text_lines(owner, path), skipinitialspace=True, strict=True)
        columns = list(reader.fieldnames or [])
        if not set(needed) <= set(columns) or (more is not None and not set(columns) <= {*needed, *more}):
            allowed = ", ".join(needed) + (f" and, optionally, {', '.join(more)}" if more else "")
            raise ValueError(
                f"{owner}: {path} must have the columns {allowed}, but has {printable(', '.join(columns)) or 'none'}; "
                "name them in the first line."
            )
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"{owner}: {path} is no CSV file that can be read ({error}).") from None
    if not rows:
        raise ValueError(f"{owner}: {path} holds no rows below its first line.")
    for line, row in enumerate(rows, start=2):
        if None in row or any(not row[column] for column in columns):
            held = printable(", ".join(str(value) for value in row.values() if value))
            raise ValueError(f"{owner}: row {line} of {path} must fill {', '.join(columns)}, but holds {held}.")
    return rows


def whole_number(owner: str, path: Path, word: str) -> int:
    """Parse a class number."""
    if not (word.isascii() and word.isdigit() and len(word) < 19):
        raise ValueError(f"{owner}: {path} must number its classes, but {printable(word, 40)!r} came.")
    return int(word)

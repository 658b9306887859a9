"""Safe reading of text files that list images: files from untrusted sources, in which a line may be huge."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar._utils.checks import printable

SIDES = ("train", "test")
LONGEST = 1 << 20  # the most characters of a line


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
                raise ValueError(f"{owner}: {path} is not UTF-8 text from line {number} on; save it so.") from None
            if not line:
                return
            if len(line) > LONGEST:
                raise ValueError(
                    f"{owner}: line {number} of {path} has more than {LONGEST:,} characters: it is no list of files."
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


def table(
    owner: str,
    path: Path,
    needed: tuple[str, ...],
    more: tuple[str, ...] | None = (),
    *,
    unique: str | None = None,
    empty: bool = False,
) -> list[dict[str, str]]:
    """Read the rows of a CSV file as mappings from column names; a column split holds train or test.

    The columns `needed` are required, and `more` are optional (None: any, and these may be empty). The values of the
    column `unique` must differ. A file without rows is an error, unless `empty` is true.
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
        filled = columns if more is not None else [name for name in columns if name in (*needed, "split")]
    except csv.Error as error:
        raise ValueError(f"{owner}: {path} cannot be read as a CSV file ({error}).") from None
    if not rows and not empty:
        raise ValueError(f"{owner}: {path} holds no rows below its first line.")
    check_rows(owner, path, rows, filled, unique=unique)
    return rows


def check_rows(
    owner: str,
    path: Path,
    rows: Sequence[Mapping[Any, Any]],
    filled: Sequence[str],
    *,
    unique: str | None = None,
    first: int = 2,
) -> None:
    """Check that rows fill some columns, that a split is train or test, and that the values of `unique` differ.

    `first` is the number of the first row, for messages.
    """
    for line, row in enumerate(rows, start=first):
        if None in row or None in row.values() or any(not row[column] for column in filled):
            held = printable(", ".join(str(value) for value in row.values() if value))
            raise ValueError(f"{owner}: row {line} of {path} must fill {', '.join(filled)}, but holds {held}.")
    seen: dict[str, int] = {}
    for line, row in enumerate(rows, start=first):
        side, key = row.get("split", "train"), row[unique] if unique else ""
        if side not in SIDES:
            raise ValueError(f"{owner}: split in {path} must be train or test, but row {line} has {printable(side)!r}.")
        if unique and seen.setdefault(key, line) != line:
            raise ValueError(f"{owner}: {printable(key)} stands in rows {seen[key]} and {line} of {path}; keep one.")


def whole_number(owner: str, path: Path, word: str) -> int:
    """Parse a class number."""
    if not (word.isascii() and word.isdigit() and len(word) < 19):
        raise ValueError(f"{owner}: {path} must have whole numbers for classes, but {printable(word, 40)!r} came.")
    return int(word)

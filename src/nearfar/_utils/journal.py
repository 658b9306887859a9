"""JSON lines, one object a line, each with a checksum, so that a damaged line is noticed and loses no other line.

A line ends in `"crc": "xxxxxxxx"}`, the CRC-32 of its bytes without that field. In a file whose lines have checksums, a
line without one is damaged; files that other programs wrote need none.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

LONGEST = 1 << 20  # bytes of a line; a longer one is damaged, and never read into memory
SHOWN = 1 << 12  # bytes of a damaged line that are kept
_END = re.compile(rb',\s*"crc":\s*"([0-9a-f]{8})"\}\s*$')

Entry = dict[str, Any]


@dataclass(frozen=True)
class Damaged:
    """A line that cannot be used: its number, from 1, and its first bytes."""

    number: int
    raw: bytes


@dataclass(frozen=True)
class Lines:
    """The content of a file: the good entries in order, and the damaged lines.

    The last line is `torn` where a crash cut it short; it is not counted among the damaged ones.
    """

    entries: tuple[Entry, ...]
    damaged: tuple[Damaged, ...]
    torn: bool = False


def to_line(entry: Entry) -> str:
    """Format an entry as a line with its checksum.

    >>> print(to_line({"step": 1}), end="")
    {"step": 1, "crc": "3a87913d"}
    """
    text = json.dumps(entry)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'


def has_step(entry: Entry) -> bool:
    """Whether an entry has a step number."""
    step = entry.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def read_lines(path: Path, good: Callable[[Entry], bool] = has_step) -> Lines:
    """Read every line of a file; entries for which `good` is false count as damaged."""
    if not path.is_file():
        return Lines((), ())
    found: list[_Line] = []
    ended = True
    with path.open("rb") as stream:
        for number, (raw, ended) in enumerate(_pieces(stream), start=1):
            if raw.strip() or not ended:
                found.append(_judge(number, raw, good))
    if any(line.sealed for line in found):
        found = [line if line.sealed else replace(line, entry=None) for line in found]
    torn = bool(found) and not ended and found[-1].entry is None
    damaged = (line.record for line in found[: len(found) - torn] if line.entry is None)
    return Lines(tuple(line.entry for line in found if line.entry is not None), tuple(damaged), torn)


@dataclass(frozen=True)
class _Line:
    """One line: its object, or None; whether it has a checksum; and its record in case it is damaged."""

    entry: Entry | None
    sealed: bool
    record: Damaged


def _judge(number: int, raw: bytes, good: Callable[[Entry], bool]) -> _Line:
    record = Damaged(number, raw[:SHOWN])
    end = _END.search(raw[-64:])
    if end is not None:
        raw = raw[: len(raw) - (end.end() - end.start())] + b"}"
        if f"{zlib.crc32(raw):08x}".encode() != end[1]:
            return _Line(None, True, record)
    try:
        entry = json.loads(raw.decode()) if len(raw) <= LONGEST else None
    except (ValueError, RecursionError):
        entry = None
    return _Line(entry if isinstance(entry, dict) and good(entry) else None, end is not None, record)


def _pieces(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield lines and whether each is complete; of a line that is too long, its first `LONGEST` + 1 bytes."""
    while line := stream.readline(LONGEST + 1):
        piece = line
        while len(piece) > LONGEST and not piece.endswith(b"\n"):
            piece = stream.readline(LONGEST + 1)
        yield line, piece.endswith(b"\n") or line.endswith(b"\n")

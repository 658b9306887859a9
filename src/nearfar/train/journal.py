"""The journal of a run: one JSON object a line, flushed as it is written, cut back when a run resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nearfar._files import write_text


class Journal:
    """Appends lines to `journal.jsonl`; a line carries `step`, and time only under `time`.

    Args:
        path: the file; lines already there stay.
        quiet: write nothing: the other ranks of a run.
    """

    def __init__(self, path: Path, *, quiet: bool = False) -> None:
        self._stream = Path(os.devnull if quiet else path).open("a", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system."""
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may have been torn by a crash and is then left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def cut(path: Path, step: int) -> None:
    """Drop what was written after `step`, so that a resumed run writes those lines again."""
    kept = [entry for entry in read(path) if entry["step"] <= step]
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))

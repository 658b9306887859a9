"""The journal of a run: one JSON object a line, flushed as it is written, truncated when a run resumes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nearfar._utils.files import write_text
from nearfar._utils.journal import Lines, read_lines, to_line

__all__ = ["Journal", "cut", "read"]


class Journal:
    """Append lines to `journal.jsonl`; each line has a `step`, and wall-clock values only under `time`.

    Args:
        path: the file; lines already there stay.
        quiet: write nothing, for all ranks but the first.
        checked: end each line in its checksum.
        heard: called with each line once it is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        quiet: bool = False,
        checked: bool = True,
        heard: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.path, self._checked, self._heard = path, checked, heard
        self.lines = 0
        """The number of lines written by this object."""
        self._stream = Path(os.devnull if quiet else path).open("a", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line and flush it to the operating system."""
        try:
            self._stream.write(to_line(entry) if self._checked else json.dumps(entry) + "\n")
            self._stream.flush()
            self.lines += 1
        except OSError as error:
            raise OSError(f"train: cannot write {self.path} ({error.strerror}); make room, then --resume.") from None
        if self._heard is not None:
            self._heard(entry)

    def sync(self) -> None:
        """Force the lines to disk: a checkpoint relies on those before it, also after a power failure."""
        if self._stream.name != os.devnull:
            os.fsync(self._stream.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._stream.close()
        except OSError:  # what could not be written has been told of
            if kind is None:
                raise


def read(path: Path) -> list[dict[str, Any]]:
    """Read all good lines; lines that are damaged or cut short by a crash are left out."""
    return list(read_lines(path).entries)


def cut(path: Path, step: int, lines: int) -> None:
    """Remove the lines written after `step`, so that a resumed run writes them again.

    Args:
        path: the journal.
        step: the step of the checkpoint.
        lines: how many lines there were when the checkpoint was written; missing ones cause a warning. Damaged lines
            are moved to `journal.damaged` beside it, with a warning too. With 0 all lines go: the run begins anew.
    """
    found = read_lines(path)
    if found.damaged:
        _set_aside(path, found)
    kept = [entry for entry in found.entries if lines and entry["step"] <= step]
    write_text(path, "".join(map(to_line, kept)))
    if len(kept) != lines:
        warnings.warn(
            f"{path} holds {len(kept)} of the {lines} lines that were written up to step {step}; the weights are not "
            "touched by this.",
            stacklevel=2,
        )


def _set_aside(path: Path, found: Lines) -> None:
    aside = path.with_suffix(".damaged")
    with aside.open("ab") as stream:
        stream.writelines(line.raw.rstrip(b"\n") + b"\n" for line in found.damaged)
    numbers = ", ".join(str(line.number) for line in found.damaged[:8]) + (", ..." if len(found.damaged) > 8 else "")
    warnings.warn(
        f"{path}: {len(found.damaged)} damaged line{'s' * (len(found.damaged) > 1)} (line {numbers}), kept in {aside}; "
        "the others stay.",
        stacklevel=3,
    )

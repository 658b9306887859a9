"""The journal of a run: one JSON object per line, flushed when written, and cut back when a run is resumed."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nearfar._utils.files import write_text
from nearfar._utils.journal import Lines, read_lines, to_line


class Journal:
    """Append lines to `journal.jsonl`; each line has a `step`, and wall-clock times only under `time`.

    With `quiet`, on all ranks but the first, nothing is written. With `checked`, each line gets a checksum. `on_write`
    is called with each line after it is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        quiet: bool = False,
        checked: bool = True,
        on_write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.path, self._checked, self._on_write = path, checked, on_write
        self.lines = 0  # the number of lines written by this object
        self._stream = Path(os.devnull if quiet else path).open("a", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line and flush it to the operating system."""
        try:
            self._stream.write(to_line(entry) if self._checked else json.dumps(entry) + "\n")
            self._stream.flush()
            self.lines += 1
        except OSError as error:
            raise OSError(f"train: cannot write {self.path} ({error.strerror}); make room, then --resume.") from None
        if self._on_write is not None:
            self._on_write(entry)

    def sync(self) -> None:
        """Force the lines to disk, so that a checkpoint can rely on them even after a power failure."""
        if self._stream.name != os.devnull:
            os.fsync(self._stream.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._stream.close()
        except OSError:  # `write` has reported it
            if kind is None:
                raise


def read(path: Path) -> list[dict[str, Any]]:
    """Read all intact lines, without those that are damaged or were cut short by a crash."""
    return list(read_lines(path).entries)


def cut(path: Path, step: int, lines: int) -> None:
    """Remove the lines after `step`, that of the checkpoint, which a resumed run writes again.

    Damaged lines are moved to `journal.damaged` beside the journal, with a warning; another warns if fewer are left
    than the `lines` when the checkpoint was written. With 0 `lines` all are removed, for a run that starts again.
    """
    found = read_lines(path)
    if found.damaged:
        _move_damaged(path, found)
    kept = [entry for entry in found.entries if lines and entry["step"] <= step]
    write_text(path, "".join(map(to_line, kept)))
    if len(kept) != lines:
        warnings.warn(
            f"{path} holds {len(kept)} of the {lines} lines that were written up to step {step}; the weights are not "
            "touched by this.",
            stacklevel=2,
        )


def _move_damaged(path: Path, found: Lines) -> None:
    aside = path.with_suffix(".damaged")
    with aside.open("ab") as stream:
        stream.writelines(line.raw.rstrip(b"\n") + b"\n" for line in found.damaged)
    numbers = ", ".join(str(line.number) for line in found.damaged[:8]) + (", ..." if len(found.damaged) > 8 else "")
    warnings.warn(
        f"{path}: {len(found.damaged)} damaged line{'s' * (len(found.damaged) > 1)} (line {numbers}), kept in {aside}; "
        "the others stay.",
        stacklevel=3,
    )

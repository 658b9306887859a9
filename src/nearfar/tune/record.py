"""`Record`: the trials of a search in a file of JSON lines, from which a stopped search goes on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nearfar._utils.files import write_text
from nearfar._utils.journal import read_lines, to_line
from nearfar._utils.lock import alone
from nearfar.runs.config import flat
from nearfar.runs.journal import Journal
from nearfar.tune.trial import Outcome

__all__ = ["Ended", "Record"]

FILE = "trials.jsonl"


@dataclass(frozen=True, eq=False)
class Ended:
    """A trial that has ended: the label of its loss, its number within the loss, its values and how it ended."""

    loss: str
    number: int
    values: Mapping[str, Any]
    outcome: Outcome

    def tree(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"loss": self.loss, "number": self.number, "values": dict(self.values), **asdict(self.outcome)}


class Record:
    """The trials that have ended, read from and appended to `trials.jsonl` in a folder.

    Args:
        folder: the folder.
        about: everything that trials depend on; another search than the one that the folder holds is refused.

    Trials that failed are forgotten when a search goes on, and so are tried again. While its block runs, the folder is
    locked: a second search in it is refused.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._file, self._about = folder / FILE, dict(about)
        self.ended: list[Ended] = []
        self._open = ExitStack()
        self._journal: Journal | None = None

    def __enter__(self) -> Self:
        folder, about = self._file.parent, self._about
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"tune: another search runs in {folder}; wait for it, or name another folder."
        with ExitStack() as stack:
            stack.enter_context(alone(folder, lambda: BlockingIOError(busy), unlocked=lambda error: None))
            self._read(folder, about)
            self._journal = stack.enter_context(Journal(self._file))
            self._open = stack.pop_all()
        return self

    def _read(self, folder: Path, about: Mapping[str, Any]) -> None:
        entries = read_lines(self._file, lambda entry: "search" in entry or "loss" in entry).entries
        if entries or (self._file.is_file() and self._file.stat().st_size):
            _check_same(folder, entries[0].get("search") if entries else None, about)
        kept = [entry for entry in entries if entry.get("state") not in (None, "failed")]
        self.ended = [_ended(entry) for entry in kept]
        write_text(self._file, "".join(map(to_line, [{"search": dict(about)}, *kept])))  # without a torn last line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)

    def add(self, ended: Ended) -> None:
        """Append a trial."""
        if self._journal is not None:
            self._journal.write(ended.tree())
            self._journal.sync()
        self.ended.append(ended)

    def of(self, loss: str) -> list[Ended]:
        """The trials of a loss by number."""
        return sorted((each for each in self.ended if each.loss == loss), key=lambda each: each.number)


def _ended(entry: Mapping[str, Any]) -> Ended:
    outcome = Outcome(
        state=entry["state"],
        score=entry["score"],
        scores=tuple(entry["scores"]),
        curves=tuple(tuple((step, value) for step, value in curve) for curve in entry["curves"]),
        error=entry["error"],
        seconds=entry["seconds"],
    )
    return Ended(entry["loss"], entry["number"], entry["values"], outcome)


def _check_same(folder: Path, before: Any, now: Mapping[str, Any]) -> None:
    if not isinstance(before, Mapping):
        raise ValueError(f"tune: {folder / FILE} is not the record of a search; name another folder.")
    old, new = flat(before), flat(now)
    for key in [*new, *old]:
        if old.get(key) != new.get(key):
            was, came = (repr(each[key]) if key in each else "not there" for each in (old, new))
            raise ValueError(
                f"tune: {folder} holds another search: {key} was {was}, and is {came} now; name another folder."
            )

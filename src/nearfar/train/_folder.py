"""The folder of a run: marked, locked by the process that trains, and never cleared of files that a run did not write.

A folder belongs to a run once the file `MARK` is created in it, which only one process can do, and only if none of
`FILES` exists yet: from then on the run may write and replace files of these names, and no others. The process that
trains holds a lock on the mark, which the system releases when the process ends or is killed. It also writes its name
into the file `LOCK`, for the message that another process gets.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import platform
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from nearfar._utils.checks import printable
from nearfar._utils.files import read_text, remove_files, write_text
from nearfar._utils.lock import alone

LOCK = "nearfar-run.lock"
MARK = "nearfar-run.json"
CHOICE = "length.json"
SEARCH = "search"  # the folder of the search for the length, a run of its own
REPORT = "report.html"
FILES = (
    "config.yaml",  # written first: a marked folder without it holds no run yet
    "journal.jsonl",
    "journal.damaged",
    "checkpoints/last.pt",
    "checkpoints/best.pt",
    "checkpoints/best-before.pt",
    "embeddings.npz",
    "scores.json",
    CHOICE,
    *(f"{SEARCH}/{name}" for name in ("config.yaml", "journal.jsonl", "journal.damaged", "checkpoints/last.pt")),
    REPORT,
    LOCK,
)
"""The files of a run, besides the event files in `tensorboard/` and the folders `checkpoints/shards-STEP`."""
SHARD_FILES = (".metadata*", "__*.distcp")  # files that torch writes into a folder of shards
RUNS = Path("runs")


@dataclass(frozen=True)
class Owner:
    """The process that trains in a folder: its user, machine, process id and start time."""

    user: str
    machine: str
    process: int
    since: str

    @staticmethod
    def of_this_process() -> Owner:
        try:
            user = getpass.getuser()
        except (OSError, KeyError, ImportError):  # a container may have no name for its user
            user = "unknown"
        return Owner(user, platform.node(), os.getpid(), datetime.now(UTC).isoformat(" ", "seconds"))

    @staticmethod
    def of(folder: Path) -> Owner | None:
        """Read the owner of a folder; None if it has none or the file cannot be read."""
        try:
            found = json.loads(read_text("train", folder / LOCK))
            return Owner(str(found["user"]), str(found["machine"]), int(found["process"]), str(found["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_text(folder / LOCK, json.dumps(asdict(self)) + "\n")

    def leave(self, folder: Path) -> None:
        """Remove the file of this owner, unless another owner has replaced it."""
        if Owner.of(folder) == self:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()

    @property
    def has_ended(self) -> bool:
        """Whether the process has certainly ended: it ran on this machine, which has no such process now."""
        if self.machine != platform.node() or sys.platform == "win32":
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
        return False

    def __str__(self) -> str:
        return f"process {self.process} of {printable(self.user)} on {printable(self.machine)}, since {self.since}"


class RunFolder:
    """A folder to train in; `claim` reserves it for this process until the block ends.

    Without a path it is a new one under `runs`, named by the time. It must not hold a run, unless this one is to
    `resume` or `overwrite` it.
    """

    def __init__(self, path: Path | None, *, resume: bool = False, overwrite: bool = False) -> None:
        self.given, self.resume, self.overwrite = path, resume, overwrite
        self._lock = ExitStack()
        self._owner: Owner | None = None
        self._claimed: Path | None = None

    def check(self) -> None:
        """Raise an error if the folder cannot be used, before anything is read or written."""
        if self.given is None:
            if self.resume:
                raise ValueError("train: a run that goes on needs its folder; name it with --run.")
            return
        there = can_resume(self.given)
        if self.resume and not there:
            old = (self.given / "checkpoints" / "last.pt").is_file()
            why = f"a run of an older version of nearfar, or no longer its {MARK}" if old else "no run to resume"
            raise FileNotFoundError(f"train: {self.given} holds {why}; train without --resume, in another folder.")
        if self.resume or (there and self.overwrite):
            return
        if there:
            raise FileExistsError(
                f"train: {self.given} already holds a run; go on with --resume, or choose another folder with --run."
            )
        if not is_run(self.given):
            _check_no_files(self.given)

    def claim(self) -> Path:
        """Reserve the folder for this process: create, mark and lock it, and remove an earlier run's files."""
        if self._claimed is not None:
            return self._claimed
        self.check()
        try:
            folder = new_folder() if self.given is None else self.given
            folder.mkdir(parents=True, exist_ok=True)
            fresh = not self.resume and _mark(folder)
        except OSError as error:
            raise OSError(
                f"train: cannot make {self.given or RUNS} ({error.strerror}); choose another folder with --run."
            ) from None
        self._lock.enter_context(alone(folder / MARK, lambda: _busy(folder), lambda why: _without_lock(folder, why)))
        if not fresh:
            self.check()  # another process may have begun and ended a run between the first check and the lock
            _remove_partial_files(folder) if self.resume else remove(folder)
        self._owner, self._claimed = Owner.of_this_process(), folder
        self._owner.write(folder)
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owner is not None and self._claimed is not None:
            self._owner.leave(self._claimed)
        self._lock.close()


def is_run(folder: Path) -> bool:
    """Whether a folder has the mark of a run."""
    try:
        text = (folder / MARK).read_text(encoding="utf-8")
        found = json.loads(text) if text else {"nearfar run": 1}  # empty: killed before it wrote, or a full disk
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "nearfar run" in found


def can_resume(folder: Path) -> bool:
    """Whether a folder holds a run that can be resumed, from a checkpoint or from its start."""
    return is_run(folder) and (folder / "config.yaml").is_file()


def remove(folder: Path) -> None:
    """Remove the files of a run, and folders that are empty afterwards; every other file stays."""
    if not is_run(folder):
        raise ValueError(f"train: {folder} is not a run, so that nothing in it is removed.")
    _remove_partial_files(folder)
    for path in (*(folder / name for name in FILES), *folder.glob("tensorboard/events.out.tfevents.*")):
        path.unlink(missing_ok=True)
    for home in (folder, folder / SEARCH):
        remove_shards(home / "checkpoints")
    for name in ("checkpoints", "tensorboard", f"{SEARCH}/checkpoints", SEARCH):
        remove_files(folder / name)


def remove_shards(folder: Path, keep: str = "") -> None:
    """Remove the shards in a folder of checkpoints, except the subfolder `keep`."""
    for other in folder.glob("shards-*"):
        if other.name != keep:
            remove_files(other, *SHARD_FILES)


def _remove_partial_files(folder: Path) -> None:
    """Remove the temporary files of a killed process; the lock keeps other processes from writing here."""
    for path in (folder / name for name in FILES):
        for part in path.parent.glob(f".{path.name}.*-????????.part"):
            part.unlink(missing_ok=True)


def _check_no_files(folder: Path) -> None:
    """Refuse a folder that is not a run's but has files with the names of a run's files."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"train: {folder} is a file; choose another folder with --run.")
    for name in (MARK, *FILES):
        if os.path.lexists(folder / name):
            raise FileExistsError(
                f"train: {folder} holds {name}, which this run would write over; choose another folder with --run."
            )


def new_folder(runs: Path | None = None) -> Path:
    """Create a new folder named by the time; processes that start in the same second get different ones."""
    runs, stamp = runs or RUNS, time.strftime("%Y%m%d-%H%M%S")
    runs.mkdir(parents=True, exist_ok=True)
    folder, numbers = runs / stamp, itertools.count(2)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            folder = runs / f"{stamp}-{next(numbers)}"
        else:
            return folder


def _mark(folder: Path) -> bool:
    """Mark a folder as a run's; False if it is marked already."""
    mark = folder / MARK
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    text = json.dumps({"nearfar run": 1, "files": FILES, "others": "are never touched"}, indent=1) + "\n"
    try:
        mark.write_text(text, encoding="utf-8")  # in place: another process may wait for the lock on this very file
    except OSError:
        os.truncate(mark, 0)  # an empty mark is valid, a part of one is not
        raise
    return True


def _busy(folder: Path) -> BlockingIOError:
    owner = Owner.of(folder)
    who = "" if owner is None else f" ({owner})"
    return BlockingIOError(
        f"train: another process is training in {folder}{who}; wait until it ends, or choose another folder."
    )


def _without_lock(folder: Path, error: OSError | None) -> None:
    """Without a lock, refuse a folder that names an owner, unless that process is known to have ended."""
    owner = Owner.of(folder)
    if owner is not None and not owner.has_ended:
        raise BlockingIOError(
            f"train: another process is training in {folder} ({owner}); wait until it ends, or, if it was killed, "
            f"remove {folder / LOCK}."
        )
    if error is not None:
        warnings.warn(
            f"{folder} lies where files cannot be locked ({error.strerror}); let no two processes train in it at once.",
            stacklevel=2,
        )

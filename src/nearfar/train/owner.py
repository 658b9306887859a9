"""Who trains in a run folder: a small file beside the lock, so that whoever is refused reads whose folder it is."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from nearfar._utils.checks import printable
from nearfar._utils.files import read_text, write_text

__all__ = ["LOCK", "Owner"]

LOCK = "nearfar-run.lock"


@dataclass(frozen=True)
class Owner:
    """The process that trains in a folder: its user, machine and number, and when it began."""

    user: str
    machine: str
    process: int
    since: str

    @staticmethod
    def of_this_process() -> Owner:
        """This process, from now on."""
        try:
            user = getpass.getuser()
        except (OSError, KeyError, ImportError):  # a container may have no name for its user
            user = "unknown"
        return Owner(user, platform.node(), os.getpid(), datetime.now(UTC).isoformat(" ", "seconds"))

    @staticmethod
    def of(folder: Path) -> Owner | None:
        """Who is written down in a folder; None if nobody is, or nobody that can be read."""
        try:
            found = json.loads(read_text("train", folder / LOCK))
            return Owner(str(found["user"]), str(found["machine"]), int(found["process"]), str(found["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Write down that this is the owner of a folder."""
        write_text(folder / LOCK, json.dumps(asdict(self)) + "\n")

    def leave(self, folder: Path) -> None:
        """Remove the file, unless another owner has written it since."""
        if Owner.of(folder) == self:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended: it was one of this machine, which has none of its number."""
        if self.machine != platform.node() or sys.platform == "win32":
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def __str__(self) -> str:
        return f"process {self.process} of {printable(self.user)} on {printable(self.machine)}, since {self.since}"

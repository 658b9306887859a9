"""Chunks of a long computation, one file each in a folder: it continues after a kill, and ranks share it.

folder/plan.json            identifies the computation
folder/chunk-000000.npz     the arrays of a chunk, with a seal and a digest of what they were computed from
folder/done-1-of-4.txt      says that a rank has finished its share
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.files import check_seal, read_arrays, read_text, remove_files, write_arrays, write_text

Part = dict[str, np.ndarray]
PLAN = "plan.json"
NAMES = (PLAN, "chunk-[0-9]*.npz", "done-[0-9]*-of-[0-9]*.txt")


class Chunks:
    """The chunks in a folder.

    Args:
        owner: the name in messages.
        folder: the folder; made when a chunk is written.
    """

    def __init__(self, owner: str, folder: Path) -> None:
        self.owner, self.folder = owner, folder

    def begin(self, plan: dict[str, Any], describe: Callable[[dict[str, Any]], str]) -> None:
        """Write the plan; an error if the folder holds chunks of another one, which `describe` phrases."""
        path, plan = self.folder / PLAN, json.loads(json.dumps(plan))
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            write_text(path, json.dumps(plan))
            return
        except ValueError:
            before = None
        if before != plan:
            former = describe(before) if isinstance(before, dict) else "something else"
            raise ValueError(
                f"{self.owner}: the folder {self.folder} holds chunks of {former}, but now {describe(plan)} came; "
                "go on with the former, name another folder, or delete this one to start afresh."
            )

    def plan(self, *counts: str) -> dict[str, Any]:
        """The plan that `begin` wrote, which must have these entries, numbers from 1 on."""
        try:
            found = json.loads(read_text(self.owner, self.folder / PLAN))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(found.get(x), int) and found[x] > 0 for x in counts):
            raise ValueError(f"{self.owner}: {self.folder / PLAN} is damaged; make the folder again.")
        return found

    def file(self, number: int) -> Path:
        """The file of a chunk."""
        return self.folder / f"chunk-{number:06d}.npz"

    def read(self, number: int, digest: str) -> Part | None:
        """Read a finished chunk; None if it is missing or damaged, or was computed from something else."""
        try:
            part = self.load(number)
        except (FileNotFoundError, ValueError):
            return None
        return part if str(part.pop("digest", None)) == digest else None

    def load(self, number: int) -> Part:
        """Read a chunk, whatever its digest; a missing or damaged one is an error."""
        check_seal(self.owner, self.file(number), needed=True)
        return read_arrays(self.owner, self.file(number))

    def read_all(self, count: int) -> Iterator[Part]:
        """Yield the first `count` chunks."""
        for number in range(count):
            part = self.load(number)
            part.pop("digest", None)
            yield part

    def write(self, number: int, part: Part, digest: str) -> None:
        """Write a finished chunk, completely or not at all."""
        write_arrays(self.file(number), {**part, "digest": np.array(digest)})

    def mark_done(self, rank: int, world: int, launch: str) -> None:
        """Write a file that says that a rank has finished its share."""
        write_text(self._done_file(rank, world), launch)

    def wait_for(self, ranks: range, world: int, launch: str, seconds: float = 0.2) -> None:
        """Wait for the files of `mark_done` of some ranks, without a time limit.

        Only files of this `launch` count; looks are `seconds` apart.
        """
        for rank in ranks:
            while True:
                with suppress(FileNotFoundError):
                    if self._done_file(rank, world).read_text(encoding="utf-8") == launch:
                        break
                time.sleep(seconds)

    def _done_file(self, rank: int, world: int) -> Path:
        return self.folder / f"done-{rank}-of-{world}.txt"

    def clear(self) -> None:
        """Remove the chunks, and their folder unless it holds other files."""
        remove_files(self.folder, *NAMES, *(f".{name}.*-????????.part" for name in NAMES))

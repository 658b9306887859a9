"""`ShardIndex`: where each sample of tar shards lies, in arrays; built once, kept in the user's cache folder.

A million samples take about 40 MB, on disk and in memory. The file records size and time of every shard, so that it is
built again when one has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar._utils.files import Arrays, check_seal, read_arrays, write_arrays
from nearfar._utils.lock import alone
from nearfar.data._cache import default_folder
from nearfar.data.folders import SIDES
from nearfar.data.pictures import Member, Places
from nearfar.data.samples import Labels, PackedNames, numbered
from nearfar.data.shard_labels import label_rule, table_file
from nearfar.data.shard_scan import Scan, first_suffixes, scan

__all__ = ["Members", "ShardIndex", "open_index"]

VERSION = 1


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the pictures of n samples in some shards lie, and what they show.

    Attributes:
        shards: the tar files.
        first: int64 [shards + 1], the first sample of each shard, and n.
        offset: int64 [n], where a picture begins in its shard.
        size: uint32 [n], its bytes.
        labels: int64 [n], from 0 without gaps.
        names: of the picture files.
        classes: the name of each class.
        sides: int8 [n], 0 for train and 1 for test; empty where no table gives a split.
        stamps: int64 [sources, 2], size and time of each shard, then of the table of labels.
    """

    shards: tuple[Path, ...]
    first: Labels
    offset: Labels
    size: NDArray[np.uint32]
    labels: Labels
    names: PackedNames
    classes: tuple[str, ...]
    sides: NDArray[np.int8]
    stamps: Labels

    def __len__(self) -> int:
        return len(self.offset)

    def locate(self, rows: Any) -> tuple[Labels, Labels, Labels]:
        """Shard number, offset and size [b] of samples [b]."""
        at = np.asarray(rows, dtype=np.int64)
        shard = np.searchsorted(self.first, at, side="right") - 1
        return shard.astype(np.int64), self.offset[at], self.size[at].astype(np.int64)

    @staticmethod
    def of(shards: Sequence[Path], found: Scan, stamps: Labels) -> ShardIndex:
        """From what a pass over the shards has found; classes are sorted, as numbers if all are."""
        words = list(found.classes)
        whole = all(word.isascii() and word.isdigit() and len(word) < 19 and str(int(word)) == word for word in words)
        places, classes = numbered(map(int, words) if whole else words)
        sides = [SIDES.index(side) for side in found.sides if side]
        return ShardIndex(
            tuple(shards),
            np.array(found.first, dtype=np.int64),
            np.array(found.offset, dtype=np.int64),
            np.array(found.size, dtype=np.uint32),
            places[np.array(found.labels, dtype=np.int64)],
            PackedNames.pack(found.names),
            classes,
            np.array(sides, dtype=np.int8),
            stamps,
        )

    def arrays(self) -> Arrays:
        """What is written to disk."""
        shards, classes = PackedNames.pack(path.name for path in self.shards), PackedNames.pack(self.classes)
        texts = {"shards": shards, "names": self.names, "classes": classes}
        return {
            "version": np.array(VERSION),
            "first": self.first,
            "offset": self.offset,
            "size": self.size,
            "labels": self.labels.astype(np.int32),
            "sides": self.sides,
            "stamps": self.stamps,
            **{f"{name}_{part}": getattr(text, part) for name, text in texts.items() for part in ("data", "start")},
        }

    @staticmethod
    def load(path: Path, shards: Sequence[Path], stamps: Labels) -> ShardIndex | None:
        """Read an index; None if there is none, or if it is of shards that have changed since."""
        if not path.is_file():
            return None
        try:
            check_seal("shards", path, needed=True)
            found = read_arrays("shards", path)
        except (OSError, ValueError):
            warnings.warn(f"shards: the index {path} is damaged, and built again.", stacklevel=4)
            return None
        if int(found["version"]) != VERSION or not np.array_equal(found["stamps"], stamps):
            return None
        texts = {
            name: PackedNames(found[f"{name}_data"], found[f"{name}_start"]) for name in ("shards", "names", "classes")
        }
        if list(texts["shards"]) != [shard.name for shard in shards]:
            return None
        return ShardIndex(
            tuple(shards),
            found["first"],
            found["offset"],
            found["size"],
            found["labels"].astype(np.int64),
            texts["names"],
            tuple(texts["classes"]),
            found["sides"],
            stamps,
        )


class Members(Places):
    """The pictures of an index, each made when it is asked for."""

    def __init__(self, table: ShardIndex) -> None:
        self.table = replace(table, labels=table.labels[:0].copy())  # the samples have their own

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(len(self))[row]]
        row = range(len(self))[row]
        shard, offset, size = (int(value) for value in self.table.locate(row))
        return Member(self.table.shards[shard], offset, size, self.table.names[row])

    @property
    def fingerprint(self) -> str:
        """A digest of the shards' places, sizes and times, and of what lies where in them."""
        found = hashlib.blake2b(digest_size=16)
        for shard in self.table.shards:
            found.update(os.path.realpath(shard).encode("utf-8", "surrogateescape") + b"\0")
        for array in (self.table.stamps, self.table.first, self.table.offset, self.table.size):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def open_index(shards: Sequence[Path], labels: str | None, inputs: str | None) -> ShardIndex:
    """Read the index of these shards in the user's cache folder, or build it there.

    While one process builds it, others wait.

    Args:
        shards: the tar files, all in the order of the samples.
        labels: where labels are, see `label_rule`.
        inputs: the suffix of the pictures; None for the only picture of each sample.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the shards are not what they should be, see `scan`.
    """
    table = table_file(labels, shards[0].parent)
    stamps = _stamps([*shards, *([] if table is None else [table])])
    path = _place(shards, labels, inputs)
    found = ShardIndex.load(path, shards, stamps)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be written, every process builds its own
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(path.with_name(f".{path.name}.lock")))
        found = ShardIndex.load(path, shards, stamps)  # another process may have built it meanwhile
        return found or _written(path, _built(shards, labels, inputs, stamps))


def _stamps(sources: Sequence[Path]) -> Labels:
    """Size and time [sources, 2] of files."""
    found = []
    for path in sources:
        if not path.is_file():
            raise FileNotFoundError(
                f"shards: there is no file {path}, one of {len(sources)}; put all of them there, or correct the path."
            )
        about = path.stat()
        found.append((about.st_size, about.st_mtime_ns))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _place(shards: Sequence[Path], labels: str | None, inputs: str | None) -> Path:
    """Where the index lies in the user's cache folder."""
    words = repr((os.path.realpath(shards[0].parent), [shard.name for shard in shards], labels, inputs))
    digest = hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return default_folder() / "shards" / f"nearfar-index-{digest}.npz"


def _built(shards: Sequence[Path], labels: str | None, inputs: str | None, stamps: Labels) -> ShardIndex:
    """Pass over all shards, with a progress bar."""
    from nearfar._utils.progress import Progress

    rule = label_rule(labels, shards[0].parent, lambda: first_suffixes(shards))
    with Progress("indexing shards", len(shards)) as bar:
        return ShardIndex.of(shards, scan(shards, rule, inputs, bar), stamps)


def _written(path: Path, index: ShardIndex) -> ShardIndex:
    """Write the index; one that cannot be written is used all the same."""
    try:
        write_arrays(path, index.arrays())
    except OSError as error:
        warnings.warn(
            f"shards: the index {path} cannot be written ({error.strerror or error}), so the next run builds it again; "
            "make room, or name another cache folder with XDG_CACHE_HOME.",
            stacklevel=4,
        )
    return index

"""Data in shards: tar files in WebDataset's form, read in any order through an index that is built once.

The index is arrays: a million samples take about 40 MB, on disk (in the user's cache folder) and in memory. It records
size and time of every shard, and is built again when one has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar._utils.files import Arrays
from nearfar.data._cache import default_folder, load_or_make
from nearfar.data._folders import halve
from nearfar.data._pictures import Member, OnCorrupt, Pictures, Places
from nearfar.data._samples import DataSet, Labels, PackedNames, part
from nearfar.data._shard_scan import LabelRule, scan, table_file
from nearfar.data._tables import SIDES

VERSION = 2  # version of the index files
ELSEWHERE = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]+:/")
"""Paths that webdataset would take for a command to run or for another machine."""


def shards(
    path: Path, *, labels: str | None = None, inputs: str | None = None, on_corrupt: OnCorrupt = "stop"
) -> DataSet:
    """Read tar shards in WebDataset's form: files of one base name are a sample, such as 000001.jpg and 000001.cls.

    The split is given by the names of the shards, if they begin with train and test or lie in folders train and test,
    or by a table of labels; otherwise half of the classes are for the test.

    Args:
        path: a folder of .tar files, or files with braces as in "s-{000..099}.tar"; several such are joined by "::".
        labels: "cls" or another suffix (the file holds the class), "json.species" (a key of the sample's .json), or a
            .csv file, relative to the folder of the shards, with the columns key, label and, optionally, split. By
            default labels.csv, if it lies beside the shards, else .cls, else the key "label" of .json.
        inputs: the suffix of the pictures, where samples have several.
        on_corrupt: see `Pictures`.

    Raises:
        FileNotFoundError: a shard is missing, or samples that the table lists.
        ValueError: a shard was cut short, a sample has no picture or no label, or two samples have one key.
    """
    files = _files(path)
    index = open_index(files, labels, inputs)
    samples = Pictures(Members(index), index.labels, index.names, index.classes, on_corrupt=on_corrupt)
    sides = _sides(index)
    name = path.name if path.is_dir() else files[0].parent.resolve().name
    if sides is None:
        return halve(name, samples)
    train, test = (part(samples, np.flatnonzero(sides == side)) for side in range(len(SIDES)))
    return DataSet(name, train, test)


def _files(path: Path) -> list[Path]:
    """The tar files that a path names, in order."""
    words = str(path)
    if ELSEWHERE.match(words):
        raise ValueError(f"shards: path must name files of this machine, but came as {printable(words)!r}; copy them.")
    if path.is_dir():
        found = sorted([*path.glob("*.tar"), *(file for side in SIDES for file in path.glob(f"{side}/*.tar"))])
        if not found:
            raise FileNotFoundError(f"shards: {path} holds no .tar files, nor do its folders train and test.")
        return found
    if not re.search(r"[{}]|::", words):
        return [path]
    try:
        expanded = need("webdataset.shardlists", "shards", "shards").expand_urls(words)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"shards: path {printable(words)!r} cannot be expanded ({printable(error)}).") from None
    files = [Path(each) for each in expanded]
    twice = next((file for place, file in enumerate(files) if file in files[:place]), None)
    if twice is not None:
        raise ValueError(f"shards: path {printable(words)!r} names {twice} twice; name every shard once.")
    return files


def _sides(index: ShardIndex) -> np.ndarray | None:
    """For each sample 0 (train) or 1 (test); None if no split is given."""
    if len(index.sides):
        for place, side in enumerate(SIDES):
            if place not in index.sides:
                raise ValueError(
                    f"shards: no sample of the table of labels is for {side}; give both sides some, or leave split out."
                )
        return index.sides
    by_shard = [_side(shard) for shard in index.shards]
    if not {0, 1} <= set(by_shard):
        return None
    if -1 in by_shard:
        odd = index.shards[by_shard.index(-1)]
        raise ValueError(
            f"shards: some shards are for train and some for test, but {odd} is for neither; begin its name with one "
            "of these words, or leave it out."
        )
    return np.repeat(by_shard, np.diff(index.first))


def _side(shard: Path) -> int:
    """0 if the name of a shard says train, 1 if test, -1 otherwise."""
    for place, side in enumerate(SIDES):
        if shard.parent.name == side or re.match(rf"{side}([^a-z]|$)", shard.name):
            return place
    return -1


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the pictures of n samples in some shards lie, and their labels."""

    shards: tuple[Path, ...]  # the tar files
    first: Labels  # int64 [shards + 1], the first sample of each shard, and n
    offset: Labels  # int64 [n], where a picture begins in its shard
    size: NDArray[np.uint32]  # uint32 [n], its bytes
    labels: Labels  # int64 [n], from 0 without gaps
    names: PackedNames  # of the picture files
    classes: tuple[str, ...]  # the name of each class
    sides: NDArray[np.int8]  # int8 [n], 0 for train and 1 for test; empty where no table gives a split
    stamps: Labels  # int64 [sources, 2], size and time of each shard, then of the table of labels

    def __len__(self) -> int:
        return len(self.offset)

    def locate(self, rows: Any) -> tuple[Labels, Labels, Labels]:
        """Shard number, offset and size [b] of samples [b]."""
        at = np.asarray(rows, dtype=np.int64)
        shard = np.searchsorted(self.first, at, side="right") - 1
        return shard.astype(np.int64), self.offset[at], self.size[at].astype(np.int64)

    @staticmethod
    def from_arrays(shards: Sequence[Path], found: Arrays) -> ShardIndex:
        """The index from the arrays of a file."""
        names, classes = (PackedNames(found[f"{name}_data"], found[f"{name}_start"]) for name in ("names", "classes"))
        return ShardIndex(
            shards=tuple(shards),
            labels=found["labels"].astype(np.int64),
            names=names,
            classes=tuple(classes),
            **{name: found[name] for name in ("first", "offset", "size", "sides", "stamps")},
        )


class Members(Places):
    """The places of an index's pictures, each made on access."""

    def __init__(self, index: ShardIndex) -> None:
        self.table = replace(index, labels=index.labels[:0].copy())  # `Pictures` has a copy of the labels

    def __len__(self) -> int:
        return len(self.table)

    def place(self, row: int) -> Member:
        """The picture with an index from 0."""
        shard, offset, size = (int(value) for value in self.table.locate(row))
        return Member(self.table.shards[shard], offset, size, self.table.names[row])

    @property
    def fingerprint(self) -> str:
        """A digest of the shards' paths, sizes and times, and of the positions of the pictures in them."""
        found = hashlib.blake2b(digest_size=16)
        for shard in self.table.shards:
            found.update(os.path.realpath(shard).encode("utf-8", "surrogateescape") + b"\0")
        for array in (self.table.stamps, self.table.first, self.table.offset, self.table.size):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def open_index(shards: Sequence[Path], labels: str | None, inputs: str | None) -> ShardIndex:
    """Read the index of these shards in the user's cache folder, or build it there; arguments as in `shards`.

    While one process builds it, others wait.
    """
    table = table_file(labels, shards[0].parent)
    stamps = _stamps([*shards, *([] if table is None else [table])])
    words = repr((VERSION, [os.path.realpath(shard) for shard in shards], labels, inputs))
    digest = hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()

    def build() -> Arrays:
        from nearfar._utils.progress import Progress

        rule = LabelRule.find(labels, shards)
        with Progress("indexing shards", len(shards)) as bar:
            return {**scan(shards, rule, inputs, bar), "stamps": stamps}

    def is_current(found: Arrays) -> bool:
        return np.array_equal(found["stamps"], stamps)

    stem = f"nearfar-index-{digest}"
    found = load_or_make(default_folder() / "shards", stem, build, is_current=is_current, lock=True)
    return ShardIndex.from_arrays(shards, found)


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

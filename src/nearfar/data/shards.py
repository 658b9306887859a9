"""Data in shards: tar files in WebDataset's form, read at random places through an index that is built once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar.data.folders import SIDES, halved
from nearfar.data.pictures import OnCorrupt, Pictures
from nearfar.data.samples import DataSet, part
from nearfar.data.shard_index import Members, ShardIndex, open_index

__all__ = ["shards"]

ELSEWHERE = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]+:/")
"""What a path that is no file begins with; webdataset would run a command, or ask another machine."""


def shards(
    path: Path, *, labels: str | None = None, inputs: str | None = None, on_corrupt: OnCorrupt = "stop"
) -> DataSet:
    """Read tar shards in WebDataset's form: files of one base name are a sample, such as 000001.jpg and 000001.cls.

    Where the names of some shards begin with train and those of the others with test, or they lie in folders train and
    test, that is the split; a table of labels may give one too; otherwise half of the classes are for the test.

    Args:
        path: a folder of .tar files, or files with braces as in "s-{000..099}.tar"; several such are joined by "::".
        labels: "cls" or another suffix (the file holds the class), "json.species" (a key of the sample's .json), or a
            .csv file, relative to the folder of the shards, with the columns key, label and, optionally, split. By
            default labels.csv, if it lies beside the shards, else .cls, else the key "label" of .json.
        inputs: the suffix of the pictures, where samples have several.
        on_corrupt: see `Pictures`.

    Raises:
        FileNotFoundError: a shard is missing, or the table lists samples that are nowhere.
        ValueError: a shard was cut short, a sample has no picture or no label, or two samples have one key.
    """
    files = _files(path)
    index = open_index(files, labels, inputs)
    samples = Pictures(Members(index), index.labels, index.names, index.classes, on_corrupt=on_corrupt)
    sides = _sides(index)
    name = path.name if path.is_dir() else files[0].parent.resolve().name
    if sides is None:
        return halved(name, samples)
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
        _check_both("the table of labels", index.sides.tolist())
        return index.sides
    named = [_side(shard) for shard in index.shards]
    if not {0, 1} <= set(named):
        return None
    if -1 in named:
        odd = index.shards[named.index(-1)]
        raise ValueError(
            f"shards: some shards are for train and some for test, but {odd} is for neither; begin its name with one "
            "of these words, or leave it out."
        )
    return np.repeat(named, np.diff(index.first))


def _check_both(where: str, sides: Sequence[int]) -> None:
    for place, side in enumerate(SIDES):
        if place not in sides:
            raise ValueError(f"shards: no sample of {where} is for {side}; give both sides some, or leave split out.")


def _side(shard: Path) -> int:
    """0 if a shard is named for training, 1 if for the test, -1 otherwise."""
    for place, side in enumerate(SIDES):
        if shard.parent.name == side or re.match(rf"{side}([^a-z]|$)", shard.name):
            return place
    return -1

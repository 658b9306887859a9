"""One pass over tar shards in WebDataset's form: where each sample's picture lies, and what its label is.

The `webdataset` package defines which files form a sample. It reads shards sequentially, which suits a stream of
shuffled samples. Batches with M samples of each class need random access, so this pass records the offset and size of
each picture, by which it is later read from the tar file.

A label is the content of a file of the sample, a key of its .json, or a row of a table.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar._utils.files import Arrays
from nearfar.data._folders import SUFFIXES
from nearfar.data._pictures import Member, tar_members
from nearfar.data._samples import Labels, PackedNames, numbered
from nearfar.data._tables import SIDES, table

if TYPE_CHECKING:  # it would load rich
    from nearfar._utils.progress import Watch

HUGE = 2**32  # a picture must have fewer bytes
LARGEST = 1 << 20  # the most bytes that the file of a label may have
TABLE = "labels.csv"  # the table of labels that is read by default if it lies beside the shards
OTHERS = re.compile(r"__[^/]*__($|/)")  # WebDataset's names of files that describe a shard and belong to no sample
Entries = dict[str, Member]  # the files of a sample by their suffixes
Read = Callable[[str], bytes | None]
"""Returns the content of a sample's file by its suffix; None if there is no such file."""


@dataclass(frozen=True)
class LabelRule:
    """Where the labels of samples are."""

    suffix: str = ""  # the suffix of the file that holds the label; empty with a table
    keys: tuple[str, ...] = ()  # keys that lead to the label inside a .json file
    table: Mapping[str, tuple[str, str]] | None = None  # label and side ("" if not given) by the sample's key
    file: Path | None = None  # the file of the table

    def label(self, key: str, read: Read) -> tuple[str, str]:
        """The label of a sample, and its side or "".

        Raises:
            ValueError: there is no label; the caller puts the sample's name before the message.
        """
        if self.table is not None:
            if key not in self.table:
                raise ValueError(f"has no row in {self.file}")
            return self.table[key]
        content = read(self.suffix)
        if content is None:
            raise ValueError(f"has no file .{self.suffix}")
        if len(content) > LARGEST:
            raise ValueError(f"has a file .{self.suffix} of more than {LARGEST:,} bytes")
        try:
            text = content.decode("utf-8-sig")
            found = _value_at(json.loads(text), self.keys) if self.keys else text.strip()
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError(f"has a file .{self.suffix} that cannot be read") from None
        if not found:
            raise ValueError(f"has no {'.'.join(self.keys)!r} in its .json" if self.keys else "has an empty label")
        return found, ""

    @staticmethod
    def find(labels: str | None, shards: Sequence[Path]) -> LabelRule:
        """Parse the argument `labels` of `nearfar.data.shards`, or detect where labels are."""
        folder = shards[0].parent
        file = table_file(labels, folder)
        if file is not None:
            rows = table("shards", file, ("key", "label"), ("split",), unique="key")
            return LabelRule(table={row["key"]: (row["label"], row.get("split", "")) for row in rows}, file=file)
        words = (_default_rule(folder, shards) if labels is None else labels).strip(".")
        suffix, _, keys = words.partition(".")
        if suffix.lower() == "json":
            return LabelRule("json", tuple((keys or "label").split(".")))
        if not suffix:
            raise ValueError(
                'shards: labels must be a suffix ("cls"), a key of the .json ("json.species") or a .csv file, but came '
                f"as {printable(labels)!r}."
            )
        return LabelRule(words.lower())


def _value_at(value: Any, keys: Sequence[str]) -> str:
    """The text or whole number under these nested keys; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    named = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    return str(value).strip() if named else ""


def table_file(labels: str | None, folder: Path) -> Path | None:
    """The path of the table of labels; None if labels are elsewhere."""
    if labels is None:
        return folder / TABLE if (folder / TABLE).is_file() else None
    return folder / labels if labels.lower().endswith(".csv") else None


def _default_rule(folder: Path, shards: Sequence[Path]) -> str:
    """Where the first sample has its label, if at a usual place: in its .cls file, or under a key of its .json."""
    first = next((entries for shard in shards for _, entries, _ in _samples(shard)), None)
    if first is None:
        raise _empty(shards)
    if "cls" in first or "json" in first:
        return "cls" if "cls" in first else "json.label"
    held = ", ".join(f".{suffix}" for suffix in first)
    raise ValueError(
        f"shards: the first sample has neither .cls nor .json ({printable(held)} alone), and no {TABLE} lies in "
        f"{folder}; say with labels where the labels are: a suffix, json.KEY or a .csv file."
    )


def scan(shards: Sequence[Path], rule: LabelRule, inputs: str | None, watch: Watch | None = None) -> Arrays:
    """Read the headers of all files in the shards, and the labels of all samples: the arrays of a `ShardIndex`."""
    first, keys = [0], dict[str, int]()
    names: list[str] = []
    labels: list[str] = []
    offset, size, sides = (list[int]() for _ in range(3))
    for number, shard in enumerate(shards):
        for key, entries, read in _samples(shard):
            if key in keys:
                before = shards[bisect_right(first, keys[key]) - 1]
                raise ValueError(
                    f"shards: two samples have the key {printable(key)!r}, in {before} and in {shard}; give each a key "
                    "of its own, and put the files of a sample one after the other."
                )
            try:
                picture = _picture(entries, inputs)
                label, side = rule.label(key, read)
            except ValueError as error:
                raise ValueError(
                    f"shards: the sample {printable(key)!r} in {shard} {printable(error)}; mend it, or say with labels "
                    "and inputs which files hold labels and pictures."
                ) from None
            keys[key] = len(labels)
            names.append(picture.name)
            labels.append(sys.intern(label))  # one string for each class
            offset.append(picture.offset)
            size.append(picture.size)
            sides += [SIDES.index(side)] if side else []
        first.append(len(labels))
        if watch is not None:
            watch("indexing shards", number + 1, len(shards))
    _check_complete(keys, shards, rule)
    numbers, classes = _number(labels)
    picture_names, class_names = PackedNames.pack(names), PackedNames.pack(classes)
    return {
        "first": np.array(first, dtype=np.int64),
        "offset": np.array(offset, dtype=np.int64),
        "size": np.array(size, dtype=np.uint32),
        "labels": numbers.astype(np.int32),
        "sides": np.array(sides, dtype=np.int8),
        "names_data": picture_names.data,
        "names_start": picture_names.start,
        "classes_data": class_names.data,
        "classes_start": class_names.start,
    }


def _number(labels: Sequence[str]) -> tuple[Labels, tuple[str, ...]]:
    """Number the classes in the order of their names, which are sorted as numbers if all are whole numbers."""
    words = list(dict.fromkeys(labels))
    whole = all(word.isascii() and word.isdigit() and len(word) < 19 and str(int(word)) == word for word in words)
    numbers, classes = numbered(map(int, words) if whole else words)
    number_of = dict(zip(words, numbers.tolist(), strict=True))
    return np.array([number_of[label] for label in labels], dtype=np.int64), classes


def _samples(shard: Path) -> Iterator[tuple[str, Entries, Read]]:
    """The key and files of each sample, grouped by webdataset's rule, and a function that reads one file."""
    group = need("webdataset.tariterators", "shards", "shards").group_by_keys
    if not shard.is_file():
        raise FileNotFoundError(f"shards: there is no file {shard}; put all shards there, or correct the path.")
    try:
        with shard.open("rb") as stream:
            for sample in group(_files(shard)):
                key = sample.pop("__key__")
                entries = {suffix: entry for suffix, entry in sample.items() if isinstance(entry, Member)}
                yield key, entries, functools.partial(_read, stream, entries)
    except ValueError as error:
        words = str(error.args[0])
        if words.startswith("shards: "):
            raise
        raise ValueError(f"shards: {shard} is not a WebDataset ({printable(words)}); mend it.") from None


def _files(shard: Path) -> Iterator[dict[str, Any]]:
    """The files of a shard in the form that `group_by_keys` takes, with positions instead of contents."""
    for member in tar_members("shards", shard):
        if not OTHERS.match(member.name):
            yield {"fname": member.name, "data": member, "__url__": str(shard)}
    yield {}


def _read(stream: IO[bytes], entries: Entries, suffix: str) -> bytes | None:
    """The content of a file of a sample, read up to one byte beyond the limit for labels."""
    if suffix not in entries:
        return None
    stream.seek(entries[suffix].offset)
    return stream.read(min(entries[suffix].size, LARGEST + 1))


def _picture(entries: Entries, inputs: str | None) -> Member:
    """The file that holds the picture of a sample."""
    if inputs is not None:
        suffixes = [inputs.strip(".").lower()]
    else:
        suffixes = [suffix for suffix in entries if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES]
    if len(suffixes) != 1:
        held = ", ".join(f".{suffix}" for suffix in entries)
        raise ValueError(f"must have one picture, but has {len(suffixes) or 'none'} ({held})")
    if suffixes[0] not in entries:
        raise ValueError(f"has no file .{suffixes[0]}")
    found = entries[suffixes[0]]
    if found.size >= HUGE:
        raise ValueError(f"has a picture of {found.size:,} bytes, and below {HUGE:,} are allowed")
    return found


def _check_complete(keys: Mapping[str, int], shards: Sequence[Path], rule: LabelRule) -> None:
    """Refuse shards without samples, and a table that lists samples which no shard holds."""
    if not keys:
        raise _empty(shards)
    missing = [key for key in rule.table or () if key not in keys]
    if missing:
        raise FileNotFoundError(
            f"shards: {len(missing)} of the {len(rule.table or ())} keys in {rule.file} are in none of the "
            f"{len(shards)} shards, the first is {printable(missing[0])!r}; put all shards there."
        )


def _empty(shards: Sequence[Path]) -> ValueError:
    return ValueError(f"shards: the {len(shards)} shards, {shards[0]} first, hold no samples; name others.")

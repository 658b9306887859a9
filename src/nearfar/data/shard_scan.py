"""One pass over tar shards in WebDataset's form: where each sample's picture lies, and what its label is.

The `webdataset` package says which files form a sample. It reads shards from the first byte to the last, which suits a
stream of shuffled samples; batches with M samples of each class need any sample at any time, so the pass notes offsets
and sizes, and pictures are then read by these from the plain tar files.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar.data.folders import SUFFIXES
from nearfar.data.shard_labels import LARGEST, LabelRule

if TYPE_CHECKING:  # it would load rich
    from nearfar._utils.progress import Watch

__all__ = ["Scan", "first_suffixes", "scan"]

BLOCK = 512
"""Bytes of a header in a tar file."""
HUGE = 2**32
"""Bytes that a picture may not have."""
OTHERS = re.compile(r"__[^/]*__($|/)")
"""Names of files that are about a shard, and belong to no sample: WebDataset's rule."""


@dataclass
class Scan:
    """What a pass has found; lists with one entry per sample, in the order of the shards."""

    first: list[int] = field(default_factory=lambda: [0])
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, name: str, picture: tarfile.TarInfo, label: str, side: str) -> None:
        """Add a sample of the current shard."""
        self.keys[key] = len(self.names)
        self.names.append(name)
        self.offset.append(picture.offset_data)
        self.size.append(picture.size)
        self.labels.append(self.classes.setdefault(label, len(self.classes)))
        self.sides.append(side)

    def shard_of(self, row: int) -> int:
        """The number of the shard that holds a sample."""
        return sum(end <= row for end in self.first[1:])


def scan(shards: Sequence[Path], rule: LabelRule, inputs: str | None, watch: Watch | None = None) -> Scan:
    """Read the headers of all files in the shards, and the labels of all samples.

    Raises:
        FileNotFoundError: a shard is missing, or samples that a table lists.
        ValueError: a shard cannot be read or was cut short, or a sample has no picture, no label or another's key.
    """
    found = Scan()
    for number, shard in enumerate(shards):
        for key, files in _samples(shard):
            if key in found.keys:
                before = shards[found.shard_of(found.keys[key])]
                raise ValueError(
                    f"shards: two samples have the key {printable(key)!r}, in {before} and in {shard}; give each a key "
                    "of its own, and put the files of a sample one after the other."
                )
            try:
                picture = _picture(files, inputs)
                label, side = rule.label(key, files.read)
            except ValueError as error:
                raise ValueError(
                    f"shards: the sample {printable(key)!r} in {shard} {printable(error)}; mend it, or say with labels "
                    "and inputs which files hold labels and pictures."
                ) from None
            found.add(key, picture.name, picture, label, side)
        found.first.append(len(found.names))
        if watch is not None:
            watch("indexing shards", number + 1, len(shards))
    _check_whole(found, shards, rule)
    return found


def first_suffixes(shards: Sequence[Path]) -> list[str]:
    """The suffixes of the files of the first sample.

    Raises:
        ValueError: there is no sample.
    """
    for shard in shards:
        for _, files in _samples(shard):
            return list(files.entries)
    raise _empty(shards)


class _Files:
    """The files of a sample, by their suffixes."""

    def __init__(self, archive: tarfile.TarFile, entries: dict[str, tarfile.TarInfo]) -> None:
        self.archive, self.entries = archive, entries

    def read(self, suffix: str) -> bytes | None:
        """At most one byte more than a label's file may have."""
        entry = self.entries.get(suffix)
        stream: Any = self.archive.fileobj
        if entry is None:
            return None
        stream.seek(entry.offset_data)
        content: bytes = stream.read(min(entry.size, LARGEST + 1))
        return content


def _samples(shard: Path) -> Iterator[tuple[str, _Files]]:
    """The key and the files of each sample; webdataset's rule says which files belong together."""
    group = need("webdataset.tariterators", "shards", "shards").group_by_keys
    if not shard.is_file():
        raise FileNotFoundError(f"shards: there is no file {shard}; put all shards there, or correct the path.")
    try:
        with tarfile.open(shard, "r:") as archive:
            for sample in group(_entries(shard, archive)):
                key = sample.pop("__key__")
                yield key, _Files(archive, {k: v for k, v in sample.items() if isinstance(v, tarfile.TarInfo)})
    except (tarfile.TarError, EOFError, OverflowError) as error:
        hint = "unpack it with gunzip" if shard.suffix in (".gz", ".tgz") else "copy it again"
        raise ValueError(f"shards: {shard} cannot be read as a plain tar file ({printable(error)}); {hint}.") from None
    except ValueError as error:
        words = str(error.args[0])
        if words.startswith("shards: "):
            raise
        raise ValueError(f"shards: {shard} is no WebDataset ({printable(words)}); mend it.") from None


def _entries(shard: Path, archive: tarfile.TarFile) -> Iterator[dict[str, Any]]:
    """The regular files of a shard, as `group_by_keys` takes them, with headers in place of contents."""
    for entry in archive:
        setattr(archive, "members", [])  # noqa: B010  all headers seen would stay in memory; unknown to type checkers
        if ".." in entry.name.split("/") or entry.name.startswith("/"):
            raise ValueError(f"shards: {printable(entry.name)!r} leads out of the archive {shard}; mend it.")
        if entry.isreg() and not entry.issparse() and not OTHERS.match(entry.name):
            yield {"fname": entry.name, "data": entry, "__url__": str(shard)}
    stream: Any = archive.fileobj
    stream.seek(archive.offset)
    if len(stream.read(BLOCK)) < BLOCK:  # a tar file ends in empty blocks: this one was cut between two files
        raise ValueError(f"shards: {shard} was cut short, for its end mark is missing; copy it again.")
    yield {}


def _picture(files: _Files, inputs: str | None) -> tarfile.TarInfo:
    """The file that holds the picture of a sample."""
    if inputs is not None:
        suffixes = [inputs.strip(".").lower()]
    else:
        suffixes = [suffix for suffix in files.entries if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES]
    if len(suffixes) != 1:
        held = ", ".join(f".{suffix}" for suffix in files.entries)
        raise ValueError(f"must have one picture, but has {len(suffixes) or 'none'} ({held})")
    if suffixes[0] not in files.entries:
        raise ValueError(f"has no file .{suffixes[0]}")
    found = files.entries[suffixes[0]]
    if found.size >= HUGE:
        raise ValueError(f"has a picture of {found.size:,} bytes, and below {HUGE:,} are allowed")
    return found


def _check_whole(found: Scan, shards: Sequence[Path], rule: LabelRule) -> None:
    """Refuse shards without samples, and a table with samples that are nowhere."""
    if not found.names:
        raise _empty(shards)
    missing = [key for key in rule.table or () if key not in found.keys]
    if missing:
        raise FileNotFoundError(
            f"shards: {len(missing)} of the {len(rule.table or ())} keys in {rule.file} are in none of the "
            f"{len(shards)} shards, the first is {printable(missing[0])!r}; put all shards there."
        )


def _empty(shards: Sequence[Path]) -> ValueError:
    return ValueError(f"shards: the {len(shards)} shards, {shards[0]} first, hold no samples; name others.")

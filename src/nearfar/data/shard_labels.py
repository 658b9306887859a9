"""Labels of samples in tar shards: from a file of the sample, from a key of its .json, or from a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.checks import printable
from nearfar.data.folders import SIDES
from nearfar.data.tables import table

__all__ = ["LARGEST", "TABLE", "LabelRule", "Read", "label_rule", "table_file"]

TABLE = "labels.csv"
"""The table that is read where nothing else is named and it lies beside the shards."""
LARGEST = 1 << 20
"""Bytes that a label's file may have."""
Read = Callable[[str], bytes | None]
"""The content of a sample's file by its suffix; None if the sample has none such."""


@dataclass(frozen=True)
class LabelRule:
    """Where the labels of samples are.

    Attributes:
        suffix: the suffix of the file that holds the label; empty with a table.
        keys: keys that lead to the label inside a .json file.
        table: label and side ("" if not given) by the sample's key.
        file: the file of the table.
    """

    suffix: str = ""
    keys: tuple[str, ...] = ()
    table: Mapping[str, tuple[str, str]] | None = None
    file: Path | None = None

    def label(self, key: str, read: Read) -> tuple[str, str]:
        """The label of a sample and its side, which is empty if none is given.

        Raises:
            ValueError: there is no label; the message says why, to be completed by where the sample is.
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
            found = _inside(json.loads(text), self.keys) if self.keys else text.strip()
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError(f"has a file .{self.suffix} that cannot be read") from None
        if not found:
            raise ValueError(f"has no {'.'.join(self.keys)!r} in its .json" if self.keys else "has an empty label")
        return found, ""


def _inside(value: Any, keys: Sequence[str]) -> str:
    """The text or whole number at the end of these keys; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    named = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    return str(value).strip() if named else ""


def table_file(labels: str | None, folder: Path) -> Path | None:
    """The table that holds the labels, if one does; see `label_rule`."""
    if labels is None:
        return folder / TABLE if (folder / TABLE).is_file() else None
    return folder / labels if labels.lower().endswith(".csv") else None


def label_rule(labels: str | None, folder: Path, suffixes: Callable[[], Sequence[str]]) -> LabelRule:
    """Read what a user wrote, or look for what is there.

    Args:
        labels: a suffix such as "cls", "json." and a key, the name of a .csv file (relative to `folder`), or None: the
            table `labels.csv` if there is one, else .cls, else the key "label" of .json.
        folder: the folder of the first shard.
        suffixes: suffixes of the files of the first sample.
    """
    file = table_file(labels, folder)
    if file is not None:
        return LabelRule(table=_table(file), file=file)
    words = (_usual(folder, suffixes()) if labels is None else labels).strip(".")
    suffix, _, keys = words.partition(".")
    if suffix.lower() == "json":
        return LabelRule("json", tuple((keys or "label").split(".")))
    if not suffix:
        raise ValueError(
            'shards: labels must be a suffix ("cls"), a key of the .json ("json.species") or a .csv file, but came '
            f"as {printable(labels)!r}."
        )
    return LabelRule(words.lower())


def _usual(folder: Path, suffixes: Sequence[str]) -> str:
    for suffix, words in (("cls", "cls"), ("json", "json.label")):
        if suffix in suffixes:
            return words
    held = ", ".join(f".{suffix}" for suffix in suffixes)
    raise ValueError(
        f"shards: the first sample has neither .cls nor .json ({printable(held)} alone), and no {TABLE} lies in "
        f"{folder}; say with labels where the labels are: a suffix, json.KEY or a .csv file."
    )


def _table(path: Path) -> dict[str, tuple[str, str]]:
    """Read a table with the columns key, label and, optionally, split."""
    found: dict[str, tuple[str, str]] = {}
    for line, row in enumerate(table("shards", path, ("key", "label"), ("split",)), start=2):
        key, side = row["key"], row.get("split", "")
        if key in found:
            raise ValueError(f"shards: the key {printable(key)!r} stands twice in {path}, again in row {line}.")
        if side and side not in SIDES:
            raise ValueError(f"shards: split in {path} must be train or test, but row {line} says {printable(side)!r}.")
        found[key] = row["label"], side
    return found

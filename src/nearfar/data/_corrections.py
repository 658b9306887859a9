"""Corrections of a data set: a CSV file of samples to ignore and of labels to replace, as `nearfar inspect` writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.checks import printable
from nearfar.data._samples import DataSet, Samples, part
from nearfar.data._tables import table

ACTIONS = ("keep", "relabel", "ignore")
"""A later one takes precedence if several rows name one sample."""
PLACES = ("train", "test", "gallery")
Place = tuple[str, int]
"""A side of the data set, and a row of it."""


def correct(data: DataSet, path: Path) -> DataSet:
    """Leave out the samples that a CSV file marks, and replace the labels that it corrects.

    Columns: `name` of the sample; `action`, which is keep, ignore or relabel; `label`, the class for relabel; and
    `side` (train, test or gallery), needed where a name stands on several sides. Other columns are not read. A sample
    whose corrected class is only on another side is left out, since it belongs to none of the classes beside it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row names no sample or several, an unknown action or class, or a second label for a sample; or no
            sample of a side would be left.
    """
    sides: dict[str, Samples] = {side: samples for side in PLACES if (samples := getattr(data, side, None)) is not None}
    rows = table("corrections", path, ("name", "action"), None, empty=True)  # a clean data set has no corrections
    wanted = {row["name"] for row in rows}
    places: dict[str, list[Place]] = {}
    for side, samples in sides.items():
        for number, name in enumerate(samples.names):
            if name in wanted:
                places.setdefault(name, []).append((side, number))
    marks: dict[Place, tuple[str, str]] = {}
    for line, row in enumerate(rows, start=2):
        place, mark = _read(f"row {line} of {path}", row, places), (row["action"], row.get("label", ""))
        before = marks.setdefault(place, mark)
        if before[0] == mark[0] == "relabel" and before[1] != mark[1]:
            raise ValueError(f"corrections: {path} gives {printable(row['name'])!r} two labels; keep one of the rows.")
        if ACTIONS.index(mark[0]) > ACTIONS.index(before[0]):
            marks[place] = mark
    everywhere = {name for samples in sides.values() for name in samples.classes}
    changed: dict[str, Any] = {side: _apply(path, side, samples, marks, everywhere) for side, samples in sides.items()}
    return replace(data, **changed)


def _read(where: str, row: dict[str, str], places: dict[str, list[Place]]) -> Place:
    """The sample that a row of the table means."""
    action, side = row["action"], row.get("side", "")
    if action not in ACTIONS or (action == "relabel" and not row.get("label")):
        raise ValueError(
            f"corrections: {where} must have the action keep, ignore or relabel, and a label for relabel, but came as "
            f"{printable(action)!r} with label {printable(row.get('label', ''))!r}."
        )
    found = [place for place in places.get(row["name"], []) if side in ("", place[0])]
    if len(found) != 1:
        raise ValueError(
            f"corrections: {where} must name one sample of the data, but {printable(row['name'])!r} names "
            f"{len(found)}{' on side ' + repr(printable(side)) if side else ''}; "
            + ("say which in a column side." if found else "inspect the same data again.")
        )
    return found[0]


def _apply(
    path: Path, side: str, samples: Samples, marks: dict[Place, tuple[str, str]], everywhere: set[str]
) -> Samples:
    """One side with its marks."""
    labels, keep = samples.labels.copy(), np.ones(len(samples), dtype=np.bool_)
    number = {name: label for label, name in enumerate(samples.classes)}
    for (home, row), (action, label) in marks.items():
        if home != side or action == "keep":
            continue
        if action == "relabel" and label not in everywhere:
            raise ValueError(f"corrections: {path} relabels to {printable(label)!r}, which is no class of the data.")
        keep[row] = action == "relabel" and label in number
        labels[row] = number.get(label, labels[row])
    if not keep.any():
        raise ValueError(f"corrections: {path} leaves no sample for {side}; mark fewer.")
    changed = not keep.all() or not np.array_equal(labels, samples.labels)
    return part(samples, np.flatnonzero(keep), labels[keep]) if changed else samples

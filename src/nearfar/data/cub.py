"""CUB-200-2011: the official folder, or tar shards with a table of labels. Classes 1-100 train, 101-200 test."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path

from nearfar.data.benchmarks import by_class_number, demand_counts, lines
from nearfar.data.pictures import Member, OnCorrupt, demand_files
from nearfar.data.samples import DataSet
from nearfar.ks import KS

LAST = 100
COUNTS = {"train": (5864, 100), "test": (5924, 100)}
TABLE = "cub200_full_labels.csv"
SHARDS = "cub200_full-*.tar"

Row = tuple[Path | Member, str, int]


def cub(path: Path, *, on_corrupt: OnCorrupt = "stop", check: bool = True) -> DataSet:
    """Read CUB-200-2011: 5,864 photographs of the classes 1 to 100 to learn from, 5,924 of the others for the test.

    Args:
        path: the unpacked folder (images.txt, image_class_labels.txt, classes.txt, images/), or one that holds
            cub200_full_labels.csv and the archives cub200_full-*.tar.
        on_corrupt: see `Pictures`.
        check: demand the counts of the papers.
    """
    rows, names = _shards(path) if (path / TABLE).is_file() else _official(path)
    sides = by_class_number("cub", rows, names, LAST, on_corrupt)
    if check:
        demand_counts("cub", sides, COUNTS)
    return DataSet("cub", sides["train"], sides["test"], ks=KS["cub"])


def _official(path: Path) -> tuple[list[Row], dict[int, str]]:
    images = lines("cub", path / "images.txt", 2)
    numbers = {row[0]: int(row[1]) for row in lines("cub", path / "image_class_labels.txt", 2)}
    names = {int(row[0]): row[1] for row in lines("cub", path / "classes.txt", 2)}
    without = next((row[1] for row in images if row[0] not in numbers), None)
    if without is not None:
        raise ValueError(f"cub: image_class_labels.txt in {path} gives no class for {without}; unpack the data again.")
    files = [path / "images" / name for _, name in images]
    demand_files("cub", files)
    return [(file, name, numbers[key]) for file, (key, name) in zip(files, images, strict=True)], names


def _shards(path: Path) -> tuple[list[Row], dict[int, str]]:
    """Images inside tar archives, found by their offset so that any worker can read any of them."""
    with (path / TABLE).open(newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    if not table or not {"filename", "class_id", "class_name"} <= set(table[0]):
        raise ValueError(f"cub: {path / TABLE} must have the columns filename, class_id and class_name.")
    members = {}
    for archive in sorted(path.glob(SHARDS)):
        with tarfile.open(archive, "r:") as shard:
            for entry in shard:
                members[entry.name] = Member(archive, entry.offset_data, entry.size, entry.name)
    missing = [row["filename"] for row in table if row["filename"] not in members]
    if missing:
        raise FileNotFoundError(
            f"cub: {len(missing)} of {len(table)} images are in none of the archives {path / SHARDS}, the first is "
            f"{missing[0]}; put all archives into the folder."
        )
    rows: list[Row] = [(members[row["filename"]], row["filename"], int(row["class_id"])) for row in table]
    return rows, {int(row["class_id"]): row["class_name"] for row in table}

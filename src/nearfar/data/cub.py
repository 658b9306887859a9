"""CUB-200-2011: the official folder, or tar shards with a table of labels. Classes 1-100 train, 101-200 test."""

from __future__ import annotations

from pathlib import Path

from nearfar._utils.checks import printable
from nearfar.data.archives import in_archives
from nearfar.data.benchmarks import by_class_number, demand_counts
from nearfar.data.ks import KS
from nearfar.data.pictures import Member, OnCorrupt, listed_files
from nearfar.data.samples import DataSet
from nearfar.data.tables import table, whole_number, words

__all__ = ["LAST", "Row", "cub"]

LAST = 100
COUNTS = {"train": (5864, 100), "test": (5924, 100)}
TABLE = "cub200_full_labels.csv"
SHARDS = "cub200_full-*.tar"

Row = tuple[Path | Member, str, int]


def cub(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read CUB-200-2011: 5,864 photographs of the classes 1 to 100 for training, 5,924 of the others for the test.

    Args:
        path: the unpacked folder (images.txt, image_class_labels.txt, classes.txt, images/), or one that holds
            cub200_full_labels.csv and the archives cub200_full-*.tar.
        on_corrupt: see `Pictures`.
        outside: allow images.txt to name files outside the folder.
        check: require the numbers of images and classes that the papers state.
    """
    rows, names = _shards(path) if (path / TABLE).is_file() else _official(path, outside)
    sides = by_class_number("cub", rows, names, LAST, on_corrupt)
    if check:
        demand_counts("cub", sides, COUNTS)
    return DataSet("cub", sides["train"], sides["test"], ks=KS["cub"])


def _official(path: Path, outside: bool) -> tuple[list[Row], dict[int, str]]:
    images = words("cub", path / "images.txt", 2)
    labels, classes = path / "image_class_labels.txt", path / "classes.txt"
    numbers = {key: whole_number("cub", labels, word) for key, word in words("cub", labels, 2)}
    names = {whole_number("cub", classes, word): name for word, name in words("cub", classes, 2)}
    without = next((row[1] for row in images if row[0] not in numbers), None)
    if without is not None:
        raise ValueError(
            f"cub: image_class_labels.txt in {path} gives no class for {printable(without)}; unpack the data again."
        )
    files = listed_files("cub", path / "images", [name for _, name in images], outside=outside)
    return [(file, name, numbers[key]) for file, (key, name) in zip(files, images, strict=True)], names


def _shards(path: Path) -> tuple[list[Row], dict[int, str]]:
    listed = table("cub", path / TABLE, ("filename", "class_id", "class_name"), None)
    files = [row["filename"] for row in listed]
    numbers = [whole_number("cub", path / TABLE, row["class_id"]) for row in listed]
    rows: list[Row] = list(zip(in_archives("cub", path, SHARDS, files), files, numbers, strict=True))
    return rows, {number: row["class_name"] for row, number in zip(listed, numbers, strict=True)}

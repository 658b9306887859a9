"""Oxford Flowers-102: the official files, or tar shards with a table of labels. Classes 1-51 train, 52-102 test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nearfar._utils.checks import printable
from nearfar.data.archives import in_archives
from nearfar.data.benchmarks import MAT_ERRORS, by_class_number, demand_counts
from nearfar.data.ks import KS
from nearfar.data.pictures import Member, OnCorrupt, listed_files
from nearfar.data.samples import DataSet
from nearfar.data.tables import table, whole_number

__all__ = ["LAST", "Row", "flowers"]

LAST = 51
COUNTS = {"train": (3493, 51), "test": (4696, 51)}
TABLE = "flowers102_labels.csv"
SHARDS = "flowers102-*.tar"
LABELS = "imagelabels.mat"

Row = tuple[Path | Member, str, int]


def flowers(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Oxford Flowers-102: 3,493 photographs of the classes 1 to 51 for training, 4,696 of 52 to 102 for the test.

    Args:
        path: the folder that holds imagelabels.mat and jpg/image_00001.jpg and so on (reading the former needs scipy),
            or one that holds flowers102_labels.csv and the archives flowers102-*.tar.
        on_corrupt: see `Pictures`.
        outside: allow jpg/ to be a link out of the folder.
        check: require the numbers of images and classes of the whole data set.
    """
    rows = _shards(path) if (path / TABLE).is_file() else _official(path, outside)
    names = {number: f"{number:03d}" for _, _, number in rows}
    sides = by_class_number("flowers", rows, names, LAST, on_corrupt)
    if check:
        demand_counts("flowers", sides, COUNTS)
    return DataSet("flowers", sides["train"], sides["test"], ks=KS["flowers"])


def _official(path: Path, outside: bool) -> list[Row]:
    file = path / LABELS
    if not file.is_file():
        raise FileNotFoundError(f"flowers: there is no file {file}; name the folder that holds the unpacked data.")
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        numbers = [int(number) for number in np.atleast_1d(loadmat(file, squeeze_me=True)["labels"])]
    except (*MAT_ERRORS, MatReadError) as error:
        raise ValueError(
            f"flowers: {file} must hold labels, one number for each image, but reading it failed ({printable(error)}); "
            "download it again."
        ) from None
    names = [f"jpg/image_{place:05d}.jpg" for place in range(1, len(numbers) + 1)]
    files = listed_files("flowers", path, names, outside=outside)
    return list(zip(files, names, numbers, strict=True))


def _shards(path: Path) -> list[Row]:
    listed = table("flowers", path / TABLE, ("name", "label"), None)
    names = [row["name"] for row in listed]
    numbers = [whole_number("flowers", path / TABLE, row["label"]) for row in listed]
    return list(zip(in_archives("flowers", path, SHARDS, names), names, numbers, strict=True))

"""Cars-196, Stanford Online Products and In-Shop in their official layouts, with the splits used in papers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nearfar._utils.checks import printable
from nearfar.data.ks import KS
from nearfar.data.pictures import Member, OnCorrupt, Pictures, listed_files
from nearfar.data.samples import DataSet, Samples, numbered
from nearfar.data.tables import whole_number, words

__all__ = ["Count", "by_class_number", "cars", "demand_counts", "inshop", "sop"]

Count = tuple[int, int]
"""Images and classes."""
MAT_ERRORS = (
    OSError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    MemoryError,
    zlib.error,
)
"""Errors that scipy raises, besides its own, for a .mat file that is damaged or holds something else."""


def demand_counts(owner: str, found: Mapping[str, Samples], expected: Mapping[str, Count]) -> None:
    """Require the numbers of images and classes that the papers state for each split."""
    for side, (images, classes) in expected.items():
        have = found[side]
        if (len(have), len(have.classes)) != (images, classes):
            raise ValueError(
                f"{owner}: {side} must hold {images:,} images of {classes:,} classes, but {len(have):,} of "
                f"{len(have.classes):,} were found; unpack the data again, or pass check=False for a part of it."
            )


def by_class_number(
    owner: str,
    rows: Sequence[tuple[Path | Member, str, int]],
    names: Mapping[int, str],
    last: int,
    on_corrupt: OnCorrupt,
) -> dict[str, Pictures]:
    """Split by class number: 1 to `last` for training, those above for the test. A row is (image, name, class)."""
    sides = {}
    for side, train in (("train", True), ("test", False)):
        chosen = [row for row in rows if (row[2] <= last) == train]
        if not chosen:
            raise ValueError(f"{owner}: no image is for {side} (classes {'1 to' if train else 'above'} {last}).")
        labels, classes = numbered(number for _, _, number in chosen)
        words = [names.get(int(number), number) for number in classes]
        sides[side] = Pictures(
            [path for path, _, _ in chosen], labels, [name for _, name, _ in chosen], words, on_corrupt=on_corrupt
        )
    return sides


def cars(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Cars-196: `cars_annos.mat` and the folder `car_ims` beside it.

    Classes 1 to 98 are for training (8,054 images), 99 to 196 for the test (8,131).
    """
    file = path / "cars_annos.mat"
    if not file.is_file():
        raise FileNotFoundError(f"cars: there is no file {file}; name the folder that holds the unpacked data.")
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        found = loadmat(file, squeeze_me=True)
        annotations = np.atleast_1d(found["annotations"])
        images = [str(name) for name in annotations["relative_im_path"]]
        numbers = [int(number) for number in annotations["class"]]
        classes = [str(name) for name in np.atleast_1d(found["class_names"])]
    except (*MAT_ERRORS, MatReadError) as error:
        raise ValueError(
            f"cars: {file} must hold annotations (relative_im_path, class) and class_names, but reading it failed "
            f"({printable(error)}); download it again."
        ) from None
    files = listed_files("cars", path, images, outside=outside)
    rows = list(zip(files, images, numbers, strict=True))
    sides = by_class_number("cars", rows, dict(enumerate(classes, start=1)), 98, on_corrupt)
    if check:
        demand_counts("cars", sides, {"train": (8054, 98), "test": (8131, 98)})
    return DataSet("cars", sides["train"], sides["test"], ks=KS["cars"])


def sop(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` (image_id class_id super_class_id path).

    59,551 images of 11,318 classes are for training, 60,502 of 11,316 others for the test.
    """
    sides = {}
    for side in ("train", "test"):
        file = path / f"Ebay_{side}.txt"
        rows = words("sop", file, 4, skip=1)
        files = listed_files("sop", path, [row[3] for row in rows], outside=outside)
        labels, classes = numbered(whole_number("sop", file, row[1]) for row in rows)
        sides[side] = Pictures(files, labels, [row[3] for row in rows], classes, on_corrupt=on_corrupt)
    if check:
        demand_counts("sop", sides, {"train": (59_551, 11_318), "test": (60_502, 11_316)})
    return DataSet("sop", sides["train"], sides["test"], ks=KS["sop"])


def inshop(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read In-Shop: `list_eval_partition.txt` (image item status), in `path` or in its folder Eval; images in `path`.

    25,882 images of 3,997 items are for training; 14,218 queries look for their item in a gallery of 12,612 images of
    the same 3,985 items.
    """
    file = path / "list_eval_partition.txt"
    if not file.is_file() and (path / "Eval" / file.name).is_file():
        file = path / "Eval" / file.name
    rows = words("inshop", file, 3, skip=2)
    if wrong := {row[2] for row in rows} ^ {"train", "query", "gallery"}:
        raise ValueError(
            f"inshop: the status in {file} must be train, query or gallery, and each must occur, but that fails for "
            f"{printable(', '.join(sorted(wrong)))}."
        )
    files = listed_files("inshop", path, [row[0] for row in rows], outside=outside)
    sides = {}
    for side in ("train", "query", "gallery"):
        chosen = [i for i, row in enumerate(rows) if row[2] == side]
        labels, classes = numbered(rows[i][1] for i in chosen)
        names = [rows[i][0] for i in chosen]
        sides[side] = Pictures([files[i] for i in chosen], labels, names, classes, on_corrupt=on_corrupt)
    if check:
        demand_counts("inshop", sides, {"train": (25_882, 3997), "query": (14_218, 3985), "gallery": (12_612, 3985)})
    lonely = set(sides["query"].classes) ^ set(sides["gallery"].classes)
    if lonely:
        raise ValueError(
            f"inshop: queries and gallery must show the same items, but {len(lonely)} stand on one side alone, such as "
            f"{printable(min(lonely))}; unpack the data again."
        )
    return DataSet("inshop", sides["train"], sides["query"], sides["gallery"], ks=KS["inshop"])

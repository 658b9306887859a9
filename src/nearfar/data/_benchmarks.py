"""The benchmarks of the field in their official layouts, with the splits that papers use.

CUB-200-2011 and Flowers-102 may also be tar archives with a table of labels; Omniglot is one `.npz` file.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.files import read_arrays
from nearfar.data._pictures import Member, OnCorrupt, Pictures, resolve_files, tar_members
from nearfar.data._samples import USUAL_KS, DataSet, Tensors, numbered, part
from nearfar.data._tables import table, whole_number, words

KS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "glyphs": USUAL_KS,
        "omniglot": USUAL_KS,
        "cub": (1, 2, 4, 8, 16, 32),
        "flowers": USUAL_KS,
        "cars": (1, 2, 4, 8, 16, 32),
        "sop": (1, 10, 100, 1000),
        "inshop": (1, 10, 20, 30, 40, 50),
    }
)
"""Name of a data set -> the K at which papers report recall@K on it; `USUAL_KS` for others."""

Row = tuple[Path | Member, str, Any]  # an image, its name and its label
Counts = Mapping[str, tuple[int, int]]  # images and classes of each split
Found = TypeVar("Found")
BAD_MAT = (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError, zlib.error)
"""Errors that scipy raises, besides its own, for a .mat file that is damaged or holds something else."""


def omniglot(path: Path) -> DataSet:
    """Read `omniglot_28.npz` (or the folder that holds it): uint8 pictures [n, 28, 28], 255 is ink.

    964 characters are for training, 659 of other alphabets for the test. The file holds `images` (bits packed by
    `np.packbits`, a row a drawing), `labels`, `class_names` and `background`, which marks the training classes.
    """
    file = path / "omniglot_28.npz" if path.is_dir() else path
    arrays, needed = read_arrays("omniglot", file), ("images", "labels", "class_names", "background")
    absent = [name for name in needed if name not in arrays]
    if absent:
        raise ValueError(f"omniglot: {file} lacks {', '.join(absent)}; it must hold {', '.join(needed)}.")
    bits = np.unpackbits(arrays["images"], axis=1)
    side = int(np.sqrt(bits.shape[1]))  # the last byte of a row may contain padding
    images = bits[:, : side * side].reshape(-1, side, side) * np.uint8(255)
    classes = [str(name) for name in arrays["class_names"]]
    whole = Tensors(images, arrays["labels"].astype(np.int64), None, classes)
    background = arrays["background"].astype(np.bool_)[whole.labels]
    return DataSet("omniglot", part(whole, np.flatnonzero(background)), part(whole, np.flatnonzero(~background)))


def cub(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read CUB-200-2011: 5,864 photographs of the classes 1 to 100 for training, 5,924 of the others for the test.

    Args:
        path: the unpacked folder (images.txt, image_class_labels.txt, classes.txt, images/), or one that holds
            cub200_full_labels.csv and the archives cub200_full-*.tar.
        on_corrupt: see `Pictures`.
        outside: allow images.txt to name files outside the folder.
        check: require the numbers of images and classes that the papers state.
    """
    listing = path / "cub200_full_labels.csv"
    if listing.is_file():
        listed = table("cub", listing, ("filename", "class_id", "class_name"), None)
        numbers = [whole_number("cub", listing, row["class_id"]) for row in listed]
        names = {number: row["class_name"] for row, number in zip(listed, numbers, strict=True)}
        files = [row["filename"] for row in listed]
        rows: list[Row] = list(zip(_members("cub", path, "cub200_full-*.tar", files), files, numbers, strict=True))
    else:
        rows, names = _official_cub(path, outside)
    sides = _split_by_class("cub", rows, names, 100, on_corrupt)
    return _data_set("cub", sides, {"train": (5864, 100), "test": (5924, 100)}, check)


def _official_cub(path: Path, outside: bool) -> tuple[list[Row], dict[int, str]]:
    images = words("cub", path / "images.txt", 2)
    labels, classes = path / "image_class_labels.txt", path / "classes.txt"
    numbers = {key: whole_number("cub", labels, word) for key, word in words("cub", labels, 2)}
    names = {whole_number("cub", classes, word): name for word, name in words("cub", classes, 2)}
    without = next((row[1] for row in images if row[0] not in numbers), None)
    if without is not None:
        raise ValueError(
            f"cub: image_class_labels.txt in {path} gives no class for {printable(without)}; unpack the data again."
        )
    files = resolve_files("cub", path / "images", [name for _, name in images], outside=outside)
    return [(file, name, numbers[key]) for file, (key, name) in zip(files, images, strict=True)], names


def flowers(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Oxford Flowers-102: 3,493 photographs of the classes 1 to 51 for training, 4,696 of 52 to 102 for the test.

    Args:
        path: the folder that holds imagelabels.mat and jpg/image_00001.jpg and so on (reading the former needs scipy),
            or one that holds flowers102_labels.csv and the archives flowers102-*.tar.
        on_corrupt: see `Pictures`.
        outside: allow jpg/ to be a link out of the folder.
        check: require the numbers of images and classes of the whole data set.
    """
    listing = path / "flowers102_labels.csv"
    if listing.is_file():
        listed = table("flowers", listing, ("name", "label"), None)
        numbers = [whole_number("flowers", listing, row["label"]) for row in listed]
        names = [row["name"] for row in listed]
        images: Sequence[Path | Member] = _members("flowers", path, "flowers102-*.tar", names)
    else:
        numbers = _read_mat(
            "flowers",
            path / "imagelabels.mat",
            "labels, one number for each image",
            lambda found: [int(number) for number in np.atleast_1d(found["labels"])],
        )
        names = [f"jpg/image_{place:05d}.jpg" for place in range(1, len(numbers) + 1)]
        images = resolve_files("flowers", path, names, outside=outside)
    rows = list(zip(images, names, numbers, strict=True))
    sides = _split_by_class("flowers", rows, {number: f"{number:03d}" for number in numbers}, 51, on_corrupt)
    return _data_set("flowers", sides, {"train": (3493, 51), "test": (4696, 51)}, check)


def cars(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Cars-196: `cars_annos.mat` and the folder `car_ims` beside it.

    Classes 1 to 98 are for training (8,054 images), 99 to 196 for the test (8,131).
    """

    def read(found: Mapping[str, Any]) -> tuple[list[str], list[int], dict[int, str]]:
        annotations = np.atleast_1d(found["annotations"])
        images = [str(name) for name in annotations["relative_im_path"]]
        classes = [str(name) for name in np.atleast_1d(found["class_names"])]
        return images, [int(number) for number in annotations["class"]], dict(enumerate(classes, start=1))

    contents = "annotations (relative_im_path, class) and class_names"
    names, numbers, classes = _read_mat("cars", path / "cars_annos.mat", contents, read)
    files = resolve_files("cars", path, names, outside=outside)
    sides = _split_by_class("cars", list(zip(files, names, numbers, strict=True)), classes, 98, on_corrupt)
    return _data_set("cars", sides, {"train": (8054, 98), "test": (8131, 98)}, check)


def sop(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` (image_id class_id super_class_id path).

    59,551 images of 11,318 classes are for training, 60,502 of 11,316 others for the test.
    """
    sides = {}
    for side in ("train", "test"):
        file = path / f"Ebay_{side}.txt"
        listed = words("sop", file, 4, skip=1)
        files = resolve_files("sop", path, [row[3] for row in listed], outside=outside)
        numbers = [whole_number("sop", file, row[1]) for row in listed]
        sides[side] = _pictures(
            [(image, row[3], number) for image, row, number in zip(files, listed, numbers, strict=True)], on_corrupt
        )
    return _data_set("sop", sides, {"train": (59_551, 11_318), "test": (60_502, 11_316)}, check)


def inshop(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False, check: bool = True) -> DataSet:
    """Read In-Shop: `list_eval_partition.txt` (image item status), in `path` or in its folder Eval; images in `path`.

    25,882 images of 3,997 items are for training; 14,218 queries look for their item in a gallery of 12,612 images of
    the same 3,985 items.
    """
    file = path / "list_eval_partition.txt"
    if not file.is_file() and (path / "Eval" / file.name).is_file():
        file = path / "Eval" / file.name
    listed = words("inshop", file, 3, skip=2)
    counts = {"train": (25_882, 3997), "query": (14_218, 3985), "gallery": (12_612, 3985)}
    if wrong := {row[2] for row in listed} ^ counts.keys():
        raise ValueError(
            f"inshop: the status in {file} must be train, query or gallery, and each must occur, but that fails for "
            f"{printable(', '.join(sorted(wrong)))}."
        )
    files = resolve_files("inshop", path, [row[0] for row in listed], outside=outside)
    rows = list(zip(files, listed, strict=True))
    sides = {
        side: _pictures([(image, row[0], row[1]) for image, row in rows if row[2] == side], on_corrupt)
        for side in counts
    }
    data = _data_set("inshop", sides, counts, check)
    lonely = set(sides["query"].classes) ^ set(sides["gallery"].classes)
    if lonely:
        raise ValueError(
            f"inshop: queries and gallery must show the same items, but {len(lonely)} are on one side only, such as "
            f"{printable(min(lonely))}; unpack the data again."
        )
    return data


def _read_mat(owner: str, file: Path, contents: str, read: Callable[[Mapping[str, Any]], Found]) -> Found:
    """Load a .mat file and pass its variables to `read`; an error says that the file must hold `contents`."""
    if not file.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {file}; name the folder that holds the unpacked data.")
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        return read(loadmat(file, squeeze_me=True))
    except (*BAD_MAT, MatReadError) as error:
        raise ValueError(
            f"{owner}: {file} must hold {contents}, but reading it failed ({printable(error)}); download it again."
        ) from None


def _pictures(rows: Sequence[Row], on_corrupt: OnCorrupt, class_names: Mapping[int, str] | None = None) -> Pictures:
    paths, names, given = zip(*rows, strict=True)
    labels, classes = numbered(given)
    if class_names is not None:
        classes = tuple(class_names.get(int(number), number) for number in classes)
    return Pictures(paths, labels, names, classes, on_corrupt=on_corrupt)


def _split_by_class(
    owner: str, rows: Sequence[Row], class_names: Mapping[int, str], last: int, on_corrupt: OnCorrupt
) -> dict[str, Pictures]:
    """Split by class number: 1 to `last` for training, larger ones for the test."""
    sides = {}
    for side, train in (("train", True), ("test", False)):
        chosen = [row for row in rows if (row[2] <= last) == train]
        if not chosen:
            raise ValueError(f"{owner}: no image is for {side} (classes {'1 to' if train else 'above'} {last}).")
        sides[side] = _pictures(chosen, on_corrupt, class_names)
    return sides


def _data_set(name: str, sides: Mapping[str, Pictures], expected: Counts, check: bool) -> DataSet:
    """Make a data set of train, test and perhaps a gallery; `check` requires the expected numbers."""
    for side, (images, classes) in expected.items() if check else ():
        found = sides[side]
        if (len(found), len(found.classes)) != (images, classes):
            raise ValueError(
                f"{name}: {side} must hold {images:,} images of {classes:,} classes, but {len(found):,} of "
                f"{len(found.classes):,} were found; unpack the data again, or pass check=False for a part of it."
            )
    train, test, *rest = sides.values()
    return DataSet(name, train, test, rest[0] if rest else None, KS[name])


def _members(owner: str, path: Path, pattern: str, names: Iterable[str]) -> list[Member]:
    """Locate the files of these names, in this order, inside the tar archives of a folder; nothing is unpacked."""
    archives = sorted(path.glob(pattern))
    members = {member.name: member for archive in archives for member in tar_members(owner, archive)}
    listed = list(names)
    missing = [name for name in listed if name not in members]
    if missing:
        raise FileNotFoundError(
            f"{owner}: {len(missing)} of {len(listed)} images are in none of the archives {path / pattern}, the first "
            f"is {printable(missing[0])}; put all archives into the folder."
        )
    return [members[name] for name in listed]

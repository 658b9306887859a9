"""Your own data: one folder per class, a CSV manifest, or vectors in `.npz` files."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.files import read_arrays
from nearfar.data._pictures import OnCorrupt, Pictures, resolve_files
from nearfar.data._samples import DataSet, Samples, Tensors, numbered, part
from nearfar.data._splits import class_disjoint
from nearfar.data._tables import SIDES, table

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SEED = 0  # seed of the split by class of data without a given split


def folder(path: Path, *, on_corrupt: OnCorrupt = "stop") -> DataSet:
    """Read a folder of class folders of images.

    If it contains the folders `train` and `test`, the class folders are inside these; otherwise half of the classes are
    for the test. Hidden files and files without the suffix of an image are ignored; a class folder without images is
    left out, with a warning. Symbolic links are followed.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are fewer than two classes with images, or one side of the split is empty.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"folder: there is no folder {path}.")
    present = [side for side in SIDES if (path / side).is_dir()]
    if len(present) == 2:
        train, test = (_class_folders(path / side, on_corrupt) for side in SIDES)
        return DataSet(path.name, train, test)
    if present:
        raise ValueError(
            f"folder: {path} holds only {present[0]}/; give it both train/ and test/, or class folders without either."
        )
    return halve(path.name, _class_folders(path, on_corrupt))


def _class_folders(path: Path, on_corrupt: OnCorrupt) -> Pictures:
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ValueError(f"folder: {path} holds no class folders; put the images of each class into its own folder.")
    held = {place: sorted(file for file in place.iterdir() if is_image(file)) for place in folders}
    empty = [place.name for place, images in held.items() if not images]
    about = f"no images ({', '.join(sorted(SUFFIXES))})"
    if len(empty) == len(folders):
        raise ValueError(f"folder: the class folders of {path} hold {about}; fill one of them.")
    if empty:
        first = printable(", ".join(empty[:5]) + (", ..." if len(empty) > 5 else ""))
        warnings.warn(
            f"folder: {len(empty)} of {len(folders)} class folders of {path} hold {about} and are left out: {first}.",
            stacklevel=4,
        )
    full = [place for place in folders if held[place]]
    paths = [file for place in full for file in held[place]]
    labels = [label for label, place in enumerate(full) for _ in held[place]]
    names = [str(file.relative_to(path)) for file in paths]
    return Pictures(paths, labels, names, [place.name for place in full], on_corrupt=on_corrupt)


def is_image(path: Path) -> bool:
    """Whether a file counts as a picture, by its name."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def manifest(path: Path, *, on_corrupt: OnCorrupt = "stop", outside: bool = False) -> DataSet:
    """Read a CSV file with the columns path, label and, optionally, split (train or test).

    Paths are relative to the folder of the file, and must be inside it unless `outside` is true. Without a split, half
    of the classes are for the test.

    Raises:
        FileNotFoundError: the manifest or an image is missing.
        ValueError: a column is missing or unknown, a value is empty, a path occurs twice or leads out of the folder,
            or one side is empty.
    """
    rows = table("manifest", path, ("path", "label"), ("split",), unique="path")
    names = [row["path"] for row in rows]
    files = resolve_files("manifest", path.parent, names, outside=outside)

    def samples(chosen: Sequence[int]) -> Pictures:
        labels, classes = numbered(rows[i]["label"] for i in chosen)
        return Pictures([files[i] for i in chosen], labels, [names[i] for i in chosen], classes, on_corrupt=on_corrupt)

    if "split" not in rows[0]:
        return halve(path.stem, samples(range(len(rows))))
    train, test = (samples(chosen) for chosen in split_rows("manifest", path, [row["split"] for row in rows]))
    return DataSet(path.stem, train, test)


def vectors(path: Path) -> DataSet:
    """Read vectors: an `.npz` file with x [n, d], y [n] and, optionally, name [n] and split [n] (train or test).

    Two files are allowed too: a folder with train.npz and test.npz, or a file whose name ends in train.npz beside one
    that ends in test.npz. With neither, half of the classes are for the test. Labels may be any numbers or strings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an array is missing or has the wrong shape, or vectors are not finite.
    """
    if path.is_dir():
        path = path / "train.npz"
    other = path.with_name(path.name.removesuffix("train.npz") + "test.npz")
    whole, split = _arrays(path)
    if path.name.endswith("train.npz") and other.is_file():
        return DataSet(path.stem, whole, _arrays(other)[0])
    if path.name == "train.npz":
        raise FileNotFoundError(f"vectors: {path.parent} holds train.npz but no test.npz; write both.")
    if split is None:
        return halve(path.stem, whole)
    train, test = (part(whole, chosen) for chosen in split_rows("vectors", path, split))
    return DataSet(path.stem, train, test)


def _arrays(path: Path) -> tuple[Tensors, list[str] | None]:
    """Read the vectors of one file, and its split if there is one."""
    arrays = read_arrays("vectors", path)
    absent = [name for name in ("x", "y") if name not in arrays]
    if absent:
        held = ", ".join(arrays) or "nothing"
        raise ValueError(f"vectors: {path} must hold x and y, but {' and '.join(absent)} is missing; it holds {held}.")
    x, y = arrays["x"], arrays["y"]
    for name in ("y", "name", "split"):
        if name in arrays and arrays[name].shape != (len(x),):
            raise ValueError(
                f"vectors: {name} in {path} must have one entry per row of x ({len(x)}), but came with shape "
                f"{list(arrays[name].shape)}."
            )
    x = check_vectors("vectors", "x", path, x)
    labels, classes = numbered(y)
    names = [str(name) for name in arrays["name"]] if "name" in arrays else None
    split = [str(side) for side in arrays["split"]] if "split" in arrays else None
    return Tensors(x, labels, names, classes), split


def check_vectors(owner: str, name: str, path: Path, x: np.ndarray) -> np.ndarray:
    """Vectors as float32 [n, d]; anything but finite numbers is an error."""
    if x.ndim != 2 or not x.size or x.dtype.kind not in "fiu":
        raise ValueError(f"{owner}: {name} in {path} must be numbers [n, d], but came as {x.dtype} {list(x.shape)}.")
    wrong = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{owner}: {name} in {path} must be finite, but {len(wrong)} rows hold NaN or infinity, "
            f"the first is row {wrong[0]}."
        )
    return x.astype(np.float32)


def split_rows(owner: str, path: Path, split: Sequence[str]) -> list[list[int]]:
    """The row numbers of the training and of the test split."""
    wrong = next((row for row, side in enumerate(split) if side not in SIDES), None)
    if wrong is not None:
        raise ValueError(
            f"{owner}: split in {path} must be train or test, but sample {wrong} says {printable(split[wrong])!r}."
        )
    chosen = [[row for row, side in enumerate(split) if side == wanted] for wanted in SIDES]
    for wanted, rows in zip(SIDES, chosen, strict=True):
        if not rows:
            raise ValueError(f"{owner}: no sample of {path} is for {wanted}; give both sides some, or leave split out.")
    return chosen


def halve(name: str, samples: Samples) -> DataSet:
    """Split by class: half of the classes for training, half for the test."""
    train, test = class_disjoint(samples, 0.5, seed=SEED)
    return DataSet(name, part(samples, train), part(samples, test))

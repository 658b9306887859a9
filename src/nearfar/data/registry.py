"""`open_data`: open any data set by its name and the path of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from nearfar._utils.checks import check_choice
from nearfar.data._glyphs import Glyphs, Split, glyphs
from nearfar.data.benchmarks import cars, cub, flowers, inshop, omniglot, sop
from nearfar.data.folders import SIDES, folder, is_image, manifest, vectors
from nearfar.data.hf import hf
from nearfar.data.pictures import OnCorrupt, check_on_corrupt
from nearfar.data.samples import DataSet, Tensors
from nearfar.data.shards import shards

__all__ = ["Reader", "kind_of", "open_data"]

Reader = Callable[[Path, OnCorrupt, bool], DataSet]


def open_data(
    name: str | None,
    path: str | Path | None = None,
    *,
    labels: str | None = None,
    inputs: str | None = None,
    on_corrupt: OnCorrupt = "stop",
    outside: bool = False,
) -> DataSet:
    """Open a data set by name.

    Args:
        name: glyphs, omniglot, cub, flowers, cars, sop, inshop, folder, manifest, vectors, shards or hf; None for what
            the path holds (`kind_of`), and for glyphs without a path.
        path: the folder or file of the data set; glyphs has none.
        labels: where the labels are in `shards` (a suffix, json.KEY or a .csv file) or `hf` (a column).
        inputs: where pictures are in `shards` (a suffix), or pictures or vectors in `hf` (a column).
        on_corrupt: what to do about an image that cannot be read: "stop", or "skip" (in training another sample of
            its class is used instead, elsewhere it is left out; with a warning).
        outside: allow a manifest or a list of files to name files outside its own folder.

    Raises:
        ValueError: the name is unknown, or the files are not what they should be.
        FileNotFoundError: a file is missing.
    """
    name = kind_of(path) if name is None else name
    check_choice("open_data", "name", name, NAMES)
    check_on_corrupt("open_data", on_corrupt)
    for key, value in (("labels", labels), ("inputs", inputs)):
        if value is not None and name not in ("shards", "hf"):
            raise ValueError(
                f"open_data: {key} is for shards and hf, but came as {value!r} for {name!r}; leave it out."
            )
    if name == "glyphs":
        if path is not None:
            raise ValueError(
                f"open_data: glyphs are drawn and have no path, but {path} came; leave one of them out "
                "(glyphs(cache=...) draws into a folder of its own)."
            )
        return of_glyphs(glyphs())
    if path is None:
        raise ValueError(
            f"open_data: {name!r} needs a path, but none came; name the folder or file that holds the data."
        )
    if name == "shards":
        return shards(Path(path), labels=labels, inputs=inputs, on_corrupt=on_corrupt)
    if name == "hf":
        return hf(Path(path), labels=labels, inputs=inputs, on_corrupt=on_corrupt, outside=outside)
    return READERS[name](Path(path), on_corrupt, outside)


def kind_of(path: str | Path | None) -> str:
    """The name of the data set that a path holds, for `open_data`.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: it holds none of the data sets, or several.
    """
    if path is None:
        return "glyphs"
    if re.search(r"\.tar\b", str(path)) and re.search("[{}]|::", str(path)):
        return "shards"  # s-{000..099}.tar
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"open_data: there is no file or folder {path}; correct data.path.")
    found = list(filter(None, _kinds(place)))
    if len(found) == 1:
        return found[0]
    came = f"may be {' or '.join(found)}" if found else "is none that can be told by its files"
    raise ValueError(f"open_data: {path} {came}; name the data set with data.name, one of {', '.join(NAMES[1:])}.")


def _kinds(place: Path) -> Iterator[str]:
    """What the files at a path speak for."""
    if place.is_file():
        yield "omniglot" if place.name in MARKS["omniglot"] else SUFFIXES.get(place.suffix.lower(), "")
        return
    marks = [name for name, files in MARKS.items() if any((place / file).exists() for file in files)]
    yield from marks
    if not marks and (any(place.glob("*.tar")) or any(place.glob("train/*.tar"))):
        yield "shards"
    elif not marks and _holds_pictures(place):
        yield "folder"


def _holds_pictures(place: Path) -> bool:
    """Whether pictures lie in a folder, its folders, or those of its train/ or test/."""
    homes = [place, *(place / side for side in SIDES if (place / side).is_dir())]
    inner = (each for home in homes for each in home.iterdir() if each.is_dir())
    return any(is_image(file) for each in (*homes, *inner) for file in each.iterdir())


def of_glyphs(data: Glyphs) -> DataSet:
    """The drawn characters, or some of them, as a data set."""

    def samples(split: Split) -> Tensors:
        names = [
            f"{split.names[label]}, {data.faces[face]}"
            for label, face in zip(split.labels.tolist(), split.faces.tolist(), strict=True)
        ]
        return Tensors(split.images, split.labels, names, split.names)

    return DataSet("glyphs", samples(data.train), samples(data.test))


READERS: dict[str, Reader] = {
    "omniglot": lambda path, on_corrupt, outside: omniglot(path),
    "cub": lambda path, on_corrupt, outside: cub(path, on_corrupt=on_corrupt, outside=outside),
    "flowers": lambda path, on_corrupt, outside: flowers(path, on_corrupt=on_corrupt, outside=outside),
    "cars": lambda path, on_corrupt, outside: cars(path, on_corrupt=on_corrupt, outside=outside),
    "sop": lambda path, on_corrupt, outside: sop(path, on_corrupt=on_corrupt, outside=outside),
    "inshop": lambda path, on_corrupt, outside: inshop(path, on_corrupt=on_corrupt, outside=outside),
    "folder": lambda path, on_corrupt, outside: folder(path, on_corrupt=on_corrupt),
    "manifest": lambda path, on_corrupt, outside: manifest(path, on_corrupt=on_corrupt, outside=outside),
    "vectors": lambda path, on_corrupt, outside: vectors(path),
}
NAMES = ("glyphs", *READERS, "shards", "hf")
SUFFIXES = {".npz": "vectors", ".csv": "manifest", ".tar": "shards"}
MARKS = {
    "omniglot": ("omniglot_28.npz",),
    "cub": ("image_class_labels.txt", "cub200_full_labels.csv"),
    "flowers": ("imagelabels.mat", "flowers102_labels.csv"),
    "cars": ("cars_annos.mat",),
    "sop": ("Ebay_train.txt",),
    "inshop": ("list_eval_partition.txt", "Eval/list_eval_partition.txt"),
    "vectors": ("train.npz",),
    "hf": ("dataset_info.json", "dataset_dict.json"),
}
"""Files by which a folder of a data set is known."""

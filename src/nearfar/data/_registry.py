"""`open_data`: open any data set by its name, or by the files at a path."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nearfar._utils.checks import check_choice
from nearfar.data._benchmarks import cars, cub, flowers, inshop, omniglot, sop
from nearfar.data._corrections import correct
from nearfar.data._folders import folder, is_image, manifest, vectors
from nearfar.data._glyphs import Glyphs, Split, glyphs
from nearfar.data._hf import hf
from nearfar.data._pictures import OnCorrupt, check_on_corrupt
from nearfar.data._samples import DataSet, Tensors
from nearfar.data._shards import shards
from nearfar.data._tables import SIDES
from nearfar.data._texts import csv_columns, layout_of, texts


def open_data(
    name: str | None,
    path: str | Path | None = None,
    *,
    labels: str | None = None,
    inputs: str | None = None,
    on_corrupt: OnCorrupt = "stop",
    outside: bool = False,
    corrections: str | Path | None = None,
) -> DataSet:
    """Open a data set by name.

    Args:
        name: glyphs, omniglot, cub, flowers, cars, sop, inshop, folder, manifest, vectors, texts, shards or hf; None:
            the kind that the files at the path show (`kind_of`), or glyphs without a path.
        path: the folder or file of the data set; glyphs has none.
        labels: where the labels are in `shards` (a suffix, json.KEY or a .csv file) or `hf` (a column).
        inputs: where pictures are in `shards` (a suffix), or pictures or vectors in `hf` (a column).
        on_corrupt: what to do if an image cannot be read: "stop", or "skip" it with a warning (training uses another
            sample of its class instead).
        outside: allow a manifest or a list of files to name files outside its own folder.
        corrections: a CSV file of samples to ignore and labels to replace (`nearfar.data.correct`), or None.

    Raises:
        ValueError: the name is unknown, or the files are not what they should be.
        FileNotFoundError: a file is missing.
    """
    name = kind_of(path) if name is None else name
    check_choice("open_data", "name", name, NAMES)
    check_on_corrupt("open_data", on_corrupt)
    for key, value in (("labels", labels), ("inputs", inputs)):
        if value is not None and name not in ("shards", "hf"):
            raise ValueError(f"open_data: {key} is for shards and hf, but {value!r} came for {name!r}; leave it out.")
    if name == "glyphs":
        if path is not None:
            raise ValueError(
                f"open_data: glyphs are drawn and have no path, but {path} came; leave one of them out "
                "(glyphs(cache=...) draws into a folder of its own)."
            )
        return _correct(of_glyphs(glyphs()), corrections)
    if path is None:
        raise ValueError(f"open_data: {name!r} needs a path, but none came; name the folder or file of the data.")
    options = {"labels": labels, "inputs": inputs, "on_corrupt": on_corrupt, "outside": outside}
    accepted = inspect.signature(READERS[name]).parameters
    data = READERS[name](Path(path), **{key: value for key, value in options.items() if key in accepted})
    return _correct(data, corrections)


def _correct(data: DataSet, corrections: str | Path | None) -> DataSet:
    return data if corrections is None else correct(data, Path(corrections))


def kind_of(path: str | Path | None) -> str:
    """The kind of data set at a path, as a name for `open_data`."""
    if path is None:
        return "glyphs"
    if re.search(r"\.tar\b", str(path)) and re.search("[{}]|::", str(path)):
        return "shards"  # s-{000..099}.tar
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"open_data: there is no file or folder {path}; correct the path.")
    found = list(filter(None, _kinds(place)))
    if len(found) == 1:
        return found[0]
    came = f"may be {' or '.join(found)}" if found else "is not a known kind of data by its files"
    raise ValueError(
        f"open_data: {path} {came}; correct the path, or, in a configuration, name "
        f"the data set with data.name, one of {', '.join(NAMES[1:])}."
    )


def _kinds(place: Path) -> Iterator[str]:
    """The kinds that the files at a path suggest."""
    if place.is_file() and place.suffix.lower() == ".csv":
        yield "texts" if layout_of(csv_columns(place)) else "manifest"
        return
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
    """Whether a folder holds pictures, directly or in its class folders or those of its train/ or test/."""
    homes = [place, *(place / side for side in SIDES if (place / side).is_dir())]
    inner = (each for home in homes for each in home.iterdir() if each.is_dir())
    return any(is_image(file) for each in (*homes, *inner) for file in each.iterdir())


def of_glyphs(data: Glyphs) -> DataSet:
    """The built-in characters as a `DataSet`."""

    def samples(split: Split) -> Tensors:
        names = [
            f"{split.names[label]}, {data.faces[face]}"
            for label, face in zip(split.labels.tolist(), split.faces.tolist(), strict=True)
        ]
        return Tensors(split.images, split.labels, names, split.names)

    return DataSet("glyphs", samples(data.train), samples(data.test))


_READERS: tuple[Any, ...] = (omniglot, cub, flowers, cars, sop, inshop, folder, manifest, vectors, texts, shards, hf)
READERS: dict[str, Callable[..., DataSet]] = {read.__name__: read for read in _READERS}
NAMES = ("glyphs", *READERS)
SUFFIXES = {".npz": "vectors", ".tar": "shards", ".jsonl": "texts", ".parquet": "texts"}
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
"""Files by which the folder of a data set is recognized."""

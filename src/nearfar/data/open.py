"""`open_data`: open any data set by its name and the path of its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nearfar._utils.checks import check_choice
from nearfar.data._glyphs import Glyphs, Split, glyphs
from nearfar.data.benchmarks import cars, inshop, sop
from nearfar.data.cub import cub
from nearfar.data.flowers import flowers
from nearfar.data.folders import folder, manifest, vectors
from nearfar.data.hf import hf
from nearfar.data.omniglot import omniglot
from nearfar.data.pictures import OnCorrupt, check_on_corrupt
from nearfar.data.samples import DataSet, Tensors
from nearfar.data.shards import shards

__all__ = ["Reader", "open_data"]

Reader = Callable[[Path, OnCorrupt, bool], DataSet]


def open_data(
    name: str,
    path: str | Path | None = None,
    *,
    labels: str | None = None,
    inputs: str | None = None,
    on_corrupt: OnCorrupt = "stop",
    outside: bool = False,
) -> DataSet:
    """Open a data set by name.

    Args:
        name: glyphs, omniglot, cub, flowers, cars, sop, inshop, folder, manifest, vectors, shards or hf.
        path: the folder or file of the data set; for glyphs the folder of the cache, which may be None.
        labels: where the labels are in `shards` (a suffix, json.KEY or a .csv file) or `hf` (a column).
        inputs: where pictures are in `shards` (a suffix), or pictures or vectors in `hf` (a column).
        on_corrupt: what to do about an image that cannot be read: "stop", or "skip" (in training another sample of
            its class is used instead, elsewhere it is left out; with a warning).
        outside: allow a manifest or a list of files to name files outside its own folder.

    Raises:
        ValueError: the name is unknown, or the files are not what they should be.
        FileNotFoundError: a file is missing.
    """
    check_choice("open_data", "name", name, NAMES)
    check_on_corrupt("open_data", on_corrupt)
    for key, value in (("labels", labels), ("inputs", inputs)):
        if value is not None and name not in ("shards", "hf"):
            raise ValueError(
                f"open_data: {key} is for shards and hf, but came as {value!r} for {name!r}; leave it out."
            )
    if name == "glyphs":
        return of_glyphs(glyphs(cache=path))
    if path is None:
        raise ValueError(
            f"open_data: {name!r} needs a path, but none came; name the folder or file that holds the data."
        )
    if name == "shards":
        return shards(Path(path), labels=labels, inputs=inputs, on_corrupt=on_corrupt)
    if name == "hf":
        return hf(Path(path), labels=labels, inputs=inputs, on_corrupt=on_corrupt, outside=outside)
    return READERS[name](Path(path), on_corrupt, outside)


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

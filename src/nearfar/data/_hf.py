"""Data sets saved to disk by the `datasets` package of Hugging Face: arrow files, read by row."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar._utils.files import inside
from nearfar.data._folders import check_vectors, halve
from nearfar.data._pictures import OnCorrupt, Pictures, Places
from nearfar.data._samples import DataSet, Labels, PackedNames, Samples, Tensors, numbered
from nearfar.data._tables import SIDES

DEFAULT_LABELS = ("label", "labels")  # columns that hold the labels by default


def hf(
    path: Path,
    *,
    labels: str | None = None,
    inputs: str | None = None,
    on_corrupt: OnCorrupt = "stop",
    outside: bool = False,
) -> DataSet:
    """Read what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.

    A dictionary must hold the splits train and test; of a single data set, half of the classes are for the test.
    Pictures are read by row from the arrow files, which are mapped into memory; vectors are read at once.

    Args:
        path: the folder.
        labels: the column of labels; by default label or labels, or the only column of the type ClassLabel.
        inputs: the column of pictures or vectors; by default the only column of pictures, else of vectors.
        on_corrupt: see `Pictures`.
        outside: allow pictures that are stored as names of files to lie outside the folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is no data set, a column is missing, a label is missing, or vectors are not finite.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"hf: there is no folder {path}; name the one that save_to_disk wrote.")
    package = need("datasets", "hf", "hf")
    try:
        found = package.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"hf: {path} cannot be read as a data set that save_to_disk wrote ({printable(error)}); write it again."
        ) from None
    reader = _Reader(path, labels, inputs, on_corrupt, outside)
    if not isinstance(found, package.DatasetDict):
        return halve(path.name, reader.samples(found, ""))
    if set(SIDES) <= set(found):
        train, test = (reader.samples(found[side], f"{side}/") for side in SIDES)
        return DataSet(path.name, train, test)
    if len(found) == 1:
        (name,) = found
        return halve(path.name, reader.samples(found[name], f"{name}/"))
    held = printable(", ".join(found))
    raise ValueError(f"hf: {path} must hold the splits train and test, or a single one, but holds {held}; save these.")


@dataclass(frozen=True)
class _Reader:
    path: Path
    labels: str | None
    inputs: str | None
    on_corrupt: OnCorrupt
    outside: bool

    def samples(self, dataset: Any, word: str) -> Samples:
        """The samples of one split; each is named by `word` and its row number."""
        labels, classes = self._labels(dataset)
        names = PackedNames.pack(f"{word}{row}" for row in range(len(dataset)))
        column = self._column(dataset, "inputs", self.inputs, ("picture", "vector"))
        only = dataset.select_columns([column])
        if _kind(dataset.features[column]) == "picture":
            cells = Cells(self.path, only, column, outside=self.outside)
            return Pictures(cells, labels, names, classes, on_corrupt=self.on_corrupt)
        x = only.with_format("numpy")[:][column]
        return Tensors(check_vectors("hf", column, self.path, np.asarray(x)), labels, names, classes)

    def _labels(self, dataset: Any) -> tuple[Labels, tuple[str, ...]]:
        default = next((name for name in DEFAULT_LABELS if name in dataset.features), None)
        column = self._column(dataset, "labels", self.labels or default, ("class",))
        values = dataset.select_columns([column]).with_format("arrow")[:][column].to_pylist()
        names = getattr(dataset.features[column], "names", None)
        for row, value in enumerate(values):
            if not isinstance(value, int | str) or (names is not None and not 0 <= int(value) < len(names)):
                raise ValueError(
                    f"hf: row {row} of {self.path} has no label: {column} holds {printable(value)!r}, and a whole "
                    "number or text is needed; mend or remove it, or name another column with labels."
                )
        return numbered(values if names is None else [names[value] for value in values])

    def _column(self, dataset: Any, key: str, given: str | None, kinds: tuple[str, ...]) -> str:
        """Find the given column, or else the only column of the first kind that the data set has."""
        columns = dataset.features
        if not len(dataset):
            raise ValueError(f"hf: {self.path} holds no rows; save a data set with some.")
        if given in columns:
            return str(given)
        found = [[name for name in columns if _kind(columns[name]) == kind] for kind in kinds]
        best = next((some for some in found if some), [])
        if given is None and len(best) == 1:
            return str(best[0])
        came = "none is named" if given is None else f"{printable(given)!r} came"
        held = printable(", ".join(columns))
        raise ValueError(f"hf: {key} must name a column of {self.path}, but {came}; its columns are {held}.")


def _kind(feature: Any) -> str:
    """The use of a column: picture, class or vector, or ""."""
    kind = type(feature).__name__
    if kind == "Image" or (kind == "Value" and feature.dtype in ("binary", "large_binary")):
        return "picture"
    if kind == "ClassLabel":
        return "class"
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    numbers = str(getattr(inner, "dtype", "")).startswith(("float", "int", "uint"))
    return "vector" if numbers else ""


class Cells(Places):
    """The positions of the pictures in a column."""

    def __init__(self, path: Path, dataset: Any, column: str, *, outside: bool = False) -> None:
        self.path, self.column, self.outside = path, column, outside
        encoded = type(dataset.features[column]).__name__ == "Image"
        # decoded by `Pictures`, which allows fewer formats and reports broken pictures
        image = need("datasets", "hf", "hf").Image
        self.dataset = dataset.cast_column(column, image(decode=False)) if encoded else dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def place(self, row: int) -> Cell:
        """The picture with an index from 0."""
        return Cell(self, row)

    @property
    def fingerprint(self) -> str:
        """A digest of the arrow files' places, sizes and times, and of the column's name."""
        found = hashlib.blake2b(f"{self.column} {len(self)}".encode(), digest_size=16)
        for file in self.dataset.cache_files:
            about = os.stat(file["filename"])
            words = f"{os.path.realpath(file['filename'])} {about.st_size} {about.st_mtime_ns}"
            found.update(words.encode("utf-8", "surrogateescape") + b"\0")
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Cell:
    """A picture in a row of a column."""

    cells: Cells
    row: int

    def __str__(self) -> str:
        return f"{self.cells.path}: {self.cells.column} of row {self.row}"

    def open(self) -> IO[bytes]:
        """Open the picture as a file: its bytes, or the file that the row names."""
        value: Any = self.cells.dataset[self.row][self.cells.column]
        name = value.get("path") if isinstance(value, dict) else None
        value = value.get("bytes") if isinstance(value, dict) else value
        if value is not None:
            return io.BytesIO(value)
        if name is None:
            raise FileNotFoundError(errno.ENOENT, "the row holds no picture")
        switch = "set data.outside: true (outside=True of open_data)"
        (file,) = inside("hf", self.cells.path, [name], outside=self.cells.outside, switch=switch)
        if not file.is_file():  # opening a pipe would wait forever
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(file))
        return file.open("rb")

"""`Vectors`: embedded samples with their labels and names, and their file `vectors.npz`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.arrays import labels_of, tensor_of, words_of
from nearfar._utils.files import read_arrays, write_arrays
from nearfar.evaluation._fingerprint import check_fingerprint
from nearfar.evaluation.vectors_folder import is_folder_of_vectors, open_folder

RUN_FILE = "embeddings.npz"


@dataclass(frozen=True, eq=False)
class Vectors:
    """Embedded samples with labels, names and thumbnails; arrays and lists are converted to the types below.

    Args:
        x: float32 [n, d], the vectors; rows with NaN or infinity are an error that names them. Vectors of a folder
            (`nearfar.evaluation.vectors_folder`) stay in their file, in the type in which they are stored.
        y: int64 [n], the classes, or None.
        name: n strings, one per sample, or None.
        images: uint8 [n, h, w] or [n, h, w, 3], thumbnails, or None.
        classes: the names of the classes in y in ascending order, or of classes 0, 1, ..., or None.
        fingerprint: identifies the network, or None if it is not known.

    >>> Vectors([[1.0, 0.0], [0.0, 1.0]], y=[3, 5])
    Vectors(2 vectors of width 2, with y)
    """

    x: Tensor
    y: Tensor | None = None
    name: tuple[str, ...] | None = None
    images: Tensor | None = None
    classes: tuple[str, ...] | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        for field, convert in CONVERTERS.items():
            value: Any = getattr(self, field)
            if value is not None or field == "x":
                object.__setattr__(self, field, convert(value))
        for field in ("y", "name", "images"):
            value = getattr(self, field)
            if value is not None and len(value) != len(self.x):
                raise ValueError(
                    f"Vectors: {field} must have one entry per row of x, but {len(value)} came for {len(self.x)} rows."
                )
        self.class_names()

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        more = [field for field in ("y", "name", "images", "classes") if getattr(self, field) is not None]
        return f"Vectors({len(self)} vectors of width {self.x.shape[1]}{', with ' + ', '.join(more) if more else ''})"

    def class_names(self) -> dict[int, str]:
        """The name of each class in y that has one.

        >>> Vectors([[1.0], [2.0]], y=[3, 5], classes=["ant", "bee"]).class_names()
        {3: 'ant', 5: 'bee'}
        """
        if self.y is None or self.classes is None:
            return {}
        return name_classes(sorted(set(self.y.tolist())), self.classes)

    def in_terms_of(self, queries: Vectors) -> Vectors:
        """Renumber the classes by the class names of the queries, if both sides have names.

        >>> gallery = Vectors([[1.0], [2.0]], y=[0, 1], classes=["ant", "bee"])
        >>> gallery.in_terms_of(Vectors([[1.0]], y=[0], classes=["bee"])).y
        tensor([2, 0])
        """
        ours, theirs = self.class_names(), queries.class_names()
        number = {name: label for label, name in theirs.items()}
        if not ours or len(number) < max(1, len(theirs)) or self.y is None:
            return self
        after = max(theirs) + 1
        for name in ours.values():
            number.setdefault(name, after + len(number))
        y = torch.tensor([number[ours[label]] for label in self.y.tolist()])
        return replace(self, y=y, classes=None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vectors:
        """Read `vectors.npz` (x and, if present, the other fields), a folder of vectors, or a run's embeddings.npz."""
        place = Path(path)
        if is_folder_of_vectors(place):
            return cls.from_arrays(open_folder(place), place)
        if place.is_dir():
            place = place / RUN_FILE
            if not place.is_file():
                raise FileNotFoundError(
                    f"Vectors: the folder {path} holds no {RUN_FILE}; embed the run first, or name a vectors.npz file."
                )
        arrays = read_arrays("Vectors", place)
        if "x" not in arrays:
            raise ValueError(
                f"Vectors: {place} must hold the key x, the vectors [n, d], but holds {', '.join(arrays) or 'nothing'}."
            )
        return cls.from_arrays(arrays, place)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], place: Path) -> Vectors:
        """Build from the arrays of a file; error messages name the file."""
        fields: dict[str, Any] = {key: arrays[key] for key in CONVERTERS if key in arrays}
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} (in {place})") from None

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Every field that is not None, as an array."""
        fields = {field: getattr(self, field) for field in CONVERTERS}
        return {field: _array(value) for field, value in fields.items() if value is not None}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `vectors.npz`, completely or not at all, and return its path."""
        write_arrays(Path(path), self.to_arrays())
        return Path(path)


def name_classes(labels: Sequence[int], classes: Sequence[str], owner: str = "Vectors") -> dict[int, str]:
    """Name distinct, ascending labels: the i-th name is that of the i-th label, unless there are more names.

    Then the i-th name is that of label i.
    """
    if len(labels) == len(classes):
        return dict(zip(labels, classes, strict=True))
    if labels and not 0 <= labels[0] <= labels[-1] < len(classes):
        raise ValueError(
            f"{owner}: classes must name each of the {len(labels)} classes in y, or each of 0..{labels[-1]}, "
            f"but {len(classes)} names came."
        )
    return {label: classes[label] for label in labels}


def _array(value: Tensor | tuple[str, ...] | str) -> np.ndarray:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.array(value, dtype=np.str_) if len(value) else np.zeros(0, dtype="<U1")


def _x(value: Any) -> Tensor:
    if isinstance(value, Tensor) and getattr(value, "mapped", False):
        return value
    x = _tensor(value)
    if x.ndim != 2:
        raise ValueError(f"Vectors: x must have shape [n, d], but came with shape {list(x.shape)}.")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"Vectors: x must hold real numbers, but came as {x.dtype}.")
    x = x.float()
    finite = torch.isfinite(x).all(dim=1)
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"Vectors: x must be finite, but {len(rows)} of {len(x)} rows hold NaN or infinity (rows {shown}); "
            "look at these samples or at the network."
        )
    return x


def _y(value: Any) -> Tensor:
    y = _tensor(value)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(
            f"Vectors: y must be integers of shape [n], but came as {y.dtype} of shape {list(y.shape)}; "
            "number the classes first."
        )
    return labels_of("Vectors", "y", y).long()


def _images(value: Any) -> Tensor:
    images = _tensor(value)
    if images.dtype != torch.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise ValueError(
            "Vectors: images must be uint8 of shape [n, h, w] or [n, h, w, 3], "
            f"but came as {images.dtype} of shape {list(images.shape)}."
        )
    return images


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"Vectors: numbers are needed, but {array.dtype} came; number the classes, name the samples.")
    return tensor_of(array.copy())


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "x": _x,
    "y": _y,
    "name": lambda value: words_of("Vectors", "name", value),
    "images": _images,
    "classes": lambda value: words_of("Vectors", "classes", value),
    "fingerprint": lambda value: check_fingerprint("Vectors", str(value)),
}
"""The conversion of each field."""

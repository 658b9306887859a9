"""Embedded samples with their labels and names, and the file that carries them: `vectors.npz`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._files import read_arrays, write_arrays

RUN_FILE = "embeddings.npz"


@dataclass(frozen=True, eq=False)
class Vectors:
    """Embedded samples. Arrays and lists are taken too, and turned into what stands here.

    Args:
        x: float32 [n, d], the vectors; rows with NaN or infinity are an error that names them.
        y: int64 [n], the classes, or None.
        name: n strings, one a sample, or None.
        images: uint8 [n, h, w] or [n, h, w, 3], thumbnails, or None.

    >>> Vectors([[1.0, 0.0], [0.0, 1.0]], y=[3, 5])
    Vectors(2 vectors of width 2, with y)
    """

    x: Tensor
    y: Tensor | None = None
    name: tuple[str, ...] | None = None
    images: Tensor | None = None

    def __post_init__(self) -> None:
        for field, convert in (("x", _x), ("y", _y), ("name", _name), ("images", _images)):
            value: Any = getattr(self, field)
            if value is not None or field == "x":
                object.__setattr__(self, field, convert(value))
        for field in ("y", "name", "images"):
            value = getattr(self, field)
            if value is not None and len(value) != len(self.x):
                raise ValueError(
                    f"Vectors: {field} must have one entry per row of x, but {len(value)} came for {len(self.x)} rows."
                )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        more = [field for field in ("y", "name", "images") if getattr(self, field) is not None]
        return f"Vectors({len(self)} vectors of width {self.x.shape[1]}{', with ' + ', '.join(more) if more else ''})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vectors:
        """Read `vectors.npz` (keys x, and where present y, name, images), or the embeddings.npz of a run folder."""
        place = Path(path)
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
        fields: dict[str, Any] = {key: arrays[key] for key in ("x", "y", "name", "images") if key in arrays}
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} (in {place})") from None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `vectors.npz`: complete, or not at all. Gives its path."""
        arrays = {"x": self.x.numpy()}
        if self.y is not None:
            arrays["y"] = self.y.numpy()
        if self.name is not None:
            arrays["name"] = np.array(self.name, dtype=np.str_) if self.name else np.zeros(0, dtype="<U1")
        if self.images is not None:
            arrays["images"] = self.images.numpy()
        write_arrays(Path(path), arrays)
        return Path(path)


def _x(value: Any) -> Tensor:
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
    return y.long()


def _name(value: Any) -> tuple[str, ...]:
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise ValueError(f"Vectors: name must have shape [n], but came with shape {list(value.shape)}.")
    return tuple(word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in value)


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
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array, order="C", copy=True))

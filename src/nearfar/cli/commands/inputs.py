"""The inputs of `nearfar embed`: glyphs, an .npz file, texts, or a folder of pictures with or without class folders."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.arrays import tensor_of, words_of
from nearfar.data._folders import SUFFIXES, is_image
from nearfar.data._samples import genuine, numbered
from nearfar.data._texts import FORMATS, corpus

if TYPE_CHECKING:
    from nearfar.data._pictures import OnCorrupt, Pictures
    from nearfar.data._samples import Transform


SIZE = 224  # side of pictures in pixels, if neither the network nor the user defines it


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples to embed, and a digest that identifies them.

    Attributes:
        data: samples prepared for a model without a transform.
        raw: the raw samples: pictures, or tensors as they are stored.
        y: classes [n], or None.
        name: one string per sample, or None.
        classes: the name of each class, or None.
        images: thumbnails [n, h, w] or [n, h, w, 3], or None.
        digest: equal for equal samples; for pictures only their names and order count, see `Transformed.digest`.
    """

    data: Any
    raw: Any
    y: np.ndarray | None
    name: tuple[str, ...] | None
    images: Tensor | None
    digest: str
    classes: tuple[str, ...] | None = None

    def fields(self, rows: Tensor | None) -> dict[str, Any]:
        """The fields of `Vectors` other than x, for some rows or all."""
        at = slice(None) if rows is None else rows.numpy()
        name = None if self.name is None else np.array(self.name, dtype=object)[at].tolist()
        y, images = (None if value is None else value[at] for value in (self.y, self.images))
        return {"y": y, "name": name, "images": images, "classes": self.classes}

    def ready(self, transform: Transform | None) -> Any:
        """The inputs of a model, with or without a transform."""
        return self.data if transform is None else Transformed(self.raw, transform)


class Transformed:
    """Samples after a deterministic transform, each with its row; None for a sample that is skipped."""

    def __init__(self, raw: Any, transform: Transform) -> None:
        self.raw, self.transform = raw, transform

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, row: int) -> tuple[Tensor, int] | None:
        sample = genuine(self.raw, row)
        return None if sample is None else (self.transform(sample, np.random.default_rng(0)), row)

    def digest(self, rows: range) -> str:
        """A digest of the encoded bytes of some picture files, without decoding; empty for samples in memory."""
        if not hasattr(self.raw, "paths"):
            return ""
        found = hashlib.sha256()
        for row in rows:
            try:
                content = self.raw.paths[row].read_bytes()
            except OSError:  # reading the picture decides whether it is skipped
                content = b""
            found.update(f"{len(content)} ".encode() + content)
        return found.hexdigest()


@dataclass(frozen=True)
class Assumed:
    """The default preprocessing for a network that does not define one: resize the short side, crop the center."""

    size: int  # pixels a side
    imagenet: bool = False  # standardize by ImageNet's mean and deviation
    pixels: bool = False  # uint8 in 0..255, if the network takes these; otherwise values in 0..1

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One picture: [3, size, size]."""
        x = torch.from_numpy(square(picture, self.size)).permute(2, 0, 1)
        if self.pixels:
            return x
        x = x.float() / 255
        if self.imagenet:
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            x = (x - mean[:, None, None]) / std[:, None, None]
        return x

    def __str__(self) -> str:
        values = "0..255" if self.pixels else "0..1"
        more = ", then shifted and scaled by ImageNet's mean" if self.imagenet else ""
        return f"3 x {self.size} x {self.size}, the middle cut out, in {values}{more}"


def read_samples(source: str, *, assumed: Assumed, thumbnails: int, on_corrupt: OnCorrupt = "stop") -> Samples:
    """Read samples from "glyphs:train", "glyphs:test", an .npz file with x, texts, or a folder of pictures."""
    if source.startswith("glyphs"):
        return _glyphs(source)
    path = Path(source)
    if path.is_dir():
        return _folder(path, assumed, thumbnails, on_corrupt)
    if path.suffix == ".npz":
        return _npz(path)
    if are_texts(path):
        return _texts(path)
    raise ValueError(
        'DATA must be "glyphs:train", "glyphs:test", an .npz file, texts (.csv, .jsonl, .parquet, .txt) or a folder of '
        f"images, not {source!r}."
    )


def are_texts(path: Path) -> bool:
    """Whether a file holds texts, by its name."""
    return path.suffix.lower() in (*FORMATS, ".txt")


def _texts(path: Path) -> Samples:
    """Texts, named after themselves."""
    found = corpus(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    y, classes = (found.texts.labels, found.texts.classes) if found.labeled else (None, None)
    return Samples(found.texts, found.texts, y, tuple(found.texts.names), None, digest, classes)


def _glyphs(source: str) -> Samples:
    from nearfar.data import glyphs

    if source not in ("glyphs:train", "glyphs:test"):
        raise ValueError(f'the embedded data are "glyphs:train" and "glyphs:test", not {source!r}.')
    data = glyphs()
    split = data.train if source == "glyphs:train" else data.test
    names = zip(split.labels.tolist(), split.faces.tolist(), strict=True)
    return Samples(
        data=split.images[:, None].float() / 255,
        raw=split.images,
        y=split.labels.numpy(),
        name=tuple(f"{split.names[label]} / {data.faces[face]}" for label, face in names),
        images=split.images,
        digest=hashlib.sha256(split.images.numpy().tobytes()).hexdigest(),
        classes=tuple(split.names),
    )


def _npz(path: Path) -> Samples:
    from nearfar._utils.files import read_arrays

    arrays = read_arrays("embed", path)
    if "x" not in arrays:
        raise ValueError(f"{path} must hold the key x, the samples [n, ...], but holds {', '.join(arrays)}.")
    x = arrays["x"]
    if x.dtype.kind not in "biuf" or not x.ndim:
        raise ValueError(f"{path}: x must hold numbers [n, ...], but came as {x.dtype} of shape {list(x.shape)}.")
    for key in ("y", "name"):
        if key in arrays and arrays[key].shape[:1] != x.shape[:1]:
            came = f"{key} of shape {list(arrays[key].shape)} for {len(x)} samples"
            raise ValueError(f"{path}: {key} must have one entry per sample, but {came} came.")
    name, classes = (words_of("embed", key, arrays[key]) if key in arrays else None for key in ("name", "classes"))
    y = arrays.get("y")
    if y is not None and y.dtype.kind in "US":
        y, classes = numbered(words_of("embed", "y", y))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Samples(torch.from_numpy(x.astype(np.float32)), tensor_of(x), y, name, None, digest, classes)


def square(picture: Any, size: int) -> np.ndarray:
    """The center of a picture as uint8 [size, size, 3]."""
    from PIL import Image, ImageOps

    return np.array(ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC), dtype=np.uint8)


def _folder(folder: Path, assumed: Assumed, thumbnails: int, on_corrupt: OnCorrupt) -> Samples:
    """Pictures in the order of their names: one subfolder per class, or all in one folder without classes."""
    from nearfar.data._pictures import Pictures

    files = _files(folder)
    names = tuple(file.relative_to(folder).as_posix() for file in files)
    flat = files[0].parent == folder
    y, classes = numbered(["" if flat else name.split("/")[0] for name in names])
    pictures = Pictures(files, y, names, classes, on_corrupt=on_corrupt)
    images = _thumbnails(pictures, thumbnails) if thumbnails else None
    digest = hashlib.sha256(repr((assumed, names, on_corrupt)).encode()).hexdigest()
    labels = (None, None) if flat else (y, classes)
    return Samples(Transformed(pictures, assumed), pictures, labels[0], names, images, digest, labels[1])


def _thumbnails(pictures: Pictures, size: int) -> Tensor:
    """Thumbnails as uint8 [n, size, size, 3]; black if a picture cannot be read and is skipped."""
    found = torch.zeros(len(pictures), size, size, 3, dtype=torch.uint8)
    for row in range(len(pictures)):
        picture = pictures.genuine(row)
        if picture is not None:
            found[row] = torch.from_numpy(square(picture, size))
    return found


def _files(folder: Path) -> list[Path]:
    """All pictures in class folders or, if there are none, in the folder itself."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    homes = [path for path in entries if path.is_dir()]
    if {home.name for home in homes} == {"train", "test"} and any(path.is_dir() for path in homes[0].iterdir()):
        raise ValueError(
            f"{folder} holds the folders train and test, which are not classes; name one of them, such as "
            f"{folder / 'test'}."
        )
    loose = [path for path in entries if is_image(path)]
    inside = [file for home in homes for file in sorted(home.rglob("*")) if is_image(file)]
    if loose and inside:
        raise ValueError(
            f"{folder} holds {len(loose)} images of its own ({loose[0].name} is the first) beside {len(inside)} in "
            "class folders; move one of the two elsewhere."
        )
    if not loose and not inside:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}), nor do its folders.")
    return loose or inside

"""Read what is inspected: vectors with their labels, names and sides, and a small gray form of each picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from nearfar._utils.files import read_arrays
from nearfar._utils.progress import Watch
from nearfar._utils.tensors import check_embeddings
from nearfar.data import DataSet, Samples, Tensors, genuine, numbered, open_data, vectors
from nearfar.data._corrections import PLACES
from nearfar.data._samples import Transform, describe
from nearfar.evaluation import Vectors, embed
from nearfar.evaluation.vectors_folder import is_folder_of_vectors
from nearfar.report._pictures import as_picture
from nearfar.similarity import unit

SIDE = 32  # pixels a side of the gray form of a picture


@dataclass(frozen=True, eq=False)
class Material:
    """What is inspected."""

    x: Tensor  # [n, d] vectors
    y: Tensor | None  # int64 [n], numbers of `classes`; None without labels
    classes: tuple[str, ...]  # the name of each class
    names: Sequence[str]  # one per row
    sides: Sequence[str]  # one per row: train, test, gallery, or ""
    gray: Tensor | None = None  # uint8 [n, SIDE, SIDE], the pictures; None without pictures
    picture: Callable[[int], Any] | None = None  # row -> picture, for the page; None without pictures
    # (name, side, class) of the pictures that could not be read and have no row
    unreadable: tuple[tuple[str, str, str], ...] = ()


def read(
    source: Any, labels: Any, model: Any, transform: Transform | None, inputs: str | None, watch: Watch | None
) -> Material:
    """Read a source of `nearfar.inspection.inspect`."""
    if isinstance(source, Material):
        return source
    if isinstance(source, str | Path):
        source, labels, inputs = _open(source, labels, inputs), None, None
    if isinstance(source, DataSet | Samples):
        _refuse("a data set", labels=labels, inputs=inputs)
        return _of_samples(source, model, transform, watch)
    own = labels if isinstance(source, Vectors) else None
    _refuse("vectors", labels=own, inputs=inputs, model=model, transform=transform)
    given = source if isinstance(source, Vectors) else Vectors(source, y=labels)
    check_embeddings("inspect", "embeddings", given.x)
    named = given.class_names()
    y, classes = (None, ()) if given.y is None else numbered(given.y)
    classes = tuple(named.get(int(label), label) for label in classes)
    names = given.name or (
        [f"row {row}" for row in range(len(given))] if y is None else describe("inspect", len(y), y, None, classes)[2]
    )
    pictures = given.images
    gray = None if pictures is None else torch.stack([shrink(picture) for picture in pictures])
    read_picture = None if pictures is None else pictures.__getitem__
    return Material(
        given.x, None if y is None else torch.from_numpy(y), classes, names, [""] * len(given), gray, read_picture
    )


def _refuse(what: str, **options: Any) -> None:
    """Require that options which have no meaning for a source are left out."""
    came = [name for name, value in options.items() if value is not None]
    if came:
        raise ValueError(f"inspect: {what} came, for which {' and '.join(came)} cannot be used; leave it out.")


def _open(path: str | Path, labels: str | None, inputs: str | None) -> Any:
    """Vectors of a file or folder, or the data set at a path."""
    place = Path(path)
    if is_folder_of_vectors(place) or (place / "embeddings.npz").is_file():
        _refuse("vectors", labels=labels, inputs=inputs)
        return Vectors.load(place)
    if place.suffix == ".npz":
        arrays = read_arrays("inspect", place)
        sibling = place.with_name(place.name.removesuffix("train.npz") + "test.npz")
        if "x" in arrays and arrays["x"].ndim == 2:
            _refuse("vectors", labels=labels, inputs=inputs)
            paired = "split" in arrays or (place.name.endswith("train.npz") and sibling.is_file())
            if "y" in arrays and (paired or arrays["y"].dtype.kind in "US"):
                return vectors(place)
            return Vectors.from_arrays(arrays, place)
    drawn = str(path) == "glyphs"
    return open_data("glyphs" if drawn else None, None if drawn else path, labels=labels, inputs=inputs)


def _of_samples(source: DataSet | Samples, model: Any, transform: Transform | None, watch: Watch | None) -> Material:
    """The samples of all sides, one after the other; pictures become vectors."""
    parts: dict[str, Any] = {"": source}
    if isinstance(source, DataSet):
        parts = {side: own for side in PLACES if (own := getattr(source, side)) is not None}
    labels, classes = numbered([own.classes[label] for own in parts.values() for label in own.labels.tolist()])
    names = [name for own in parts.values() for name in own.names]
    sides = [side for side, own in parts.items() for _ in range(len(own))]
    if all(isinstance(own, Tensors) and own.x.ndim == 2 for own in parts.values()):
        _refuse("vectors", model=model, transform=transform)
        x = torch.cat([own.x.float() for own in parts.values()])
        check_embeddings("inspect", "x", x)
        return Material(x, torch.from_numpy(labels), classes, names, sides)
    pictures = _Pictures(list(parts.values()), watch)
    if model is None:
        model, transform = _network(pictures)
    pictures.transform = transform
    made: Any = embed(model, pictures, batch_size=64, progress=False)  # `Vectors`; y numbers the rows that were read
    rows = made.y.tolist()
    kept = set(rows)
    lost = [(names[row], sides[row], classes[labels[row]]) for row in range(len(names)) if row not in kept]
    return Material(
        made.x,
        torch.from_numpy(labels[rows]),
        classes,
        [names[row] for row in rows],
        [sides[row] for row in rows],
        pictures.gray[rows],
        lambda row: pictures.read(rows[row]),
        tuple(lost),
    )


class _Pictures:
    """The pictures of several sides: each item is a network's input with its row; reading one also fills `gray`."""

    def __init__(self, parts: Sequence[Samples], watch: Watch | None) -> None:
        self.parts, self.watch = parts, watch
        self.starts = np.cumsum([0, *map(len, parts)])
        self.gray = torch.zeros(len(self), SIDE, SIDE, dtype=torch.uint8)
        self.transform: Transform | None = None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, row: int) -> Any:
        """A picture, or None if it cannot be read."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        try:
            return genuine(self.parts[part], row - int(self.starts[part]))
        except ValueError:  # a picture that `on_corrupt="stop"` refuses is a finding here
            return None

    def __getitem__(self, row: int) -> tuple[Tensor, int] | None:
        picture = self.read(row)
        if self.watch is not None:
            self.watch("embedding", row + 1, len(self))
        if picture is None:
            return None
        self.gray[row] = shrink(picture)
        if self.transform is None:
            return pixels(self.gray[row : row + 1])[0].float(), row
        return self.transform(picture, np.random.default_rng(0)), row


def _network(pictures: _Pictures) -> tuple[Any, Transform | None]:
    """The pretrained network for photographs if it is installed; else pixels are the vectors."""
    first = next((found for row in range(len(pictures)) if (found := pictures.read(row)) is not None), None)
    if first is None:
        raise ValueError("inspect: no picture of the data can be read; correct the path, or mend the files.")
    from nearfar import models
    from nearfar.data import transforms
    from nearfar.models.registry import LARGE

    if not isinstance(first, Image.Image) or min(first.size) <= LARGE:
        return nn.Identity(), None
    try:
        network = models.build("lite0", embedding_dim=None)
    except ImportError:
        return nn.Identity(), None
    return network, transforms.get("photographs", False, network.mean, network.std)


def shrink(picture: Any) -> Tensor:
    """The gray form [SIDE, SIDE] of a picture, its sides scaled to fit."""
    small = as_picture(picture).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small))


def pixels(gray: Tensor, side: int = SIDE // 2) -> Tensor:
    """Unit vectors [n, side²] of pictures, in half precision: their product is the correlation of the pixels."""
    parts = [
        unit((flat := F.adaptive_avg_pool2d(part[:, None].float(), side).flatten(1)) - flat.mean(dim=1, keepdim=True))
        for part in torch.split(gray, 8192)
    ]
    return torch.cat(parts).half()

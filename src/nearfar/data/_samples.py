"""Data sets: samples with one label each, in memory or on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.arrays import int64_of, tensor_of
from nearfar.data._device_samples import DeviceSamples

Labels = NDArray[np.int64]
Transform = Callable[[Any, np.random.Generator], Tensor]
Size = tuple[int, int]  # width and height
USUAL_KS = (1, 2, 4, 8)  # the customary values of K in recall@K, for data sets without others


@runtime_checkable
class Samples(Protocol):
    """Protocol of a data set: `samples[i]` is the raw input (a PIL image or a tensor), `samples.labels[i]` its class.

    Attributes:
        labels: int64 [n], from 0 without gaps.
        classes: the name of each class.
        names: one per sample: a file name, or class/number.
    """

    labels: Labels
    classes: tuple[str, ...]
    names: Sequence[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class DataSet:
    """The training and the test samples of a data set.

    Attributes:
        name: such as "glyphs".
        train: training samples.
        test: test samples: each is a query against the others, or against `gallery` if there is one.
        gallery: the reference set of the queries in `test`; its labels and classes are those of `test`.
        ks: the customary values of k in recall@k.
        about: how its files were understood, in words, if there was a choice.
    """

    name: str
    train: Samples
    test: Samples
    gallery: Samples | None = None
    ks: tuple[int, ...] = USUAL_KS
    about: str = ""


class PackedNames(Sequence[str]):
    """Strings packed into two arrays: a list of a million names takes 70 MB, this a third of it.

    `data` [bytes] holds the strings in UTF-8, one after the other, and `start` [m + 1] the first byte of each, and the
    end. `rows` [n] chooses strings; None takes all, in their order.

    >>> names = PackedNames.pack(["ant", "", "bée"])
    >>> list(names), names[-1], list(names.take(np.array([2, 0]))), names.data.nbytes
    (['ant', '', 'bée'], 'bée', ['bée', 'ant'], 7)
    """

    def __init__(self, data: NDArray[np.uint8], start: NDArray[np.integer], rows: Labels | None = None) -> None:
        self.data, self.start, self.rows = data, start, rows

    @staticmethod
    def pack(words: Iterable[str]) -> PackedNames:
        """Pack strings; names in an archive that are not UTF-8 come with surrogates, which become escapes."""
        encoded = [word.encode("utf-8", "backslashreplace") for word in words]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return PackedNames(
            np.frombuffer(b"".join(encoded), np.uint8), ends.astype(np.uint32) if ends[-1] < 2**32 else ends
        )

    def take(self, rows: Labels) -> PackedNames:
        """A subset of the names, which shares the arrays."""
        return PackedNames(self.data, self.start, rows if self.rows is None else self.rows[rows])

    def __len__(self) -> int:
        return len(self.start) - 1 if self.rows is None else len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        chosen = (range(len(self)) if self.rows is None else self.rows)[index]
        return [self._text(row) for row in chosen] if isinstance(index, slice) else self._text(chosen)

    def _text(self, row: Any) -> str:
        return self.data[self.start[row] : self.start[row + 1]].tobytes().decode()


def numbered(values: Iterable[Any]) -> tuple[Labels, tuple[str, ...]]:
    """Number any labels (numbers or strings) from 0 without gaps; also return the class names, sorted.

    >>> numbered(["cat", "ant", "cat"])
    (array([1, 0, 1]), ('ant', 'cat'))
    """
    given = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(list(values))
    found, labels = np.unique(given, return_inverse=True)
    return labels.reshape(-1).astype(np.int64), tuple(str(value) for value in found.tolist())


class Tensors:
    """Samples in memory: `x` [n, ...] holds vectors, or pictures (uint8 pictures stay uint8 until the transform).

    Args:
        x: tensor or array [n, ...].
        labels: integers [n], from 0 without gaps, as `numbered` makes them.
        names: one per sample; by default class/number.
        classes: the name of each class; by default its number.

    >>> samples = Tensors(torch.eye(3), [0, 0, 1], classes=("a", "b"))
    >>> samples.names[2], samples[2]
    ('b/0', tensor([0., 0., 1.]))
    """

    def __init__(
        self, x: Any, labels: Any, names: Sequence[str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.x = tensor_of(x) if isinstance(x, np.ndarray) else torch.as_tensor(x)
        if not self.x.ndim or not len(self.x):
            raise ValueError(f"Tensors: x must have shape [n, ...] with n > 0, but came as {list(self.x.shape)}.")
        self.labels, self.classes, self.names = describe("Tensors", len(self.x), labels, names, classes)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]

    def hold(self, device: torch.device) -> DeviceSamples:
        count = len(self)
        height, width = self.x.shape[-2:] if self.x.ndim > 2 else (0, 0)
        sizes = np.broadcast_to(np.array([width, height]), (count, 2))
        return DeviceSamples(self.x.to(device), np.arange(count), np.ones(count, dtype=bool), sizes)


class Labeled:
    """Wrap any dataset with a length whose items are samples or (sample, label, ...), and add its labels.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        labels: integers [n], from 0 without gaps; None reads `dataset.targets` or `dataset.labels`.
        names: one per sample; by default class/number.
        classes: the name of each class; by default `dataset.classes`, else its number.
    """

    def __init__(
        self, dataset: Any, labels: Any = None, names: Sequence[str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        if labels is None:
            labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
        if labels is None:
            raise ValueError(
                f"Labeled: {type(dataset).__name__} has neither targets nor labels, so labels must be given; "
                "pass one integer per sample."
            )
        if classes is None:
            classes = getattr(dataset, "classes", None)
        self.dataset = dataset
        self.labels, self.classes, self.names = describe("Labeled", len(dataset), labels, names, classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return item[0] if isinstance(item, tuple | list) else item

    def genuine(self, index: int) -> Any:
        """The sample itself; None if it cannot be read and the dataset skips such samples."""
        return genuine(self.dataset, index) if hasattr(self.dataset, "genuine") else self[index]


class Subset:
    """A subset of another data set, with labels of its own."""

    def __init__(self, whole: Samples, rows: Labels, labels: Labels, classes: tuple[str, ...]) -> None:
        self.whole, self.rows, self.labels, self.classes = whole, rows, labels, classes
        names = whole.names
        self.names: Sequence[str] = (
            names.take(rows) if isinstance(names, PackedNames) else [names[row] for row in rows.tolist()]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.whole[int(self.rows[index])]

    def genuine(self, index: int) -> Any:
        """The sample itself; None if it cannot be read and the full data set skips such samples."""
        return genuine(self.whole, int(self.rows[index]))

    def over(self, other: Callable[[Samples], Samples]) -> Samples:
        """Apply `other` to the full data set, and take the same part of the result."""
        return Subset(other(self.whole), self.rows, self.labels, self.classes)

    def hold(self, device: torch.device) -> DeviceSamples | None:
        """The subset on a device, if the full data set can be copied there."""
        held = hold(self.whole, device)
        return None if held is None else held.part(self.rows)


def genuine(samples: Samples, index: int) -> Any:
    """The sample itself, never a substitute; None if it cannot be read and is skipped.

    `samples[i]` is for training, which may use a substitute; everything that scores, embeds or shows samples uses this.

    >>> genuine(Tensors(torch.eye(2), [0, 1]), 1)
    tensor([0., 1.])
    """
    own = getattr(samples, "genuine", None)
    return samples[index] if own is None else own(index)


class ByName(Mapping[str, Any]):
    """A mapping from names to samples, never substitutes; a sample is None if it cannot be read and is skipped."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._places = {name: place for place, name in enumerate(samples.names)}

    def __getitem__(self, name: str) -> Any:
        return genuine(self._samples, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def hold(samples: Samples, device: torch.device) -> DeviceSamples | None:
    """The samples on a device; None if they have no method `hold`, or if it reports that they do not fit."""
    own = getattr(samples, "hold", None)
    held: DeviceSamples | None = None if own is None else own(device)
    return held


def part(samples: Samples, indices: Any, given: Labels | None = None) -> Samples:
    """The subset at `indices`, in that order; labels are renumbered without gaps, class names stay.

    `given` are other labels for these samples, in the numbers of `samples.classes`.

    >>> chosen = part(Tensors(torch.eye(3), [0, 1, 2], classes=("a", "b", "c")), [2, 0])
    >>> chosen.labels, chosen.classes
    (array([1, 0]), ('a', 'c'))
    """
    rows = np.asarray(indices, dtype=np.int64).reshape(-1)
    if not len(rows):
        raise ValueError("part: indices must name at least one sample, but none came.")
    if rows.min() < 0 or rows.max() >= len(samples):
        raise ValueError(f"part: indices must lie in 0..{len(samples) - 1}, but came as {rows.min()} to {rows.max()}.")
    own = getattr(samples, "part", None)
    if own is not None:
        chosen: Samples = own(rows, given)
        return chosen
    present, labels = np.unique(samples.labels[rows] if given is None else given, return_inverse=True)
    labels = labels.reshape(-1).astype(np.int64)
    classes = tuple(samples.classes[label] for label in present.tolist())
    if isinstance(samples, Tensors):
        names = [samples.names[row] for row in rows.tolist()]
        return Tensors(samples.x[torch.from_numpy(rows)], labels, names, classes)
    return Subset(samples, rows, labels, classes)


def describe(
    owner: str, rows: int, labels: Any, names: Sequence[str] | None, classes: Sequence[str] | None
) -> tuple[Labels, tuple[str, ...], Sequence[str]]:
    """Check labels, class names and sample names against each other, and fill in defaults."""
    given = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if given.shape != (rows,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"{owner}: labels must be {rows} integers, one per sample, but came as {given.dtype} of shape "
            f"{list(given.shape)}; nf.data.numbered turns any labels into these."
        )
    checked: Labels = int64_of(owner, "labels", given)
    count = int(checked.max()) + 1 if rows else 0
    missing = np.setdiff1d(np.arange(max(count, len(classes or ()))), checked)
    if (rows and checked.min() < 0) or len(missing):
        came = f"class {missing[0]} has no sample" if len(missing) else f"{checked.min()} came"
        raise ValueError(
            f"{owner}: labels must count the classes from 0 without gaps, but {came}; "
            "nf.data.numbered renumbers any labels."
        )
    if classes is not None and len(classes) != count:
        raise ValueError(f"{owner}: classes must name all {count} classes, but {len(classes)} names came.")
    if names is not None and len(names) != rows:
        raise ValueError(f"{owner}: names must name all {rows} samples, but {len(names)} names came.")
    named = tuple(str(label) for label in range(count)) if classes is None else tuple(str(name) for name in classes)
    if names is None:
        seen = [itertools.count() for _ in named]  # class/number
        return checked, named, [f"{named[label]}/{next(seen[label])}" for label in checked.tolist()]
    return checked, named, names if isinstance(names, PackedNames) else list(map(str, names))

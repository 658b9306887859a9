"""`View` and `collate`: transformed samples for a DataLoader, with augmentation seeded by (seed, draw, sample)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nearfar._utils.checks import check_seed
from nearfar.data._device_samples import DeviceSamples
from nearfar.data._samples import Samples, Size, Tensors, Transform, genuine, hold
from nearfar.data._tokens import pad

Key = int | tuple[int, int]
Batch = tuple[Tensor, Tensor, Tensor]
Same = TypeVar("Same")
NONE = np.random.default_rng(0)  # a generator for transforms that draw nothing


@runtime_checkable
class Rendering(Protocol):
    """Protocol of transforms in two steps: draw the random numbers of a sample, and apply those of many samples."""

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""

    def draw(self, size: Size, generator: np.random.Generator, /) -> Sequence[float]:
        """Draw the numbers that `render` needs for a sample of this width and height."""

    def render(self, samples: Any, draws: Tensor, /) -> Tensor:
        """Transform samples, a tensor [b, ...] or `Ragged` pictures, by the numbers [b, k] drawn for each."""


class View(Dataset[Any]):
    """Transformed samples for a network: `view[i]` or `view[(i, draw)]` is (tensor, label, i).

    The transform gets a random generator seeded by (seed, draw, i), so augmentation depends only on the sample and the
    draw (an epoch, or a step): it is the same on all workers and ranks, and in a resumed run.

    `view.__getitems__(keys)` is a whole batch (x, labels [b], indices [b]); pass `collate_fn=collate` to the
    `DataLoader`, which returns it unchanged, and x to `view.render(x, indices, device)`, which returns the network's
    input. If the samples are on a device, and the transform has `draw` and `render`, x holds only the random numbers,
    and `render` makes the pictures there; otherwise it moves them.

    Args:
        samples: the data set.
        transform: `transform(picture, generator)` returns a tensor.
        seed: seed of all draws.
        substitutes: whether another sample may replace one that cannot be read, as in training; otherwise a batch
            leaves it out, and its indices say which samples it contains.
        device: copy the samples to this device, if they can be; None: do not.
    """

    def __init__(
        self,
        samples: Samples,
        transform: Transform,
        *,
        seed: int = 0,
        substitutes: bool = True,
        device: torch.device | None = None,
    ) -> None:
        check_seed("View", seed)
        self.samples, self.transform, self.seed, self.substitutes = samples, transform, seed, substitutes
        self._rendering = cast(Rendering | None, transform if isinstance(transform, Rendering) else None)
        self.held: DeviceSamples | None = None if device is None or self._rendering is None else hold(samples, device)
        self._source: DeviceSamples | None = self.held
        if self._source is None and self._rendering is not None and isinstance(samples, Tensors):
            self._source = samples.hold(samples.x.device)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int]:
        index, draw = _key(key)
        x = self._read(index, draw)
        if x is None:
            raise LookupError(f"View: the sample {self.samples.names[index]} cannot be read, and has no substitute.")
        return x, int(self.samples.labels[index]), index

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """A whole batch: x [b, ...], labels [b], indices [b]; if no sample can be read, x is [0]."""
        pairs = [_key(key) for key in keys]
        if self._rendering is not None and self._source is not None:
            pairs = [pair for pair in pairs if self.substitutes or self._source.readable[pair[0]]]
            indices, x = _indices(pairs), self._draws(self._rendering, self._source, pairs)
            if self.held is None:
                x = self._rendering.render(self._source.take(indices), x)
        else:
            read = [(self._read(*pair), pair) for pair in pairs]
            found = [(x, pair) for x, pair in read if x is not None]
            indices = _indices([pair for _, pair in found])
            x = _stack([x for x, _ in found]) if found else torch.empty(0)
        return x, torch.from_numpy(self.samples.labels[indices.numpy()]), indices

    def render(self, x: Tensor, indices: Tensor, device: torch.device) -> Tensor:
        """The network's input on its device, from x and indices of a batch."""
        if self._rendering is None or self.held is None:
            return x.to(device, non_blocking=True)
        return self._rendering.render(self.held.take(indices), x)

    def _draws(self, rendering: Rendering, source: DeviceSamples, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """The numbers [b, k] of samples and draws; generators are expensive, and made only if needed."""
        drawn = [
            rendering.draw(source.size(index), self._generator(index, at) if rendering.random else NONE)
            for index, at in pairs
        ]
        return torch.tensor(drawn, dtype=torch.float64).reshape(len(pairs), -1)

    def _read(self, index: int, draw: int) -> Tensor | None:
        """One transformed sample; None if it cannot be read and substitutes are not allowed."""
        item = self.samples[index] if self.substitutes else genuine(self.samples, index)
        if item is None and not self.substitutes:
            return None
        return self.transform(item, self._generator(index, draw))

    def _generator(self, index: int, draw: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64((self.seed, draw, index)))


def collate(batch: Same) -> Same:
    """Return the batch of `View.__getitems__` unchanged: the `collate_fn` for a DataLoader."""
    return batch


def _key(key: Key) -> tuple[int, int]:
    if isinstance(key, tuple | list):
        return int(key[0]), int(key[1])
    return int(key), 0


def _indices(pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor([index for index, _ in pairs], dtype=torch.int64)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = pad(tensors)
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise ValueError(
            f"View: the samples of a batch must have one shape, but {list(first)} and {list(second)} came; "
            "choose a transform that crops, such as 'qi2020' or 'can2019'."
        )
    return torch.stack(tensors)

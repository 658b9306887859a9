"""`DeviceSamples`: samples copied to a device, from which batches are taken without a transfer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data._resample import Ragged


@dataclass(frozen=True, eq=False)
class DeviceSamples:
    """Samples on a device; subsets share the tensors of the whole.

    Attributes:
        x: all samples: a tensor [m, ...], or pictures of different sizes.
        rows: int64 [n], the row of each sample in `x`; of a substitute if it cannot be read.
        readable: bool [n], whether the sample itself can be read.
        sizes: int64 [n, 2], width and height of each.
    """

    x: Tensor | Ragged
    rows: NDArray[np.int64]
    readable: NDArray[np.bool_]
    sizes: NDArray[np.int64]

    def part(self, rows: NDArray[np.int64]) -> DeviceSamples:
        """A subset of the samples, which shares their tensors."""
        return replace(self, rows=self.rows[rows], readable=self.readable[rows], sizes=self.sizes[rows])

    def size(self, index: int) -> tuple[int, int]:
        """Width and height of the picture that `take` returns for a sample."""
        width, height = self.sizes[index].tolist()
        return width, height

    def take(self, indices: Tensor) -> Tensor | Ragged:
        """The samples with these indices [b]; the indices are on the CPU."""
        return self.x[torch.from_numpy(self.rows[indices.numpy()]).to(self.x.device, non_blocking=True)]

    def __getstate__(self) -> dict[str, Any]:
        # worker processes draw random numbers for pixels on a device, and never read the pixels
        return {**self.__dict__, "x": self.x if isinstance(self.x, Tensor) and self.x.device.type == "cpu" else None}

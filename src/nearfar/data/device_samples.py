"""Samples on a device: the pixels of all of them, from which a batch is taken without leaving it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.pixel_file import PixelFile
from nearfar.data.resample import Ragged

__all__ = ["Held", "Source"]


class Source:
    """All samples of a data set on a device: a tensor [n, ...], or pictures of different sizes.

    Args:
        x: [n, ...], or the pixels [p, 3] of pictures.
        tables: for pictures, int64 [n] each: first pixel, height, width.
    """

    def __init__(self, x: Tensor, tables: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        self.x, self.tables = x, tables

    @staticmethod
    def of_file(file: PixelFile, device: torch.device) -> Source:
        """Copy decoded pictures to a device."""
        x = torch.empty(file.bytes // 3, 3, dtype=torch.uint8, device=device)
        flat, piece = x.view(-1), 1 << 28
        for first in range(0, file.bytes, piece):  # in pieces: the file need not fit into memory
            flat[first : first + piece] = torch.from_numpy(np.array(file.pixels[first : first + piece]))
        numbers = (file.start[:-1], file.sizes[:, 1], file.sizes[:, 0])
        start, height, width = (torch.from_numpy(np.array(each)).to(device) for each in numbers)
        return Source(x, (start, height, width))

    def take(self, rows: Tensor) -> Tensor | Ragged:
        """Some of the samples, by their numbers [b]."""
        rows = rows.to(self.x.device, non_blocking=True)
        if self.tables is None:
            return self.x[rows]
        start, height, width = (table[rows] for table in self.tables)
        return Ragged(self.x, start, height, width)

    def __getstate__(self) -> dict[str, Any]:
        return {"x": None, "tables": None}  # a worker process draws numbers and never reads pixels


@dataclass(frozen=True, eq=False)
class Held:
    """Samples of a data set that lie on a device.

    Attributes:
        source: where they lie.
        rows: int64 [n], the number of each sample in the source; of a substitute if it cannot be read.
        there: bool [n], whether it can be read.
        sizes: int64 [n, 2], width and height of each.
    """

    source: Source
    rows: NDArray[np.int64]
    there: NDArray[np.bool_]
    sizes: NDArray[np.int64]

    def part(self, rows: NDArray[np.int64]) -> Held:
        """Some of the samples."""
        return Held(self.source, self.rows[rows], self.there[rows], self.sizes[rows])

    def size(self, index: int) -> tuple[int, int]:
        """Width and height of what `take` gives for a sample."""
        width, height = self.sizes[index].tolist()
        return width, height

    def take(self, indices: Tensor) -> Tensor | Ragged:
        """Some of the samples, by their indices [b] on the CPU."""
        return self.source.take(torch.from_numpy(self.rows[indices.numpy()]))

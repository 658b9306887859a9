"""Samples on a device: batches are taken without a transfer, and pictures of different sizes are cropped there.

Crops are resized by PIL's bilinear filter as two matrix products. PIL weights input pixels by a triangle around each
output pixel: its half width is one input pixel if a crop grows, and the scale if it shrinks. PIL filters along the
rows, then along the columns, and rounds to whole gray levels after each. Floating-point sums agree with it to two gray
levels, and exactly for most values; PIL uses integer weights, which break ties differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP = 32  # regions are rounded up to a multiple of this, so that the sizes of temporary tensors repeat


@dataclass(frozen=True, eq=False)
class Ragged:
    """Pictures of different sizes in one tensor."""

    pixels: Tensor  # uint8 [p, 3], all pixels, picture after picture, row after row
    start: Tensor  # int64 [b], the first pixel of each picture
    height: Tensor  # int64 [b]
    width: Tensor  # int64 [b]

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def __getitem__(self, rows: Tensor) -> Ragged:
        return Ragged(self.pixels, self.start[rows], self.height[rows], self.width[rows])


def crops(pictures: Ragged, boxes: Tensor, flips: Tensor, size: int) -> Tensor:
    """Crop and resize: gray levels [b, 3, size, size] as float32, whole numbers in 0..255, channels last in memory.

    `boxes` [b, 4] are left, top, width and height in pixels, on the CPU, since the largest one sets the size that is
    read; `flips` [b] says which crops are mirrored left to right.
    """
    device, count = pictures.device, len(boxes)
    margin = math.ceil(max(1.0, float(boxes[:, 2:].amax()) / size)) + 1
    wide, high = (-(-(int(boxes[:, place].amax()) + 2 * margin) // STEP) * STEP for place in (2, 3))
    left, top, width, height = boxes.to(device, torch.float32, non_blocking=True).unbind(dim=1)
    across = _weights(left, width, margin, wide, pictures.width, size)
    along = _weights(top, height, margin, high, pictures.height, size)
    across = torch.where(flips.to(device, non_blocking=True)[:, None, None], across.flip(1), across)
    region = _region(pictures, left.long() - margin, top.long() - margin, wide, high)
    rows = region.permute(0, 2, 1, 3).reshape(count, wide, high * 3).float()
    rows = _to_levels(torch.bmm(across, rows)).view(count, size, high, 3)
    columns = rows.permute(0, 2, 1, 3).reshape(count, high, size * 3)
    return _to_levels(torch.bmm(along, columns)).view(count, size, size, 3).permute(0, 3, 1, 2)


def _to_levels(x: Tensor) -> Tensor:
    """Round half up to whole gray levels, in place."""
    return x.add_(0.5).floor_().clamp_(0.0, 255.0)


def _weights(first: Tensor, length: Tensor, margin: int, region: int, limit: Tensor, size: int) -> Tensor:
    """The weight [b, size, region] of each input pixel in each output pixel, along one direction.

    Crops [b] begin at `first` and have a `length`. Regions begin `margin` pixels before them; pixels from `limit` [b]
    on, the end of a picture, are not read.
    """
    scale = length / size
    places = torch.arange(region, device=first.device) + (first - margin)[:, None]  # [b, region]
    center = first[:, None] + (torch.arange(size, device=first.device) + 0.5) * scale[:, None]  # [b, size]
    reach = scale.clamp_min(1.0)[:, None, None]
    weights = (1 - ((places + 0.5)[:, None, :] - center[:, :, None]).abs_() / reach).clamp_min_(0.0)
    weights = weights * ((places >= 0) & (places < limit[:, None]))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _region(pictures: Ragged, left: Tensor, top: Tensor, wide: int, high: int) -> Tensor:
    """uint8 [b, high, wide, 3] from the pictures; beyond their borders the nearest pixel, whose weight is 0."""
    device = pictures.device
    rows = top[:, None] + torch.arange(high, device=device)
    rows = torch.minimum(rows.clamp_min_(0), pictures.height[:, None] - 1)
    columns = left[:, None] + torch.arange(wide, device=device)
    columns = torch.minimum(columns.clamp_min_(0), pictures.width[:, None] - 1)
    place = (pictures.start[:, None] + rows * pictures.width[:, None])[:, :, None] + columns[:, None, :]
    return pictures.pixels[place]


@dataclass(frozen=True, eq=False)
class DeviceSamples:
    """Samples on a device; subsets share the tensors of the whole."""

    x: Tensor | Ragged  # all samples: a tensor [m, ...], or pictures of different sizes
    rows: NDArray[np.int64]  # int64 [n], the row of each sample in `x`; of a substitute if it cannot be read
    readable: NDArray[np.bool_]  # bool [n], whether the sample itself can be read
    sizes: NDArray[np.int64]  # int64 [n, 2], width and height of each

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

"""Transforms from raw samples to network inputs: crops, flips and small shifts, with explicit random generators.

A transform is called as `transform(picture, generator)`, where the picture is a PIL image or a tensor. Some also have
`batch(x, generators)`, which transforms many samples in memory at once, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from nearfar._utils.checks import check_choice, check_whole
from nearfar.data.samples import Transform

__all__ = ["CROPS", "Moved", "Numbers", "Photograph", "Plain", "get", "to_tensor"]

Numbers = Sequence[float]


def get(name: str, train: bool, mean: Numbers = (0.0,), std: Numbers = (1.0,), *, size: int | None = None) -> Transform:
    """Return a transform by name, for training or for evaluation.

    Args:
        name: "none" (unchanged), "glyphs" (small drawings; training shifts, rotates and scales them a little),
            "qi2020" (short side 256; training crops a share .16 to 1 of the area to 227 x 227 and flips; evaluation
            takes the middle 227 x 227), "can2019" (256 x 256; training crops 224 x 224 anywhere and flips; evaluation
            takes the middle 224 x 224), "photographs" (as "qi2020", with 224 x 224).
        train: with random augmentation, or without.
        mean: subtracted from each channel of a picture with values in 0..1.
        std: what each channel is then divided by.
        size: pixels a side of the crop in place of those above; the sides before the crop change in proportion.
    """
    check_choice("transforms", "name", name, (*NAMED, *CROPS))
    if name in CROPS:
        crop, options = CROPS[name]
        if size is not None:
            check_whole("transforms", "size", size)
        side = round(SIDE * (size or crop) / crop)
        return Photograph(crop=size or crop, side=side, train=train, mean=tuple(mean), std=tuple(std), **options)
    if size is not None:
        raise ValueError(
            f"transforms: {name!r} leaves pictures as large as they are, but size={size} came; take one of "
            f"{', '.join(CROPS)}, or leave size out."
        )
    return NAMED[name](train, tuple(mean), tuple(std))


def to_tensor(picture: Any) -> Tensor:
    """Convert a raw sample to a float tensor: pictures become [c, h, w] in 0..1, other values stay.

    >>> to_tensor(torch.full((2, 2), 255, dtype=torch.uint8)).shape
    torch.Size([1, 2, 2])
    """
    if isinstance(picture, Image.Image):
        array = np.array(picture, dtype=np.uint8)
        x = torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)
        return x.float() / 255
    return _floating(torch.as_tensor(picture)[None])[0]


def _floating(x: Tensor) -> Tensor:
    """Convert to float [b, ...]: uint8 pictures [b, h, w] or [b, c, h, w] to [b, c, h, w] in 0..1; others stay."""
    if x.dtype != torch.uint8:
        return x.float()
    return (x[:, None] if x.ndim == 3 else x).float() / 255


def _scaled(x: Tensor, mean: Numbers, std: Numbers) -> Tensor:
    """Standardize, (x - mean) / std, each channel of [..., c, h, w], or all values if there is one mean and one std."""
    if tuple(mean) == (0.0,) and tuple(std) == (1.0,):
        return x
    shape = (-1,) if x.ndim < 3 else (-1, 1, 1)
    return (x - torch.tensor(mean, dtype=x.dtype).view(shape)) / torch.tensor(std, dtype=x.dtype).view(shape)


@dataclass(frozen=True)
class Plain:
    """No augmentation: (x - mean) / std."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One sample."""
        return _scaled(to_tensor(picture), self.mean, self.std)

    def batch(self, x: Tensor, generators: Iterable[np.random.Generator]) -> Tensor:
        """Many samples at once."""
        return _scaled(_floating(x), self.mean, self.std)


@dataclass(frozen=True)
class Moved:
    """Random affine augmentation of a drawing: shift, scale, rotate and shear, each drawn uniformly.

    Args:
        shift: at most this many pixels in each direction; what leaves the frame is lost.
        scale: at most this share larger or smaller, width and height independently.
        turn: at most this many degrees of rotation.
        slant: shear, at most this much sideways per unit upwards.
        mean: as for `Plain`.
        std: as for `Plain`.
    """

    shift: float = 1.0
    scale: float = 0.08
    turn: float = 0.0
    slant: float = 0.1
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One drawing."""
        return _scaled(self._moved(to_tensor(picture)[None], [generator])[0], self.mean, self.std)

    def batch(self, x: Tensor, generators: Iterable[np.random.Generator]) -> Tensor:
        """Many drawings at once."""
        return _scaled(self._moved(_floating(x), generators), self.mean, self.std)

    def _moved(self, x: Tensor, generators: Iterable[np.random.Generator]) -> Tensor:
        draws = torch.from_numpy(np.stack([generator.uniform(-1, 1, 6) for generator in generators])).float()
        right, down, wide, high, turn, slant = draws.unbind(dim=1)
        angle = turn * math.radians(self.turn)
        cos, sin, lean = torch.cos(angle), torch.sin(angle), self.slant * slant
        wide, high = 1 + self.scale * wide, 1 + self.scale * high
        across = torch.stack([wide * cos, wide * (lean * cos - sin), right * 2 * self.shift / x.shape[-1]])
        along = torch.stack([high * sin, high * (lean * sin + cos), down * 2 * self.shift / x.shape[-2]])
        rows = torch.stack([across, along]).permute(2, 0, 1)
        grid = F.affine_grid(rows, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@dataclass(frozen=True)
class Photograph:
    """Resize and crop a color photograph: a random crop and flip for training, the center crop otherwise.

    Args:
        crop: pixels a side of the network's input.
        side: the short side is resized to this many pixels; with `square`, both sides are.
        square: ignore the aspect ratio.
        train: random crop, and flip with probability 1/2.
        area: the range of the share of the area that a random crop takes, with an aspect ratio of 3:4 to 4:3; None
            crops `crop` x `crop` pixels anywhere.
        mean: as for `Plain`.
        std: as for `Plain`.
    """

    crop: int = 224
    side: int = 256
    square: bool = False
    train: bool = False
    area: tuple[float, float] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One photograph: [3, crop, crop]."""
        if not isinstance(picture, Image.Image):
            raise TypeError(
                f"Photograph: picture must be a PIL image, but came as {type(picture).__name__}; "
                "choose the transform 'none' or 'glyphs' for samples in memory."
            )
        picture = self._resized(picture.convert("RGB"))
        left, top, width, height = self._box(picture.size, generator)
        size, box = (self.crop, self.crop), (left, top, left + width, top + height)
        if (width, height) == size:
            picture = picture.crop(box)
        else:
            picture = picture.resize(size, Image.Resampling.BILINEAR, box=box)
        if self.train and generator.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return _scaled(to_tensor(picture), self.mean, self.std)

    def _resized(self, picture: Image.Image) -> Image.Image:
        width, height = picture.size
        if self.square:
            size = (self.side, self.side)
        else:
            short = min(width, height)
            size = (self.side * width // short, self.side * height // short)
        return picture if size == picture.size else picture.resize(size, Image.Resampling.BILINEAR)

    def _box(self, size: tuple[int, int], generator: np.random.Generator) -> tuple[int, int, int, int]:
        """Left, top, width and height of the crop."""
        width, height = size
        if not self.train:
            return (width - self.crop) // 2, (height - self.crop) // 2, self.crop, self.crop
        wide, high = self.crop, self.crop
        if self.area is not None:
            wide, high = _shape(width, height, self.area, generator)
        left = int(generator.integers(width - wide + 1))
        top = int(generator.integers(height - high + 1))
        return left, top, wide, high


def _shape(width: int, height: int, area: tuple[float, float], generator: np.random.Generator) -> tuple[int, int]:
    """Width and height of a crop with random area and aspect ratio; if none fits, the largest square."""
    for _ in range(10):
        share = width * height * generator.uniform(*area)
        aspect = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(share * aspect)), round(math.sqrt(share / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return wide, high
    return min(width, height), min(width, height)


def _glyphs(train: bool, mean: tuple[float, ...], std: tuple[float, ...]) -> Transform:
    return Moved(mean=mean, std=std) if train else Plain(mean, std)


NAMED: dict[str, Callable[[bool, tuple[float, ...], tuple[float, ...]], Transform]] = {
    "none": lambda train, mean, std: Plain(mean, std),
    "glyphs": _glyphs,
}
SIDE = 256
"""Pixels that the short side of a photograph has before it is cropped, at the usual size."""
CROPS: dict[str, tuple[int, dict[str, Any]]] = {
    "qi2020": (227, {"area": (0.16, 1.0)}),
    "can2019": (224, {"square": True}),
    "photographs": (224, {"area": (0.16, 1.0)}),
}
"""Transforms of photographs: pixels a side of the crop, and how it is taken."""

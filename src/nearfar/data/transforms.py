"""Transforms from raw samples to network inputs: crops, flips and small shifts, with explicit random generators.

A transform is called as `transform(picture, generator)`, where the picture is a PIL image or a tensor. Some also work
in two steps: `draw(size, generator)` draws the random numbers of one sample, and `render(samples, draws)` applies those
of many samples at once, on their device. Both ways give the same result (photographs agree to two gray levels).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from nearfar._utils.checks import check_choice, check_whole
from nearfar.data._device_samples import Ragged, crops
from nearfar.data._samples import Size, Transform

__all__ = ["CROPS", "Moved", "Numbers", "Photograph", "Plain", "get", "to_tensor"]

Numbers = Sequence[float]


def get(
    name: str,
    train: bool,
    mean: Numbers = (0.0,),
    std: Numbers = (1.0,),
    *,
    size: int | None = None,
    train_size: int | None = None,
    crop_pct: float | None = None,
    area: float | None = None,
    color: float = 0.0,
    move: float = 1.0,
) -> Transform:
    """Return a transform by name, for training or for evaluation.

    Args:
        name: "none" (unchanged), "glyphs" (small drawings; training shifts, rotates and scales them a little),
            "qi2020" (short side 256; training crops a share .16 to 1 of the area to 227 x 227 and flips; evaluation
            takes the middle 227 x 227), "can2019" (256 x 256; training crops 224 x 224 anywhere and flips; evaluation
            takes the middle 224 x 224), "photographs" (as "qi2020", with 224 x 224).
        train: with random augmentation, or without.
        mean: subtracted from each channel of a picture with values in 0..1.
        std: divides each channel then.
        size: pixels a side of the crop, instead of those above; the sides before the crop change in proportion.
        train_size: pixels a side of the crop in training only; the sides before the crop are those of `size`, so that
            one cache of pictures serves both.
        crop_pct: the share of the short side that the center crop takes, instead of about .875; 1 is all of a square
            picture.
        area: the smallest share of the area that a random crop takes, instead of those above.
        color: how much brightness, contrast and saturation vary in training, see `Photograph`.
        move: how far "glyphs" shifts, scales and slants drawings in training: 2 is twice as far as `Moved` by default.
    """
    check_choice("transforms", "name", name, (*NAMED, *CROPS))
    if move != 1 and name != "glyphs":
        raise ValueError(f"transforms: {name!r} moves no drawings, but move={move:g} came; take 'glyphs', or no move.")
    if name not in CROPS:
        given = {"size": size, "train_size": train_size, "crop_pct": crop_pct, "area": area, "color": color or None}
        for option, value in given.items():
            if value is not None:
                raise ValueError(
                    f"transforms: {name!r} leaves pictures as they are, but {option}={value} came; take one of "
                    f"{', '.join(CROPS)}, or leave {option} out."
                )
        return NAMED[name](train, tuple(mean), tuple(std), move)
    crop, options = CROPS[name]
    for option, pixels in (("size", size), ("train_size", train_size)):
        if pixels is not None:
            check_whole("transforms", option, pixels)
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise ValueError(f"transforms: crop_pct must be above 0 and at most 1, but came as {crop_pct}.")
    side = round(SIDE * (size or crop) / crop if crop_pct is None else (size or crop) / crop_pct)
    crop = (train_size if train else None) or size or crop
    if crop > side:
        raise ValueError(f"transforms: train_size={crop} is more than the picture's short side of {side}; take less.")
    if area is not None:
        options = {**options, "area": (area, 1.0)}
    return Photograph(crop=crop, side=side, train=train, mean=tuple(mean), std=tuple(std), color=color, **options)


def to_tensor(picture: Any) -> Tensor:
    """Convert a raw sample to a float tensor: pictures become [c, h, w] in 0..1, other values stay.

    >>> to_tensor(torch.full((2, 2), 255, dtype=torch.uint8)).shape
    torch.Size([1, 2, 2])
    """
    if isinstance(picture, Image.Image):
        array = np.array(picture, dtype=np.uint8)
        x = torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)
        return x.float() / 255
    return _to_float(torch.as_tensor(picture)[None])[0]


def _to_float(x: Tensor) -> Tensor:
    """Convert to float [b, ...]: uint8 pictures [b, h, w] or [b, c, h, w] to [b, c, h, w] in 0..1; others stay."""
    if x.dtype != torch.uint8:
        return x.float()
    return (x[:, None] if x.ndim == 3 else x).float() / 255


def _standardize(x: Tensor, mean: Numbers, std: Numbers) -> Tensor:
    """Standardize, (x - mean) / std, each channel of [..., c, h, w], or all values if there is one mean and one std."""
    if tuple(mean) == (0.0,) and tuple(std) == (1.0,):
        return x
    shape = (-1,) if x.ndim < 3 else (-1, 1, 1)
    low, spread = (_constant(tuple(values), x.dtype, x.device).view(shape) for values in (mean, std))
    return (x - low) / spread


@functools.lru_cache(maxsize=16)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor, moved to its device once, because each transfer waits for the device."""
    return torch.tensor(values, dtype=dtype).to(device)


@dataclass(frozen=True)
class Plain:
    """No augmentation: (x - mean) / std."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    random = False

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One sample."""
        return _standardize(to_tensor(picture), self.mean, self.std)

    def draw(self, size: Size, generator: np.random.Generator) -> list[float]:
        """Nothing to draw."""
        return []

    def render(self, x: Tensor, draws: Tensor) -> Tensor:
        """Many samples at once."""
        return _standardize(_to_float(x), self.mean, self.std)


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
    random = True

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One drawing."""
        x = to_tensor(picture)
        draws = torch.tensor([self.draw((x.shape[-1], x.shape[-2]), generator)], dtype=torch.float64)
        return _standardize(self._move(x[None], draws)[0], self.mean, self.std)

    def draw(self, size: Size, generator: np.random.Generator) -> list[float]:
        """Six numbers in -1..1: right, down, wide, high, turn, slant."""
        drawn: list[float] = generator.uniform(-1, 1, 6).tolist()
        return drawn

    def render(self, x: Tensor, draws: Tensor) -> Tensor:
        """Many drawings at once, on the device of `x`; `draws` [b, 6]."""
        return _standardize(self._move(_to_float(x), draws), self.mean, self.std)

    def _move(self, x: Tensor, draws: Tensor) -> Tensor:
        right, down, wide, high, turn, slant = draws.to(x.device, non_blocking=True).float().unbind(dim=1)
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

    The filter is PIL's bilinear one, which uses every pixel where a picture shrinks. `render` computes it on the
    device of the pictures (`nearfar.data._device_samples`) and agrees with PIL to two gray levels.

    Args:
        crop: pixels a side of the network's input.
        side: the short side is resized to this many pixels; with `square`, both sides are.
        square: ignore the aspect ratio.
        train: random crop, and flip with probability 1/2.
        area: the range of the share of the area that a random crop takes, with an aspect ratio of 3:4 to 4:3; None
            crops `crop` x `crop` pixels anywhere.
        color: brightness, contrast and saturation are each multiplied by 1 - color to 1 + color in training.
        mean: as for `Plain`.
        std: as for `Plain`.
    """

    crop: int = 224
    side: int = 256
    square: bool = False
    train: bool = False
    area: tuple[float, float] | None = None
    color: float = 0.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def random(self) -> bool:
        """Whether anything is drawn: in training."""
        return self.train

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One photograph: [3, crop, crop]."""
        if not isinstance(picture, Image.Image):
            raise TypeError(
                f"Photograph: picture must be a PIL image, but came as {type(picture).__name__}; "
                "choose the transform 'none' or 'glyphs' for samples in memory."
            )
        picture = self.resize(picture.convert("RGB"))
        numbers = self.draw(picture.size, generator)
        left, top, width, height = map(int, numbers[:4])
        box = (left, top, left + width, top + height)
        if width == height == self.crop:
            picture = picture.crop(box)
        else:
            picture = picture.resize((self.crop, self.crop), Image.Resampling.BILINEAR, box=box)
        if numbers[4]:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = to_tensor(picture)
        if len(numbers) > 5:
            x = _jitter(x[None], torch.tensor([numbers[5:]]))[0]
        return _standardize(x, self.mean, self.std)

    @property
    def storage(self) -> str:
        """The settings on which the result of `resize` depends, as text."""
        return f"{self.side} x {self.side}" if self.square else f"short side {self.side}"

    def resize(self, picture: Image.Image) -> Image.Image:
        """Resize a picture to its size before the crop; one of that size is returned unchanged."""
        size = self.stored_size(picture.size)
        return picture if size == picture.size else picture.resize(size, Image.Resampling.BILINEAR)

    def stored_size(self, size: Size) -> Size:
        """Width and height before the crop, for a picture of this width and height."""
        if self.square:
            return self.side, self.side
        short = min(size)
        return self.side * size[0] // short, self.side * size[1] // short

    def draw(self, size: Size, generator: np.random.Generator) -> list[float]:
        """Left, top, width and height of the crop, 1 to flip it or 0, and with `color` three factors."""
        width, height = size
        if not self.train:
            return [(width - self.crop) // 2, (height - self.crop) // 2, self.crop, self.crop, 0]
        wide, high = self.crop, self.crop
        if self.area is not None:
            wide, high = _crop_size(width, height, self.area, generator)
        left = int(generator.integers(width - wide + 1))
        top = int(generator.integers(height - high + 1))
        drawn: list[float] = [left, top, wide, high, float(generator.random() < 0.5)]
        if self.color:
            drawn += generator.uniform(1 - self.color, 1 + self.color, 3).tolist()
        return drawn

    def render(self, pictures: Ragged, draws: Tensor) -> Tensor:
        """Many photographs at once, on their device: [b, 3, crop, crop]; `draws` [b, 5 or 8] on the CPU."""
        x = crops(pictures, draws[:, :4], draws[:, 4] > 0, self.crop) / 255
        if draws.shape[1] > 5:
            x = _jitter(x, draws[:, 5:].to(x.device, non_blocking=True).float())
        return _standardize(x, self.mean, self.std)


def _jitter(x: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, then contrast, then saturation of pictures [b, 3, h, w] in 0..1 by factors [b, 3].

    Contrast is the distance from the mean gray of a picture, saturation that from the gray of a pixel.
    """
    bright, contrast, full = factors.to(x.dtype)[:, :, None, None, None].unbind(dim=1)
    x = (x * bright).clamp(0, 1)
    middle = _gray(x).mean(dim=(2, 3), keepdim=True)
    x = torch.lerp(middle, x, contrast).clamp(0, 1)
    return torch.lerp(_gray(x), x, full).clamp(0, 1)


def _gray(x: Tensor) -> Tensor:
    """The luma of ITU-R BT.601: [b, 3, h, w] -> [b, 1, h, w]."""
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


def _crop_size(width: int, height: int, area: tuple[float, float], generator: np.random.Generator) -> tuple[int, int]:
    """Width and height of a crop with random area and aspect ratio; if none fits, the largest square."""
    for _ in range(10):
        share = width * height * generator.uniform(*area)
        aspect = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(share * aspect)), round(math.sqrt(share / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return wide, high
    return min(width, height), min(width, height)


def _glyphs(train: bool, mean: tuple[float, ...], std: tuple[float, ...], move: float) -> Transform:
    if not train:
        return Plain(mean, std)
    default = Moved()
    return Moved(move * default.shift, move * default.scale, move * default.turn, move * default.slant, mean, std)


NAMED: dict[str, Callable[[bool, tuple[float, ...], tuple[float, ...], float], Transform]] = {
    "none": lambda train, mean, std, move: Plain(mean, std),
    "glyphs": _glyphs,
}
SIDE = 256
"""Pixels of the short side of a photograph before the crop, at the default size."""
CROPS: dict[str, tuple[int, dict[str, Any]]] = {
    "qi2020": (227, {"area": (0.16, 1.0)}),
    "can2019": (224, {"square": True}),
    "photographs": (224, {"area": (0.16, 1.0)}),
}
"""Transforms of photographs: pixels a side of the crop, and how it is taken."""

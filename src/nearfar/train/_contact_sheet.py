"""Draw a batch as one picture: every sample as the network receives it, above the name of its class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearfar._utils.console import visible
from nearfar._utils.files import atomic_write

TILE, CAPTION, GAP, ACROSS = 96, 13, 4, 16
"""Side of a sample, height of its caption and gap, in pixels; and the largest number of columns."""


def is_picture(shape: Sequence[int]) -> bool:
    """Whether samples of a shape are pictures, gray or in color.

    >>> is_picture((3, 32, 32)), is_picture((1, 8, 8)), is_picture((128,))
    (True, True, False)
    """
    return len(shape) == 3 and shape[0] in (1, 3)


def contact_sheet(
    path: Path, x: Tensor, names: Sequence[str], *, mean: Sequence[float], std: Sequence[float], columns: int = ACROSS
) -> Path:
    """Write samples [n, c, h, w] to one PNG file, each with its name.

    Args:
        path: the file.
        x: the standardized samples.
        names: one per sample; cut to the width of the sample.
        mean: the mean of each channel that standardization subtracted.
        std: the deviation of each channel that it divided by.
        columns: samples per line.
    """
    shape = (-1, 1, 1)
    plain = x.detach().float().cpu() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    pixels = (plain.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    wide, tall = TILE + GAP, TILE + CAPTION + GAP
    columns = min(columns, len(pixels))
    sheet = Image.new("RGB", (columns * wide + GAP, -(-len(pixels) // columns) * tall + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for place, (picture, name) in enumerate(zip(pixels, names, strict=True)):
        left, top = GAP + place % columns * wide, GAP + place // columns * tall
        sheet.paste(_tile(Image.fromarray(picture.squeeze())), (left, top))
        draw.text((left, top + TILE + 1), _cut(draw, visible(name, "latin-1"), font), fill="black", font=font)
    with atomic_write(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def _tile(picture: Image.Image) -> Image.Image:
    """Resize a picture to a square of `TILE` pixels; small drawings are enlarged without smoothing."""
    how = Image.Resampling.NEAREST if max(picture.size) < TILE else Image.Resampling.BILINEAR
    share = TILE / max(picture.size)
    size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
    tile = Image.new("RGB", (TILE, TILE), "white")
    tile.paste(picture.convert("RGB").resize(size, how))
    return tile


def _cut(draw: ImageDraw.ImageDraw, name: str, font: object) -> str:
    """The beginning of a name that fits below a sample."""
    while name and draw.textlength(name, font=font) > TILE:  # type: ignore[arg-type]
        name = name[:-1]
    return name

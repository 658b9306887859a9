"""Thumbnails within a size limit: pictures are reduced, encoded and embedded in a given number of characters.

Photographs become WebP (JPEG where Pillow lacks it), as large and as good as fits: sizes and qualities in `LADDER` are
tried from the best until all of them fit. Small gray drawings are encoded without loss; if their background is black
(as in `glyphs` or MNIST) they are inverted, so that ink is dark on light, and the page inverts them back in dark mode.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.checks import printable
from nearfar._utils.progress import Watch

__all__ = ["Atlas", "Pictures", "Thumbnails", "Watch", "as_picture", "has_black_ground", "is_drawing", "turned"]

LADDER = ((128, 60), (112, 56), (96, 54), (96, 42), (80, 40), (64, 36), (48, 32), (32, 25))
ATLAS = ((48, 40), (40, 36), (32, 32), (24, 28), (16, 25))
DRAWING = 64
"""The longest side, in pixels, of a gray picture that is kept without loss."""


@dataclass(frozen=True)
class Thumbnails:
    """Encoded pictures by row: `mime` and base64 text; `ink` if they are drawings, dark on light."""

    mime: str = ""
    ink: bool = False
    drawing: bool = False
    data: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Atlas:
    """Many small pictures in one: square tiles in reading order, `across` tiles in a line."""

    uri: str
    tile: int
    across: int
    ink: bool


class Pictures:
    """Open pictures by row, each once, and count those that cannot be read.

    Args:
        opener: row -> array, path or PIL image; None for no picture.
        watch: called as watch(what, done, total) during the work.
    """

    def __init__(self, opener: Callable[[int], Any], watch: Watch | None = None) -> None:
        self._opener = opener
        self._watch = watch
        self._small: dict[int, Any] = {}
        self.missing: set[int] = set()

    def small(self, row: int) -> Any:
        """The picture of a row with sides of at most 128 pixels, or None if it cannot be read."""
        if row not in self._small and row not in self.missing:
            try:
                picture = as_picture(self._opener(row))
            except (OSError, LookupError):  # a missing or broken file, or a missing member of an archive
                picture = None
            if picture is None:
                self.missing.add(row)
                return None
            picture.thumbnail((LADDER[0][0], LADDER[0][0]))
            self._small[row] = picture
            if self._watch is not None:
                self._watch("reading pictures", len(self._small), 0)
        return self._small.get(row)

    def thumbnails(self, rows: Iterable[int], room: int) -> Thumbnails:
        """Encode the pictures of these rows in at most `room` characters of base64."""
        found = {row: picture for row in sorted(set(rows)) if (picture := self.small(row)) is not None}
        if not found:
            return Thumbnails()
        if is_drawing(found.values()):
            ink = has_black_ground(found.values())
            mime, encode = _lossless()
            data = {row: _text(encode(turned(picture, ink))) for row, picture in found.items()}
            if sum(map(len, data.values())) <= room:
                return Thumbnails(mime, ink, True, data)
        mime, data = _lossy(found, room)
        return Thumbnails(mime, False, False, data)

    def atlas(self, rows: list[int], room: int) -> Atlas | None:
        """One picture of all rows, in order, a tile each; None if not even tiny tiles fit into `room` characters."""
        found = [self.small(row) for row in rows]
        there = [picture for picture in found if picture is not None]
        if not there:
            return None
        across = int(np.ceil(np.sqrt(len(found))))
        if is_drawing(there):
            ink = has_black_ground(there)
            side = max(max(picture.size) for picture in there)
            sheet = _sheet([turned(p, ink) if p is not None else None for p in found], side, across, "L")
            mime, encode = _lossless()
            text = _text(encode(sheet))
            if len(text) <= room:
                return Atlas(f"data:{mime};base64,{text}", side, across, ink)
        for side, quality in ATLAS:
            mime, text = _encode(_sheet(found, side, across, "RGB"), quality)
            if len(text) <= room:
                return Atlas(f"data:{mime};base64,{text}", side, across, False)
        return None


def as_picture(thing: Any) -> Any:
    """Convert an array, a tensor, a path or an image to a PIL image, gray or RGB; None stays None."""
    from PIL import Image

    if thing is None:
        return None
    if isinstance(thing, str | os.PathLike):
        image = _file(Path(thing))
    elif isinstance(thing, Image.Image):
        image = thing.copy()
    else:
        image = Image.fromarray(_array(thing))
    if image.mode in ("RGBA", "LA", "PA", "P"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "L" else image.convert("L" if image.mode in ("1", "I", "F", "I;16") else "RGB")


def _file(path: Path) -> Any:
    """Open a picture file; OSError if it cannot be read."""
    from PIL import ImageOps

    from nearfar.data.pictures import UNREADABLE, open_picture

    try:
        with open_picture(path) as opened:
            opened.draft("RGB", (2 * LADDER[0][0], 2 * LADDER[0][0]))  # JPEG decodes at a fraction of its size
            image = ImageOps.exif_transpose(opened)
            image.load()
    except UNREADABLE:
        raise OSError(f"report: {printable(path)} cannot be read as a picture.") from None
    return image


def _array(thing: Any) -> np.ndarray:
    """Convert an array or a tensor to uint8 [h, w] or [h, w, 3], channels last."""
    array = np.asarray(thing)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        raise ValueError(
            f"report: a picture must be uint8 [h, w] or [h, w, 3], but came as {array.dtype} {list(array.shape)}; "
            "scale it to 0..255 and call .astype('uint8')."
        )
    return np.ascontiguousarray(array)


def is_drawing(pictures: Iterable[Any]) -> bool:
    """Whether all pictures are gray and small."""
    return all(picture.mode == "L" and max(picture.size) <= DRAWING for picture in pictures)


def has_black_ground(pictures: Iterable[Any]) -> bool:
    """Whether most of the pictures are mostly black: drawings on a black background."""
    dark = [float(np.median(np.asarray(picture))) < 64 for picture in pictures]
    return 2 * sum(dark) > len(dark)


def turned(picture: Any, ink: bool) -> Any:
    """The picture, or with `ink` its negative."""
    from PIL import ImageOps

    return ImageOps.invert(picture) if ink else picture


def _sheet(pictures: list[Any], side: int, across: int, mode: str) -> Any:
    from PIL import Image, ImageOps

    sheet = Image.new(mode, (across * side, -(-len(pictures) // across) * side), "white")
    for place, picture in enumerate(pictures):
        if picture is not None:
            tile = ImageOps.fit(picture.convert(mode), (side, side)) if picture.size != (side, side) else picture
            sheet.paste(tile, (place % across * side, place // across * side))
    return sheet


def _lossy(found: dict[int, Any], room: int) -> tuple[str, dict[int, str]]:
    """Encode at decreasing size and quality until all fit; a sample of 40 shows which steps can be skipped."""
    sample = list(found.values())[:: max(1, len(found) // 40)]
    mime = ""
    data: dict[int, str] = {}
    for step, (side, quality) in enumerate(LADDER):
        last = step == len(LADDER) - 1
        guess = sum(len(_encode(_reduced(p, side), quality)[1]) for p in sample) / len(sample) * len(found)
        if guess > 1.05 * room and not last:
            continue
        data = {}
        for row, picture in found.items():
            mime, data[row] = _encode(_reduced(picture, side), quality)
        if sum(map(len, data.values())) <= room:
            break
    return mime, data


def _reduced(picture: Any, side: int) -> Any:
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    return small


def _encode(picture: Any, quality: int) -> tuple[str, str]:
    from PIL import features

    buffer = io.BytesIO()
    if features.check("webp"):
        picture.save(buffer, format="WEBP", quality=quality, method=4)
        return "image/webp", _text(buffer.getvalue())
    picture.save(buffer, format="JPEG", quality=quality, optimize=True)
    return "image/jpeg", _text(buffer.getvalue())


def _lossless() -> tuple[str, Callable[[Any], bytes]]:
    from PIL import features

    webp = features.check("webp")

    def encode(picture: Any) -> bytes:
        buffer = io.BytesIO()
        if webp:
            picture.save(buffer, format="WEBP", lossless=True, quality=60, method=4)
        else:
            picture.save(buffer, format="PNG", optimize=True)
        return buffer.getvalue()

    return ("image/webp" if webp else "image/png"), encode


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

"""Thumbnails within a size limit: pictures are reduced and encoded in a given number of characters.

Photographs become WebP (JPEG if Pillow lacks it) in the first size and quality of `LADDER` in which all of them fit.
Small gray drawings are encoded without loss; if their background is black (as in `glyphs` or MNIST) they are inverted
to dark ink on light, and the page inverts them back in dark mode.
"""

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

LADDER = ((128, 60), (112, 56), (96, 54), (96, 42), (80, 40), (64, 36), (48, 32), (32, 25))
ATLAS = ((48, 40), (40, 36), (32, 32), (24, 28), (16, 25))
DRAWING = 64  # the longest side, in pixels, of a gray picture that is encoded without loss


@dataclass(frozen=True)
class Thumbnails:
    """Base64 text by row with its `mime` type; `ink` is true if drawings were inverted to dark on light."""

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
    """Read pictures by row, each once, and collect the rows of those that cannot be read.

    Args:
        read: row -> array, path or PIL image; None for no picture.
        watch: called as watch(what, done, total) during the work.
    """

    def __init__(self, read: Callable[[int], Any], watch: Watch | None = None) -> None:
        self._read = read
        self._watch = watch
        self._small: dict[int, Any] = {}
        self.missing: set[int] = set()

    def small(self, row: int) -> Any:
        """The picture of a row with sides of at most 128 pixels, or None if it cannot be read."""
        if row not in self._small and row not in self.missing:
            try:
                picture = as_picture(self._read(row))
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
            ink = has_black_background(found.values())
            data = {row: _encode(invert_if(picture, ink)) for row, picture in found.items()}
            if sum(map(len, data.values())) <= room:
                return Thumbnails(_mime(lossless=True), ink, True, data)
        return Thumbnails(_mime(), False, False, _encode_to_fit(found, room))

    def atlas(self, rows: list[int], room: int) -> Atlas | None:
        """One picture with a tile per row, in order; None if even the smallest tiles exceed `room` characters."""
        found = [self.small(row) for row in rows]
        there = [picture for picture in found if picture is not None]
        if not there:
            return None
        across = int(np.ceil(np.sqrt(len(found))))
        if is_drawing(there):
            ink = has_black_background(there)
            side = max(max(picture.size) for picture in there)
            sheet = _sheet([invert_if(p, ink) if p is not None else None for p in found], side, across, "L")
            text = _encode(sheet)
            if len(text) <= room:
                return Atlas(f"data:{_mime(lossless=True)};base64,{text}", side, across, ink)
        for side, quality in ATLAS:
            text = _encode(_sheet(found, side, across, "RGB"), quality)
            if len(text) <= room:
                return Atlas(f"data:{_mime()};base64,{text}", side, across, False)
        return None


def as_picture(thing: Any) -> Any:
    """Convert an array, a tensor, a path or an image to a gray or RGB PIL image; None stays None."""
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

    from nearfar.data._pictures import UNREADABLE, open_picture

    try:
        with open_picture(path) as opened:
            opened.draft("RGB", (2 * LADDER[0][0], 2 * LADDER[0][0]))  # JPEG can be decoded at a fraction of its size
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


def has_black_background(pictures: Iterable[Any]) -> bool:
    """Whether most of the pictures are mostly black: drawings on a black background."""
    dark = [float(np.median(np.asarray(picture))) < 64 for picture in pictures]
    return 2 * sum(dark) > len(dark)


def invert_if(picture: Any, ink: bool) -> Any:
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


def _encode_to_fit(found: dict[int, Any], room: int) -> dict[int, str]:
    """Encode at decreasing size and quality until all fit; a sample of 40 tells which steps to skip."""
    sample = list(found.values())[:: max(1, len(found) // 40)]
    data: dict[int, str] = {}
    for side, quality in LADDER:
        guess = sum(len(_encode(_shrink(p, side), quality)) for p in sample) / len(sample) * len(found)
        if guess > 1.05 * room and side != LADDER[-1][0]:
            continue
        data = {row: _encode(_shrink(picture, side), quality) for row, picture in found.items()}
        if sum(map(len, data.values())) <= room:
            break
    return data


def _shrink(picture: Any, side: int) -> Any:
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    return small


def _encode(picture: Any, quality: int | None = None) -> str:
    """Encode a picture as base64 text, without loss if no quality is given."""
    buffer = io.BytesIO()
    mime = _mime(lossless=quality is None)
    if mime == "image/webp":
        picture.save(buffer, format="WEBP", lossless=quality is None, quality=quality or 60, method=4)
    elif mime == "image/jpeg":
        picture.save(buffer, format="JPEG", quality=quality, optimize=True)
    else:
        picture.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _mime(*, lossless: bool = False) -> str:
    """The type of encoded pictures: WebP if Pillow has it, else PNG without loss or JPEG with loss."""
    from PIL import features

    return "image/webp" if features.check("webp") else "image/png" if lossless else "image/jpeg"

"""Pictures of strangers, decoded within limits: known formats only, and no more pixels than allowed."""

from __future__ import annotations

import io
import warnings
from typing import Any

from PIL import Image

from nearfar.data.pictures import FORMATS, UNREADABLE

__all__ = ["PIXELS", "RefusedError", "decoded"]

PIXELS = 64_000_000
"""Pixels of a picture at most: 192 MB when decoded."""


class RefusedError(ValueError):
    """A request that is refused, with the HTTP status that says so.

    Args:
        status: 4xx or 503.
        reason: one sentence.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def decoded(content: bytes, pixels: int = PIXELS) -> Any:
    """Decode a picture to RGB. Its size is read from its header, before anything is unpacked.

    Raises:
        RefusedError: no picture of a known format, damaged, or of more pixels than allowed.

    >>> decoded(b"GIF89a")
    Traceback (most recent call last):
    nearfar.serve.decode.RefusedError: the picture cannot be read: send a whole JPEG, PNG or WebP file.
    """
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels, for which there is a limit here; of odd metadata
            with Image.open(io.BytesIO(content), formats=known) as picture:
                width, height = picture.size
                if width * height > pixels:
                    raise _too_many(f"{width:,} x {height:,} pixels", pixels)
                return picture.convert("RGB")
    except Image.DecompressionBombError:
        raise _too_many("far more pixels", pixels) from None
    except RefusedError:
        raise
    except (*UNREADABLE, MemoryError):
        raise RefusedError(422, "the picture cannot be read: send a whole JPEG, PNG or WebP file.") from None


def _too_many(came: str, pixels: int) -> RefusedError:
    return RefusedError(413, f"the picture has {came}, and {pixels:,} pixels are allowed; send a smaller one.")

"""Pictures of requests, decoded within limits, and small pictures of the rows of an index."""

import base64
import io
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from nearfar._utils.files import inside
from nearfar.data._pictures import FORMATS, UNREADABLE
from nearfar.evaluation import SearchIndex
from nearfar.report._pictures import as_picture

PIXELS = 64_000_000  # most pixels of a picture: 192 MB when decoded
SIDE = 160  # pixels of the longer side of a thumbnail
CACHED = 1024  # maximum number of encoded thumbnails kept in memory, most recently used ones


class RefusedError(ValueError):
    """A request is refused.

    Args:
        status: the HTTP status, 4xx or 503.
        reason: one sentence.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def decode(content: bytes, pixels: int = PIXELS) -> Any:
    """Decode a picture to RGB. Its size is read from its header before anything is unpacked.

    Raises:
        RefusedError: the picture has an unknown format, is damaged, or has more pixels than allowed.

    >>> decode(b"GIF89a")
    Traceback (most recent call last):
    nearfar.serve._pictures.RefusedError: the picture cannot be read: send a whole JPEG, PNG or WebP file.
    """
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about many pixels, which are limited here, and about odd metadata
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


class Thumbnails:
    """Encoded pictures by row; callers name rows, never paths.

    Args:
        index: its thumbnails and names are used.
        folder: the folder in which names are files; a name that leads out of it has no picture. None for the index's
            thumbnails.
    """

    def __init__(self, index: SearchIndex, folder: Path | None = None) -> None:
        self.folder = folder
        self._images: Any = index.thumbnails
        self._names: Any = index.name
        self._rows, self._cached = len(index), lru_cache(CACHED)(self._make)
        if folder is not None and not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} of pictures.")
        if folder is not None and self._names is None:
            raise ValueError("the vectors of this index have no names, so no file can be found; leave --images out.")

    @property
    def available(self) -> bool:
        """Whether pictures can be available at all."""
        return self.folder is not None or self._images is not None

    def get(self, row: int) -> tuple[str, bytes] | None:
        """The type and bytes of a row's picture; None if there is none."""
        return self._cached(row) if self.available and 0 <= row < self._rows else None

    def _make(self, row: int) -> tuple[str, bytes] | None:
        try:
            if self.folder is None:
                return encode(as_picture(self._images[row]))
            path = inside("search", self.folder, [self._names[row]], switch="")[0]
            return encode(as_picture(path))
        except (OSError, ValueError):
            return None


def encode(picture: Any) -> tuple[str, bytes]:
    """Shrink and encode a PIL image: small gray drawings as PNG, all else as JPEG; returns type and bytes."""
    picture.thumbnail((SIDE, SIDE))
    kind, how = ("PNG", {}) if picture.mode == "L" and max(picture.size) <= 64 else ("JPEG", {"quality": 82})
    stream = io.BytesIO()
    picture.save(stream, kind, **how)
    return f"image/{kind.lower()}", stream.getvalue()


def data_uri(found: tuple[str, bytes] | None) -> str | None:
    """A picture as a data URI."""
    return None if found is None else f"data:{found[0]};base64,{base64.b64encode(found[1]).decode()}"

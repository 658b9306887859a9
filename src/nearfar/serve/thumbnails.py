"""Small pictures of the rows of an index: from its own thumbnails, or from a folder in which names are files."""

from __future__ import annotations

import base64
import io
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from nearfar._utils.files import inside
from nearfar.evaluation.disk_index import DiskIndex
from nearfar.evaluation.index import Index
from nearfar.report.pictures import as_picture

__all__ = ["SIDE", "Thumbnails", "encoded", "uri"]

SIDE = 160
"""Pixels of the longer side."""
KEPT = 1024
"""Encoded pictures that are kept, the last ones asked for."""


class Thumbnails:
    """Pictures by row, encoded; only rows are asked for, never paths.

    Args:
        index: whose thumbnails and names are used.
        folder: where the names are files; a name that leads out of it has no picture. None for the index's thumbnails.
    """

    def __init__(self, index: Index | DiskIndex, folder: Path | None = None) -> None:
        self.folder = folder
        self._images: Any = index.thumbnails if isinstance(index, DiskIndex) else index.vectors.images
        self._names: Any = index.name if isinstance(index, DiskIndex) else index.vectors.name
        self._rows, self._lock = len(index), Lock()
        self._kept: OrderedDict[int, tuple[str, bytes] | None] = OrderedDict()
        if folder is not None and not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} of pictures.")
        if folder is not None and self._names is None:
            raise ValueError(
                "the vectors of this index have no names, so that no file can be found; leave --images out."
            )

    @property
    def there(self) -> bool:
        """Whether there may be pictures at all."""
        return self.folder is not None or self._images is not None

    def get(self, row: int) -> tuple[str, bytes] | None:
        """The type and bytes of a row's picture; None if there is none."""
        if not self.there or not 0 <= row < self._rows:
            return None
        with self._lock:
            if row in self._kept:
                self._kept.move_to_end(row)
                return self._kept[row]
        made = self._made(row)
        with self._lock:
            self._kept[row] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def _made(self, row: int) -> tuple[str, bytes] | None:
        try:
            if self.folder is None:
                return encoded(as_picture(self._images[row]))
            path = inside("search", self.folder, [self._names[row]], switch="")[0]
            return encoded(as_picture(path))
        except (OSError, ValueError):
            return None


def encoded(picture: Any) -> tuple[str, bytes]:
    """A PIL image, made small: small gray drawings as PNG, all else as JPEG."""
    picture.thumbnail((SIDE, SIDE))
    kind, how = ("PNG", {}) if picture.mode == "L" and max(picture.size) <= 64 else ("JPEG", {"quality": 82})
    stream = io.BytesIO()
    picture.save(stream, kind, **how)
    return f"image/{kind.lower()}", stream.getvalue()


def uri(found: tuple[str, bytes] | None) -> str | None:
    """A picture as a data URI."""
    return None if found is None else f"data:{found[0]};base64,{base64.b64encode(found[1]).decode()}"

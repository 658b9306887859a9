"""Image files: opened when they are asked for, and named when they cannot be read."""

from __future__ import annotations

import errno
import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image, UnidentifiedImageError

from nearfar._utils.checks import check_choice, printable
from nearfar._utils.files import inside
from nearfar.data.samples import described

__all__ = [
    "UNREADABLE",
    "CorruptImageError",
    "CorruptImageWarning",
    "Member",
    "OnCorrupt",
    "Pictures",
    "check_on_corrupt",
    "listed_files",
    "open_picture",
]

OnCorrupt = Literal["stop", "skip"]
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, LookupError, struct.error, Image.DecompressionBombError)
"""What PIL raises for files that are no image, are cut short, or unpack to something enormous."""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


class CorruptImageError(ValueError):
    """An image cannot be read; the message names it."""


class CorruptImageWarning(UserWarning):
    """An image cannot be read: in training another of its class stands in for it, elsewhere it is left out."""


@dataclass(frozen=True)
class Member:
    """An image inside a tar archive: `size` bytes from `offset` on."""

    archive: Path
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"

    def open(self) -> io.BytesIO:
        """The bytes of the file; the archive is opened anew, so that workers never share a position in it."""
        with self.archive.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(min(self.size, self.archive.stat().st_size)))


class Pictures:
    """Image files with a label each; `pictures[i]` is a PIL image in RGB, opened when it is asked for.

    Args:
        paths: files, or members of tar archives.
        labels: integers [n], from 0 on without gaps.
        names: one per image; by default class folder/file name.
        classes: the name of each class; by default its number.
        on_corrupt: "stop" raises `CorruptImageError`, which names the image; "skip" warns at the first
            (`CorruptImageWarning`) and keeps all in `corrupt`: `pictures[i]`, which training draws, is then the next
            readable image of the same class, while `pictures.genuine(i)`, which everything else reads, is None.
    """

    def __init__(
        self,
        paths: Sequence[Path | Member],
        labels: Any,
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        *,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        check_on_corrupt("Pictures", on_corrupt)
        self.paths = [Path(path) if isinstance(path, str) else path for path in paths]
        if names is None:
            names = [
                path.name if isinstance(path, Member) else f"{path.parent.name}/{path.name}" for path in self.paths
            ]
        self.labels, self.classes, self.names = described("Pictures", len(self.paths), labels, names, classes)
        self.on_corrupt = on_corrupt
        self.corrupt: set[int] = set()
        """Indices of the images found unreadable so far, by this process: each worker of a loader counts its own."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image.Image:
        picture = self.genuine(index)
        return self._stand_in(index) if picture is None else picture

    def genuine(self, index: int) -> Image.Image | None:
        """The image itself, never one that stands in for it; None where it cannot be read and is to be skipped."""
        path = self.paths[index]
        try:
            return _opened(path)
        except UNREADABLE as error:
            reason = _reason(error)
        if self.on_corrupt == "stop":
            raise CorruptImageError(
                f"Pictures: the image {printable(path)} cannot be read ({reason}); mend or remove it, "
                'or pass on_corrupt="skip" to go on without it.'
            )
        if not self.corrupt:
            warnings.warn(
                f"Pictures: the image {printable(path)} cannot be read ({reason}): in training another of its class "
                "stands in, elsewhere it is left out; `corrupt` of these samples counts all such images.",
                CorruptImageWarning,
                stacklevel=3,
            )
        self.corrupt.add(index)
        return None

    def _stand_in(self, index: int) -> Image.Image:
        """The next readable image of the same class, in order and around the end."""
        positive = (self.labels == self.labels[index]).nonzero()[0].tolist()
        place = positive.index(index)
        for other in positive[place + 1 :] + positive[:place]:
            try:
                return _opened(self.paths[other])
            except UNREADABLE:
                self.corrupt.add(other)
        raise CorruptImageError(
            f"Pictures: no image of the class {self.classes[self.labels[index]]!r} can be read "
            f"(the last tried was {printable(self.paths[index])}); mend or remove the class."
        )


def _opened(path: Path | Member) -> Image.Image:
    """The image, read whole: PIL would read it late, and fail where nobody knows its name."""
    with open_picture(path) as picture:
        return picture.convert("RGB")


@contextmanager
def open_picture(path: Path | Member) -> Iterator[Image.Image]:
    """A picture file of a format that is only ever decoded: PIL would start a program for some others.

    Raises:
        OSError: no plain file, or no picture of such a format; `UNREADABLE` has what reading it may raise besides.
    """
    if isinstance(path, Path) and not path.is_file():  # opening a pipe would wait for ever
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    stream = path.open() if isinstance(path, Member) else path.open("rb")
    with stream, Image.open(stream, formats=known) as picture:
        yield picture


def _reason(error: Exception) -> str:
    """Why, in few words."""
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
    if isinstance(error, UnidentifiedImageError):
        return "no picture of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error) or type(error).__name__)


def check_on_corrupt(owner: str, value: object) -> None:
    """Demand "stop" or "skip"."""
    check_choice(owner, "on_corrupt", value, get_args(OnCorrupt))


def listed_files(owner: str, folder: Path, names: Sequence[str], *, outside: bool = False) -> list[Path]:
    """The files that a list names, relative to `folder`: all of them in it (but with `outside`) and all of them there.

    Raises:
        ValueError: a name leads out of the folder.
        FileNotFoundError: files are missing; the error counts them and names the first.
    """
    switch = "set data.outside: true (outside=True of open_data)"
    paths = inside(owner, folder, names, outside=outside, switch=switch)
    missing = [path for path in paths if not _is_there(path)]
    if missing:
        raise FileNotFoundError(
            f"{owner}: {len(missing)} of {len(paths)} images are missing, the first is {printable(missing[0])}; "
            "unpack the data again, or correct the path."
        )
    return paths


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file system allows, a folder that may not be looked into
        return False

"""Image files with labels, opened on access; an error or warning names a file that cannot be read."""

import errno
import io
import struct
import tarfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from nearfar._utils.checks import check_choice, printable
from nearfar._utils.files import inside
from nearfar.data._samples import Labels, describe

OnCorrupt = Literal["stop", "skip"]
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, LookupError, struct.error, Image.DecompressionBombError)
"""Errors that PIL raises for files that are not images, are truncated, or unpack to something huge."""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


class CorruptImageError(ValueError):
    """An image cannot be read; the message names it."""


class CorruptImageWarning(UserWarning):
    """An image cannot be read: training replaces it by another of its class, all other code leaves it out."""


class Stored(Protocol):
    """Protocol of an image inside an archive or a table; `str` names its place."""

    def open(self) -> IO[bytes]:
        """Open the image as a file."""


@dataclass(frozen=True)
class Member:
    """An image inside a tar archive: `size` bytes that start at `offset`."""

    archive: Path
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"

    def open(self) -> io.BytesIO:
        """Open the image as a file; the archive is opened each time, so that workers never share a position in it."""
        with self.archive.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(min(self.size, self.archive.stat().st_size)))


def tar_members(owner: str, path: Path) -> Iterator[Member]:
    """Yield the regular files of a plain tar archive, in their order; nothing is unpacked."""
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                setattr(archive, "members", [])  # noqa: B010  it would keep all headers in memory
                if ".." in entry.name.split("/") or entry.name.startswith("/"):
                    raise ValueError(f"{owner}: {printable(entry.name)!r} leads out of the archive {path}; mend it.")
                if entry.isreg() and not entry.issparse():
                    yield Member(path, entry.offset_data, entry.size, entry.name)
            stream: Any = archive.fileobj
            stream.seek(archive.offset)
            if len(stream.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:  # the empty blocks at the end are missing
                raise ValueError(f"{owner}: {path} was cut short: its end mark is missing; copy it again.")
    except (tarfile.TarError, EOFError, OverflowError) as error:
        hint = "unpack it with gunzip" if path.suffix in (".gz", ".tgz") else "copy it again"
        raise ValueError(f"{owner}: {path} cannot be read as a plain tar file ({printable(error)}); {hint}.") from None


class Places(Sequence["Path | Stored"]):
    """Base class for the positions of many images, created on access; a list of a million would take 250 MB."""

    @abstractmethod
    def place(self, row: int) -> Path | Stored:
        """Where the image with an index from 0 lies."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes with the images, or with the files that hold them."""

    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        return self.place(rows) if isinstance(rows, int) else [self.place(row) for row in rows]


class Pictures:
    """Image files with one label each; `pictures[i]` is a PIL image in RGB, opened on access.

    Args:
        paths: files, members of tar archives, or `Places`.
        labels: integers [n], from 0 without gaps.
        names: one per image; by default class folder/file name.
        classes: the name of each class; by default its number.
        on_corrupt: "stop" raises `CorruptImageError`, which names the image; "skip" warns at the first one
            (`CorruptImageWarning`) and lists all in `corrupt`: `pictures[i]`, used in training, is then the next
            readable image of the same class, and `pictures.genuine(i)`, used everywhere else, is None.
    """

    def __init__(
        self,
        paths: Sequence[Path | Stored],
        labels: Any,
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        *,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        check_on_corrupt("Pictures", on_corrupt)
        self.paths: Sequence[Path | Stored] = (
            paths if isinstance(paths, Places) else [Path(path) if isinstance(path, str) else path for path in paths]
        )
        if names is None:
            names = [_name(path) for path in self.paths]
        self.labels, self.classes, self.names = describe("Pictures", len(self.paths), labels, names, classes)
        self.on_corrupt = on_corrupt
        self.cached: dict[Any, Any] = {}
        """Decoded forms of these images, see `nearfar.data._picture_cache`; runs in one process share them."""
        self.corrupt: set[int] = set()
        """Indices of the images that this process found unreadable; each worker of a loader counts its own."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image.Image:
        picture = self.genuine(index)
        return self._substitute(index) if picture is None else picture

    def genuine(self, index: int) -> Image.Image | None:
        """The image itself, never a substitute; None if it cannot be read and is skipped."""
        path = self.paths[index]
        try:
            return _read(path)
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
                "stands in, elsewhere it is left out; `corrupt` of these samples lists all such images.",
                CorruptImageWarning,
                stacklevel=3,
            )
        self.corrupt.add(index)
        return None

    def _substitute(self, index: int) -> Image.Image:
        for other in others_of_class(self.labels, index).tolist():
            try:
                return _read(self.paths[other])
            except UNREADABLE:
                self.corrupt.add(other)
        raise no_readable_image(self.classes[self.labels[index]], self.paths[index])


def others_of_class(labels: Labels, index: int) -> Labels:
    """The indices of the other samples of a class, those after `index` first.

    >>> others_of_class(np.array([5, 7, 5, 7, 5]), 2).tolist()
    [4, 0]
    """
    same = np.flatnonzero(labels == labels[index])
    return np.concatenate([same[same > index], same[same < index]])


def no_readable_image(class_name: str, image: object) -> CorruptImageError:
    """The error if no image of a class can be read."""
    return CorruptImageError(
        f"Pictures: no image of the class {class_name!r} can be read (one is {printable(image)}); mend or remove the "
        "class."
    )


def _name(path: Path | Stored) -> str:
    if isinstance(path, Path):
        return f"{path.parent.name}/{path.name}"
    return path.name if isinstance(path, Member) else str(path)


def _read(path: Path | Stored) -> Image.Image:
    """Read an image completely; PIL would otherwise decode it later, when an error could not name the file."""
    with open_picture(path) as picture:
        return picture.convert("RGB")


@contextmanager
def open_picture(path: Path | Stored) -> Iterator[Image.Image]:
    """Open an image file of a format that PIL decodes itself; for some other formats it would start a program."""
    if isinstance(path, Path) and not path.is_file():  # opening a pipe would wait forever
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    stream = path.open("rb") if isinstance(path, Path) else path.open()
    with stream, Image.open(stream, formats=known) as picture:
        yield picture


def _reason(error: Exception) -> str:
    """A short reason for an error message."""
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
    if isinstance(error, UnidentifiedImageError):
        return "no picture of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error) or type(error).__name__)


def check_on_corrupt(owner: str, value: object) -> None:
    """Require "stop" or "skip"."""
    check_choice(owner, "on_corrupt", value, get_args(OnCorrupt))


def resolve_files(owner: str, folder: Path, names: Sequence[str], *, outside: bool = False) -> list[Path]:
    """Resolve a list of file names relative to `folder`; all must exist, and be inside it unless `outside`."""
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
    except OSError:  # a name longer than any file system allows, or a folder without permission
        return False

"""Decoded pictures in one file that processes map into memory: written once, with checksums.

The file holds the pixels of all pictures, uint8 [h, w, 3] one after the other, then for each picture its height, width
and CRC-32, then an end mark with the number of pictures. It gets its name once it is complete. Until then pixels are
appended to NAME.part and rows to NAME.rows, so that a later process continues where one was stopped.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from multiprocessing import current_process
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from nearfar._utils.files import plain_target
from nearfar._utils.lock import alone

if TYPE_CHECKING:  # it would load rich
    from nearfar._utils.progress import Watch

Pixels = NDArray[np.uint8]
Rows = NDArray[np.void]
Decode = Callable[[int], Pixels | None]
"""The pixels [h, w, 3] of a picture by its number; None if it cannot be read and is left out."""
ROW = np.dtype([("height", "<i4"), ("width", "<i4"), ("crc", "<u4")])
END = b"nearfar pixels 1"
TOGETHER = 256  # the number of pictures that are decoded between two commits
BLOCK = 32  # the number of pictures that a worker decodes at once


class PixelFile:
    """The pictures of a complete file: `file[i]` is the pixels [h, w, 3], mapped; None if picture i could not be read.

    Raises FileNotFoundError if there is none, and ValueError if it is cut short or pixels have changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = _index(path)
        self.sizes: NDArray[np.int64] = np.stack([self.rows["width"], self.rows["height"]], axis=1).astype(np.int64)
        """Width and height [n, 2] of each picture; 0 if it could not be read."""
        self.start: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.sizes.prod(axis=1))])
        """The first pixel [n + 1] of each picture."""
        self.bytes = 3 * int(self.start[-1])
        self._map: Pixels | None = None
        self._sound = np.zeros(len(self.rows), dtype=bool)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Pixels | None:
        width, height = self.sizes[number].tolist()
        if not width:
            return None
        first = 3 * int(self.start[number])
        found = self.pixels[first : first + 3 * width * height]
        if not self._sound[number]:  # each picture is verified once
            if zlib.crc32(found.data) != self.rows["crc"][number]:
                raise ValueError(f"data: picture {number} in {self.path} is damaged; remove the file to make it again.")
            self._sound[number] = True
        return found.reshape(height, width, 3)

    @property
    def pixels(self) -> Pixels:
        """All bytes, mapped from the file or, after `read_all`, in memory."""
        if self._map is None:
            self._map = np.memmap(self.path, np.uint8, "r", shape=(self.bytes,)) if self.bytes else np.empty(0, "u1")
        return self._map

    def read_all(self) -> None:
        """Read everything into memory, and verify the checksums."""
        self._map = np.fromfile(self.path, np.uint8, self.bytes)
        self.check()

    def check(self) -> None:
        """Verify the checksums of all pictures."""
        for number in np.flatnonzero(~self._sound).tolist():
            self[number]

    @staticmethod
    def build(path: Path, count: int, decode: Decode, *, workers: int, watch: Watch | None = None) -> PixelFile:
        """Open the file, or write it with `count` pictures while other processes that need it wait."""
        plain_target(path).parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_name(f"{path.name}.lock")):
            with contextlib.suppress(FileNotFoundError, ValueError):
                return PixelFile(path)  # another process may have written it
            _write(path, count, decode, workers, watch)
        return PixelFile(path)


def _index(path: Path) -> Rows:
    """Read the rows at the end of a complete file."""
    if not path.is_file():
        raise FileNotFoundError(f"data: there is no file {path}.")
    tail = len(END) + 8
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - tail))
        end = stream.read()
        count = int.from_bytes(end[len(END) :], "little") if end.startswith(END) else -1
        first = size - tail - count * ROW.itemsize
        if count < 0 or first < 0:
            raise ValueError(f"data: {path} is not a complete file of decoded pictures; remove it to make it again.")
        stream.seek(first)
        rows: Rows = np.frombuffer(stream.read(count * ROW.itemsize), ROW)
    if 3 * int((rows["height"].astype(np.int64) * rows["width"]).sum()) != first:
        raise ValueError(f"data: {path} holds more or fewer pixels than its rows say; remove it to make it again.")
    return rows


class _Blocks(Dataset["Rows | None"]):
    """Decodes blocks of pictures in worker processes; the pixels of a block go to a file of its own.

    Pixels in files need neither pipes nor shared memory, which is small in many containers.
    """

    def __init__(self, part: Path, decode: Decode) -> None:
        self.part, self.decode = part, decode

    def __getitem__(self, numbers: range) -> Rows | None:
        """The rows of a block; None if a picture cannot be read or the file cannot be written."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rows = self.write(numbers)
            except Exception:  # the calling process tries again, and raises it with its own type and words
                return None
        return rows if rows["height"].all() else None

    def write(self, numbers: range) -> Rows:
        """Decode a block and write its pixels."""
        found = []
        with self.path(numbers).open("wb") as pixels:
            for picture in map(self.decode, numbers):
                data = b"" if picture is None else picture.tobytes()
                pixels.write(data)
                found.append((*((0, 0) if picture is None else picture.shape[:2]), zlib.crc32(data)))
        return np.array(found, ROW)

    def path(self, numbers: range) -> Path:
        """The file of a block."""
        return self.part.with_name(f"{self.part.name}.{numbers.start}")

    def decoded(self, first: int, count: int, workers: int) -> Iterator[tuple[Path, Rows]]:
        """Yield the file and the rows of each block, in order; a file is removed after its turn."""
        size = min(BLOCK, TOGETHER)
        blocks = [range(start, min(start + size, count)) for start in range(first, count, size)]
        for numbers, rows in zip(blocks, self._load(blocks, min(workers, len(blocks))), strict=True):
            yield self.path(numbers), self.write(numbers) if rows is None else rows
            self.path(numbers).unlink()

    def _load(self, blocks: list[range], workers: int) -> Iterable[Rows | None]:
        """The rows of each block, None for those that the calling process has to decode."""
        if workers < 2 or current_process().daemon:  # a daemon may not start processes
            return repeat(None, len(blocks))
        return DataLoader(
            self,
            sampler=blocks,
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # draws a seed for workers, which must not come from the global generator
        )


def _unchanged(rows: Any) -> Any:
    return rows


def _write(path: Path, count: int, decode: Decode, workers: int, watch: Watch | None) -> None:
    """Decode the missing pictures, with commits in between, then give the file its name."""
    part, log = (path.with_name(f"{path.name}.{end}") for end in ("part", "rows"))
    rows = _read_committed(part, log)
    committed = len(rows)
    try:
        with part.open("ab") as pixels, log.open("ab") as written:
            for block, found in _Blocks(part, decode).decoded(committed, count, workers):
                with block.open("rb") as stream:
                    shutil.copyfileobj(stream, pixels, 1 << 20)
                rows = np.concatenate([rows, found])
                if len(rows) - committed >= TOGETHER or len(rows) == count:
                    _commit(pixels)
                    written.write(rows[committed:].tobytes())
                    _commit(written)
                    committed = len(rows)
                if watch is not None:
                    watch("decoding pictures", len(rows), count)
            pixels.write(rows.tobytes() + END + count.to_bytes(8, "little"))
            _commit(pixels)
    finally:
        for block in path.parent.glob(f"{glob.escape(part.name)}.*"):
            block.unlink(missing_ok=True)
    os.replace(part, path)
    log.unlink()


def _read_committed(part: Path, log: Path) -> Rows:
    """Read the rows that a stopped process had committed, and cut both files back to them."""
    data = log.read_bytes() if log.is_file() else b""
    rows: Rows = np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
    ends = 3 * np.cumsum(rows["height"].astype(np.int64) * rows["width"])
    length = part.stat().st_size if part.is_file() else 0
    rows = rows[: int(np.searchsorted(ends, length, side="right"))]
    for file, size in ((part, int(ends[len(rows) - 1]) if len(rows) else 0), (log, len(rows) * ROW.itemsize)):
        with file.open("ab") as stream:
            stream.truncate(size)
    return rows


def _commit(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())

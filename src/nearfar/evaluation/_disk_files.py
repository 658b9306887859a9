"""The files of an index in a folder: digests, memory-mapped names, and the record `about.json`."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.files import atomic_write, read_text, write_text

ABOUT = "about.json"  # the record; it is written last, and an index without it is unfinished
DIGEST = 32  # bytes of a digest


def digest_of_file(path: Path) -> str:
    """BLAKE2b of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST)).hexdigest()


def digest_of_rows(*arrays: np.ndarray, salt: str = "") -> str:
    """BLAKE2b of some arrays' shapes, types and bytes."""
    found = hashlib.blake2b(salt.encode(), digest_size=DIGEST)
    for array in arrays:
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return found.hexdigest()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, completely or not at all."""
    write_text(path, json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if it is missing or damaged."""
    try:
        found = json.loads(read_text("Index", path, most=1 << 26))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write an .npy file, completely or not at all."""
    with atomic_write(path) as temporary, temporary.open("xb") as stream:
        np.save(stream, array, allow_pickle=False)


class Names:
    """Names of rows in two memory-mapped files: the text of all in UTF-8, and where each ends, an .npy of int64 [n]."""

    def __init__(self, text: Path, ends: Path) -> None:
        self._ends = np.load(ends, mmap_mode="r", allow_pickle=False)
        whole = int(self._ends[-1]) if len(self._ends) else 0
        # an empty file cannot be mapped
        self._text = np.memmap(text, dtype=np.uint8, mode="r") if whole else np.zeros(0, dtype=np.uint8)
        if self._ends.dtype != np.int64 or self._ends.ndim != 1 or len(self._text) != whole:
            raise ValueError(f"{text} holds {len(self._text):,} bytes of names, and {whole:,} belong there")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> str:
        start, stop = int(self._ends[row - 1]) if row else 0, int(self._ends[row])
        return bytes(self._text[start:stop]).decode("utf-8", errors="replace")

    @staticmethod
    def write(text: Path, ends: Path, names: Sequence[str]) -> None:
        """Write both files."""
        coded = [name.encode("utf-8", errors="replace") for name in names]
        with atomic_write(text) as temporary, temporary.open("xb") as stream:
            stream.writelines(coded)
        write_npy(ends, np.cumsum([len(name) for name in coded], dtype=np.int64))


@contextmanager
def silence() -> Iterator[None]:
    """Silence the output streams of the process within the block, since faiss prints from C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    former = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor, _ in former:
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, copy in former:
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)

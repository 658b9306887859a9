"""Whole files or none: what is written appears under its name only once it is complete."""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

Arrays = Mapping[str, np.ndarray]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; it takes the name when the block ends, and is removed when the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text)


def write_arrays(path: Path, arrays: Arrays) -> None:
    """An `.npz` file, whole or not at all; equal arrays give equal bytes."""
    with whole(path) as temporary, temporary.open("xb") as stream:
        np.savez(stream, allow_pickle=False, **dict(arrays))


def read_arrays(owner: str, path: Path) -> dict[str, np.ndarray]:
    """Every array of an `.npz` file; nothing in it is ever unpickled.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no `.npz` file, is damaged, or holds pickled objects.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {path}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{owner}: {path} is no .npz file, or it was cut short; write it again with numpy.savez.")
    name = ""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {}
            for name in archive.files:
                found[name] = archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise ValueError(f"{owner}: {path} cannot be read ({error}); write it again.") from None
        raise ValueError(
            f"{owner}: {name!r} in {path} holds pickled objects, which are never loaded; save numbers or plain strings."
        ) from None
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{owner}: {path} is damaged ({error}); write it again.") from None
    return found

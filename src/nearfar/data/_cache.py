"""Arrays kept between runs: one `.npz` file whose name carries the SHA-256 of its bytes.

The name makes a torn or altered file visible without a second file that could disagree with the first:
two processes that write at once write equal bytes under an equal name, and each write is one rename.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearfar._files import whole

Arrays = Mapping[str, NDArray[np.generic]]


def default_folder() -> Path:
    """Return `$XDG_CACHE_HOME/nearfar`, or `~/.cache/nearfar` where that variable is unset or relative.

    Raises:
        RuntimeError: If the account has no home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "nearfar"
    try:
        return Path.home() / ".cache" / "nearfar"
    except RuntimeError as error:
        raise RuntimeError(
            "nearfar found no home folder to keep its cache in; set XDG_CACHE_HOME to an absolute path, "
            "or name a folder with the argument `cache`."
        ) from error


def cached(folder: Path, stem: str, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored under `stem`, or make and store them.

    A file whose bytes do not have the checksum in its name is made again, with one warning. A folder that
    cannot be written costs one warning and never the arrays.

    Args:
        folder: Where the file lives; made when missing.
        stem: Start of the file name; whatever the arrays depend on belongs in it.
        make: Called without arguments when no sound file is there.

    Returns:
        The arrays by name.
    """
    stored = _load(folder, stem)
    if stored is not None:
        return stored
    arrays = make()
    try:
        _store(folder, stem, arrays)
    except OSError as error:
        warnings.warn(
            f"The cache folder {folder} could not be written ({error.strerror or error}), so the next run "
            "makes the data again; name a writable folder with the argument `cache`.",
            stacklevel=3,
        )
    return arrays


def _load(folder: Path, stem: str) -> Arrays | None:
    """Return the arrays of the first sound file, after removing every broken one."""
    broken: list[Path] = []
    found: Arrays | None = None
    for path in _files(folder, stem):
        try:
            payload = path.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(payload).hexdigest() != path.stem.rpartition("-")[2]:
            broken.append(path)
        elif found is None:
            with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
    if found is None and broken:
        warnings.warn(
            f"The cache file {broken[0]} does not match its checksum, so the data is made again.",
            stacklevel=4,
        )
    for path in broken:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # a read-only folder: the file is simply passed over again next time
            continue
    return found


def _files(folder: Path, stem: str) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # missing, unreadable or no folder at all: nothing is stored there
        return []
    return [folder / name for name in names if name.startswith(f"{stem}-") and name.endswith(".npz")]


def _store(folder: Path, stem: str, arrays: Arrays) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **dict(arrays))
    payload = buffer.getvalue()
    with whole(folder / f"{stem}-{hashlib.sha256(payload).hexdigest()}.npz") as temporary:
        temporary.write_bytes(payload)

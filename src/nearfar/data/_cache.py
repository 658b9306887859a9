"""A cache of arrays on disk: one sealed `.npz` file for each name.

The seal detects a truncated or altered file, and each write is one rename: if two processes write at once, the later
one replaces equal bytes by equal bytes.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from nearfar._utils.files import Arrays, check_seal, read_arrays, write_arrays


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

    A file whose seal is broken is made again, with a warning. If the folder cannot be written, there is a warning and
    the arrays are returned all the same.

    Args:
        folder: Where the file lives; made when missing.
        stem: The name of the file; whatever the arrays depend on belongs in it.
        make: Called without arguments when no sound file is there.

    Returns:
        The arrays by name.
    """
    path = folder / f"{stem}.npz"
    stored = _load(path)
    if stored is not None:
        return stored
    arrays = make()
    try:
        write_arrays(path, arrays)
    except OSError as error:
        warnings.warn(
            f"The cache folder {folder} could not be written ({error.strerror or error}), so the next run "
            "makes the data again; name a writable folder with the argument `cache`.",
            stacklevel=3,
        )
    return arrays


def _load(path: Path) -> Arrays | None:
    """Read the arrays of a file with a valid seal; None if there is none."""
    try:
        if not path.is_file():
            return None
        check_seal("cache", path, needed=True)
        return read_arrays("cache", path)
    except OSError:  # it cannot be read, as if it were not there
        return None
    except ValueError:
        warnings.warn(f"The cache file {path} does not match its seal, so the data is made again.", stacklevel=4)
        return None

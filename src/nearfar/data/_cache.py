"""A cache of arrays on disk: one sealed `.npz` file for each name.

The seal detects a truncated or altered file, and each write is one rename: if two processes write at once, the later
one replaces equal bytes by equal bytes.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from nearfar._utils.files import Arrays, check_seal, read_arrays, write_arrays
from nearfar._utils.lock import alone


def default_folder() -> Path:
    """Return `$XDG_CACHE_HOME/nearfar`, or `~/.cache/nearfar` where that variable is unset or relative."""
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


def load_or_make(
    folder: Path,
    stem: str,
    make: Callable[[], Arrays],
    *,
    is_current: Callable[[Arrays], bool] = lambda arrays: True,
    lock: bool = False,
) -> Arrays:
    """Return the arrays stored under `stem`, or make and store them.

    `stem` must name whatever the arrays depend on, unless `is_current` compares that. With `lock`, other processes that
    need the same arrays wait, if the folder can hold a lock. A file with a broken seal is made again, with a warning.
    If the folder cannot be written, there is a warning, and the arrays are returned nevertheless.
    """
    path = folder / f"{stem}.npz"
    stored = _load(path, is_current)
    if stored is not None:
        return stored
    with contextlib.ExitStack() as stack:
        if lock:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone(folder / f".{path.name}.lock"))
            stored = _load(path, is_current)  # another process may have made it meanwhile
            if stored is not None:
                return stored
        arrays = make()
        try:
            write_arrays(path, arrays)
        except OSError as error:
            warnings.warn(
                f"The cache file {path} could not be written ({error.strerror or error}), so the next run makes it "
                "again; make room, or name a writable folder with XDG_CACHE_HOME (for glyphs, with `cache`).",
                stacklevel=3,
            )
        return arrays


def _load(path: Path, is_current: Callable[[Arrays], bool]) -> Arrays | None:
    """Read the arrays of a file with a valid seal; None if there is none, or if it is not current."""
    try:
        if not path.is_file():
            return None
        check_seal("cache", path, needed=True)
        arrays = read_arrays("cache", path)
    except OSError:  # treated as missing
        return None
    except ValueError:
        warnings.warn(f"The cache file {path} does not match its seal, so the data is made again.", stacklevel=4)
        return None
    return arrays if is_current(arrays) else None

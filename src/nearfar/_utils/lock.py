"""`alone`: one process at a time in a block, by a lock that the system releases when its process dies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["alone"]


@contextmanager
def alone(path: Path, busy: Exception | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is made and stays: removed, it would let in who waits for it beside who comes.

    Args:
        path: the file.
        busy: raised where another process holds it; None waits for that process.
    """
    if sys.platform == "win32":  # nothing there dies with its process as a lock does here
        yield
        return
    with path.open("wb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            if busy is None:
                raise
            raise busy from None
        yield

"""`alone`: let one process at a time into a block, by a lock that the system releases when the process dies."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_held: set[int] = set()


def _forget() -> None:
    """Release the locks in a forked process (a data loader): they must end with the process that took them."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def alone(
    path: Path, busy: Callable[[], Exception] | None = None, unlocked: Callable[[OSError | None], object] | None = None
) -> Iterator[None]:
    """Hold the lock of a folder or file.

    The file is created and never removed: otherwise one process could lock the removed file and another a new one. If
    another process holds the lock, the error that `busy` makes is raised; without it, this process waits. If the disk
    (with its error) or the system (with None) cannot lock, `unlocked` is called and the block runs without a lock;
    without it, the disk's error is raised.
    """
    if sys.platform == "win32":  # it has no lock that ends with its process
        if unlocked is not None:
            unlocked(None)
        yield
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(handle)
    taker = os.getpid()
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except OSError as error:
            if busy is not None and error.errno in (errno.EAGAIN, errno.EACCES):
                raise busy() from None
            if unlocked is None:
                raise
            unlocked(error)
        yield
    finally:
        if os.getpid() == taker:  # in a forked process the lock is closed, and its number may be another file's
            _held.remove(handle)
            os.close(handle)

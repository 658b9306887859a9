"""`full_disk`: writes that stop after some bytes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes within the block: a longer write stops there and raises an OSError."""
    resource = pytest.importorskip("resource")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))

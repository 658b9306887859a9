"""How busy a GPU is while a block runs, from nvidia-smi."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Utilization"]

EVERY = 0.5
"""Seconds between two samples."""
COMMAND = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


class Utilization:
    """Samples how busy the first GPU is while the block runs; without a GPU there are no samples."""

    def __enter__(self) -> Self:
        self.busy: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(EVERY):
            try:
                lines = subprocess.run(COMMAND, capture_output=True, encoding="utf-8", check=False).stdout.splitlines()
            except OSError:
                return
            if lines and lines[0].strip().isdigit():
                self.busy.append((time.time(), int(lines[0]) / 100))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def idle_between(self, start: float = 0.0, end: float = math.inf) -> float | None:
        """The mean idle share between two times of the clock; None without samples, or if all are zero."""
        shares = [share for at, share in self.busy if start <= at <= end]
        return 1 - sum(shares) / len(shares) if any(shares) else None

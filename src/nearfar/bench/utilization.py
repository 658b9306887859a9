"""How busy a GPU is while something runs, asked of nvidia-smi twice a second."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Utilization"]

EVERY = 0.5
"""Seconds between two questions."""
WORDS = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


class Utilization:
    """Samples how busy the first GPU is while the block runs; where there is none, it knows nothing."""

    def __enter__(self) -> Self:
        self.busy: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(EVERY):
            try:
                told = subprocess.run(WORDS, capture_output=True, encoding="utf-8", check=False).stdout.splitlines()
            except OSError:
                return
            if told and told[0].strip().isdigit():
                self.busy.append((time.time(), int(told[0]) / 100))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def idle_between(self, start: float = 0.0, end: float = math.inf) -> float | None:
        """The mean idle share between two times of the clock; None if nothing, or only zeros, were told."""
        shares = [share for at, share in self.busy if start <= at <= end]
        return 1 - sum(shares) / len(shares) if any(shares) else None

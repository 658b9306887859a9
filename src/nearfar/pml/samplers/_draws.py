"""Draws from NumPy's global generator, as PML makes them: `np.random.seed` gives both libraries the same batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["choose", "numpy_random"]


def numpy_random() -> Any:
    """NumPy's global generator, or the one that a script has set as PML's `utils.common_functions.NUMPY_RANDOM`."""
    switch = sys.modules.get("pytorch_metric_learning.utils.common_functions")
    return getattr(switch, "NUMPY_RANDOM", np.random)


def choose(rows: Sequence[int], count: int) -> list[int]:
    """Draw `count` of the rows, without repetition where there are enough."""
    drawn: list[int] = numpy_random().choice(np.asarray(rows), size=count, replace=len(rows) < count).tolist()
    return drawn

"""The customary values of K in recall@K for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["KS", "USUAL"]

USUAL = (1, 2, 4, 8)
_BIRDS_AND_CARS = (1, 2, 4, 8, 16, 32)

KS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "glyphs": USUAL,
        "omniglot": USUAL,
        "cub": _BIRDS_AND_CARS,
        "flowers": USUAL,
        "cars": _BIRDS_AND_CARS,
        "sop": (1, 10, 100, 1000),
        "inshop": (1, 10, 20, 30, 40, 50),
    }
)
"""Name of a data set -> the K at which papers report recall on it; `USUAL` for others."""

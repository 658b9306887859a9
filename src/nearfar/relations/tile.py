"""`Tile`: what a relation says of some rows against some columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tile"]


@dataclass(frozen=True, eq=False)
class Tile:
    """What a relation says about t rows against u columns.

    Args:
        same: [t, u] positive where true.
        valid: [t, u] pairs that count at all (not a sample with itself, nothing ignored).
        weight: [t, u] how much each pair counts, or None for once each.
    """

    same: Tensor
    valid: Tensor
    weight: Tensor | None = None

    @property
    def positive(self) -> Tensor:
        """Base measure [t, u] of the positive pairs: a mask, or weights."""
        return self._measure(self.same & self.valid)

    @property
    def negative(self) -> Tensor:
        """Base measure [t, u] of the negative pairs: a mask, or weights."""
        return self._measure(~self.same & self.valid)

    def _measure(self, mask: Tensor) -> Tensor:
        return mask if self.weight is None else torch.where(mask, self.weight, torch.zeros_like(self.weight))

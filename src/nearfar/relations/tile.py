"""`Tile`: the masks of a relation for some rows and columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tile"]


@dataclass(frozen=True, eq=False)
class Tile:
    """The masks of a relation for t rows and u columns.

    Args:
        same: [t, u] whether a pair is positive.
        valid: [t, u] whether a pair counts at all (not a sample with itself, no ignored label).
        weight: [t, u] pair weights, or None if every pair counts once.
        own_only: all pairs count except those of a sample with itself.
    """

    same: Tensor
    valid: Tensor
    weight: Tensor | None = None
    own_only: bool = False

    @property
    def positive(self) -> Tensor:
        """Base measure [t, u] of the positive pairs: a mask, or weights."""
        return self._measure(self.same & self.valid)

    @property
    def negative(self) -> Tensor:
        """Base measure [t, u] of the negative pairs: a mask, or weights."""
        return self._measure(~self.same if self.own_only else ~self.same & self.valid)

    def _measure(self, mask: Tensor) -> Tensor:
        return mask if self.weight is None else torch.where(mask, self.weight, torch.zeros_like(self.weight))

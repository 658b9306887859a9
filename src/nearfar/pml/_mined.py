"""`Mined`: the index tuple of one of our miners, together with the masks that it was made from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["Mined"]


class Mined(tuple[Tensor, ...]):
    """An index tuple like those of PML's miners, with masks [n, m] of the chosen pairs for the loss that uses it.

    The indices are (anchor, positive, anchor, negative), or (anchor, positive, negative). With masks, no pair is listed
    twice.
    """

    def __new__(
        cls, indices: Iterable[Tensor], positive: Tensor | None = None, negative: Tensor | None = None
    ) -> Mined:
        """Make a tuple of the indices."""
        made = super().__new__(cls, indices)
        made._masks = None if positive is None or negative is None else (positive, negative)
        made._versions = [each._version for each in made]
        return made

    _masks: tuple[Tensor, Tensor] | None
    _versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no index was modified since the miner made it."""
        return [each._version for each in self] == self._versions

    def masks(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """The masks for a batch of this shape; None if there are none, or if an index was modified since."""
        if self._masks is None or self._masks[0].shape != shape:
            return None
        return self._masks if self.unchanged else None

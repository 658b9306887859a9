"""`Composed`: losses that are a product after something was made first: proxies, a rectangle, a regularizer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor

from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, Loss, RobustLoss

__all__ = ["Composed"]


class Composed(Loss):
    """A `RobustLoss` whose rows, columns or relation are made from the batch first."""

    def __init__(self, robust: RobustLoss) -> None:
        super().__init__()
        self.robust = robust
        robust.owner = self.owner

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value."""
        return self.robust.exact_gradient

    @abstractmethod
    def _inner(self, call: Call) -> Call:
        """What the product inside is called with."""

    def _extra(self, embeddings: Tensor) -> Tensor | None:
        """A term beside the product, or None."""
        return None

    def _inside(self, call: Call) -> Call:
        if call.indices is not None:
            raise ValueError(f"{self.owner}: this loss chooses its own pairs and takes no index tuple; leave it out.")
        return self._inner(call)

    def _core(self) -> RobustLoss:
        return self.robust

    def _value(self, call: Call) -> Tensor:
        value = self.robust._value(self._inside(call))
        extra = self._extra(call.embeddings)
        return value if extra is None else value + extra

    def _explanation(self, call: Call) -> Explanation:
        """In the rows and columns of the product inside."""
        found = self.robust._explanation(self._inside(call))
        extra = self._extra(call.embeddings)
        return found if extra is None else replace(found, value=found.value + extra.detach())

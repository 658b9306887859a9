"""`Composed`: a `RobustLoss` on rows or pairs that are first computed from the batch, such as proxies."""

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor

from nearfar.losses.explanation import Explanation
from nearfar.losses.recipe import Recipe
from nearfar.losses.robust import Call

__all__ = ["Composed"]


class Composed(Recipe):
    """A recipe that first computes the rows, columns or relation of its product from the batch."""

    composed = True

    @abstractmethod
    def _inner(self, call: Call) -> Call:
        """The arguments of the product, given those of the loss."""

    def _extra(self, embeddings: Tensor) -> Tensor | None:
        """A term to add to the product, or None."""
        return None

    def _inside(self, call: Call) -> Call:
        if call.indices is not None:
            raise ValueError(f"{self.owner}: this loss chooses its own pairs and takes no index tuple; leave it out.")
        return self._inner(call)

    def _value(self, call: Call) -> Tensor:
        value = super()._value(self._inside(call))
        extra = self._extra(call.embeddings)
        return value if extra is None else value + extra

    def _explanation(self, call: Call) -> Explanation:
        """The explanation for the rows and columns of the product."""
        found = super()._explanation(self._inside(call))
        extra = self._extra(call.embeddings)
        return found if extra is None else replace(found, value=found.value + extra.detach())

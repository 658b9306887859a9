"""`Recipe`: the base class of named losses, which derive the factors of a `RobustLoss` from a few settings.

A `Composed` first computes rows or pairs from the batch, such as proxies.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

from torch import Tensor

from nearfar.losses.explanation import Explanation
from nearfar.losses.factors import Factors, Pairs
from nearfar.losses.robust import Call, RobustLoss

__all__ = ["Composed", "Recipe"]


class Recipe(RobustLoss, ABC, without=("over", "groups", "link", "reduction", "members")):
    """A loss that derives its factors from settings: constructor arguments that can be read and set at any time.

    A change takes effect at the next call, on every engine. A part that was given, such as a pair loss, is a setting
    too and may be modified itself; parts that the loss made from its settings refuse changes.

    Args:
        pair: the pair loss l(s, sign), or two of them (positive, negative), in place of the one that the loss makes.
        similarity: scores between rows; None for the default of the loss.
        miner: selects the pairs that count (nearfar.miners); None for all.
        engine: see `RobustLoss`.
    """

    pair: Pairs | None = None  # type: ignore[assignment]

    @abstractmethod
    def factors(self) -> Factors:
        """The factors for the present settings; a given `pair` later replaces the pair loss returned here."""


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

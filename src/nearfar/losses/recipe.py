"""`Recipe`: the base class of named losses, which derive the factors of a `RobustLoss` from a few settings."""

from abc import ABC, abstractmethod

from nearfar.losses.factors import Factors, Pairs
from nearfar.losses.robust import RobustLoss

__all__ = ["Recipe"]


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

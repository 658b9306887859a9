"""`Recipe`: the base class of named losses, which make the factors of a `RobustLoss` from settings of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nearfar.losses.factors import Factors, Pairs
from nearfar.losses.robust import RobustLoss

__all__ = ["Recipe"]


class Recipe(RobustLoss, ABC, without=("over", "groups", "link", "reduction", "members")):
    """A loss that makes its factors from settings: its arguments, which can be read and set at any time.

    The next call follows, on every engine. A part that was given, such as a pair loss, is a setting too and may be
    changed itself; what the loss makes from its settings refuses changes.

    Args:
        pair: the pair loss l(s, sign), or two of them (positive, negative), in place of the one that the loss makes.
        similarity: scores between rows, in place of the usual ones of the loss.
        miner: which pairs count (nearfar.miners); all of them where none is given.
        engine: see `RobustLoss`.
    """

    pair: Pairs | None = None  # type: ignore[assignment]

    @abstractmethod
    def factors(self) -> Factors:
        """The factors as the settings are now. A given `pair` stands in for the one made here."""

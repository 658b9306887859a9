"""Which rows of a batch have pairs to learn from, and the reason if none has."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Had"]


@dataclass(frozen=True, eq=False)
class Had:
    """Which rows [n] had a positive and which had a negative pair before mining."""

    had_positive: Tensor
    had_negative: Tensor

    @property
    def anchors(self) -> Tensor:
        """Rows with at least one pair."""
        return self.had_positive | self.had_negative

    def reason(self) -> str:
        """The reason why no anchor has the pairs that a loss needs; reads the data."""
        if not bool(self.anchors.any()):
            return "no two of its rows form a valid pair (a single row, or all are ignored)"
        if not bool(self.had_positive.any()):
            return "no two of its rows are positives of each other (every class is a singleton)"
        if not bool(self.had_negative.any()):
            return "all of its rows are positives of each other (there is one class only)"
        return "no anchor has both a positive and a negative pair"

"""Names of very many samples, made when they are asked for: a list of a million strings would take 70 MB."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chosen", "Counted", "Names", "Texts"]


class Names(Sequence[str]):
    """Base class: a sequence of strings that are made on access; a subclass writes `one` and `__len__`."""

    @abstractmethod
    def one(self, index: int) -> str:
        """The string at an index from 0."""

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))
        if isinstance(index, slice):
            return [self.one(number) for number in numbers[index]]
        return self.one(numbers[index])


class Texts(Names):
    """Strings in two arrays: their UTF-8 bytes one after the other, and where each begins.

    Args:
        data: uint8 [bytes].
        start: uint32 or int64 [n + 1], the first byte of each, and the end.

    >>> texts = Texts.of(["ant", "", "bée"])
    >>> list(texts), texts[-1], texts.data.nbytes
    (['ant', '', 'bée'], 'bée', 7)
    """

    def __init__(self, data: NDArray[np.uint8], start: NDArray[np.integer]) -> None:
        self.data, self.start = data, start

    @staticmethod
    def of(words: Iterable[str]) -> Texts:
        """Pack strings; what was no UTF-8 in an archive (it came as surrogates) is spelled with backslashes."""
        encoded = [word.encode("utf-8", "backslashreplace") for word in words]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        narrow = ends.astype(np.uint32) if ends[-1] < 2**32 else ends
        return Texts(np.frombuffer(b"".join(encoded), np.uint8), narrow)

    def __len__(self) -> int:
        return len(self.start) - 1

    def one(self, index: int) -> str:
        """The string at an index from 0."""
        return self.data[self.start[index] : self.start[index + 1]].tobytes().decode("utf-8")


class Chosen(Names):
    """The names of some rows of another data set, in their order.

    >>> list(Chosen(Texts.of(["ant", "bee", "cat"]), np.array([2, 0])))
    ['cat', 'ant']
    """

    def __init__(self, whole: Sequence[str], rows: NDArray[np.int64]) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return len(self.rows)

    def one(self, index: int) -> str:
        """The name of row number `index`."""
        return self.whole[int(self.rows[index])]


class Counted(Names):
    """A word and a number from 0.

    >>> list(Counted("train/", 2))
    ['train/0', 'train/1']
    """

    def __init__(self, word: str, count: int) -> None:
        self.word, self.total = word, count

    def __len__(self) -> int:
        return self.total

    def one(self, index: int) -> str:
        """The word and this number."""
        return f"{self.word}{index}"

"""`Rounds`: the batches of an epoch of `MPerClass` one after the other, where all of them would fill the memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearfar.batches.sampler import Classes, Rows, next_round

__all__ = ["Rounds"]

SHUFFLES = 1
"""Tells the generator that shuffles samples from that of rounds, whose number is the epoch's alone."""


class Rounds:
    """One epoch in rounds: each is a shuffled list of all classes, and batches are cut from one list after the other.

    With a class of 10,000 samples among 50,000 small ones an epoch has hundreds of millions of rows. Only this round
    and the end of the last one are kept, and one order of the samples of each class. A batch before the present one, or
    a later epoch, begins again with the first round, which takes a millisecond for each round of 50,000 classes.

    Args:
        classes: the rows of each class.
        width: C, classes in a batch.
        samples: S, samples of a class in a batch.
        random: the generator of one place, from numbers.
        epoch: the number of the epoch.
    """

    def __init__(
        self, classes: Classes, width: int, samples: int, random: Callable[..., np.random.Generator], epoch: int
    ) -> None:
        self.classes, self.width, self.samples, self.epoch = classes, width, samples, epoch
        self._random, self._groups = random, -(-classes.size // samples)
        self._salt = random(epoch, SHUFFLES).integers(2**63, dtype=np.uint64)
        self._order: Rows = classes.rows.copy()
        self._passes: Rows = np.full(len(classes), -1)
        self._begin()

    def batch(self, place: int) -> Rows:
        """The rows [C·S] of batch number `place` of the epoch."""
        count = len(self.classes)
        stream = np.arange(place * self.width, (place + 1) * self.width)
        rounds, places = np.divmod(stream, count)
        if rounds[0] < self._last and rounds[0] not in self._kept:
            self._begin()
        while self._last < rounds[-1]:
            self._draw()
        drawn: Rows = np.where(rounds == rounds[0], self._kept[rounds[0]][places], self._kept[rounds[-1]][places])
        passes, group = np.divmod(rounds, self._groups[drawn])
        new = self._passes[drawn] != passes
        self._shuffle(drawn[new], passes[new])
        inside = (group[:, None] * self.samples + np.arange(self.samples)) % self.classes.size[drawn, None]
        rows: Rows = self._order[self.classes.start[drawn, None] + inside].reshape(-1)
        return rows

    def _begin(self) -> None:
        self._stream, self._last = self._random(self.epoch), -1
        self._kept: dict[int, Rows] = {}

    def _draw(self) -> None:
        """Draw the next round, and keep the one before: a batch has no more classes than there are, so spans two."""
        count, before = len(self.classes), self._kept.get(self._last)
        tail = (self._last + 1) * count % self.width
        unfinished = before[count - tail :] if tail and before is not None else None
        fresh = next_round(self._stream, count, self.width, unfinished)
        self._kept = {self._last: before} if before is not None else {}
        self._last += 1
        self._kept[self._last] = fresh

    def _shuffle(self, drawn: Rows, passes: Rows) -> None:
        """Shuffle the samples of some classes for the pass that each begins: by keys that depend on nothing else."""
        size, start = self.classes.size[drawn], self.classes.start[drawn]
        of = np.repeat(np.arange(len(drawn)), size)
        place = start[of] + np.arange(len(of)) - np.repeat(np.cumsum(size) - size, size)
        begin = _mixed(self._salt + _mixed(drawn.astype(np.uint64)) + passes.astype(np.uint64))
        order = np.lexsort((_mixed(begin[of] + place.astype(np.uint64)), of))
        self._order[place] = self.classes.rows[place[order]]
        self._passes[drawn] = passes


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, each a function of its own (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return found

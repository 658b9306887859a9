"""`MPerClass`: batches of C classes with S samples each that visit every sample in every epoch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar.batches._sampler import Classes, GlobalBatches, Rows, class_rounds, shuffle_within, shuffled_rounds

MOST = 2**24  # an epoch of at most this many rows is planned at once, using about 400 MB; a longer one round by round
SHUFFLES = 1
"""Distinguishes the generator that shuffles samples from that of the rounds, which is seeded by the epoch only."""


class MPerClass(GlobalBatches):
    """Batches of C classes with S samples each, class after class: B = C·S rows.

    An epoch visits **every sample**, and **every class equally often**: R = max over classes of ceil(size / S) times,
    so that the largest class is covered once. The samples of a class are visited in shuffled order, S at a time, and
    reshuffled when all have been visited; a last, incomplete group is filled from the beginning of the same order. No
    group holds a sample twice, except in **small classes** of fewer than S samples, whose samples repeat in turn. All
    batches have the same size; the last one of an epoch is filled with classes of one more round.

    Args:
        labels: [n] whole numbers: a tensor, an array or a list.
        classes: C, at least 2 and at most the number of classes.
        samples: S, samples of each class in a batch.
        seed: determines the order of everything.
        rank: the rank of this process, which selects its part of each batch; see `GlobalBatches`.
        world: how many ranks share a batch.

    `len()` is the number of batches in an epoch, ceil(R·L / C) for L classes.

    >>> sampler = MPerClass([0, 0, 0, 0, 1, 1, 2, 2], classes=2, samples=2, seed=1)
    >>> len(sampler), [len(batch) for batch in sampler]
    (3, [4, 4, 4])
    """

    def __init__(
        self,
        labels: Tensor | NDArray[Any] | Sequence[int],
        *,
        classes: int,
        samples: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_whole("MPerClass", "classes", classes)
        check_whole("MPerClass", "samples", samples)
        self._classes = Classes("MPerClass", labels)
        if not 2 <= classes <= len(self._classes):
            raise ValueError(
                f"MPerClass: classes must be from 2 to the {len(self._classes)} classes of the labels, "
                f"but came as {classes}."
            )
        super().__init__(batch_size=classes * samples, seed=seed, rank=rank, world=world)
        self.classes, self.samples = int(classes), int(samples)
        self._groups: Rows = -(-self._classes.size // self.samples)
        self._rounds = int(self._groups.max())
        self._plan: tuple[int, Rows] | None = None
        self._long: _LongEpoch | None = None

    def __len__(self) -> int:
        return -(-self._rounds * len(self._classes) // self.classes)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.step // len(self)

    def _settings(self) -> list[int]:
        return [self._classes.mark, self.classes, self.samples, self.seed]

    def _global(self, step: int) -> Rows:
        epoch, place = divmod(step, len(self))
        if len(self) * self.batch_size > MOST:
            if self._long is None or self._long.epoch != epoch:
                self._long = _LongEpoch(self._classes, self.classes, self.samples, self._random, epoch)
            return self._long.batch(place)
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, self._draw(epoch)
        batch: Rows = self._plan[1][place]
        return batch

    def _draw(self, epoch: int) -> Rows:
        """All batches [len, B] of an epoch."""
        random = self._random(epoch)
        known, wide = self._classes, self.samples
        drawn = class_rounds(random, len(known), self.classes, len(self)).reshape(-1)
        turn = np.arange(len(drawn)) // len(known)  # how often the class was drawn earlier in this epoch
        passes, group = np.divmod(turn, self._groups[drawn])
        inside = (group[:, None] * wide + np.arange(wide)) % known.size[drawn, None]
        place = known.start[drawn, None] + inside
        rows = np.empty_like(place)
        # next to a large class, small ones are shuffled thousands of times per epoch: only touch classes in a pass
        order = np.argsort(passes, kind="stable")
        ends = np.searchsorted(passes[order], np.arange(int(passes[order[-1]]) + 2))
        shuffled, again = known.rows.copy(), np.arange(len(known.rows))
        for number, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            again = again[(self._rounds // self._groups >= number)[known.of[again]]]
            shuffled[again] = known.rows[again[shuffle_within(random, known.of[again])]]
            wanted = order[begin:end]
            rows[wanted] = shuffled[place[wanted]]
        return rows.reshape(len(self), self.batch_size)


class _LongEpoch:
    """One epoch, planned round by round: a round is a shuffled list of all classes, from which batches are cut.

    With a class of 10,000 samples among 50,000 small ones, an epoch has hundreds of millions of rows. In memory are the
    current round, the one before it, and one order of the samples of each class. An earlier batch starts again from the
    first round, which takes a millisecond per round of 50,000 classes. A batch has `width` classes.
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

    def _begin(self) -> None:
        self._stream = shuffled_rounds(self._random(self.epoch), len(self.classes), self.width)
        self._last = -1
        self._before: Rows = np.zeros(len(self.classes), dtype=np.int64)
        self._now: Rows = self._before

    def batch(self, place: int) -> Rows:
        """The rows [C·S] of batch number `place` of the epoch, which lies in one round or in two."""
        rounds, places = np.divmod(np.arange(place * self.width, (place + 1) * self.width), len(self.classes))
        if rounds[0] < self._last - 1:
            self._begin()
        while self._last < rounds[-1]:
            self._before, self._now = self._now, next(self._stream)
            self._last += 1
        drawn: Rows = np.where(rounds == self._last, self._now[places], self._before[places])
        passes, group = np.divmod(rounds, self._groups[drawn])
        new = self._passes[drawn] != passes
        self._shuffle(drawn[new], passes[new])
        inside = (group[:, None] * self.samples + np.arange(self.samples)) % self.classes.size[drawn, None]
        rows: Rows = self._order[self.classes.start[drawn, None] + inside].reshape(-1)
        return rows

    def _shuffle(self, drawn: Rows, passes: Rows) -> None:
        """Shuffle the samples of some classes for a pass each, by keys that depend on class and pass only."""
        size, start = self.classes.size[drawn], self.classes.start[drawn]
        of = np.repeat(np.arange(len(drawn)), size)
        place = start[of] + np.arange(len(of)) - np.repeat(np.cumsum(size) - size, size)
        begin = _hash(self._salt + _hash(drawn.astype(np.uint64)) + passes.astype(np.uint64))
        order = np.lexsort((_hash(begin[of] + place.astype(np.uint64)), of))
        self._order[place] = self.classes.rows[place[order]]
        self._passes[drawn] = passes


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014), number by number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return found

"""`MPerClass`: batches of C classes with S samples each that visit every sample in every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar.batches.rounds import Rounds
from nearfar.batches.sampler import Classes, GlobalBatches, Rows, class_rounds, shuffle_within

__all__ = ["MPerClass"]

MOST = 2**24
"""Rows of an epoch up to which it is planned at once, in some 400 MB; longer ones are planned round by round."""


class MPerClass(GlobalBatches):
    """Batches of C classes with S samples each, class after class: B = C·S rows.

    An epoch visits **every sample**, and **every class equally often**: R = max over classes of ceil(size / S) times,
    so that the largest class is covered once. The samples of a class are visited in shuffled order, S at a time, and
    reshuffled when all have been visited; a last, incomplete group is filled from the beginning of the same order. No
    group holds a sample twice, except in **small classes** of fewer than S samples, whose samples repeat in turn. The
    last batch of an epoch is filled with classes of one more round, so that all batches have the same size.

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
        self._long: Rounds | None = None

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
                self._long = Rounds(self._classes, self.classes, self.samples, self._random, epoch)
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
        turn = np.arange(len(drawn)) // len(known)  # how often the class has come before, in this epoch
        passes, group = np.divmod(turn, self._groups[drawn])
        inside = (group[:, None] * wide + np.arange(wide)) % known.size[drawn, None]
        place = known.start[drawn, None] + inside
        rows = np.empty_like(place)
        # where a class is large and others are small, these are shuffled again thousands of times in an epoch, so that
        # a pass touches only the classes that need it
        order = np.argsort(passes, kind="stable")
        ends = np.searchsorted(passes[order], np.arange(int(passes[order[-1]]) + 2))
        shuffled, again = known.rows.copy(), np.arange(len(known.rows))
        for number, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            again = again[(self._rounds // self._groups >= number)[known.of[again]]]
            shuffled[again] = known.rows[again[shuffle_within(random, known.of[again])]]
            wanted = order[begin:end]
            rows[wanted] = shuffled[place[wanted]]
        return rows.reshape(len(self), self.batch_size)

"""`MinedNegatives`: batches of anchors, other samples of their classes, and the hard negatives mined for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.tensors import check_tensor
from nearfar.batches._sampler import Classes, GlobalBatches, Rows, State, as_tensor


class MinedNegatives(GlobalBatches):
    """Batches of groups: an anchor, other samples of its class, and hard negatives of the anchor, all as rows.

    Every sample that has another of its class is an anchor once in an epoch. Its negatives are drawn from its row of a
    table that `nf.mine` gives for the samples among themselves, see `update`; before the first update, and where the
    table has none left, samples of other classes are drawn at random. No row occurs twice in a batch. A loss takes a
    batch like any other: with labels, every pair of it counts.

    In a training run, the table is mined anew after every `every` steps, with the network of that moment. The batches
    then depend on training, so that the sampler must not run ahead of it: use `num_workers=0` in the DataLoader.

    Args:
        labels: [n] whole numbers: a tensor, an array or a list.
        batch_size: B; rounded down to whole groups, and to one for each anchor.
        samples: rows of the anchor's class in a group, with the anchor; fewer in a class that has fewer.
        negatives: hard negatives in a group.
        every: steps between two tables in a training run.
        k: negatives per sample in these tables, from which those of a group are drawn.
        margin: the guard of `nf.mine` in these tables against unlabeled positives; None for no guard.
        seed: determines the order of everything.
        rank: the rank of this process, which selects its part of each batch; see `GlobalBatches`.
        world: how many ranks share a batch.

    `len()` is the number of batches in an epoch.

    >>> sampler = MinedNegatives([0, 0, 1, 1, 2, 2], batch_size=3, samples=2, negatives=1)
    >>> import torch
    >>> sampler.update(torch.tensor([[4], [5], [0], [0], [1], [1]]))
    >>> sampler.batch_size, len(sampler)
    (3, 6)
    """

    def __init__(
        self,
        labels: Tensor | NDArray[Any] | Sequence[int],
        *,
        batch_size: int,
        samples: int = 2,
        negatives: int = 2,
        every: int = 200,
        k: int = 20,
        margin: float | None = 0.0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        owner = "MinedNegatives"
        for name, value in (("samples", samples), ("negatives", negatives), ("every", every), ("k", k)):
            check_whole(owner, name, value)
        self._classes = Classes(owner, labels)
        self.labels: Rows = np.empty(len(self._classes.rows), dtype=np.int64)
        self.labels[self._classes.rows] = self._classes.of  # numbers of classes
        several = np.flatnonzero((self._classes.size > 1)[self.labels])
        self._anchors: Rows = several if len(several) else np.arange(len(self.labels))
        wide = samples + negatives
        if samples < 2 or not wide <= batch_size <= len(self.labels):
            raise ValueError(
                f"{owner}: batch_size must be from {max(2, samples) + negatives}, a group of samples (2 or more) and "
                f"negatives, to the {len(self.labels)} samples, but came as {batch_size} with samples={samples}."
            )
        self.groups = min(batch_size // wide, len(self._anchors))
        super().__init__(batch_size=self.groups * wide, seed=seed, rank=rank, world=world)
        self.samples, self.negatives, self.every, self.k, self.margin = samples, negatives, every, k, margin
        self._table: Rows | None = None
        self._order: tuple[int, Rows] | None = None

    def __len__(self) -> int:
        return -(-len(self._anchors) // self.groups)

    def update(self, places: Tensor) -> None:
        """Replace the table: [n, k] row numbers of negatives of each sample, -1 for none."""
        check_tensor("MinedNegatives", "places", places)
        n = len(self.labels)
        if places.ndim != 2 or len(places) != n or places.is_floating_point() or int(places.max()) >= n:
            raise ValueError(
                f"MinedNegatives: update takes row numbers [{n}, k] below {n}, but got {places.dtype} of shape "
                f"{list(places.shape)}; mine the samples of the sampler among themselves."
            )
        self._table = places.detach().cpu().numpy().astype(np.int64)

    def state_dict(self, step: int | None = None) -> State:
        state = super().state_dict(step)
        if state["step"] != self.step:
            raise ValueError(
                f"MinedNegatives: a state can be saved only when all {self.step} yielded batches have been used, but "
                f"step={step} came; use a DataLoader with num_workers=0."
            )
        return state | {"table": None if self._table is None else as_tensor(self._table.copy())}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._table = None if state["table"] is None else state["table"].cpu().numpy().copy()

    def _settings(self) -> list[int]:
        return [self._classes.mark, self.groups, self.samples, self.negatives, self.seed]

    def _global(self, step: int) -> Rows:
        epoch, place = divmod(step, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._random(epoch).permutation(self._anchors)
        # the last batch of an epoch is filled from the beginning of the same order
        chosen = np.arange(place * self.groups, (place + 1) * self.groups) % len(self._anchors)
        random, anchors = self._random(epoch, place), self._order[1][chosen]
        used = np.zeros(len(self.labels), dtype=bool)
        used[anchors] = True
        rows = list[int]()
        for anchor in anchors.tolist():
            known, number = self._classes, self.labels[anchor]
            own = known.rows[known.start[number] :][: known.size[number]]
            found = [anchor, *self._draw(random, own, self.samples - 1, used)]
            if self._table is not None:
                listed = self._table[anchor]
                found += self._draw(random, listed[listed >= 0], self.samples + self.negatives - len(found), used)
            rows += [*found, *self._draw_any(random, number, self.samples + self.negatives - len(found), used)]
        return np.array(rows, dtype=np.int64)

    def _draw(self, random: np.random.Generator, rows: Rows, count: int, used: NDArray[np.bool_]) -> list[int]:
        """Draw up to `count` of some rows that are not used yet, and mark them as used."""
        free = rows[~used[rows]]
        drawn: list[int] = random.permutation(free)[:count].tolist()
        used[drawn] = True
        return drawn

    def _draw_any(self, random: np.random.Generator, number: int, count: int, used: NDArray[np.bool_]) -> list[int]:
        """Draw `count` unused rows of other classes than `number`, or of any if there are no others."""
        found = list[int]()
        if count:
            some = np.unique(random.integers(len(used), size=8 * count))  # most often enough, and quick
            found = self._draw(random, some[self.labels[some] != number], count, used)
        if len(found) < count:
            found += self._draw(random, np.flatnonzero(self.labels != number), count - len(found), used)
        if len(found) < count:
            found += self._draw(random, np.arange(len(used)), count - len(found), used)
        return found

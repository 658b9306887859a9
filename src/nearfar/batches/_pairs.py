"""`QueryPairs`: batches of queries and their documents, one query of a class."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar.batches._m_per_class import MPerClass
from nearfar.batches._sampler import GlobalBatches, Rows


class QueryPairs(GlobalBatches):
    """Batches of records: the rows of B queries, then of their B documents, then of the hard negatives.

    An epoch visits every record, and no batch has two queries of one class, so that the other documents of a batch are
    wrong answers. Classes with fewer records are visited as often as the largest one (`MPerClass`).

    Args:
        labels: [n] whole numbers, the classes of all texts.
        records: [m, 2 + k], the rows of a query, of a document that answers it, and of k that do not.
        batch_size: B, the records of a batch.
        seed: determines the order of everything.
        rank: the rank of this process, which selects its part of each batch; see `GlobalBatches`.
        world: how many ranks share a batch.

    >>> sampler = QueryPairs([0, 0, 1, 1, 2, 2], [[0, 1], [2, 3], [4, 5]], batch_size=2)
    >>> batch = next(iter(sampler))
    >>> len(batch), [row + 1 for row in batch[:2]] == batch[2:]
    (4, True)
    """

    def __init__(
        self,
        labels: Tensor | NDArray[Any] | Sequence[int],
        records: NDArray[Any] | Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._records: Rows = np.asarray(records, dtype=np.int64)
        if self._records.ndim != 2 or self._records.shape[1] < 2 or not len(self._records):
            raise ValueError(
                f"QueryPairs: records must be the rows [m, 2 or more] of queries and documents, but came as "
                f"{list(self._records.shape)}."
            )
        of = np.asarray(labels)[self._records[:, 0]]
        count = len(np.unique(of))
        if not 2 <= batch_size <= count:
            raise ValueError(
                f"QueryPairs: batch_size must be from 2 to {count}, the number of classes of the queries, but came as "
                f"{batch_size}; write --batches.batch_size {count}, or fewer."
            )
        super().__init__(batch_size=batch_size, seed=seed, rank=rank, world=world)
        self._inside = MPerClass(of, classes=batch_size, samples=1, seed=seed)

    @property
    def documents(self) -> int:
        """How many documents each query brings into a batch: one right one, and its hard negatives."""
        return int(self._records.shape[1]) - 1

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[list[int]]:
        for rows in super().__iter__():
            yield self._records[rows].T.reshape(-1).tolist()

    def _settings(self) -> list[int]:
        return [*self._inside._settings(), zlib.crc32(self._records.tobytes())]

    def _global(self, step: int) -> Rows:
        return self._inside._global(step)

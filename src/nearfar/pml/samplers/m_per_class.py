"""PML's `MPerClassSampler`: m samples of each class, class after class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from nearfar.pml._names import check_names

__all__ = ["MPerClassSampler"]


class MPerClassSampler(Sampler[int]):
    """Yield row numbers, m of one class after m of another; with a batch size, batch_size / m classes per batch.

    Only classes with fewer than m samples repeat some. Draws follow `torch.manual_seed` (PML's follow NumPy's global
    generator): one number is drawn from torch's global generator when an iteration starts.

    Args:
        labels: [n] a class per sample: a tensor, an array or a list.
        m: samples of each class.
        batch_size: that of the DataLoader; m must divide it. Without it a pass visits all classes, shuffled.
        length_before_new_iter: how many numbers an iteration yields, rounded down to whole batches (or whole passes).
        unknown: anything else is an error.

    >>> sampler = MPerClassSampler([0, 0, 1, 1, 1, 2, 2], m=2, batch_size=4, length_before_new_iter=10)
    >>> len(sampler)
    8
    """

    def __init__(
        self,
        labels: Tensor | Sequence[Any],
        m: int,
        batch_size: int | None = None,
        length_before_new_iter: int = 100000,
        **unknown: object,
    ) -> None:
        check_names(self, unknown)
        self.m_per_class = int(m)
        self.batch_size = None if batch_size is None else int(batch_size)
        self.rows = _rows_by_class(labels)
        self.list_size = length_before_new_iter
        if self.m_per_class < 1 or not self.rows:
            raise ValueError(f"MPerClassSampler: m must be above zero and labels not empty, but m={m!r} came.")
        self.length_of_single_pass = self.m_per_class * len(self.rows)
        if self.batch_size is not None:
            self._check_batch(self.batch_size)
            self.list_size -= self.list_size % self.batch_size
        elif self.length_of_single_pass < self.list_size:
            self.list_size -= self.list_size % self.length_of_single_pass

    def _check_batch(self, size: int) -> None:
        if size % self.m_per_class:
            raise ValueError(f"MPerClassSampler: m must divide batch_size, but m={self.m_per_class} and {size} came.")
        if size > self.length_of_single_pass:
            raise ValueError(
                f"MPerClassSampler: batch_size must be at most m x classes = {self.m_per_class} x {len(self.rows)}, "
                f"but came as {size}; raise m or lower batch_size."
            )
        if size > self.list_size:
            raise ValueError(
                f"MPerClassSampler: length_before_new_iter must be at least batch_size = {size}, "
                f"but came as {self.list_size}."
            )

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
        left = self.list_size
        classes = len(self.rows) if self.batch_size is None else self.batch_size // self.m_per_class
        while left > 0:
            for name in torch.randperm(len(self.rows), generator=generator)[:classes].tolist():
                run = self._draw(self.rows[name], generator)[:left]
                left -= len(run)
                yield from run

    def _draw(self, rows: Tensor, generator: torch.Generator) -> list[int]:
        """Draw m rows of one class, without repetition if it has enough."""
        if len(rows) < self.m_per_class:
            place = torch.randint(len(rows), (self.m_per_class,), generator=generator)
        else:
            place = torch.randperm(len(rows), generator=generator)[: self.m_per_class]
        drawn: list[int] = rows[place].tolist()
        return drawn


def _rows_by_class(labels: Tensor | Sequence[Any]) -> list[Tensor]:
    found: dict[Any, list[int]] = {}
    for row, label in enumerate(labels.tolist() if isinstance(labels, Tensor) else labels):
        found.setdefault(label, []).append(row)
    return [torch.tensor(rows) for rows in found.values()]

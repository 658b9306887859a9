"""Batches for the training loop: drawn by the sampler, loaded by workers, augmented by (seed, step, sample)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from nearfar.data.loading import Batch, View, collate

__all__ = ["feed"]


class _Draws:
    """An endless batch sampler: one epoch of `sampler` after the other, each index with the number of its step."""

    def __init__(self, sampler: Any, step: int) -> None:
        self.sampler, self.step = sampler, step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            for batch in self.sampler:
                step += 1
                yield [(index, step) for index in batch]


def feed(view: View, sampler: Any, *, after: int, workers: int, pin: bool) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) for step = after + 1, after + 2, ... without end.

    The sampler continues from its own state. With workers it runs ahead of the training.
    """
    loader: DataLoader[Any] = DataLoader(
        view,
        batch_sampler=_Draws(sampler, after),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        generator=torch.Generator(),  # its own, so that loading never moves the generator that dropout draws from
    )
    return enumerate(loader, start=after + 1)

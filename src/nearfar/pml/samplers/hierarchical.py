"""PML's `HierarchicalSampler`: batches of classes that share a class above them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from nearfar._utils.checks import check_whole
from nearfar.pml.samplers._draws import choose, numpy_random

__all__ = ["HierarchicalSampler"]


class HierarchicalSampler(Sampler[list[int]]):
    """Yield batches, for `DataLoader(batch_sampler=...)`, in which classes are hard to tell apart.

    Every tuple of super-classes gives some batches; each super-class fills its share of a batch with classes of its
    own, some samples of each. Draws follow `np.random.seed`, as in PML.

    Args:
        labels: [n, c] columns of labels.
        batch_size: how many samples a batch has; fewer where the classes of a super-class do not fill its share.
        samples_per_class: how many samples of a class, or "all".
        batches_per_super_tuple: how many batches each tuple of super-classes gives.
        super_classes_per_batch: how many super-classes a batch has.
        inner_label: the column of the classes.
        outer_label: the column of the super-classes.

    >>> labels = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1], [3, 1], [3, 1]])
    >>> sampler = HierarchicalSampler(labels, batch_size=4, samples_per_class=2, batches_per_super_tuple=3)
    >>> len(sampler), {len(batch) for batch in sampler}
    (3, {4})
    """

    def __init__(
        self,
        labels: Any,
        batch_size: int,
        samples_per_class: int | str,
        batches_per_super_tuple: int = 4,
        super_classes_per_batch: int = 2,
        inner_label: int = 0,
        outer_label: int = 1,
    ) -> None:
        owner = "HierarchicalSampler"
        check_whole(owner, "batch_size", batch_size)
        check_whole(owner, "super_classes_per_batch", super_classes_per_batch)
        check_whole(owner, "batches_per_super_tuple", batches_per_super_tuple)
        if batch_size % super_classes_per_batch:
            raise ValueError(
                f"{owner}: batch_size must be a multiple of super_classes_per_batch={super_classes_per_batch}, "
                f"but came as {batch_size}."
            )
        self.sub_batch_len = batch_size // super_classes_per_batch
        if samples_per_class != "all":
            check_whole(owner, "samples_per_class, where it is not 'all',", samples_per_class)
            if self.sub_batch_len % int(samples_per_class):
                raise ValueError(
                    f"{owner}: samples_per_class must divide {self.sub_batch_len}, the share of a super-class in a "
                    f"batch, but came as {samples_per_class}."
                )
        self.batch_size, self.samples_per_class = batch_size, samples_per_class
        self.batches_per_super_tuple, self.super_classes_per_batch = batches_per_super_tuple, super_classes_per_batch
        table = (labels.cpu() if isinstance(labels, torch.Tensor) else np.asarray(labels)).tolist()
        self.super_image_lists = _tree([(row[outer_label], row[inner_label]) for row in table])
        self.super_pairs = list(itertools.combinations(self.super_image_lists, super_classes_per_batch))
        if not self.super_pairs:
            raise ValueError(
                f"{owner}: labels must hold {super_classes_per_batch} super-classes or more, but hold "
                f"{len(self.super_image_lists)}."
            )
        self.reshuffle()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.reshuffle()
        return iter(self.batches)

    def reshuffle(self) -> None:
        """Draw the batches of a pass."""
        chosen = itertools.product(self.super_pairs, range(self.batches_per_super_tuple))
        self.batches = [self._batch(pair) for pair, _ in chosen]
        numpy_random().shuffle(self.batches)

    def _batch(self, pair: tuple[Any, ...]) -> list[int]:
        batch = [row for name in pair for row in self._share(self.super_image_lists[name])]
        numpy_random().shuffle(batch)
        return batch

    def _share(self, classes: dict[Any, list[int]]) -> list[int]:
        """The rows of one super-class: classes in random order, each that still fits."""
        names = list(classes)
        numpy_random().shuffle(names)
        share: list[int] = []
        for name in names:
            if len(share) >= self.sub_batch_len:
                break
            rows = classes[name]
            count = len(rows) if self.samples_per_class == "all" else int(self.samples_per_class)
            if len(share) + count <= self.sub_batch_len:
                share += choose(rows, count)
        return share


def _tree(names: list[tuple[Any, Any]]) -> dict[Any, dict[Any, list[int]]]:
    """Rows by class by super-class; super-classes in the order of Python's sets, in which PML draws."""
    tree: dict[Any, dict[Any, list[int]]] = {above: {} for above in {above for above, _ in names}}
    for row, (above, name) in enumerate(names):
        tree[above].setdefault(name, []).append(row)
    return tree

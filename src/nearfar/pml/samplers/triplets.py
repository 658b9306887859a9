"""PML's `FixedSetOfTriplets`: the only ground truth is a list of triplets, drawn once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from nearfar._utils.checks import check_whole
from nearfar.pml.samplers._draws import choose, numpy_random

__all__ = ["FixedSetOfTriplets"]


class FixedSetOfTriplets(Sampler[int]):
    """Yield row numbers as anchor, positive, negative, anchor, positive, negative, ... of a fixed list of triplets.

    The list is drawn once: two classes, two samples of the first, one of the second. Each pass shuffles the triplets.
    Draws follow `np.random.seed`, as in PML. `miners.EmbeddingsAlreadyPackagedAsTriplets` hands them to a loss.

    Args:
        labels: [n] a class per sample: a tensor, an array or a list.
        num_triplets: how many triplets.

    Attributes:
        fixed_set_of_triplets: [num_triplets, 3] row numbers.

    >>> sampler = FixedSetOfTriplets([0, 0, 1, 1], num_triplets=5)
    >>> len(list(sampler)) == len(sampler) == 15
    True
    """

    def __init__(self, labels: Tensor | Sequence[Any], num_triplets: int) -> None:
        check_whole("FixedSetOfTriplets", "num_triplets", num_triplets)
        self.num_triplets = int(num_triplets)
        self.labels_to_indices: dict[Any, list[int]] = {}
        for row, label in enumerate(labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels):
            self.labels_to_indices.setdefault(label, []).append(row)
        if len(self.labels_to_indices) < 2:
            raise ValueError(
                f"FixedSetOfTriplets: labels must hold two classes or more, but hold {len(self.labels_to_indices)}."
            )
        self.create_fixed_set_of_triplets()

    def create_fixed_set_of_triplets(self) -> None:
        """Draw the triplets anew."""
        classes = list(self.labels_to_indices.values())
        found = []
        for _ in range(self.num_triplets):
            first, second = numpy_random().choice(len(classes), size=2, replace=False)
            pair = choose(classes[first], 2)
            found.append([*pair, *choose(classes[second], 1)])
        self.fixed_set_of_triplets = np.array(found)

    def __len__(self) -> int:
        return 3 * self.num_triplets

    def __iter__(self) -> Iterator[int]:
        numpy_random().shuffle(self.fixed_set_of_triplets)
        return iter(self.fixed_set_of_triplets.flatten().tolist())

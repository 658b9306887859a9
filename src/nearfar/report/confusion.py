"""What the worst classes are taken for: of each query of theirs, the class of its nearest neighbor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nearfar.evaluation.summary import Evaluation

__all__ = ["Row", "confusion"]


@dataclass(frozen=True)
class Row:
    """One class: what its queries found.

    Attributes:
        label: the class.
        example: a row that shows it, the one nearest to the mean of the class.
        recall_at_1: share of its queries whose nearest is right.
        queries: how many there are.
        counts: how often each of the worst classes was found, and last how often any other.
        mostly: the wrong class that was found most often, and how often; None where nothing wrong was found.
    """

    label: int
    example: int
    recall_at_1: float
    queries: int
    counts: tuple[int, ...]
    mostly: tuple[int, int] | None


def confusion(x: Tensor, y: Tensor, evaluation: Evaluation, rows: np.ndarray, nearest: np.ndarray) -> list[Row]:
    """The rows of the table, worst class first.

    Args:
        x: [n, d] vectors.
        y: [n] labels.
        evaluation: names the worst classes.
        rows: rows whose nearest is known; all rows of the worst classes are among them.
        nearest: the nearest other row of each of them.
    """
    labels = y.numpy()
    worst = [row.label for row in evaluation.worst]
    table = []
    for row in evaluation.worst:
        mine = labels[rows] == row.label
        found, counts = np.unique(labels[nearest[mine]], return_counts=True)
        by_class = dict(zip(found.tolist(), counts.tolist(), strict=True))
        wrong = [(count, -label) for label, count in by_class.items() if label != row.label]
        listed = [by_class.get(label, 0) for label in worst]
        table.append(
            Row(
                label=row.label,
                example=_example(x, rows[mine]),
                recall_at_1=row.recall_at_1,
                queries=row.queries,
                counts=(*listed, sum(by_class.values()) - sum(listed)),
                mostly=(-max(wrong)[1], max(wrong)[0]) if wrong else None,
            )
        )
    return table


def _example(x: Tensor, rows: np.ndarray) -> int:
    vectors = x[rows].float()
    return int(rows[int((vectors - vectors.mean(dim=0)).square().sum(dim=1).argmin())])

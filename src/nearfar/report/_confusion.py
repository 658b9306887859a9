"""Confusion of the worst classes: the classes of the nearest neighbors of their queries."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nearfar.evaluation._evaluate import Evaluation


@dataclass(frozen=True)
class Row:
    """One row of the confusion table: the nearest neighbors of one class's queries.

    Attributes:
        label: the class.
        example: the row nearest to the mean of the class, to illustrate it.
        recall_at_1: share of its queries whose nearest neighbor is right.
        queries: the number of its queries.
        counts: how often each of the worst classes was found; the last count is for all other classes.
        mostly: the wrong class that was found most often, and how often; None if no wrong class was found.
    """

    label: int
    example: int
    recall_at_1: float
    queries: int
    counts: tuple[int, ...]
    mostly: tuple[int, int] | None


def confusion(x: Tensor, y: Tensor, evaluation: Evaluation, rows: np.ndarray, nearest: np.ndarray) -> list[Row]:
    """Compute the rows of the confusion table of the worst classes of an evaluation, worst class first.

    The nearest other row is known of some `rows` of x [n, d], among them all rows of the worst classes.
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
        vectors = x[rows[mine]].float()
        central = int((vectors - vectors.mean(dim=0)).square().sum(dim=1).argmin())
        table.append(
            Row(
                label=row.label,
                example=int(rows[mine][central]),
                recall_at_1=row.recall_at_1,
                queries=row.queries,
                counts=(*listed, sum(by_class.values()) - sum(listed)),
                mostly=(-max(wrong)[1], max(wrong)[0]) if wrong else None,
            )
        )
    return table

"""One positive pair per class, as in `NPair`: the first row of the class, and its first positive column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["first_of_each"]


def first_of_each(
    mine: Tensor, theirs: Tensor | None, ignore: int | None, itself: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Select the first row of each class [n], and the first positive column of that row [m].

    Selects all columns if no class has a positive pair.

    Args:
        mine: [n] labels of the rows.
        theirs: [m] labels of the columns; None if they are the rows themselves.
        ignore: a label whose columns are never positive.
        itself: recognizes a row's own sample, given indices of rows and columns.
    """
    n = len(mine)
    row, rank = mine.sort(stable=True)
    first = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]])
    anchors = torch.zeros_like(first).index_put((rank,), first)
    if theirs is None:  # the second row of each class
        second = torch.cat([torch.zeros_like(first[:1]), first[:-1] > first[1:]])
        second = second if ignore is None else second & (row != ignore)
        positive = torch.zeros_like(first).index_put((rank,), second)
        return anchors, positive | ~positive.any()
    col, order = theirs.sort(stable=True)
    # position of the anchor of each column's class; not every class has one
    at = torch.searchsorted(row, col).clamp(max=max(n - 1, 0))
    good = (row[at] == col) & ~itself(rank[at], order) if n else torch.zeros_like(col, dtype=torch.bool)
    if ignore is not None:
        good = good & (col != ignore)
    so_far = good.cumsum(dim=0)
    before = torch.cat([so_far.new_zeros(1), so_far])[torch.searchsorted(col, col)]
    positive = torch.zeros_like(good).index_put((order,), good & (so_far - before == 1))
    return anchors, positive | ~positive.any()

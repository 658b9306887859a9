"""One positive pair per class, as in `NPair`: the first row of the class, and its first positive column."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["first_of_each", "first_two"]


def first_of_each(
    mine: Tensor, theirs: Tensor | None, ignore: int | None, itself: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Select the first row of each class [n], and the first positive column of that row [m].

    Selects all columns if no class has a positive pair. `mine` and `theirs` are labels, None if the columns are the
    rows; columns labeled `ignore` are never positive; `itself` recognizes a row's own sample by indices.
    """
    n = len(mine)
    row, rank = mine.sort(stable=True)
    first = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]])
    anchors = torch.zeros_like(first).index_put((rank,), first)
    if theirs is None:
        second = _second(first)
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


def first_two(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The second row of each class [n] as a mask, and for the first row its index, else -100 [n]."""
    row, rank = labels.sort(stable=True)
    second = _second(torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]]))
    follows = torch.cat([torch.where(second[1:], rank[1:], -100), rank.new_full((1,), -100)])
    return torch.zeros_like(second).index_put((rank,), second), torch.zeros_like(rank).index_put((rank,), follows)


def _second(first: Tensor) -> Tensor:
    """The second of each run that begins where `first` is true."""
    return torch.cat([torch.zeros_like(first[:1]), first[:-1] > first[1:]])

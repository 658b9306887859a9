"""Ranks of queries whose first right answer lies beyond their lists, found by counting the references before it.

With several processes each rank counts among its own references, and the counts are added up: the best right key is the
largest over all ranks, and of equal keys the earliest reference is the first.
"""

from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.progress import Watch
from nearfar.evaluation._exact_search import TILE
from nearfar.evaluation._ranking_keys import Buffer, Metric, Rows, keys
from nearfar.evaluation.parallel import SharedSpace, current_group, share

Ties = Literal["place", "favorable"]
WIDE = 8192  # references that are compared at once


def count_ranks(
    queries: Tensor,
    references: Tensor | None,
    labels: Tensor,
    names: Tensor,
    chosen: Tensor,
    *,
    similarity: Metric,
    ties: Ties,
    watch: Watch | None,
) -> Tensor:
    """Ranks [c] of the queries with row numbers `chosen` [c], each of which must have a right answer.

    `labels` [n] are the classes of the queries, `names` [m] those of the references; the rest as in `retrieve`.
    """
    group, itself = current_group(), references is None
    space = SharedSpace(group, queries, references, similarity)
    mine = share(-(-len(names) // WIDE), group.rank, group.world)
    left, right = (min(end * WIDE, len(names)) for end in (mine.start, mine.stop))
    tall = min(len(chosen), max(16, TILE // len(names)))
    counting = _Counting(group, space.references(slice(left, right)), names, left, tall, ties)
    found: list[Tensor] = []
    for part in torch.split(chosen, tall):
        found.append(counting.ranks(space.queries(part)[:], labels[part], part if itself else None))
        if watch is not None:
            watch("ranking queries whose answer lies deep", sum(map(len, found)), len(chosen))
    return torch.cat(found)


class _Counting:
    """Counts of references: of this rank's, `y` from number `left` on, added up over all ranks."""

    def __init__(self, group: ProcessGroup, y: Rows, names: Tensor, left: int, tall: int, ties: Ties) -> None:
        self.group, self.y, self.left, self.ties, self.last = group, y, left, ties, len(names)
        self.names = names[left : left + len(y)]
        self.scores, self.only = (Buffer(tall * len(y), y[:0].side) for _ in range(2))
        self.flags = Buffer(tall * len(y), names.bool()[:0])

    def ranks(self, strip: Rows, labels: Tensor, itself: Tensor | None) -> Tensor:
        """Ranks [t] of some queries; `itself` holds their row numbers if they are references too."""
        shape = (len(strip), len(self.y))
        row = self.scores.tile(*shape)
        for start in range(0, len(self.y), WIDE):
            row[:, start : start + WIDE] = keys(strip, self.y[start : start + WIDE])
        if itself is not None:
            here = ((itself >= self.left) & (itself < self.left + len(self.y))).nonzero().flatten()
            row[here, itself[here] - self.left] = -torch.inf
        right = torch.eq(self.names[None, :], labels[:, None], out=self.flags.tile(*shape))
        nothing = torch.full((), -torch.inf, dtype=row.dtype, device=row.device)
        best = nothing.expand(len(strip), 1)
        if len(self.y):
            best = torch.where(right, row, nothing, out=self.only.tile(*shape)).amax(dim=1, keepdim=True)
        best = self.group.largest(best.contiguous())
        rank = _count(torch.gt(row, best, out=self.flags.tile(*shape)))
        if self.ties == "place":
            rank = rank + self._earlier(torch.eq(row, best, out=self.flags.tile(*shape)), labels)
        return self.group.sum(rank) + 1

    def _earlier(self, equal: Tensor, labels: Tensor) -> Tensor:
        """Count the references [t] that tie with the best right one and precede the first right one of that score."""
        tied = self.group.sum(_count(equal)) > 1
        found = torch.zeros(len(equal), dtype=torch.long, device=equal.device)
        if not bool(tied.any()):
            return found
        first = torch.full_like(found, self.last)
        for i in tied.nonzero().flatten().tolist():  # few rows have ties
            right = (equal[i] & (self.names == labels[i])).nonzero()
            first[i] = int(right[0, 0]) + self.left if len(right) else self.last
        first = -self.group.largest(-first)
        for i in tied.nonzero().flatten().tolist():
            found[i] = equal[i, : max(0, int(first[i]) - self.left)].count_nonzero()
        return found


def _count(flags: Tensor) -> Tensor:
    """Count the true entries of each row [n]; on a CPU `sum` would first copy them to int64, eight times the size."""
    if flags.device.type != "cpu":
        return flags.sum(dim=1)
    return torch.stack([line.count_nonzero() for line in flags])

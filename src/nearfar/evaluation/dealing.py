"""The processes that share an evaluation: within `dealt`, searches and k-means are dealt out over the ranks.

    with dealt(Group("evaluate")):      # on every rank, around the same call with the same arguments
        found = evaluate(x, y)          # the same result on every rank, bit for bit that of one process

Every rank passes the same rows, which may lie in a memory-mapped file: a rank reads its share of them. Equal bits need
equal tiles, since the last digit of a matrix product depends on the shape of its factors (and for a few shapes on the
number of threads); so the tiles are those of one process, and each is computed on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation.spaces import Metric, Rows, odd_norms, rows_of_share, shift

__all__ = ["SharedSpace", "alone", "check_rows", "dealt", "filled", "paced", "ranks", "share"]

T = TypeVar("T")
WORK = 2**39
"""Multiplications between two messages at most: half a minute of one core at 20 billion a second, less elsewhere."""
_ranks: ContextVar[ProcessGroup] = ContextVar("ranks", default=ALONE)


def ranks() -> ProcessGroup:
    """The processes that share the evaluation at hand; outside of `dealt` this one alone."""
    return _ranks.get()


@contextmanager
def dealt(group: ProcessGroup) -> Iterator[None]:
    """Deal the evaluations within the block out over a group, every rank of which must run the same block."""
    before = _ranks.set(group)
    try:
        yield
    finally:
        _ranks.reset(before)


def alone() -> AbstractContextManager[None]:
    """Within this block the process works by itself again."""
    return dealt(ALONE)


def share(count: int, rank: int, world: int) -> range:
    """The numbers out of 0..count-1 that belong to a rank: consecutive, and as many as others have, or one more.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(count * rank // world, count * (rank + 1) // world)


def paced(mine: Sequence[T], most: int, work: int, beat: Callable[[], None]) -> Iterator[T]:
    """Yield this rank's pieces of work, with a message to the other ranks each `WORK` multiplications.

    Args:
        mine: the pieces.
        most: the most pieces that a rank has, so that all send equally many messages.
        work: multiplications of a piece.
        beat: sends the message.
    """
    step = max(1, WORK // max(1, work))
    for start in range(0, max(most, len(mine)), step):
        if start:
            beat()
        yield from mine[start : start + step]


def filled(group: ProcessGroup, like: Tensor, parts: Sequence[tuple[slice | Tensor, Tensor]]) -> Tensor:
    """A tensor of the shape of `like` on every rank, each of whose rows one rank knows: (rows, values) pairs."""
    nothing = -0.0 if like.is_floating_point() else 0  # -0.0 + v is v for every v, 0.0 too
    whole = torch.full_like(like, nothing)
    for rows, values in parts:
        whole[rows] = values
    return group.sum(whole)


class SharedSpace:
    """Queries and references as `Rows` of one space, any part of them on any rank, as one process would have them.

    Args:
        group: the ranks.
        queries: [n, d].
        references: [m, d].
        similarity: "cosine", "dot" or "euclidean".
    """

    def __init__(self, group: ProcessGroup, queries: Tensor, references: Tensor, similarity: Metric) -> None:
        self._sides, self.similarity = (queries, references), similarity
        self._origin = shift(references) if similarity == "euclidean" else None
        self._odd = [self._any_odd(group, side) for side in self._sides]

    def _any_odd(self, group: ProcessGroup, side: Tensor) -> bool:
        own = share(len(side), group.rank, group.world)
        return not group.all_agree(not odd_norms(side[own.start : own.stop], self.similarity), side)

    def queries(self, chosen: slice | Tensor) -> Rows:
        """Some of the queries."""
        return rows_of_share(self._sides[0][chosen], self.similarity, self._origin, self._odd[0])

    def references(self, chosen: slice | Tensor) -> Rows:
        """Some of the references."""
        return rows_of_share(self._sides[1][chosen], self.similarity, self._origin, self._odd[1])


def check_rows(owner: str, name: str, x: Tensor) -> None:
    """`check_embeddings`; over ranks each reads its share, and where one finds something wrong all raise an error."""
    group = ranks()
    if group.world == 1:
        check_embeddings(owner, name, x)
        return
    check_embeddings(owner, name, x, finite=False)
    own = share(len(x), group.rank, group.world)
    problem: Exception | None = None
    try:
        check_embeddings(owner, name, x[own.start : own.stop])
    except ValueError as error:
        problem = error
    if bool(group.any(torch.tensor(problem is not None, device=x.device))):
        raise problem or ValueError(f"{owner}: {name} must be finite, but other ranks found rows that are not.")

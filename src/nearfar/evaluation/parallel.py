"""Evaluation with several processes: within `split_over`, searches and k-means are divided among the ranks.

    with split_over(Group("evaluate")):     # on every rank, around the same call with the same arguments
        found = evaluate(x, y)              # the same result on every rank, bit for bit that of one process

Every rank passes the same rows, which may lie in a memory-mapped file; a rank reads its share of them. The last digit
of a matrix product depends on the shape of its factors (and for a few shapes on the number of threads), so the tiles
are those of one process, and each is computed on one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation._ranking_keys import Metric, Rows, make_rows, odd_norms, shift, spaces

__all__ = ["SharedSpace", "check_rows", "current_group", "merge_rows", "pace", "share", "single_process", "split_over"]

T = TypeVar("T")
WORK = 2**39
"""Maximum number of multiplications between two messages: half a minute on one core at 20 billion a second."""
_group: ContextVar[ProcessGroup] = ContextVar("group", default=ALONE)


def current_group() -> ProcessGroup:
    """The processes that share the current evaluation; outside of `split_over`, this process alone."""
    return _group.get()


@contextmanager
def split_over(group: ProcessGroup) -> Iterator[None]:
    """Divide the evaluations within the block among the ranks of a group, all of which must run the same block."""
    before = _group.set(group)
    try:
        yield
    finally:
        _group.reset(before)


def single_process() -> AbstractContextManager[None]:
    """Compute evaluations within the block in this process alone."""
    return split_over(ALONE)


def share(count: int, rank: int, world: int) -> range:
    """A rank's consecutive share of the numbers 0..count-1; the sizes of two shares differ by one at most.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(count * rank // world, count * (rank + 1) // world)


def pace(mine: Sequence[T], most: int, work: int, beat: Callable[[], None]) -> Iterator[T]:
    """Yield this rank's pieces of work, and send a message to the other ranks every `WORK` multiplications.

    Args:
        mine: the pieces.
        most: the largest number of pieces that a rank has, so that all ranks send equally many messages.
        work: multiplications per piece.
        beat: sends the message.
    """
    step = max(1, WORK // max(1, work))
    for start in range(0, max(most, len(mine)), step):
        if start:
            beat()
        yield from mine[start : start + step]


def merge_rows(group: ProcessGroup, like: Tensor, parts: Sequence[tuple[slice | Tensor, Tensor]]) -> Tensor:
    """Merge the (rows, values) pairs of all ranks into one tensor like `like`; one rank has a row's values."""
    nothing = -0.0 if like.is_floating_point() else 0  # -0.0 + v is v for every v, 0.0 too
    whole = torch.full_like(like, nothing)
    for rows, values in parts:
        whole[rows] = values
    return group.sum(whole)


class SharedSpace:
    """Queries and references as `Rows` of one space; any rank can prepare any part, with the bits of one process.

    Args:
        group: the ranks.
        queries: [n, d].
        references: [m, d]; None for the queries themselves.
        similarity: "cosine", "dot" or "euclidean".
    """

    def __init__(self, group: ProcessGroup, queries: Tensor, references: Tensor | None, similarity: Metric) -> None:
        self.similarity = similarity
        self._whole = spaces(queries, references, similarity) if group.world == 1 else None
        if self._whole is None:
            references = queries if references is None else references
            self._sides = queries, references
            self._origin = shift(references) if similarity == "euclidean" else None
            self._odd = [self._any_odd(group, side) for side in self._sides]

    def _any_odd(self, group: ProcessGroup, side: Tensor) -> bool:
        own = share(len(side), group.rank, group.world)
        return not group.all_agree(not odd_norms(side[own.start : own.stop], self.similarity), side)

    def queries(self, chosen: slice | Tensor) -> Rows:
        """Some of the queries."""
        return self._rows(0, chosen)

    def references(self, chosen: slice | Tensor) -> Rows:
        """Some of the references."""
        return self._rows(1, chosen)

    def _rows(self, side: int, chosen: slice | Tensor) -> Rows:
        if self._whole is not None:
            rows = self._whole[side]
            return Rows(rows.x[chosen], rows.side[chosen], self.similarity)
        return make_rows(self._sides[side][chosen], self.similarity, self._origin, self._odd[side])


def check_rows(owner: str, name: str, x: Tensor) -> None:
    """Check embeddings as `check_embeddings` does; each rank reads its share, and all fail if one finds a problem."""
    group = current_group()
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

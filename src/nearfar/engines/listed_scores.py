"""Scores of some pairs: from their own rows, from strips of the matrix product, or from the whole matrix.

Few pairs are scored from their own rows, in t·d work; many pairs from strips of the matrix product, of which only the
listed entries are kept. Derivatives of any order are the same sums, a few pairs or one strip at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from nearfar.similarity import Similarity

__all__ = ["How", "ListedScores", "cheapest"]

MOST = 3
"""If more than one in `MOST` of all pairs is listed, the list is no smaller than the matrix, which is used then."""
DEAR = 16
"""Cost of scoring a pair by itself, relative to a pair in a matrix product (measured: 16 to 26)."""
SMALL = 2**16
"""Smaller matrices are computed as a whole: strips do not pay, and the list must be half as long as otherwise."""
SMALL_FOR_TRIPLETS = 2**22
"""The same for triplets, whose two lists of pairs would need two products in strips."""
CHUNK = 2**18
"""Entries of the rows [t, d] that are gathered at a time, so that they fit in the processor's cache."""
CHUNK_ON_GPU = 2**24
"""The same on a GPU, where shorter chunks would wait for kernel launches."""
STRIP = 2**20
"""Entries of a strip of the matrix product."""

How = Literal["rows", "strips", "matrix"]


@dataclass(frozen=True, eq=False)
class ListedScores:
    """A lazy matrix of scores [n, m]: `scores[rows, cols]` computes only these entries.

    Args:
        similarity: computes the scores.
        rows: [n, d] prepared queries.
        cols: [m, d] prepared references.
        how: each pair from its own "rows", from "strips" of the matrix product, or from the whole "matrix".
    """

    similarity: Similarity
    rows: Tensor
    cols: Tensor
    how: How

    @classmethod
    def of(cls, similarity: Similarity, x: Tensor, y: Tensor | None, how: How) -> ListedScores:
        """The scores of raw rows x [n, d] and references y [m, d]."""
        if how == "rows" and (similarity.form is not None or not similarity.shifts):
            rows = similarity.prepare(x)  # differences of rows need no common origin
            return cls(similarity, rows, rows if y is None else similarity.prepare(y), how)
        return cls(similarity, *similarity.prepared(x, y), how)

    def of_references(self) -> ListedScores:
        """The scores [m, m] among the references."""
        if self.cols is self.rows:
            return self
        # the reference matrix may be much larger than that of rows and references
        how: How = "rows" if self.how == "rows" else "strips"
        return ListedScores(self.similarity, self.cols, self.cols, how)

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        """Scores [t] of rows and columns given by their indices [t]."""
        a, j = at
        if self.how == "matrix":
            return self._whole.reshape(-1).index_select(0, a * len(self.cols) + j)
        cols = None if self.cols is self.rows else self.cols
        if self.how == "rows" and self.similarity.form in ("distance", "squared"):
            gaps: Tensor = _Gaps.apply(self.rows, cols, a, j, self.similarity.form == "distance")  # type: ignore[no-untyped-call]
            return -gaps
        dots: Tensor = _Dots.apply(self.rows, cols, a, j, self.how == "strips")  # type: ignore[no-untyped-call]
        if not self.similarity.norms:
            return dots
        rows, refs = ((z * z).sum(dim=1) for z in (self.rows, self.cols))
        return self.similarity.finish(dots, rows.index_select(0, a), refs.index_select(0, j))

    @cached_property
    def _whole(self) -> Tensor:
        return self.similarity.scores(self.rows, self.cols)


def cheapest(pairs: int, all_pairs: int, *, triplets: bool = False) -> How:
    """The cheapest way to score some of all pairs, by operation counts; the matrix must not need much more memory."""
    small = all_pairs < (SMALL_FOR_TRIPLETS if triplets else SMALL)
    if (2 * DEAR if small else DEAR) * pairs <= all_pairs:
        return "rows"
    return "matrix" if small or MOST * pairs >= all_pairs else "strips"


def _chunks(d: int, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split lists [t] into parts whose rows [t, d] have about CHUNK entries."""
    chunk = CHUNK if lists[0].device.type == "cpu" else CHUNK_ON_GPU
    step = max(1, chunk // max(1, d))
    if len(lists[0]) <= step:
        return iter((lists,))
    return zip(*(torch.split(x, step) for x in lists), strict=True)


class _Gaps(torch.autograd.Function):
    """Distances, or squared distances, [t] of rows x[a] and y[j], from their differences, a few at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, a: Tensor, j: Tensor, root: bool) -> Tensor:
        cols = x if y is None else y
        parts = [
            (x.index_select(0, a) - cols.index_select(0, j)).square_().sum(dim=1) for a, j in _chunks(x.shape[1], a, j)
        ]
        found = _joined(parts)
        found = found.sqrt_() if root else found
        ctx.save_for_backward(x, y, a, j, found if root else None)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        x, y, a, j, gaps = ctx.saved_tensors
        cols, dx, dy = x if y is None else y, torch.zeros_like(x), None if y is None else torch.zeros_like(y)
        slope = 2 * grad_output[0] if gaps is None else grad_output[0] / torch.where(gaps == 0, torch.inf, gaps)
        for here, there, by in _chunks(x.shape[1], a, j, slope):
            along = (x.index_select(0, here) - cols.index_select(0, there)) * by[:, None]
            dx.index_add_(0, here, along)
            (dx if dy is None else dy).index_add_(0, there, along, alpha=-1)
        return dx, dy, None, None, None


class _Dots(torch.autograd.Function):
    """Products [t] of rows x[a] and y[j], each from its rows, a few at a time, or from strips of the matrix x yᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, a: Tensor, j: Tensor, strips: bool) -> Tensor:
        ctx.save_for_backward(x, y, a, j)
        ctx.strips = strips
        cols = x if y is None else y
        if not strips:
            return _joined(
                [(x.index_select(0, a) * cols.index_select(0, j)).sum(dim=1) for a, j in _chunks(x.shape[1], a, j)]
            )
        found = x.new_empty(len(a))
        for rows, members, flat in _sorted_strips(a, j, len(x), len(cols)):
            found[members] = (x[rows] @ cols.T).reshape(-1).index_select(0, flat)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        x, y, a, j = ctx.saved_tensors
        cols, slope = x if y is None else y, grad_output[0]
        dx, dy = torch.zeros_like(x), None if y is None else torch.zeros_like(y)
        sink = dx if dy is None else dy
        if not ctx.strips:
            for here, there, by in _chunks(x.shape[1], a, j, slope):
                dx.index_add_(0, here, cols.index_select(0, there) * by[:, None])
                sink.index_add_(0, there, x.index_select(0, here) * by[:, None])
            return dx, dy, None, None, None
        for rows, members, flat in _sorted_strips(a, j, len(x), len(cols)):
            tall = rows.stop - rows.start
            tile = slope.new_zeros(tall * len(cols)).index_add(0, flat, slope[members]).reshape(tall, -1)
            dx[rows] += tile @ cols
            sink += tile.T @ x[rows]
        return dx, dy, None, None, None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sorted_strips(a: Tensor, j: Tensor, n: int, m: int) -> list[tuple[slice, Tensor, Tensor]]:
    """Strips of rows, the pairs that lie in each, and their positions in its flattened scores."""
    tall = max(1, STRIP // max(1, m))
    order = a.argsort(stable=True)
    ends = torch.arange(0, n + tall, tall, device=a.device)
    cuts = torch.searchsorted(a.index_select(0, order), ends).tolist()
    found = []
    for place, (low, high) in enumerate(pairwise(cuts)):
        members, first = order[low:high], place * tall
        rows = slice(first, min(first + tall, n))
        found.append((rows, members, (a.index_select(0, members) - first) * m + j.index_select(0, members)))
    return found

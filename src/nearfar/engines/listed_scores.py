"""Scores of some pairs: each from its own two rows, or all from a matrix product if they are many."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nearfar.similarity import Similarity, root

__all__ = ["ListedScores", "fits_rows"]

DEAR = 16  # cost of scoring a pair by itself, relative to a pair in a matrix product (measured: 16 to 26)
CHUNK = 2**16  # entries of rows [t, d] gathered at a time: the system takes larger temporary memory back each time
CHUNK_ON_GPU = 2**24  # the same on a GPU, where shorter chunks would wait for kernel launches


def fits_rows(pairs: int, all_pairs: int, small: int) -> bool:
    """Whether `pairs` of all pairs are cheaper to score one by one than by a matrix product.

    A matrix of fewer than `small` entries takes so little time that the list must be half as long as otherwise.
    """
    return (2 * DEAR if all_pairs < small else DEAR) * pairs <= all_pairs


@dataclass(frozen=True, eq=False)
class ListedScores:
    """A lazy matrix of scores [n, m]: `scores[rows, cols]` computes only these entries."""

    similarity: Similarity  # computes the scores
    rows: Tensor  # [n, d] prepared queries
    cols: Tensor  # [m, d] prepared references
    by_rows: bool = True  # compute each entry from its own two rows, else take it from the matrix product

    @classmethod
    def of(cls, similarity: Similarity, x: Tensor, y: Tensor | None, *, by_rows: bool) -> "ListedScores":
        """The scores of raw rows x [n, d] and references y [m, d]."""
        if not by_rows or (similarity.shifts and similarity.form is None):
            return cls(similarity, *similarity.prepared(x, y), by_rows)
        rows = similarity.prepare(x)  # differences of rows need no common origin
        return cls(similarity, rows, rows if y is None else similarity.prepare(y))

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        """Scores [t] of rows and columns given by their indices [t]."""
        (a, j), form = at, self.similarity.form
        found: Tensor
        if self.by_rows:
            apart = form in ("distance", "squared")
            found = _PairProducts.apply(self.rows, self.cols, a, j, apart)  # type: ignore[no-untyped-call]
            if apart:
                return -root(found) if form == "distance" else -found
        else:
            found = self._product.index_select(0, a * len(self.cols) + j)
        if not self.similarity.norms:
            return found
        rows, refs = ((z * z).sum(dim=1) for z in (self.rows, self.cols))
        return self.similarity.finish(found, rows.index_select(0, a), refs.index_select(0, j))

    @cached_property
    def _product(self) -> Tensor:
        return (self.rows @ self.cols.T).reshape(-1)


class _PairProducts(torch.autograd.Function):
    """Products ⟨x[a], y[j]⟩, or with `apart` squared distances, [t], a few pairs at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, j: Tensor, apart: bool) -> Tensor:
        ctx.save_for_backward(x, y, a, j)
        ctx.apart = apart
        both = ((x.index_select(0, a), y.index_select(0, j)) for a, j in _chunks(x.shape[1], a, j))
        found = [((r - c).square_() if apart else r * c).sum(dim=1) for r, c in both]
        return found[0] if len(found) == 1 else torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        x, y, a, j = ctx.saved_tensors
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        slope = grad_output[0][:, None] * (2 if ctx.apart else 1)
        for here, there, by in _chunks(x.shape[1], a, j, slope):
            r, c = x.index_select(0, here), y.index_select(0, there)
            dr, dc = ((r - c) * by,) * 2 if ctx.apart else (c * by, r * by)
            dx.index_add_(0, here, dr)
            dy.index_add_(0, there, dc, alpha=-1 if ctx.apart else 1)
        return dx, dy, None, None, None


def _chunks(d: int, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split lists [t] into parts whose rows [t, d] have about CHUNK entries."""
    chunk = CHUNK if lists[0].device.type == "cpu" else CHUNK_ON_GPU
    return zip(*(torch.split(x, max(1, chunk // max(1, d))) for x in lists), strict=True)

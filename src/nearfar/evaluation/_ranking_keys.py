"""Keys by which rows are ranked, computed tile by tile without a second copy of the rows.

A key is larger the nearer two rows are. It is computed from their inner product and one number per row:

    cosine       ⟨x, y⟩ · 1/|x| · 1/|y|
    dot          ⟨x, y⟩
    euclidean    ⟨x, y⟩ - |x|²/2 - |y|²/2  =  -|x - y|²/2

Dividing after the product keeps ties: integer rows of equal norms have equal keys, to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearfar.similarity import unit

Metric = Literal["cosine", "dot", "euclidean"]
METRICS: tuple[Metric, ...] = ("cosine", "dot", "euclidean")
BLOCK = 2**22  # maximum number of entries that a pass over all rows copies at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows x [n, d], and the number per row that the keys need, `side` [n]."""

    x: Tensor
    side: Tensor
    similarity: Metric

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, chosen: slice | Tensor) -> Rows:
        """Some of the rows, in float32 or wider."""
        return Rows(wide(self.x[chosen]), self.side[chosen], self.similarity)


def wide(x: Tensor) -> Tensor:
    """Convert rows to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def spaces(queries: Tensor, references: Tensor | None, similarity: Metric) -> tuple[Rows, Rows]:
    """Prepare queries and references as `Rows` of one space; without references the queries are both."""
    origin = shift(queries if references is None else references) if similarity == "euclidean" else None
    x = make_rows(queries, similarity, origin)
    return x, x if references is None or references is queries else make_rows(references, similarity, origin)


def make_rows(x: Tensor, similarity: Metric, origin: Tensor | None, odd: bool = False) -> Rows:
    """Prepare rows [t, d], or some rows of a side with the bits that they have in the whole side.

    `origin` is the `shift` of the references, for "euclidean". With `odd`, rows are first scaled to unit length,
    because the whole side has `odd_norms`.
    """
    x = x.detach() if origin is None else wide(x.detach()) - origin
    x = unit(wide(x)) if odd else x
    if similarity == "dot" or not len(x):
        return Rows(x, wide(x.new_zeros(len(x))), similarity)
    if similarity == "euclidean":
        return Rows(x, torch.cat([wide(block).square().sum(dim=1) / 2 for block in _blocks(x)]), similarity)
    side = _inverse_norms(x)
    return make_rows(x, similarity, None, odd=True) if side is None else Rows(x, side, similarity)


def odd_norms(x: Tensor, similarity: Metric) -> bool:
    """Whether squares of the norms of some rows overflow or vanish, so that all rows must be scaled first."""
    return similarity == "cosine" and _inverse_norms(x.detach()) is None


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, BLOCK // max(1, x.shape[1])))


def _inverse_norms(x: Tensor) -> Tensor | None:
    """1/|x| of each row, 0 for a row of zeros; None if the square of a norm overflows or vanishes."""
    if not len(x):
        return wide(x.new_zeros(0))
    norm = torch.cat([torch.linalg.vector_norm(wide(block), dim=1) for block in _blocks(x)])
    tiny, huge = torch.finfo(norm.dtype).tiny ** 0.45, torch.finfo(norm.dtype).max ** 0.45
    odd = (norm > huge) | (norm < tiny)
    if bool(odd.any()) and bool((x[odd] != 0).any()):
        return None
    return torch.where(norm > 0, 1 / norm, 0.0)


def shift(x: Tensor) -> Tensor | None:
    """A shift of the origin [d] that avoids cancellation in |x|² + |y|² - 2xy; None if none is needed.

    It is an integer multiple of a power of two near the spread of the rows, so that integers remain integers and ties
    remain ties.
    """
    if len(x) < 2:
        return None
    sample = x[:: max(1, len(x) // 4096)].double()
    center = sample.mean(dim=0)
    spread = float((sample - center).square().mean())
    if float(center.square().mean()) <= 100 * spread or spread == 0:
        return None
    step = 2.0 ** round(math.log2(spread) / 2)
    return (torch.round(center / step) * step).to(wide(x[:0]).dtype)


def keys(x: Rows, y: Rows, out: Tensor | None = None) -> Tensor:
    """The keys [n, m] between rows selected by indexing; written to `out` if given."""
    product = torch.mm(x.x, y.x.T, out=out)
    if x.similarity == "cosine":
        product.mul_(x.side[:, None]).mul_(y.side)
    elif x.similarity == "euclidean":
        product.sub_(x.side[:, None]).sub_(y.side)
    return product


class Buffer:
    """Reusable memory for one tile; a new tile each time would fragment the allocator's memory."""

    def __init__(self, entries: int, like: Tensor) -> None:
        self.memory = torch.empty(entries, dtype=like.dtype, device=like.device)

    def tile(self, rows: int, columns: int) -> Tensor:
        """A contiguous, uninitialized matrix [rows, columns] in that memory."""
        return self.memory[: rows * columns].view(rows, columns)


def pair_keys(x: Rows, y: Rows) -> Tensor:
    """Keys [n] of pairs of rows: the i-th of x with the i-th of y."""
    product = (x.x * y.x).sum(dim=1)
    if x.similarity == "cosine":
        return product * x.side * y.side
    return product - x.side - y.side if x.similarity == "euclidean" else product


def scores(found: Tensor, similarity: Metric) -> Tensor:
    """Convert keys to scores: cosines within [-1, 1], inner products, negative distances."""
    if similarity == "cosine":
        return found.clamp(-1, 1)
    return found if similarity == "dot" else -torch.sqrt((-2 * found).clamp_min(0))

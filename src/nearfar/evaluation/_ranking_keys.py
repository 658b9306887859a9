"""Tiles of scores between the rows of one space, without a second copy of the rows.

Rows are ranked by a *key*, larger = nearer, computed from the inner product of the rows and one number per row:

    cosine       ⟨x, y⟩ · 1/|x| · 1/|y|
    dot          ⟨x, y⟩
    euclidean    ⟨x, y⟩ - |x|²/2 - |y|²/2  =  -|x - y|²/2

Dividing after the product keeps ties: rows of integers with equal norms give equal keys, to the last bit.
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
BLOCK = 2**22
"""Entries that a pass over all rows may copy at once."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows x [n, d] and the number per row that the keys need, `side` [n]."""

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
    queries = queries.detach()
    references = queries if references is None else references.detach()
    if similarity == "euclidean":
        origin = shift(references)
        if origin is not None:
            same = queries is references
            references = wide(references) - origin
            queries = references if same else wide(queries) - origin
    rows = _rows(queries, similarity)
    return rows, rows if queries is references else _rows(references, similarity)


def rows_of_share(x: Tensor, similarity: Metric, origin: Tensor | None, odd: bool) -> Rows:
    """`Rows` of some rows of a side, equal to those that `spaces` makes of the whole side.

    Args:
        x: [t, d].
        similarity: "cosine", "dot" or "euclidean".
        origin: `shift` of the references, for "euclidean".
        odd: whether the whole side has `odd_norms`, for "cosine".
    """
    x = x.detach() if origin is None else wide(x.detach()) - origin
    return _rows(unit(wide(x)) if odd else x, similarity)


def odd_norms(x: Tensor, similarity: Metric) -> bool:
    """Whether rows have norms whose squares overflow or vanish, so that all rows must be scaled first."""
    return similarity == "cosine" and _inverse_norms(x.detach()) is None


def _rows(x: Tensor, similarity: Metric) -> Rows:
    if similarity == "dot" or not len(x):
        return Rows(x, wide(x.new_zeros(len(x))), similarity)
    if similarity == "euclidean":
        return Rows(x, torch.cat([wide(block).square().sum(dim=1) / 2 for block in _blocks(x)]), similarity)
    side = _inverse_norms(x)
    return _rows(unit(wide(x)), similarity) if side is None else Rows(x, side, similarity)


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, BLOCK // max(1, x.shape[1])))


def _inverse_norms(x: Tensor) -> Tensor | None:
    """1/|x| of each row, 0 for a row of zeros; None if squares overflow or vanish: only such rows are worth a copy."""
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

    It is an integer multiple of a power of two near the rows' spread, so that integers stay integers and ties stay
    ties.
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
    """The keys [n, m] between rows selected by `[...]`; written to `out` if given."""
    product = torch.mm(x.x, y.x.T, out=out)
    if x.similarity == "cosine":
        product.mul_(x.side[:, None]).mul_(y.side)
    elif x.similarity == "euclidean":
        product.sub_(x.side[:, None]).sub_(y.side)
    return product


class Buffer:
    """Memory for one tile, reused: a new tile each time would fragment the allocator's memory."""

    def __init__(self, entries: int, like: Tensor) -> None:
        self.memory = torch.empty(entries, dtype=like.dtype, device=like.device)

    def tile(self, rows: int, columns: int) -> Tensor:
        """A contiguous, uninitialized matrix [rows, columns] in that memory."""
        return self.memory[: rows * columns].view(rows, columns)


def pair_keys(x: Rows, y: Rows) -> Tensor:
    """Keys [n] of corresponding rows: the first of x with the first of y, and so on."""
    product = (x.x * y.x).sum(dim=1)
    if x.similarity == "cosine":
        return product * x.side * y.side
    return product - x.side - y.side if x.similarity == "euclidean" else product


def scores(found: Tensor, similarity: Metric) -> Tensor:
    """Convert keys to scores: cosines within [-1, 1], inner products, negative distances."""
    if similarity == "cosine":
        return found.clamp(-1, 1)
    return found if similarity == "dot" else -torch.sqrt((-2 * found).clamp_min(0))

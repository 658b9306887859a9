"""Exact search: compute tiles of scores one after the other, and keep the k best of each query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.evaluation.best import Best
from nearfar.evaluation.spaces import Buffer, Metric, Rows, keys, scores, spaces

__all__ = ["TILE", "Neighbors", "Strip", "strips"]

Strip = tuple[slice, Tensor, Tensor]
TILE = 2**22
"""Entries of one tile of scores: 16 MB in float32."""
LISTS = 2**22
"""Entries of lists up to which a search of rows among themselves multiplies each pair of them once."""


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The k nearest references of each query.

    Attributes:
        scores: [n, k] similarities, larger = nearer (Euclidean: the negative distance), best first.
        places: [n, k] the row numbers of these references.
    """

    scores: Tensor
    places: Tensor


def strips(
    queries: Tensor, references: Tensor | None, *, k: int, similarity: Metric, tile: int = TILE
) -> Iterator[tuple[slice, Neighbors]]:
    """Yield `Neighbors` for a strip of queries at a time, for callers that do not need the whole [n, k] list."""
    x, y = spaces(queries, references, similarity)
    side = max(1, math.isqrt(tile))
    # both sides of a tile are read where that pays: lists that fit, and rows many enough for short ones
    once = references is None and x.x.device.type == "cpu" and 256 * k <= len(x) <= LISTS // k
    found = _once(x, k, side) if once else _each(x, y, k, *_shape(side, tile, len(y)), references is None)
    for rows, best, places in found:
        yield rows, Neighbors(scores(best, similarity), places)


def _shape(side: int, tile: int, columns: int) -> tuple[int, int]:
    """Height and width of a tile: whole rows where they are short, else four times as wide as high."""
    wide = columns if columns <= 4 * side else 2 * side
    return max(1, tile // max(1, wide)), max(1, wide)


def _each(x: Rows, y: Rows, k: int, tall: int, wide: int, itself: bool) -> Iterator[Strip]:
    """Compare strips of rows with all columns."""
    buffer = Buffer(min(tall, len(x)) * min(wide, len(y)), x[:0].side)
    for rows in _slices(0, len(x), tall):
        strip = x[rows]
        best = Best(len(strip), k, strip.side)
        for columns in _slices(0, len(y), wide):
            chosen = y[columns]
            tile = keys(strip, chosen, out=buffer.tile(len(strip), len(chosen)))
            if itself:
                _hide_itself(tile, rows.start, columns.start)
            best.meet(slice(0, len(strip)), tile, columns.start)
        yield rows, best.keys, best.places


def _once(x: Rows, k: int, side: int) -> Iterator[Strip]:
    """Compare rows among themselves: each pair is multiplied once, and its tile is read along rows and columns.

    Each row sees its columns from left to right: the strips above its own first, then its own, then the rest.
    """
    best = Best(len(x), k, x[:0].side)
    buffer = Buffer(min(side, len(x)) ** 2, x[:0].side)
    for rows in _slices(0, len(x), side):
        strip = x[rows]
        square = keys(strip, strip, out=buffer.tile(len(strip), len(strip)))
        square.fill_diagonal_(-torch.inf)
        best.meet(rows, square, rows.start)
        for columns in _slices(rows.stop, len(x), side):
            chosen = x[columns]
            tile = keys(strip, chosen, out=buffer.tile(len(strip), len(chosen)))
            best.meet(rows, tile, columns.start)
            best.meet(columns, tile.T, rows.start)
        yield rows, best.keys[rows], best.places[rows]


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _hide_itself(tile: Tensor, top: int, left: int) -> None:
    """Mask the diagonal of the whole matrix where it crosses this tile."""
    first, last = max(top, left), min(top + tile.shape[0], left + tile.shape[1])
    if first < last:
        place = torch.arange(first, last, device=tile.device)
        tile[place - top, place - left] = -torch.inf

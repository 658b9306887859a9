"""Exact search: compute tiles of scores one after the other, and keep the k best of each query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.progress import Watch
from nearfar.evaluation.best import Best
from nearfar.evaluation.dealing import ranks
from nearfar.evaluation.dealt_sweep import Grid, hide_itself, over_ranks
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
    queries: Tensor,
    references: Tensor | None,
    *,
    k: int,
    similarity: Metric,
    tile: int = TILE,
    watch: Watch | None = None,
) -> Iterator[tuple[slice, Neighbors]]:
    """Yield `Neighbors` for a strip of queries at a time, for callers that do not need the whole [n, k] list.

    Over ranks (`nearfar.evaluation.dealing`) each yields its own queries only.
    """
    grid, group = _grid(queries, references, k, tile), ranks()
    if group.world > 1:
        options: dict[str, Any] = {"k": k, "similarity": similarity, "watch": watch}
        found = over_ranks(group, queries, references, grid, **options)
    else:
        x, y = spaces(queries, references, similarity)
        found = _once(x, k, grid.tall) if grid.once else _each(x, y, k, grid)
    for rows, best, places in found:
        yield rows, Neighbors(scores(best, similarity), places)
        if watch is not None and group.world == 1:
            watch("searching neighbors of queries", rows.stop, len(queries))


def _grid(queries: Tensor, references: Tensor | None, k: int, tile: int) -> Grid:
    """The tiles of a sweep: whole rows where they are short, else four times as wide as high."""
    side, itself = max(1, math.isqrt(tile)), references is None
    columns = len(queries) if references is None else len(references)
    # both sides of a tile are read where that pays: lists that fit, and rows many enough for short ones
    once = itself and queries.device.type == "cpu" and 256 * k <= columns <= LISTS // k
    wide = columns if columns <= 4 * side else 2 * side
    tall, wide = (side, side) if once else (max(1, tile // max(1, wide)), max(1, wide))
    return Grid(len(queries), columns, tall, wide, itself, once)


def _each(x: Rows, y: Rows, k: int, grid: Grid) -> Iterator[Strip]:
    """Compare strips of rows with all columns."""
    buffer = Buffer(min(grid.tall, len(x)) * min(grid.wide, len(y)), x[:0].side)
    for rows in map(grid.strip, range(grid.strips)):
        strip = x[rows]
        best = Best(len(strip), k, strip.side)
        for columns in map(grid.tile, range(grid.tiles)):
            chosen = y[columns]
            tile = keys(strip, chosen, out=buffer.tile(len(strip), len(chosen)))
            if grid.itself:
                hide_itself(tile, rows.start, columns.start)
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

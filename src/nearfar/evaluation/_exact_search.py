"""Exact search: compute tiles of keys and keep the k best references of each query, in one process or several.

With several processes, each rank holds a share of the references. The owner of a strip of queries sends it to all
ranks, each compares it with its own references, and the owner merges the lists that come back. A rank
holds its share of the rows, its lists and one tile. Tiles are those of one process (see `nearfar.evaluation.parallel`),
so that keys are the same bits.

If queries are the references, each pair of strips i < j is multiplied once: on the owner of j if i + j is even, else on
the owner of i. So each rank does half of the work of each visit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.progress import Watch
from nearfar.evaluation._ranking_keys import Buffer, Metric, Rows, keys, scores, spaces
from nearfar.evaluation._top_k import TopK, merge_lists
from nearfar.evaluation.parallel import SharedSpace, current_group, pace, share

Lists = tuple[Tensor, Tensor]
Strip = tuple[slice, Tensor, Tensor]
TILE = 2**22  # entries of one tile of keys: 16 MB in float32
LISTS = 2**22  # largest number of list entries for which a search among the queries multiplies each pair of rows once


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
    """Yield the `Neighbors` of one strip of queries at a time, for callers that do not need the whole [n, k] list.

    With several processes (`nearfar.evaluation.parallel`), each rank yields its own queries only.
    """
    grid, group = _grid(queries, references, k, tile), current_group()
    if grid.once and group.world == 1:
        found = _once(spaces(queries, None, similarity)[0], k, grid)
    else:
        sweep = _Sweep(group, queries, references, grid, k, similarity)
        found = sweep.by_queries() if sweep.whole else sweep.by_references(watch)
    for rows, best, places in found:
        yield rows, Neighbors(scores(best, similarity), places)
        if watch is not None and group.world == 1:
            watch("searching neighbors of queries", rows.stop, len(queries))


@dataclass(frozen=True)
class _Grid:
    """How a search is cut into tiles, in one process and in many."""

    rows: int  # number of queries
    columns: int  # number of references
    tall: int  # queries per strip
    wide: int  # references per tile
    itself: bool  # the queries are the references
    once: bool  # each pair of strips is multiplied once; then `tall` and `wide` are equal

    def strip(self, number: int) -> slice:
        return slice(number * self.tall, min((number + 1) * self.tall, self.rows))

    def tile(self, number: int) -> slice:
        return slice(number * self.wide, min((number + 1) * self.wide, self.columns))

    @property
    def strips(self) -> int:
        return -(-self.rows // self.tall)

    @property
    def tiles(self) -> int:
        return -(-self.columns // self.wide)


def _grid(queries: Tensor, references: Tensor | None, k: int, tile: int) -> _Grid:
    """The tiles of a search: whole rows if they are short, else four times as wide as high."""
    side, itself = max(1, math.isqrt(tile)), references is None
    columns = len(queries) if references is None else len(references)
    # reading both sides of a tile pays if lists are small and there are many more rows than k
    once = itself and queries.device.type == "cpu" and 256 * k <= columns <= LISTS // k
    wide = columns if columns <= 4 * side else 2 * side
    tall, wide = (side, side) if once else (max(1, tile // max(1, wide)), max(1, wide))
    return _Grid(len(queries), columns, tall, wide, itself, once)


def _once(x: Rows, k: int, grid: _Grid) -> Iterator[Strip]:
    """Compare rows among themselves in one process: each tile is read along its rows and along its columns.

    Each row sees its columns from left to right: the strips above its own first, then its own, then the rest.
    """
    best = TopK(len(x), k, x[:0].side)
    buffer = Buffer(min(grid.tall, len(x)) ** 2, x[:0].side)
    for number in range(grid.strips):
        rows = grid.strip(number)
        strip = x[rows]
        square = keys(strip, strip, out=buffer.tile(len(strip), len(strip)))
        square.fill_diagonal_(-torch.inf)
        best.update(rows, square, rows.start)
        for columns in map(grid.tile, range(number + 1, grid.tiles)):
            chosen = x[columns]
            tile = keys(strip, chosen, out=buffer.tile(len(strip), len(chosen)))
            best.update(rows, tile, columns.start)
            best.update(columns, tile.T, rows.start)
        yield rows, best.keys[rows], best.places[rows]


class _Sweep:
    """One rank's part of a search: its queries `x`, from row `top` on, and its references `y`, from row `left` on.

    If each rank holds all references (one process, or a gallery with fewer tiles than ranks), `whole` is true, and each
    rank searches only for its own queries.
    """

    def __init__(
        self, group: ProcessGroup, queries: Tensor, references: Tensor | None, grid: _Grid, k: int, similarity: Metric
    ) -> None:
        self.group, self.grid, self.k = group, grid, k
        self.whole = group.world == 1 or (not grid.once and grid.tiles < group.world)
        self.tiles = range(grid.tiles) if self.whole else share(grid.tiles, group.rank, group.world)
        self.strips = share(grid.strips, group.rank, group.world)
        self.left, self.top = self.tiles.start * grid.wide, self.strips.start * grid.tall
        space = SharedSpace(group, queries, references, similarity)
        self.y = space.references(slice(self.left, min(self.tiles.stop * grid.wide, grid.columns)))
        # if strips are tiles, a rank's queries are also its references
        own = slice(self.top, min(self.strips.stop * grid.tall, grid.rows))
        self.x = self.y if grid.once else space.queries(own)
        self.buffer = Buffer(min(grid.tall, grid.rows) * min(grid.wide, grid.columns), self.y.side)

    def by_queries(self) -> Iterator[Strip]:
        """Compare this rank's strips with all references."""
        grid, unused = self.grid, TopK(0, self.k, self.y.side)
        work = grid.tall * grid.columns * self.y.x.shape[1]
        for number in pace(self.strips, -(-grid.strips // self.group.world), work, self._beat):
            rows = grid.strip(number)
            strip = self.x[slice(rows.start - self.top, rows.stop - self.top)]
            best = self._compare(number, strip, self.tiles, unused)
            yield rows, best.keys, best.places

    def by_references(self, watch: Watch | None) -> Iterator[Strip]:
        """Send strips around, and compare each with every rank's references."""
        grid, own = self.grid, TopK(len(self.y) if self.grid.once else 0, self.k, self.y.side)
        waiting, work = list[tuple[slice, Lists]](), grid.tall * grid.wide * self.y.x.shape[1]
        for number in range(grid.strips):
            strip, owner = self._send(number)
            tiles = pace(self.tiles, -(-grid.tiles // self.group.world), work, self._beat)  # in case a strip takes long
            best = self._compare(number, strip, tiles, own)
            best.places += self.left
            found = [self.group.collect(owner, side) for side in (best.keys, best.places)]
            if found[0] is not None and found[1] is not None:
                lists = merge_lists(list(zip(found[0], found[1], strict=True)))
                if grid.once:
                    waiting.append((grid.strip(number), lists))
                else:
                    yield grid.strip(number), *lists
            if watch is not None:
                watch("searching neighbors of queries", grid.strip(number).stop, grid.rows)
        for rows, lists in waiting:
            here = slice(rows.start - self.left, rows.stop - self.left)
            yield rows, *merge_lists([lists, (own.keys[here], own.places[here])])

    def _send(self, number: int) -> tuple[Rows, int]:
        """Send a strip of queries to every rank; return it with its owner."""
        rows, world = self.grid.strip(number), self.group.world
        owner = next(rank for rank in range(world) if number in share(self.grid.strips, rank, world))
        wide = self.x[:0]
        packed = torch.empty(rows.stop - rows.start, wide.x.shape[1] + 1, dtype=wide.side.dtype, device=wide.x.device)
        if owner == self.group.rank:
            strip = self.x[slice(rows.start - self.top, rows.stop - self.top)]
            packed[:, :-1], packed[:, -1] = strip.x, strip.side
        self.group.copy_from(owner, packed)
        return Rows(packed[:, :-1].contiguous(), packed[:, -1].contiguous(), self.y.similarity), owner

    def _compare(self, number: int, strip: Rows, tiles: Iterable[int], own: TopK) -> TopK:
        """Search for a strip in tiles of this rank's references; with `once`, update their own lists too."""
        grid, rows, best = self.grid, self.grid.strip(number), TopK(len(strip), self.k, strip.side)
        for tile in tiles:
            columns = grid.tile(tile)
            here = slice(columns.start - self.left, columns.stop - self.left)
            if grid.once and tile != number:
                if ((number + tile) % 2 == 0) == (number < tile):
                    self._compare_both(number, strip, tile, here, best, own)
                continue
            found = keys(strip, self.y[here], out=self.buffer.tile(len(strip), here.stop - here.start))
            if grid.itself:
                _hide_itself(found, rows.start, columns.start)
            best.update(slice(0, len(strip)), found, here.start)
        return best

    def _compare_both(self, number: int, strip: Rows, tile: int, here: slice, best: TopK, own: TopK) -> None:
        """Multiply a visiting strip with one of this rank's, the earlier one first, and update the lists of both."""
        pair = (strip, self.y[here]) if number < tile else (self.y[here], strip)
        found = keys(*pair, out=self.buffer.tile(len(pair[0]), len(pair[1])))
        visiting, standing = (found, found.T) if number < tile else (found.T, found)
        # half of the tiles before this one were compared here; for the first the list is empty and reads all of it
        met = (tile - self.tiles.start) // 2 * self.grid.wide
        best.update(slice(0, len(strip)), visiting, here.start, seen=met)
        own.update(here, standing, number * self.grid.tall, seen=max(0, number - 1) // 2 * self.grid.tall)

    def _beat(self) -> None:
        self.group.beat(self.y.x.device)


def _hide_itself(tile: Tensor, top: int, left: int) -> None:
    """Mask the diagonal of the whole matrix where it crosses this tile."""
    first, last = max(top, left), min(top + tile.shape[0], left + tile.shape[1])
    if first < last:
        place = torch.arange(first, last, device=tile.device)
        tile[place - top, place - left] = -torch.inf

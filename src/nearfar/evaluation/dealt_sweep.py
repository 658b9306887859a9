"""Exact search over ranks: each keeps a share of the references, and strips of queries go around.

Strip after strip, its owner sends it to all, each rank compares it with its own references, and the owner merges the
lists that come back; ties go to the earlier reference, on whichever rank it is. A rank holds its share of the rows, its
lists and one tile. Tiles are those of one process (see `nearfar.evaluation.dealing`), so that keys are the same bits.

Rows among themselves: each pair of strips i < j is multiplied once, where i visits the owner of j if i + j is even, and
where j visits the owner of i otherwise. So every visit is half of the work, on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.progress import Watch
from nearfar.evaluation.best import Best, joined
from nearfar.evaluation.dealing import SharedSpace, paced, share
from nearfar.evaluation.spaces import Buffer, Metric, Rows, keys

__all__ = ["Grid", "hide_itself", "over_ranks"]

Lists = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Grid:
    """How a sweep is cut into tiles, in one process and in many.

    Attributes:
        rows: how many queries.
        columns: how many references.
        tall: queries of a strip.
        wide: references of a tile.
        itself: the queries are the references.
        once: each pair of strips is multiplied once; then `tall` and `wide` are equal.
    """

    rows: int
    columns: int
    tall: int
    wide: int
    itself: bool
    once: bool

    def strip(self, number: int) -> slice:
        """The queries of a strip."""
        return slice(number * self.tall, min((number + 1) * self.tall, self.rows))

    def tile(self, number: int) -> slice:
        """The references of a tile."""
        return slice(number * self.wide, min((number + 1) * self.wide, self.columns))

    @property
    def strips(self) -> int:
        """How many strips there are."""
        return -(-self.rows // self.tall)

    @property
    def tiles(self) -> int:
        """How many tiles a strip has."""
        return -(-self.columns // self.wide)


def over_ranks(
    group: ProcessGroup,
    queries: Tensor,
    references: Tensor | None,
    grid: Grid,
    *,
    k: int,
    similarity: Metric,
    watch: Watch | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield strips of this rank's queries with their best keys and places, [t, k].

    A gallery of fewer tiles than ranks is small: each rank then reads all of it for its own queries.
    """
    few = not grid.once and grid.tiles < group.world
    sweep = _Sweep(group, queries, queries if references is None else references, grid, similarity, k, whole=few)
    if few:
        yield from sweep.by_queries()
        return
    own = Best(len(sweep.y) if grid.once else 0, k, sweep.y.side)
    kept: list[tuple[slice, Lists]] = []
    for number in range(grid.strips):
        strip, owner = sweep.send(number)
        best = sweep.meet(number, strip, sweep.paced_tiles(), own)
        best.places += sweep.left
        found = [group.collect(owner, side) for side in (best.keys, best.places)]
        if found[0] is not None and found[1] is not None:
            lists = joined(list(zip(found[0], found[1], strict=True)))
            if grid.once:
                kept.append((grid.strip(number), lists))
            else:
                yield grid.strip(number), *lists
        if watch is not None:
            watch("searching neighbors of queries", grid.strip(number).stop, grid.rows)
    for rows, lists in kept:
        here = slice(rows.start - sweep.left, rows.stop - sweep.left)
        yield rows, *joined([lists, (own.keys[here], own.places[here])])


class _Sweep:
    """One rank's part of a sweep: its queries `x` from row `top` on, its references `y` from row `left` on."""

    def __init__(
        self,
        group: ProcessGroup,
        queries: Tensor,
        references: Tensor,
        grid: Grid,
        similarity: Metric,
        k: int,
        *,
        whole: bool,
    ) -> None:
        self.group, self.grid, self.k = group, grid, k
        self.tiles = range(grid.tiles) if whole else share(grid.tiles, group.rank, group.world)
        self.strips = share(grid.strips, group.rank, group.world)
        self.left, self.top = self.tiles.start * grid.wide, self.strips.start * grid.tall
        space = SharedSpace(group, queries, references, similarity)
        self.y = space.references(slice(self.left, min(self.tiles.stop * grid.wide, grid.columns)))
        # where strips are tiles, a rank's queries are its references
        own = slice(self.top, min(self.strips.stop * grid.tall, grid.rows))
        self.x = self.y if grid.once else space.queries(own)
        self.buffer = Buffer(min(grid.tall, grid.rows) * min(grid.wide, grid.columns), self.y.side)

    def send(self, number: int) -> tuple[Rows, int]:
        """A strip of queries, on every rank, and the rank that it comes from."""
        rows, world = self.grid.strip(number), self.group.world
        owner = next(rank for rank in range(world) if number in share(self.grid.strips, rank, world))
        wide = self.x[:0]
        packed = torch.empty(rows.stop - rows.start, wide.x.shape[1] + 1, dtype=wide.side.dtype, device=wide.x.device)
        if owner == self.group.rank:
            strip = self.x[slice(rows.start - self.top, rows.stop - self.top)]
            packed[:, :-1], packed[:, -1] = strip.x, strip.side
        self.group.copy_from(owner, packed)
        return Rows(packed[:, :-1].contiguous(), packed[:, -1].contiguous(), self.y.similarity), owner

    def meet(self, number: int, strip: Rows, tiles: Iterable[int], own: Best) -> Best:
        """The lists of a strip over tiles of this rank's references, whose own lists, if any, see the strip too."""
        grid, rows, best = self.grid, self.grid.strip(number), Best(len(strip), self.k, strip.side)
        for tile in tiles:
            columns = grid.tile(tile)
            here = slice(columns.start - self.left, columns.stop - self.left)
            if grid.once and tile != number:
                if ((number + tile) % 2 == 0) == (number < tile):
                    self._both(number, strip, tile, here, best, own)
                continue
            found = keys(strip, self.y[here], out=self.buffer.tile(len(strip), here.stop - here.start))
            if grid.itself:
                hide_itself(found, rows.start, columns.start)
            best.meet(slice(0, len(strip)), found, here.start)
        return best

    def by_queries(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """This rank's strips against all references, which it holds."""
        grid, nobody = self.grid, Best(0, self.k, self.y.side)
        work = grid.tall * grid.columns * self.y.x.shape[1]
        for number in paced(self.strips, -(-grid.strips // self.group.world), work, self._beat):
            rows = grid.strip(number)
            strip = self.x[slice(rows.start - self.top, rows.stop - self.top)]
            best = self.meet(number, strip, self.tiles, nobody)
            yield rows, best.keys, best.places

    def paced_tiles(self) -> Iterator[int]:
        """This rank's tiles, with messages in between where a strip is long work."""
        work = self.grid.tall * self.grid.wide * self.y.x.shape[1]
        return paced(self.tiles, -(-self.grid.tiles // self.group.world), work, self._beat)

    def _beat(self) -> None:
        self.group.beat(self.y.x.device)

    def _both(self, number: int, strip: Rows, tile: int, here: slice, best: Best, own: Best) -> None:
        """Multiply a visiting strip with one of this rank's own, the earlier one first, for the lists of both."""
        pair = (strip, self.y[here]) if number < tile else (self.y[here], strip)
        found = keys(*pair, out=self.buffer.tile(len(pair[0]), len(pair[1])))
        visiting, standing = (found, found.T) if number < tile else (found.T, found)
        # half of the tiles before this one were met here; of the first, none: what an empty list asks for is all of it
        met = (tile - self.tiles.start) // 2 * self.grid.wide
        best.meet(slice(0, len(strip)), visiting, here.start, seen=met)
        own.meet(here, standing, number * self.grid.tall, seen=max(0, number - 1) // 2 * self.grid.tall)


def hide_itself(tile: Tensor, top: int, left: int) -> None:
    """Mask the diagonal of the whole matrix where it crosses this tile."""
    first, last = max(top, left), min(top + tile.shape[0], left + tile.shape[1])
    if first < last:
        place = torch.arange(first, last, device=tile.device)
        tile[place - top, place - left] = -torch.inf

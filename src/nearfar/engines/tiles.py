"""`Tiles`: tiles of the product of rows and columns, in PyTorch, and gradients accumulated over them.

Rows and columns are sorted by label (see `Sorted`), so that the columns that are not negatives of a row are contiguous,
and most tiles hold none. If pairs are symmetric, tiles below the diagonal are the transposes of those above it. A tile
fits in the processor's cache: a pass over it costs a tenth of the product. The gradient recomputes all scores, which
is cheaper than writing them to memory and reading them back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nearfar.engines.spec import ALL, LINE, MOMENTS, NEGATIVE, PACE, POSITIVE, POWER, SOFTPLUS, Inputs, Spec
from nearfar.relations.layout import list_own

__all__ = ["FAR", "ScoreTile", "TileGradients", "Tiles", "descend_"]

TALL, WIDE = 256, 512  # rows and columns of a tile: 512 KB of float32; its buffers share the processor's cache
FULL = 2**18  # entries of a tile that spans whole rows, used if a row's largest loss is needed first
ON_GPU = 16  # factor by which tiles are taller and wider on a GPU, where launching kernels would dominate otherwise
FAR = 1e30
"""A score beyond that of any pair."""
LISTED = 2**20  # number of pairs that are not negative up to which they are listed at once, not strip by strip
GATHER = 2**16  # entries of gathered rows that are held at a time; larger temporary memory costs as much as the work
BAND = 64  # rows of a band, whose pairs are taken from the product with their range of columns if that is narrow


@dataclass(frozen=True)
class ScoreTile:
    """A range of rows and columns, and whether it also stands for the transposed pairs."""

    rows: slice
    cols: slice
    mirrored: bool
    own: tuple[Tensor, Tensor] | None
    """Positions [k] in the flattened tile of pairs that are not negative, and which of them are positive [k]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start


class Tiles:
    """One call of an operator on rows [n, d] and columns [m, d] (None: the columns are the rows); see `Operator`."""

    def __init__(self, spec: Spec, *inputs: *Inputs) -> None:
        rows, cols, offset, self.score, floor, vectors = inputs
        self.spec, self.square = spec, cols is None
        self.x = rows.detach()
        self.y = self.x if cols is None else cols.detach()
        self.n, self.m = len(self.x), len(self.y)
        left = iter(vectors)
        self.start, self.end = next(left), next(left)
        given = [(next(left), next(left)) if spec.given & bit else None for bit in (1, 2, 4)]
        self.listed, self.samples, self.weights = given
        self.more = list(left)
        self.floor = None if floor is None else floor.detach().to(self.x.dtype).clamp(-FAR, FAR)
        self.mined = floor is not None
        """Whether a miner keeps the scores above a floor."""
        # in float64: under float64 scores, a float32 offset must not round the constant
        self.b = spec.b if offset is None else float(spec.b + spec.by_offset * offset.detach().double())
        self._buffers = dict[str, Tensor]()
        self.larger = ON_GPU if self.x.is_cuda else 1
        self.stored: Tensor | None = None
        """Scores of all tiles, one after the other, which a sweep stores and later ones of the same tiles read."""
        self.stores, self.next = False, 0

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Rows and columns whose products are the scores; -|x - y|² as products of (2x, -1, -|x|²) and (y, |y|², 1)."""
        return (_extend(self.x, 2.0), _extend(self.y, 1.0)) if self.spec.similarity else (self.x, self.y)

    # ------------------------------------------------------------------------------------ tiles

    def strips(self) -> Iterator[slice]:
        """Iterate over the rows of the tiles."""
        tall = max(16, min(TALL, FULL // max(1, self.m))) if self.spec.full else TALL
        tall = self.spec.tile or tall * self.larger
        return (slice(r0, min(r0 + tall, self.n)) for r0 in range(0, self.n, tall))

    def tiles(self) -> Iterator[ScoreTile]:
        """Iterate over all tiles with members."""
        spec = self.spec
        half = bool(spec.half) and not spec.full and spec.side != POSITIVE
        wide = self.m if spec.full else WIDE * self.larger
        for rows in self.strips():
            own = self.own(rows)
            reach = tuple(int(x) for x in own[1].aminmax()) if len(own[1]) else (0, -1)
            reach = reach[0], reach[1] + 1
            low, high = (0, self.m) if spec.side != POSITIVE else reach
            if half:
                yield self._tile(rows, rows, False, own, reach)  # a tile on the diagonal holds both orders
                low = rows.stop
            for c0 in range(low, high, max(1, wide)):
                yield self._tile(rows, slice(c0, min(c0 + wide, high)), half, own, reach)

    def own(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [k] (from 0) and columns [k] of the pairs of these rows that are not negative; which are positive."""
        if self.every_own is not None:
            edges, (row, col, positive) = self.every_own
            here = slice(edges[rows.start], edges[rows.stop])
            return row[here] - rows.start, col[here], positive[here]
        samples = None if self.samples is None else (self.samples[0][rows], self.samples[1])
        return list_own(self.start[rows], self.end[rows], self.listed, samples)

    @cached_property
    def every_own(self) -> tuple[list[int], tuple[Tensor, Tensor, Tensor]] | None:
        """Where the pairs of each row begin in `own` of all rows, and these pairs; None if they are many."""
        edges = [0, *(self.end - self.start).cumsum(0).tolist()]
        return None if edges[-1] > LISTED else (edges, list_own(self.start, self.end, self.listed, self.samples))

    def _tile(
        self, rows: slice, cols: slice, mirrored: bool, own: tuple[Tensor, Tensor, Tensor], reach: tuple[int, int]
    ) -> ScoreTile:
        row, col, positive = own
        if reach[1] <= cols.start or reach[0] >= cols.stop:
            return ScoreTile(rows, cols, mirrored, None)
        place = row * (cols.stop - cols.start) + col - cols.start
        if reach[0] < cols.start or reach[1] > cols.stop:
            inside = (col >= cols.start) & (col < cols.stop)
            place, positive = place[inside], positive[inside]
        return ScoreTile(rows, cols, mirrored, (place, positive) if len(place) else None)

    def buffer(self, name: str, tile: ScoreTile) -> Tensor:
        """A buffer [t, u] that all tiles reuse."""
        t, u = tile.shape
        held = self._buffers.get(name)
        if held is None or held.numel() < t * u:
            held = self._buffers[name] = self.x.new_empty(t * u)
        return held[: t * u].view(t, u)

    def scores(self, tile: ScoreTile) -> Tensor:
        """Scores [t, u] of a tile."""
        out = self.buffer("scores", tile)
        if self.stored is not None:
            part = self.stored[self.next : self.next + out.numel()].view(out.shape)
            self.next += out.numel()
            if not self.stores:
                return out.copy_(part)
        left, right = self.sides
        torch.mm(left[tile.rows], right[tile.cols].T, out=out)
        if self.spec.similarity == 2:
            out.clamp_max_(0.0).neg_().sqrt_().neg_()
        if self.stores:
            part.copy_(out)
        return out

    def affine(self, x: Tensor, a: float, b: float, out: Tensor) -> Tensor:
        """a·x + b, in one pass."""
        return torch.add(x.new_full((), b), x, alpha=a, out=out)

    def losses(self, s: Tensor, out: Tensor) -> Tensor:
        """Pair losses [t, u], equal for equal scores; see `PairForm`."""
        spec = self.spec
        if spec.a == 1.0:
            torch.add(s, self.b, out=out)
        else:
            torch.mul(s, spec.a, out=out)
            if self.b:
                out.add_(self.b)
        if spec.shape == LINE:
            return out
        if spec.shape == SOFTPLUS:
            torch._C._nn.softplus(out, 1, 40, out=out)  # type: ignore[call-arg]
        else:
            out.clamp_min_(0.0)
        if spec.shape == PACE:
            out.mul_(s - spec.center)
        elif spec.shape == POWER and spec.power == 2.0:
            out.mul_(out)
        elif spec.shape == POWER and spec.power != 1.0:
            out.pow_(spec.power)
        return out if spec.scale == 1.0 else out.mul_(spec.scale)

    def slopes(self, s: Tensor, out: Tensor) -> tuple[Tensor | None, float]:
        """dl/ds [t, u] (None for 1) and a scalar factor of it."""
        spec = self.spec
        if spec.shape == LINE:
            return None, spec.a
        z = self.affine(s, spec.a, self.b, out)
        if spec.shape == SOFTPLUS:
            return z.sigmoid_(), spec.scale * spec.a
        if spec.shape == POWER and spec.power == 1.0:
            return z.gt_(0.0), spec.scale * spec.a
        z.clamp_min_(0.0)
        if spec.shape == PACE:
            return z, spec.scale
        return (z if spec.power == 2.0 else z.pow_(spec.power - 1)), spec.scale * spec.a * spec.power

    # ------------------------------------------------------------------------------------ members

    def members_(self, x: Tensor, tile: ScoreTile, absent: float = 0.0) -> Tensor:
        """Overwrite the entries of x [t, u] that are not members of the side with `absent`."""
        if self.spec.side != POSITIVE:
            if tile.own is not None:
                place, positive = tile.own
                x.view(-1).index_fill_(0, place if self.spec.side == NEGATIVE else place[~positive], absent)
            return x
        if tile.own is None:
            return x.fill_(absent)
        place, positive = tile.own
        kept = x.view(-1)[place[positive]]
        x.fill_(absent).view(-1)[place[positive]] = kept
        return x

    def keep(self, s: Tensor, tile: ScoreTile) -> tuple[Tensor | None, Tensor | None]:
        """Masks [t, u] of the pairs that a miner keeps for rows, and for columns if the tile is mirrored."""
        if self.floor is None:
            return None, None
        floors = [self.floor[tile.rows, None], *([self.floor[None, tile.cols]] if tile.mirrored else [])]
        found = []
        for axis, floor in enumerate(floors):
            mask = torch.gt(s, floor, out=self.buffer(f"keep {axis}", tile))
            if self.spec.high != math.inf:
                mask.mul_(torch.lt(s, self.spec.high, out=self.buffer("coef", tile)))
            found.append(self.members_(mask, tile))
        return found[0], found[1] if tile.mirrored else None

    def sum(self, x: Tensor | None, mask: Tensor | None, tile: ScoreTile, axis: int, *, weighed: bool = True) -> Tensor:
        """Σ w·x over the columns (axis 1) or rows (0) of a tile, of the pairs of a mask, float64; x None: 1."""
        if x is not None and mask is not None:
            x = torch.mul(x, mask, out=self.buffer("coef", tile))
        x = mask if x is None else x
        assert x is not None  # noqa: S101 - without a miner members are counted by labels
        if self.weights is None or not weighed:
            return x.sum(dim=axis).double()
        rows, cols = self.weights[0][tile.rows].to(x.dtype), self.weights[1][tile.cols].to(x.dtype)
        return ((x @ cols) * rows if axis else (rows @ x) * cols).double()

    def weighed_(self, g: Tensor, tile: ScoreTile) -> Tensor:
        """Multiply g [t, u] by the weights of its pairs, in place."""
        if self.weights is not None:
            rows, cols = self.weights[0][tile.rows], self.weights[1][tile.cols]
            g.mul_(rows[:, None].to(g.dtype)).mul_(cols.to(g.dtype))
        return g

    def count(self) -> tuple[Tensor, Tensor]:
        """Σ w and number of each row's members [n], float64; with all pairs, the number counts negative ones only."""
        one = torch.ones(self.m, dtype=torch.float64, device=self.x.device)
        each = one if self.weights is None else self.weights[1].double()
        found = torch.zeros(4, self.n, dtype=torch.float64, device=self.x.device)
        for rows in self.strips():
            row, col, positive = self.own(rows)
            here = found[:, rows]
            for place, by in enumerate((each[col], one[col], each[col] * positive, one[col] * positive)):
                here[place].index_add_(0, row, by)
        own, owns, positive, positives = found
        mine = 1.0 if self.weights is None else self.weights[0].double()
        rest = torch.where(owns == self.m, 0.0, each.sum() - own)  # a difference of equal sums is not always 0
        size = {NEGATIVE: rest, POSITIVE: positive, ALL: rest + positive}[self.spec.side]
        return size * mine, positives if self.spec.side == POSITIVE else self.m - owns

    @property
    def selects(self) -> bool:
        """Whether losses determine which members count."""
        return bool(self.spec.drop) or (self.spec.sums == MOMENTS and self.spec.level > -FAR)

    # ------------------------------------------------------------------------------------ single pairs

    def near(self) -> Tensor:
        """Scores [n, P] of each row and its columns `place` [n, P]."""
        place = self.more[0]
        found = self.x.new_empty(place.shape)
        for here, cols, at in self._bands(place):
            if cols is None:
                x, y = self.x[here, None], self.y[at]
                found[here] = (y - x).square_().sum(dim=2).neg_() if self.spec.similarity else (y * x).sum(dim=2)
            else:
                found[here] = (self.sides[0][here] @ self.sides[1][cols].T).gather(1, at)
        if self.spec.similarity == 2:
            found.clamp_max_(0.0).neg_().sqrt_().neg_()
        return found

    def weigh_near(self) -> tuple[Tensor, Tensor]:
        """Gradients of rows and columns, given those of the scores that `near` returned."""
        place, *_, found, slope = self.more
        slope = descend_(slope.clone(), found.clone(), self.spec.similarity)
        pulls = TileGradients(self)
        for here, cols, at in self._bands(place):
            if cols is None:
                pulls.few(here, at, slope[here])
            else:
                tile = slope.new_zeros(here.stop - here.start, cols.stop - cols.start).scatter_add_(1, at, slope[here])
                pulls.product(here, cols, tile, 1.0)
        return pulls.found()[:2]

    def _bands(self, place: Tensor) -> Iterator[tuple[slice, slice | None, Tensor]]:
        """Slices of rows with the range of their columns, and positions within it; no range if columns are gathered.

        Distances of near rows, which are float64, need differences of rows.
        """
        number = place.shape[1]
        gathers = number == 0 or (self.spec.similarity > 0 and self.x.dtype == torch.float64)
        step = max(1, GATHER // max(1, number * self.x.shape[1]))
        for r0 in range(0, self.n, step if gathers else BAND):
            here = slice(r0, min(r0 + (step if gathers else BAND), self.n))
            low, high = (0, self.m) if gathers else (int(x) for x in place[here].aminmax())
            if not gathers and high - low < max(4 * BAND, 16 * number):
                yield here, slice(low, high + 1), place[here] - low
                continue
            for first in range(r0, here.stop, step):
                part = slice(first, min(first + step, here.stop))
                yield part, None, place[part]


class TileGradients:
    """Gradients of rows and columns, accumulated over tiles, and of a learned offset."""

    def __init__(self, work: Tiles) -> None:
        self.work = work
        self.rows = torch.zeros_like(work.x)
        self.cols = self.rows if work.square else torch.zeros_like(work.y)
        self.learned = work.x.new_zeros((), dtype=torch.float64)
        far = bool(work.spec.similarity)
        self.by_row = work.x.new_zeros(work.n * far)
        self.by_col = self.by_row if work.square else work.x.new_zeros(work.m * far)
        """Row and column sums of dF/d⟨x, y⟩, for distances."""

    def add(self, tile: ScoreTile, s: Tensor, g: Tensor, factor: float) -> None:
        """Back-propagate factor·g, with g = dF/ds [t, u] of a tile; overwrites both."""
        if self.work.spec.by_offset:
            self.learned += g.sum(dtype=torch.float64) * factor
        self.product(tile.rows, tile.cols, descend_(g, s, self.work.spec.similarity), factor)

    def product(self, rows: slice, cols: slice, g: Tensor, factor: float) -> None:
        """Back-propagate factor·g, where g = dF/d⟨x, y⟩ [t, u]."""
        x, y = self.work.x[rows], self.work.y[cols]
        self.rows[rows].addmm_(g, y, alpha=factor)
        self.cols[cols].addmm_(g.T, x, alpha=factor)
        if self.work.spec.similarity:
            self.by_row[rows].add_(g.sum(dim=1), alpha=factor)
            self.by_col[cols].add_(g.sum(dim=0), alpha=factor)

    def few(self, rows: slice, place: Tensor, g: Tensor) -> None:
        """Back-propagate g = dF/d⟨x, y⟩ [t, P] for the columns `place` [t, P]."""
        x, y = self.work.x[rows, None], self.work.y[place]
        by_row = (y - x if self.work.spec.similarity else y) * g[:, :, None]
        by_col = -by_row if self.work.spec.similarity else x * g[:, :, None]
        self.rows[rows] += by_row.sum(dim=1)
        self.cols.index_add_(0, place.reshape(-1), by_col.reshape(-1, by_col.shape[-1]))

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, of columns (empty if they are the rows) and of the offset."""
        spec = self.work.spec
        learned = self.learned * (spec.by_offset / spec.a) if spec.by_offset else self.learned
        if spec.similarity:  # along y - x: independent of the origin
            self.rows.addcmul_(self.work.x, self.by_row[:, None], value=-1)
            if not self.work.square:
                self.cols.addcmul_(self.work.y, self.by_col[:, None], value=-1)
        return self.rows, self.rows.new_empty(0) if self.work.square else self.cols, learned.to(self.rows.dtype)


def descend_(g: Tensor, s: Tensor, similarity: int) -> Tensor:
    """Convert dF/ds to dF/d⟨x, y⟩, in place; overwrites the scores of distances."""
    if similarity == 1:
        return g.mul_(2.0)
    if similarity == 2:  # ds/d⟨x, y⟩ = 1/|x - y|, and 0 at distance 0: the clamp keeps the quotient finite
        g.mul_(s < 0)
        return g.div_(s.clamp_max_(-1e-30).neg_())
    return g


def _extend(x: Tensor, times: float) -> Tensor:
    """Rows (2x, -1, -|x|²) or columns (y, |y|², 1), so that their product is -|x - y|²."""
    norm, one = (x * x).sum(dim=1, keepdim=True), torch.ones_like(x[:, :1])
    return torch.cat([times * x, -one, -norm] if times == 2.0 else [x, norm, one], dim=1)

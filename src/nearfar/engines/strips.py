"""The operators in PyTorch, for CPUs and devices without Triton: tiles of a product are reduced as computed.

The gradient recomputes all scores, which is cheaper than writing them to memory and reading them back. In passes over a
tile, masks are numbers 0 and 1 in the type of the rows: comparisons that give booleans take six times as long.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.spec import AROUND, BELOW_TOP, LINE, LOSSES, MOMENTS, POWER, fold_outputs
from nearfar.engines.tiles import ScoreTile, TileGradients, Tiles, descend_
from nearfar.sets.entropic import LOWEST

__all__ = ["Strips"]

KEPT = 2**22  # pairs at most whose scores or weights are kept between sweeps: 16 MB of float32; more would not pay
SAMPLED = 8  # one in so many losses of a tile is compared to estimate a level that the largest losses reach
TOTAL, SECOND, HELD, SIZE, SEEN, LEVEL = range(6)  # rows of the sums of a fold
Parts = list[tuple[int, Tensor | None]]  # rows of the sums, and what is added to them
Masks = tuple[Tensor | None, Tensor | None]
"""Pairs of a tile that a miner keeps, for its rows and for its columns (if it stands for the transposed pairs)."""


class Strips(Tiles):
    """One call of an operator; each method returns the outputs listed in operators.py."""

    # ------------------------------------------------------------------------------------ fold and weigh

    def fold(self) -> list[Tensor]:
        """Fold the rows, or their triplets if scores of positives are given."""
        if self.score is not None:
            return self._triplets()
        spec = self.spec
        self.stored = self.more[0] if self.more else None
        sums = self.x.new_zeros(6, self.n, dtype=torch.float64)
        sums[LEVEL].fill_(math.inf if spec.sums == MOMENTS else spec.level)
        pulls = TileGradients(self) if spec.one_group else None
        keeps = spec.keep and self.n * self.m <= KEPT and not (self.mined and spec.half) and not spec.by_offset
        kept, filled = self.x.new_empty(self.n * self.m if keeps else 0), 0
        for tile in self.tiles():
            s = self.scores(tile)
            keep = self.keep(s, tile)
            parts, raw = self._parts(s, tile, sums[LEVEL], levels=True)
            for place, x in parts:
                for mask, lines, axis in zip(keep, (tile.rows, tile.cols), (1, 0), strict=True):
                    if axis or tile.mirrored:
                        sums[place, lines] += self.sum(x, mask, tile, axis, weighed=place != SEEN)
            if pulls is not None:
                pulls.add(tile, s, *self._slope(raw, s, tile, keep, None))
            elif keeps:
                g, factor = self._raw_slope(raw, s, tile)
                g = self.weighed_(g if keep[0] is None else g.mul_(keep[0]), tile)
                into = kept[filled : filled + g.numel()].view(g.shape)
                descend_(torch.mul(g, factor, out=into), s, spec.similarity)
                filled += g.numel()
        none = [self.x.new_empty(0) for _ in range(3)]
        total, second, held, size, seen, level = (x.clone() for x in sums)
        if not self.mined:
            members, seen = self.count()
            size = size if self.selects else members
        found = fold_outputs(spec, total, size, seen, level, second, held)
        return [*found, none[0], *([kept[:filled], *none[1:]] if pulls is None else pulls.found())]

    def weigh(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, columns and offset, from dF/dt [n] and the level and norm of the weights."""
        spec, pulls, place = self.spec, TileGradients(self), 0
        *stored, level, norm, kept, pull = self.more
        self.stored = stored[0] if stored else None
        coef = (over(pull.double(), norm) if spec.sums in (AROUND, BELOW_TOP) else pull).to(self.x.dtype)
        for tile in self.tiles():
            if len(kept):
                t, u = tile.shape
                g = kept[place : place + t * u].view(t, u)
                g = torch.mul(g, self._coef(coef, tile), out=self.buffer("l", tile))
                place += t * u
                pulls.product(tile.rows, tile.cols, g, 1.0)
                continue
            s = self.scores(tile)
            keep = self.keep(s, tile)
            _, raw = self._parts(s, tile, level)
            pulls.add(tile, s, *self._slope(raw, s, tile, keep, coef))
        return pulls.found()

    def _parts(self, s: Tensor, tile: ScoreTile, level: Tensor, *, levels: bool = False) -> tuple[Parts, Tensor | None]:
        """Summands of each row's sums (None: 1), and unscaled weights [t, u] (None: 1) of a tile; 0 if absent.

        With `levels`, updates the levels first.
        """
        spec = self.spec
        # (l - level)/γ in one pass; a loss of exactly 0 stays 0 at level 0
        direct = spec.shape == LINE and spec.sums == AROUND and not (spec.drop or spec.base)
        if direct and (spec.level != 0 or self.b == 0):
            z = self.affine(s, spec.a / spec.gamma, (self.b - spec.level) / spec.gamma, self.buffer("l", tile))
            parts = self._exponentials(z, None, None, tile)
            return [*parts, *([(SIZE, None), (SEEN, None)] if self.mined else [])], parts[0][1]
        l, alive = self.losses(s, self.buffer("l", tile)), None
        if self.selects:
            least = spec.level if spec.sums == MOMENTS else 0.0
            alive = self.members_(torch.gt(l, least, out=self.buffer("alive", tile)), tile)
        counts: Parts = [(SIZE, alive)] if alive is not None or self.mined else []
        counts += [(SEEN, None)] if self.mined else []
        if spec.sums in (AROUND, BELOW_TOP):
            parts = self._heights(l, alive, tile, level, levels=levels)
            return [*parts, *counts], parts[0][1]
        if levels and spec.sums == MOMENTS:
            level.copy_(torch.minimum(level, self._least(l, tile)))
        l = l.sub_(spec.about) if spec.about else l
        l = self.members_(l, tile) if alive is None else l.mul_(alive)
        if spec.sums == LOSSES:
            return [(TOTAL, l), *counts], alive
        parts = [(TOTAL, l), (SECOND, torch.mul(l, l, out=self.buffer("x", tile))), *counts]
        if not spec.first:  # this sweep only computes sums
            return parts, None
        raw = self.affine(l, spec.second, spec.first, self.buffer("raw", tile))
        return parts, self.members_(raw, tile) if alive is None else raw.mul_(alive)

    def _heights(self, l: Tensor, alive: Tensor | None, tile: ScoreTile, level: Tensor, *, levels: bool) -> Parts:
        """Summands of exponentials of losses [t, u], or of a power of them; overwrites the losses."""
        spec, value = self.spec, None
        if spec.base:
            value, l = self.buffer("x", tile).copy_(l), l.div_(spec.base).log1p_().mul_(spec.raised)
        if spec.sums == AROUND:
            return self._exponentials(self.affine(l, 1 / spec.gamma, -spec.level / spec.gamma, l), value, alive, tile)
        if levels:
            level[tile.rows] = self._top(l, tile)
        z = l.sub_(level[tile.rows, None].to(l.dtype)).mul_(1 / spec.gamma)
        return self._exponentials(z.clamp_(LOWEST[z.dtype], 0.0), value, alive, tile)  # only absent pairs exceed it

    def _exponentials(self, z: Tensor, value: Tensor | None, alive: Tensor | None, tile: ScoreTile) -> Parts:
        """Summands e^z, and z·e^z or (with `value`) value·e^z, or e^z - 1."""
        parts: Parts = []
        if self.spec.held:
            parts = [(HELD, torch.exp(z, out=self.buffer("free", tile)).mul_(z if value is None else value))]
        elif self.spec.flat:
            parts = [(SECOND, torch.expm1(z, out=self.buffer("free", tile)))]
        parts = [(TOTAL, z.exp_()), *parts]
        for _, x in parts:
            assert x is not None  # noqa: S101
            if alive is None:
                self.members_(x, tile)
            else:
                x.mul_(alive)
        return parts

    def _top(self, l: Tensor, tile: ScoreTile) -> Tensor:
        """The largest loss of each row's members, 0 for a row without any, float64."""
        x = self.members_(self.buffer("free", tile).copy_(l), tile, -math.inf)
        if self.spec.drop:
            torch.threshold_(x, 0.0, -math.inf)
        if self.mined:
            x.masked_fill_(self.buffer("keep 0", tile) == 0, -math.inf)
        top = x.amax(dim=1).double()
        return torch.where(top == -math.inf, 0.0, top)

    def _least(self, l: Tensor, tile: ScoreTile) -> Tensor:
        """The smallest loss of the tile's members above the level; larger than all losses if there are none."""
        most = torch.finfo(l.dtype).max / 4
        x = torch.threshold(l, max(self.spec.level, -most), most)
        return self.members_(x, tile, most).amin().double()

    def _slope(
        self, raw: Tensor | None, s: Tensor, tile: ScoreTile, keep: Masks, coef: Tensor | None
    ) -> tuple[Tensor, float]:
        """dF/ds [t, u] and a scalar factor of it, from each row's dF/dt over its norm; coef None: 1 for all rows."""
        g, factor = self._raw_slope(raw, s, tile)
        mine, theirs = keep
        if mine is None:
            if coef is not None:
                g.mul_(self._coef(coef, tile))
            elif tile.mirrored:
                factor *= 2
            return self.weighed_(g, tile), factor
        if coef is not None:
            mine.mul_(coef[tile.rows, None])
        if theirs is not None:
            mine.add_(theirs) if coef is None else mine.addcmul_(theirs, coef[None, tile.cols])
        return self.weighed_(g.mul_(mine), tile), factor

    def _raw_slope(self, raw: Tensor | None, s: Tensor, tile: ScoreTile) -> tuple[Tensor, float]:
        """Weights (None: 1) times dl/ds [t, u], and a scalar factor of it; entries of absent members are 0."""
        slope, factor = self.slopes(s, self.buffer("slope", tile))
        if raw is not None:
            return raw if slope is None else raw.mul_(slope), factor
        return self.members_(self.buffer("slope", tile).fill_(1.0) if slope is None else slope, tile), factor

    def _coef(self, coef: Tensor, tile: ScoreTile) -> Tensor:
        """Coefficients of pairs, [t, u] or [t, 1], from those of the rows."""
        if not tile.mirrored:
            return coef[tile.rows, None]
        return torch.add(coef[tile.rows, None], coef[None, tile.cols], out=self.buffer("coef", tile))

    # ------------------------------------------------------------------------------------ largest losses

    def _ranked(self, tile: ScoreTile) -> tuple[Tensor, Tensor | None]:
        """Losses [t, u] of a tile for its rows, -inf for absent members; and for its columns if pairs are symmetric."""
        s = self.scores(tile)
        keep = self.keep(s, tile)
        plain = self.spec.shape == LINE and self.spec.a == 1.0 and self.b == 0.0
        l = self.members_(s if plain else self.losses(s, self.buffer("l", tile)), tile, -math.inf)
        if self.spec.half == 2 and tile.rows == tile.cols:
            l.masked_fill_(torch.ones_like(l, dtype=torch.bool).tril_(), -math.inf)
        if keep[0] is None:
            return l, l if tile.mirrored else None
        mine, theirs = (x if x is None else l.masked_fill(x == 0, -math.inf) for x in keep)
        assert mine is not None  # noqa: S101
        return mine, theirs

    def hardest(self) -> tuple[Tensor, Tensor, Tensor]:
        """The largest loss of each row (-inf without members), its column, and the number of members tied at it.

        With `keep` only the largest loss; the second output is then the scores of all tiles, if they are to be stored.
        """
        if self.spec.keep and self.n * self.m <= KEPT:
            self.stored, self.stores = self.x.new_empty(self.n * self.m), True
        best = self.x.new_full((self.n,), -math.inf)
        place, ties = (torch.zeros(self.n, dtype=torch.int64, device=best.device) for _ in range(2))
        for tile in self.tiles():
            mine, theirs = self._ranked(tile)
            turned = () if theirs is None else ((theirs.T, tile.cols, tile.rows),)
            for l, rows, cols in ((mine, tile.rows, tile.cols), *turned):
                before, top = best[rows], l.amax(dim=1)
                if not self.spec.keep:
                    ties[rows] += (top == before) & (top > -math.inf)
                    hit = (top > before).nonzero()[:, 0]
                    found = l[hit] == top[hit, None]
                    row = hit + rows.start
                    place[row], ties[row] = found.to(torch.uint8).argmax(dim=1) + cols.start, found.sum(dim=1)
                best[rows] = torch.maximum(before, top)
        return best, place if self.stored is None else self.stored, ties

    def candidates(self, count: int) -> Tensor:
        """Positions row·m + col of all losses that reach a level reached by at least `count` of them (or by all)."""
        share = 2 * count / (self.n * self.m)
        found = self._reaching(count, share) if share < 0.5 else None
        return self._reaching(count, None) if found is None or len(found) < count else found

    def _reaching(self, count: int, share: float | None) -> Tensor:
        """Like `candidates`; with a `share` of losses to keep, starts at a level that a sample of the first tile gives.

        That level may be too high: there are fewer positions than `count` then.
        """
        level, held, found = torch.finfo(self.x.dtype).min, 0, list[tuple[Tensor, Tensor]]()
        for tile in self.tiles():
            l = self._ranked(tile)[0]
            if share is not None:
                sample = l.view(-1)[::SAMPLED]
                rank = max(1, len(sample) - 4 - int(share * len(sample)))
                level, share = max(level, float(sample.kthvalue(rank).values)), None
            place = (l.view(-1) >= level).nonzero()[:, 0]
            row = torch.div(place, l.shape[1], rounding_mode="floor")
            near, place = l.view(-1)[place], place + row * (self.m - l.shape[1])
            found.append((near, place + tile.rows.start * self.m + tile.cols.start))
            held += len(near)
            if held > 2 * count:
                found = [keep_largest(found, count)]
                level, held = float(found[0][0].amin()), len(found[0][0])
        found = [keep_largest(found, count)] if held > count else found
        return torch.cat([place for _, place in found]) if found else torch.zeros(0, dtype=torch.int64)

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest losses [n, count] of each row, padded with -inf, and their columns."""
        found = [self._ranked(tile)[0].topk(min(count, self.m), dim=1) for tile in self.tiles()]
        return torch.cat([x.values for x in found]), torch.cat([x.indices for x in found])

    def draw(self, chance: Callable[[Tensor], Tensor], spots: Tensor) -> tuple[Tensor, Tensor]:
        """Draw columns [n, K] from each row's members, with replacement; also returns which rows [n] have members.

        `chance` computes log-odds from scores, and may overwrite them; `spots` [n, K] are uniform random numbers.
        """
        places, there = [], []
        for tile in self.tiles():
            odds = self.members_(chance(self.scores(tile)), tile, -math.inf)
            top = odds.amax(dim=1, keepdim=True)
            weight = odds.sub_(torch.where(top > -math.inf, top, 0.0)).exp_()
            if self.weights is not None:
                weight.mul_(self.weights[1].to(weight.dtype))
            heights = over(weight, weight.sum(dim=1, keepdim=True)).double().cumsum(dim=1)
            end = heights[:, -1:]
            places.append(torch.searchsorted(heights, spots[tile.rows] * end, right=True).clamp(max=self.m - 1))
            there.append(end[:, 0] > 0)
        return torch.cat(places), torch.cat(there)

    # ------------------------------------------------------------------------------------ triplets

    def _triplets(self) -> list[Tensor]:
        """Fold the triplets of each row; their gradient is computed in the same sweep, see `Spec.one_group`."""
        spec, (place, real) = self.spec, self.more
        total, size = self.x.new_zeros(2, self.n, dtype=torch.float64)
        by_near = torch.zeros_like(place, dtype=self.x.dtype)
        pulls = TileGradients(self) if spec.one_group else None
        weight, seen = self.count()
        for tile in self.tiles():
            s, g, here = self.scores(tile), self.buffer("sum", tile).zero_(), tile.rows
            near = s.gather(1, place[here])
            # hides all but negatives: no loss but that of a line differs from 0 there
            self.members_(s, tile, math.copysign(torch.finfo(s.dtype).max ** 0.5, -spec.a))
            for p in range(place.shape[1]):
                there = real[here, p].double()
                l, slope, factor, alive = self._of_positive(s, near[:, p, None], tile)
                total[here] += torch.where(there > 0, there * self.sum(l, None, tile, 1), 0.0)
                mine = weight[here] if alive is None else self.sum(alive, None, tile, 1)
                size[here] += there * mine
                pull = mine if slope is alive else self.sum(slope, None, tile, 1)
                by_near[here, p] = torch.where(there > 0, there * pull * factor, 0.0).to(s.dtype)
                g.addcmul_(slope, (there * factor).to(s.dtype)[:, None])
            if pulls is not None:
                s.scatter_(1, place[here], near)
                pulls.add(tile, s, self.weighed_(g, tile).scatter_add_(1, place[here], -by_near[here]), 1.0)
        none = [torch.zeros_like(total) for _ in range(3)]
        gradients = [self.x.new_empty(0) for _ in range(3)] if pulls is None else pulls.found()
        return [total, size, seen, *none, by_near, *gradients]

    def _of_positive(self, s: Tensor, near: Tensor, tile: ScoreTile) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """Losses, slopes up to a factor, the factor, and which triplets count (None: all), of one positive a row."""
        spec, l = self.spec, self.buffer("l", tile)
        hinge = spec.shape == POWER and spec.a == spec.scale == spec.power == 1.0
        if hinge and (not spec.band or spec.low == -self.b):  # the usual loss in fewer passes: half the time of others
            if spec.band:  # z < high by the difference itself, so that ties are exact; z > low where there is a loss
                torch.threshold_(torch.sub(near, s, out=l), -spec.high, self.b)
                self.affine(l, -1.0, self.b, l).clamp_min_(0.0)
            else:
                torch.sub(s, near - self.b, out=l).clamp_min_(0.0)
            slope = torch.sign(l, out=self.buffer("slope", tile))
            return l, slope, 1.0, slope if spec.band or spec.drop else None
        z, alive = torch.sub(s, near, out=self.buffer("x", tile)), None
        self.losses(z, l)
        if spec.drop:
            alive = torch.gt(l, 0.0, out=self.buffer("alive", tile))
        if spec.band:
            inside = torch.lt(z, spec.high, out=self.buffer("coef", tile))
            inside.mul_(torch.gt(z, spec.low, out=self.buffer("slope", tile)))
            alive = inside if alive is None else alive.mul_(inside)
        if alive is not None:
            l.mul_(alive)
        elif spec.shape == LINE:
            self.members_(l, tile)
        slope, factor = self._raw_slope(None, z, tile)
        return l, slope if alive is None else slope.mul_(alive), factor, alive


def keep_largest(found: list[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of these losses, with all ties of the smallest of them, and their positions."""
    losses, places = (torch.cat(x) for x in zip(*found, strict=True))
    kept = losses >= losses.kthvalue(len(losses) - count + 1).values
    return losses[kept], places[kept]

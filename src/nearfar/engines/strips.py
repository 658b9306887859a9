"""The operators in PyTorch, for CPUs and devices without Triton: tiles of a product are reduced as computed.

The gradient recomputes all scores, which is cheaper than writing them to memory and reading them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.spec import AROUND, BELOW_TOP, LOSSES, MOMENTS, POWER
from nearfar.engines.tiles import FAR, Tile, TileGradients, Tiles, descend_
from nearfar.sets.entropic import LOWEST

__all__ = ["Strips"]

KEPT = 2**22
"""Maximum number of pairs whose weights are kept for the gradient: 16 MB of float32; more would not pay."""
BLOCK = 16
"""Entries of a block; to find the largest entries, block maxima are compared first."""


class Strips(Tiles):
    """One call of an operator; takes the arguments of `Tiles`."""

    # ------------------------------------------------------------------------------------ fold and weigh

    def fold(self) -> list[Tensor]:
        """t, Σ w, number of members, level, norm and Σ p·l of each row, float64; then gradients; see `operators`."""
        spec = self.spec
        sums = self.x.new_zeros(6, self.n, dtype=torch.float64)
        sums[5].fill_(math.inf if spec.sums == MOMENTS else spec.level)
        pulls = TileGradients(self) if spec.whole else None
        mined = self.floor is not None and bool(spec.half)
        keeps = spec.keep and self.n * self.m <= KEPT and not mined and not spec.by_offset
        kept, filled = self.x.new_empty(self.n * self.m if keeps else 0), 0
        for tile in self.tiles(full=bool(spec.full)):
            s = self.scores(tile)
            keep = self.keep(s, tile)
            l = self.losses(s, tile)
            if spec.sums == BELOW_TOP:
                sums[5, tile.rows] = self._rise_(l, tile)
            elif spec.sums == MOMENTS:
                sums[5] = torch.minimum(sums[5], self._least(l, tile))
            parts, raw = self._parts(l, tile, sums[5])
            for place, x in parts:
                weighed = place != SEEN
                sums[place, tile.rows] += self.sum(x, keep[0], tile, 1, weighed=weighed)
                if tile.mirrored:
                    sums[place, tile.cols] += self.sum(x, keep[1], tile, 0, weighed=weighed)
            if pulls is not None:
                pulls.add(tile, s, *self._slope(raw, s, tile, keep, None))
            elif len(kept):
                g = self._unit_slope(raw, s, tile, keep[0])
                kept[filled : filled + g.numel()].view(g.shape).copy_(g)
                filled += g.numel()
        none = self.x.new_empty(0)
        gradients = (kept[:filled], none, none) if pulls is None else pulls.found()
        return [*self._finish(sums), *gradients]

    def weigh(self, level: Tensor, norm: Tensor, pull: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, columns and offset, from dF/dt [n] and the level and norm of the weights."""
        spec, pulls, place = self.spec, TileGradients(self), 0
        coef = (over(pull.double(), norm) if spec.sums in (AROUND, BELOW_TOP) else pull).to(self.x.dtype)
        for tile in self.tiles(full=bool(spec.full)):
            if len(kept):
                t, u = tile.shape
                g = kept[place : place + t * u].view(t, u)
                place += t * u
                g = torch.mul(g, self._coef(coef, tile), out=self.buffer("free", tile))
                pulls.product(tile.rows, tile.cols, g, 1.0)
                continue
            s = self.scores(tile)
            keep = self.keep(s, tile)
            _, raw = self._parts(self.losses(s, tile), tile, level)
            pulls.add(tile, s, *self._slope(raw, s, tile, keep, coef))
        return pulls.found()

    def _parts(self, l: Tensor, tile: Tile, level: Tensor) -> tuple[list[tuple[int, Tensor | None]], Tensor | None]:
        """Summands of each row's sums (None: 1), and unscaled weights [t, u] (None: 1), of a tile.

        Losses are overwritten; entries of absent members are 0.
        """
        spec, free = self.spec, self.buffer("more", tile)
        alive: Tensor | None = None
        if self.selects:
            alive = torch.sub(l, spec.level if spec.sums == MOMENTS else 0.0, out=self.buffer("alive", tile))
            alive = self.members_(alive.clamp_min_(0.0).sign_(), tile)
        counts = [(SIZE, alive)] if alive is not None or self.floor is not None else []
        counts += [(SEEN, None)] if self.floor is not None else []
        if spec.sums == LOSSES:
            l = self.members_(l, tile) if alive is None else l.mul_(alive)
            return [(TOTAL, l), *counts], alive if spec.drop and spec.shape != POWER else None
        if spec.sums == MOMENTS:
            parts, raw = self._moments(l, alive, tile)
            return [*parts, *counts], raw
        z = l.sub_(spec.level if spec.sums == AROUND else level[tile.rows, None].to(l.dtype)).mul_(1 / spec.gamma)
        if spec.sums == BELOW_TOP:
            z.clamp_(LOWEST[z.dtype], 0.0)  # only absent pairs exceed the level
        more: list[tuple[int, Tensor | None]] = []
        if spec.held:
            more.append((HELD, torch.exp(z, out=free).mul_(z)))
        elif spec.flat:
            more.append((SECOND, torch.expm1(z, out=free)))
        e = self.members_(z.exp_(), tile)
        for x in (e, *(x for _, x in more)):
            assert x is not None  # noqa: S101
            if x is not e:
                self.members_(x, tile)
            if alive is not None:
                x.mul_(alive)
        return [(TOTAL, e), *more, *counts], e

    def _moments(
        self, l: Tensor, alive: Tensor | None, tile: Tile
    ) -> tuple[list[tuple[int, Tensor | None]], Tensor | None]:
        """Like `_parts` for sums of losses and squared losses about a level, above which weights rise linearly."""
        spec = self.spec
        l = l if spec.about == 0.0 else l.sub_(spec.about)
        l = self.members_(l, tile) if alive is None else l.mul_(alive)
        parts: list[tuple[int, Tensor | None]] = [(TOTAL, l), (SECOND, torch.mul(l, l, out=self.buffer("more", tile)))]
        if not spec.first:  # this sweep only computes sums
            return parts, None
        raw = self.buffer("raw", tile)
        if alive is None:
            return parts, self.members_(torch.mul(l, spec.second, out=raw).add_(spec.first), tile)
        return parts, torch.mul(alive, spec.first, out=raw).add_(l, alpha=spec.second)

    def _rise_(self, l: Tensor, tile: Tile) -> Tensor:
        """The largest loss of each row's members, 0 for a row without any, float64."""
        free = self.buffer("free", tile).copy_(l)
        self.members_(free, tile, -math.inf)
        if self.spec.drop:
            torch.threshold_(free, 0.0, -math.inf)
        if self.floor is not None:
            free.masked_fill_(self.buffer("keep 0", tile) == 0, -math.inf)
        top = free.amax(dim=1).double()
        return torch.where(top == -math.inf, 0.0, top)

    def _least(self, l: Tensor, tile: Tile) -> Tensor:
        """The smallest loss of the tile's members above the level; larger than all losses if there are none."""
        level, most = self.spec.level, torch.finfo(l.dtype).max / 4
        if level <= -FAR:
            return self.members_(self.buffer("free", tile).copy_(l), tile, most).amin().double()
        there = torch.sub(l, level, out=self.buffer("free", tile)).clamp_min_(0.0).sign_()
        return self.members_(there, tile).mul_(-most).add_(most).add_(l).amin().double()

    def _slope(
        self, raw: Tensor | None, s: Tensor, tile: Tile, keep: tuple[Tensor | None, Tensor | None], coef: Tensor | None
    ) -> tuple[Tensor, float]:
        """dF/ds [t, u] and a scalar factor of it, from each row's dF/dt over its norm; coef None: 1 for all rows."""
        g, factor = self._raw_slope(raw, s, tile)
        mine, theirs = keep
        if mine is None:
            if coef is not None:
                g.mul_(self._coef(coef, tile))
            elif tile.mirrored:
                factor *= 2
            return self._weighed_(g, tile), factor
        if coef is not None:
            mine.mul_(coef[tile.rows, None])
        if theirs is not None:
            mine.add_(theirs if coef is None else theirs.mul_(coef[None, tile.cols]))
        return self._weighed_(g.mul_(mine), tile), factor

    def _raw_slope(self, raw: Tensor | None, s: Tensor, tile: Tile) -> tuple[Tensor, float]:
        """Weights times dl/ds [t, u], and a scalar factor of it; entries of absent members are 0."""
        slope, factor = self.slopes(s, tile)
        if raw is not None:
            return raw if slope is None else raw.mul_(slope), factor
        return self.members_(self.buffer("free", tile).fill_(1.0) if slope is None else slope, tile), factor

    def _weighed_(self, g: Tensor, tile: Tile) -> Tensor:
        """Multiply g [t, u] by the weights of its pairs, in place."""
        if self.weights is not None:
            rows, cols = self.weights[0][tile.rows], self.weights[1][tile.cols]
            g.mul_(rows[:, None].to(g.dtype)).mul_(cols.to(g.dtype))
        return g

    def _unit_slope(self, raw: Tensor | None, s: Tensor, tile: Tile, keep: Tensor | None) -> Tensor:
        """dF/d⟨x, y⟩ [t, u] if dF/dt divided by the norm is 1 for every row."""
        g, factor = self._raw_slope(raw, s, tile)
        g = g if keep is None else g.mul_(keep)
        g = self._weighed_(g, tile)
        return descend_(g if factor == 1.0 else g.mul_(factor), s, self.spec.similarity)

    def _coef(self, coef: Tensor, tile: Tile) -> Tensor:
        """Coefficients of pairs, [t, u] or [t, 1], from those of the rows."""
        if not tile.mirrored:
            return coef[tile.rows, None]
        return torch.add(coef[tile.rows, None], coef[None, tile.cols], out=self.buffer("coef", tile))

    def _finish(self, sums: Tensor) -> list[Tensor]:
        """The results of a fold from the sums of each row."""
        spec, (total, second, held, size, seen, level) = self.spec, sums
        number = None
        if not self.selects and self.floor is None:
            size, number = self.count()
        elif self.floor is None:
            number = self.count()[1]
        seen = seen if number is None else number
        zero = torch.zeros_like(total)
        if spec.sums == LOSSES:
            return [total, size, seen, zero, torch.ones_like(total), zero]
        if spec.sums == MOMENTS:
            return [spec.first * total + 0.5 * spec.second * second, size, seen, level, total, second]
        empty = size == 0
        level = torch.where(empty, 0.0, level)
        norm, log = total, torch.where(empty, 1.0, over(total, size)).log()
        if spec.flat and not spec.held:  # a mean of exponentials near 1
            rise = over(second, size)
            flat = rise > -0.5
            norm = torch.where(flat, size + second, total)
            log = torch.where(flat, torch.log1p(torch.where(flat, rise, 0.0)), log)
        t = torch.where(empty, 0.0, level + spec.gamma * log)
        value = torch.where(empty, 0.0, level + spec.gamma * over(held, norm)) if spec.held else zero
        return [t, size, seen, level, norm, value]

    # ------------------------------------------------------------------------------------ largest losses

    def _ranked(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Losses [t, u] of a tile for its rows, -inf for absent members; and for its columns if pairs are symmetric."""
        s = self.scores(tile)
        keep = self.keep(s, tile)
        l = self.members_(self.losses(s, tile), tile, -math.inf)
        if self.spec.half == 2 and tile.rows == tile.cols:
            l.masked_fill_(torch.ones_like(l, dtype=torch.bool).tril_(), -math.inf)
        if self.floor is None:
            return l, l if tile.mirrored else None
        both = [x if x is None else l.masked_fill(x == 0, -math.inf) for x in keep]
        assert both[0] is not None  # noqa: S101
        return both[0], both[1]

    def hardest(self) -> tuple[Tensor, Tensor, Tensor]:
        """The largest loss of each row (-inf without members), its column, and the number of members tied at it."""
        best = self.x.new_full((self.n,), -math.inf)
        place, ties = torch.zeros(2, self.n, dtype=torch.int64, device=best.device).unbind()
        for tile in self.tiles(full=bool(self.spec.full)):
            mine, theirs = self._ranked(tile)
            turned = () if theirs is None else ((theirs.T, tile.cols, tile.rows),)
            for l, rows, cols in ((mine, tile.rows, tile.cols), *turned):
                before, top = best[rows], l.amax(dim=1)
                if not self.spec.whole:
                    ties[rows] += (top == before) & (top > -math.inf)
                    hit = (top > before).nonzero()[:, 0]
                    found = l[hit] == top[hit, None]
                    row = hit + rows.start
                    place[row], ties[row] = found.to(torch.uint8).argmax(dim=1) + cols.start, found.sum(dim=1)
                best[rows] = torch.maximum(before, top)
        return best, place, ties

    def candidates(self, count: int) -> Tensor:
        """Positions row·m + col of all losses that reach a level reached by at least `count` of them (or by all)."""
        level, held = torch.finfo(self.x.dtype).min, 0
        found = list[tuple[Tensor, Tensor]]()
        for tile in self.tiles():
            l = self._ranked(tile)[0]
            tops = blocks(l)
            if tops.numel() >= count:  # as many blocks reach this level, and hold a loss each that does
                level = max(level, float(tops.view(-1).kthvalue(tops.numel() - count + 1).values))
            row, block = (tops >= level).nonzero(as_tuple=True)
            each, apart = torch.arange(BLOCK, device=l.device), l.shape[1] // BLOCK
            col = torch.where((block < apart)[:, None], block[:, None] + each * apart, apart * BLOCK + each)
            inside = col < l.shape[1]
            col = col.clamp_(max=l.shape[1] - 1)
            place = (row * l.shape[1])[:, None] + col
            near = l.view(-1)[place]
            kept = (inside & (near >= level)).view(-1).nonzero()[:, 0]
            place = place.view(-1)[kept]
            near, row = near.view(-1)[kept], torch.div(place, l.shape[1], rounding_mode="floor")
            found.append((near, place + row * (self.m - l.shape[1]) + tile.rows.start * self.m + tile.cols.start))
            held += len(near)
            if held > 2 * count:
                found = [_largest(found, count)]
                level, held = float(found[0][0].amin()), len(found[0][0])
        found = [_largest(found, count)] if held > count else found
        return torch.cat([place for _, place in found]) if found else torch.zeros(0, dtype=torch.int64)

    def ranks(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest losses [n, count] of each row, padded with -inf, and their columns."""
        values, places = [], []
        for tile in self.tiles(full=True):
            found = self._ranked(tile)[0].topk(min(count, self.m), dim=1)
            values.append(found.values)
            places.append(found.indices)
        return torch.cat(values), torch.cat(places)

    def draw(self, chance: Callable[[Tensor], Tensor], spots: Tensor) -> tuple[Tensor, Tensor]:
        """Draw columns [n, K] from each row's members, with replacement; also returns which rows [n] have members.

        Args:
            chance: computes log-odds [t, u] from scores; it may overwrite them.
            spots: [n, K] uniform random numbers, float64.
        """
        places, there = [], []
        for tile in self.tiles(full=True):
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

    def triplets(self, near: Tensor, place: Tensor, real: Tensor) -> list[Tensor]:
        """Σ l, Σ w and number of negatives of each row, Σ dl/ds [n, P] of each positive; then gradients."""
        spec, number = self.spec, near.shape[1]
        total, size = self.x.new_zeros(2, self.n, dtype=torch.float64)
        by_near = torch.zeros_like(near, dtype=self.x.dtype)
        pulls = TileGradients(self) if spec.whole else None
        weight, seen = self.count()
        for tile in self.tiles(full=True):
            s, g, here = self.scores(tile), self.buffer("sum", tile).zero_(), tile.rows
            near = s.gather(1, place[here])
            for p in range(number):
                there = real[here, p].double()
                z = torch.sub(s, near[:, p, None], out=self.buffer("z", tile))
                l = self.losses(z, tile)
                slope, factor = self.slopes(z, tile) if spec.shape != POWER or spec.power != 1.0 else (None, spec.a)
                alive = self._counted(z, l, tile)
                l = self.members_(l, tile) if alive is None else l.mul_(alive)
                total[here] += torch.where(there > 0, there * self.sum(l, None, tile, 1), 0.0)
                mine = weight[here] if alive is None else self.sum(alive, None, tile, 1)
                size[here] += there * mine
                if spec.shape == POWER and spec.power == 1.0:  # a hinge has one slope wherever its loss is positive
                    slope = alive if alive is not None and spec.drop else l.sign_()
                    factor = spec.scale * spec.a
                elif slope is None:
                    slope = self.members_(self.buffer("free", tile).fill_(1.0), tile) if alive is None else alive
                else:
                    slope = self.members_(slope, tile) if alive is None else slope.mul_(alive)
                pull = mine if slope is alive else self.sum(slope, None, tile, 1)
                by_near[here, p] = torch.where(there > 0, there * pull * factor, 0.0).to(s.dtype)
                g.addcmul_(slope, (there * factor).to(s.dtype)[:, None])
            if pulls is not None:
                pulls.add(tile, s, self._weighed_(g, tile), 1.0)
        none = self.x.new_empty(0)
        return [total, size, seen, by_near, *((none, none) if pulls is None else pulls.found()[:2])]

    def _counted(self, z: Tensor, l: Tensor, tile: Tile) -> Tensor | None:
        """1 for triplets that count by their score and loss, else 0; None if all count."""
        if not self.spec.band and not self.spec.drop:
            return None
        alive = self.buffer("alive", tile)
        if self.spec.drop:
            torch.sign(l, out=alive).clamp_min_(0.0)
        if self.spec.band:  # arithmetic, because comparisons take three times as long
            above = torch.sub(z, self.spec.low, out=self.buffer("coef", tile)).clamp_min_(0.0).sign_()
            above.mul_(torch.rsub(z, self.spec.high).clamp_min_(0.0).sign_())
            alive = alive.mul_(above) if self.spec.drop else above
        return self.members_(alive, tile)


TOTAL, SECOND, HELD, SIZE, SEEN = range(5)
"""Rows of the sums of a fold; the sixth row is the level."""


def blocks(l: Tensor) -> Tensor:
    """The maximum of each block of `BLOCK` entries of a row, [t, ceil(u/BLOCK)].

    Block k of the first u // BLOCK has every (u // BLOCK)-th entry from k on, and the last block the remaining entries.
    """
    t, u = l.shape
    whole = u - u % BLOCK
    found = [l[:, :whole].reshape(t, BLOCK, -1).amax(dim=1)] if whole else []
    return torch.cat([*found, l[:, whole:].amax(dim=1, keepdim=True)], dim=1) if u > whole else found[0]


def _largest(found: list[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of these losses, with all ties of the smallest of them, and their positions."""
    losses, places = (torch.cat(x) for x in zip(*found, strict=True))
    kept = losses >= losses.topk(count).values[-1]
    return losses[kept], places[kept]

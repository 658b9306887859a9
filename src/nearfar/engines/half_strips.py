"""Strips for groups of the whole batch: rows and columns sorted by label, each unordered pair once if square.

The positive pairs of a row are then consecutive columns. If the columns are the rows, each strip starts at the column
of its first row: half of the matrix, in which each pair counts twice. Miners look at whole rows, so with one of them
every strip has all columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nearfar._utils.process_group import cuts
from nearfar.engines.forms import Form, form_of, write_losses
from nearfar.engines.runs import Narrow, columns
from nearfar.engines.strips import Slopes, Strips
from nearfar.engines.windows import fence
from nearfar.sets.stream import Support

__all__ = ["Half", "Start", "Strip", "Sums"]


@dataclass(frozen=True, eq=False)
class Strip:
    """A block of rows of the half matrix.

    Args:
        rows: the t sorted rows.
        first: the first of the u sorted columns.
        scores: [t, u].
        losses: [t, u] negative pair loss of every entry.
        free: [t, u] unused buffer.
        place: [t, P] columns near each row's own class, relative to `first`.
        positive: [t, P] which of them are positive pairs to be counted here.
        absent: [t, P] which of them have the row's label but are not counted here.
        near: [t, P] their scores.
        fence: [t, u] 0 at the negative pairs that a miner keeps, -inf elsewhere; None without a miner.
        weights: [t, u] weights of the negative pairs, 0 elsewhere; None if each pair counts once.
        near_weights: [t, P] weights of the positive pairs, 0 elsewhere; likewise.
    """

    rows: slice
    first: int
    scores: Tensor
    losses: Tensor
    free: Tensor
    place: Tensor
    positive: Tensor
    absent: Tensor
    near: Tensor
    fence: Tensor | None = None
    weights: Tensor | None = None
    near_weights: Tensor | None = None


Start = tuple[int, slice, int]
"""Index of a strip's first entry in order of arrival, its rows, and its first column."""


@lru_cache(maxsize=4)
def _corners(tall: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two masks [tall, tall]: 1 above the diagonal and 0 elsewhere; 0 above the diagonal and -inf elsewhere."""
    upper = torch.ones(tall, tall, dtype=dtype, device=device).triu(1)
    return upper, torch.where(upper > 0, 0.0, -math.inf).to(dtype)


class Sums:
    """Accumulated gradient of the sorted rows and columns, and of a learned threshold λ.

    Losses depend on s - λ, so that the gradient in λ is -Σ dF/ds.
    """

    def __init__(self, rows: Tensor, cols: Tensor) -> None:
        self.rows, self.cols = torch.zeros_like(rows), torch.zeros_like(cols)
        self.learned = rows.new_zeros(())

    def shrink(self, by: Tensor | None) -> None:
        """Multiply the accumulated gradient by a factor [1]; None for 1."""
        if by is not None:
            for total in (self.rows, self.cols, self.learned):
                total.mul_(by[0].to(total.dtype))


class Half:
    """State of one call: rows and columns sorted by label, buffers, and the strips of the half matrix."""

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        form, layout = form_of(strips.product.similarity), strips.layout
        assert layout is not None  # noqa: S101 - checked by `halves`
        assert form is not None  # noqa: S101
        self.product, self.slopes = strips.product, slopes
        self.square = layout.square and strips.product.miner is None
        self.per = 1 if self.square else int(layout.orders)
        # the square block at the start of a strip is computed in full: low strips waste less
        least = 2048 if strips.rows.is_cuda else 256
        tall = strips.wanted if strips.given else min(strips.wanted, max(least, len(strips.cols) // 16))
        if strips.ranks.world > 1:  # at least two strips for each process, to balance long and short ones
            tall = min(tall, -(-len(strips.rows) // (2 * strips.ranks.world)))
        self.ranks, self.cuts = strips.ranks, cuts(len(strips.rows), tall, strips.ranks)
        self.tall = max(here.stop - here.start for here in self.cuts)
        self.layout = layout
        self.runs = columns(layout, strips.rows.dtype, sort_rows=True)
        every = torch.arange(len(strips.rows), device=strips.rows.device)
        self.by_row = every if self.runs.by_row is None else self.runs.by_row
        strips.had_positive[self.by_row], strips.had_negative[self.by_row] = (
            self.runs.has_positive(),
            self.runs.has_negative(),
        )
        self.rows = strips.rows[self.by_row]
        self.form: Form = form(strips.cols[self.runs.order])
        size = min(self.tall, len(self.rows)) * len(strips.cols)
        wanted = (True, True, True, self.product.miner is not None, self.runs.weights is not None)
        self.buffers = [strips.rows.new_empty(size if each else 0) for each in wanted]
        self.upper, self.hide = _corners(min(self.tall, len(self.rows)), strips.rows.dtype, strips.rows.device)

    def __iter__(self) -> Iterator[Strip]:
        n, m = len(self.rows), len(self.form.cols)
        for here in self.cuts:
            if self.square and 0 < here.start == n - 1 and len(self.cuts) > 1:
                continue  # all pairs of the last row have been seen
            first = here.start if self.square else 0
            shape = (here.stop - here.start, m - first)
            scores, losses, free, ring, weights = (
                buffer[: shape[0] * shape[1]].view(shape) if len(buffer) else None for buffer in self.buffers
            )
            assert scores is not None and losses is not None and free is not None  # noqa: S101, PT018
            self.form.scores(self.rows[here], scores, first)
            narrow = self._narrow(here, first)
            near, positive, measure = scores.gather(1, narrow.place), narrow.positive, narrow.weight
            if self.product.miner is not None and ring is not None:
                given = positive if measure is None else measure
                window = fence(self.product.miner, scores, near, narrow, given, ring)[1]
                positive = window.positive
                measure = None if measure is None else measure * positive
            write_losses(self.product.negative, scores, losses)
            if weights is not None:
                self._weigh_(weights, here, first, narrow, ring)
            yield Strip(
                here, first, scores, losses, free, narrow.place, positive, narrow.run & ~positive, near, ring, weights,
                measure,
            )  # fmt: skip

    def _weigh_(self, weights: Tensor, here: slice, first: int, narrow: Narrow, ring: Tensor | None) -> None:
        """Write the weights [t, u] of the negative pairs of a strip."""
        self.runs.weigh_wide_(weights, here, narrow, 0.0, ring, first)
        if self.square:
            t = len(weights)
            weights[:, :t].mul_(self.upper[:t, :t])

    def _narrow(self, here: slice, first: int) -> Narrow:
        """Columns near each row's class, which have its label, and which are positive pairs, [t, P] each."""
        return self.runs.above(here, first) if self.square else self.runs.narrow(here)

    def members(self, strip: Strip) -> tuple[Tensor, Tensor]:
        """Measure of the positive and of the negative pairs in a strip."""
        t, u = strip.losses.shape
        if strip.weights is not None and strip.near_weights is not None:
            return strip.near_weights.sum(), strip.weights.sum()
        positive = strip.positive.sum()
        if strip.fence is not None:
            return positive, (strip.fence == 0).sum()
        if self.square:
            # of the columns after their row, those that are not negative
            after = strip.place > torch.arange(t, device=strip.place.device)[:, None]
            return positive, t * u - t * (t + 1) // 2 - positive - (strip.absent & after).sum()
        return positive, t * u - positive - strip.absent.sum()

    def fill_(self, x: Tensor, strip: Strip, near: Tensor, absent: float) -> Tensor:
        """Overwrite x [t, u] with `near` [t, P] at positive pairs, and with `absent` at entries that are no pair."""
        if self.square:
            t = len(x)
            if absent:
                x[:, :t].add_(self.hide[:t, :t])
            else:
                x[:, :t].mul_(self.upper[:t, :t])
        old = x.gather(1, strip.place)
        return x.scatter_(1, strip.place, torch.where(strip.positive, near, torch.where(strip.absent, absent, old)))

    def pull(self, strip: Strip, slope: Tensor, sums: Sums) -> None:
        """Back-propagate dF/ds [t, u] of a strip to `sums`."""
        sums.learned -= slope.sum()
        slope = self.form.descend_(slope, strip.scores)
        rows, cols = self.rows[strip.rows], self.form.cols[strip.first :]
        self.form.pull_(sums.rows[strip.rows], slope, rows, cols)
        self.form.pull_(sums.cols[strip.first :], slope.T, cols, rows)

    def pull_near(self, strip: Strip, slope: Tensor, sums: Sums) -> None:
        """Back-propagate dF/ds [t, P] of the positive pairs of a strip to `sums`."""
        sums.learned -= slope.sum()
        slope = self.form.descend_(slope, strip.near)
        totals = sums.rows[strip.rows], sums.cols
        self.form.pull_few_(totals, slope, self.rows[strip.rows], strip.place + strip.first)

    def gather(self, sums: Sums, scale: Tensor) -> None:
        """Add a gradient times `scale` to the result, with rows and columns in their original order."""
        scale = scale.to(self.rows.dtype)
        found = (self.by_row, sums.rows), (self.runs.order, sums.cols)
        for total, (order, part) in zip(self.slopes.sums[:2], found, strict=True):
            if total is not None:
                total.index_add_(0, order, part * scale)
        for total in self.slopes.sums[2:]:
            if total is not None:
                total += sums.learned * scale

    def support(self, starts: list[Start], found: Support, *, near: bool) -> Support:
        """Map members, by their index in order of arrival (`near`: among positive pairs), to flat indices i·m + j."""
        place = found.place
        i, j = torch.zeros_like(place), torch.zeros_like(place)
        for offset, here, first in starts:
            columns = self._narrow(here, first).place if near else None
            width = len(self.form.cols) - first if columns is None else columns.shape[1]
            mine = ((place >= offset) & (place < offset + (here.stop - here.start) * width)).nonzero()[:, 0]
            row, col = (place[mine] - offset) // width, (place[mine] - offset) % width
            i[mine], j[mine] = row + here.start, first + (col if columns is None else columns[row, col])
        i, j = self.by_row[i], self.runs.order[j]
        return Support(i * len(self.form.cols) + j, found.weights, self.layout.same(i, j))

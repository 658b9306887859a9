"""Fast path for groups of the whole batch with plain labels: in place, and each unordered pair once if square.

Rows and columns are sorted by label, so that the positive pairs of a row are consecutive columns. If the columns are
the rows, each strip starts at the column of its first row: half of the matrix, in which each pair counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nearfar._utils.process_group import cuts
from nearfar._utils.shortcuts import exactly
from nearfar._utils.tensors import over
from nearfar.engines.forms import Form, form_of, plain_hinge, write_losses, write_slopes
from nearfar.engines.runs import Runs
from nearfar.engines.solvers import Few, Named, Solver, solver
from nearfar.engines.strips import Slopes, Strips
from nearfar.engines.sweeps import Ask, Made, few
from nearfar.groups.groupings import Balanced, Batch, Grouping, Product, Sign
from nearfar.pairs import Hinge, Logistic, PairLoss, Squared
from nearfar.relations.layout import Layout
from nearfar.sets.base import Support
from nearfar.sets.online import Online, Variance

__all__ = ["Start", "Strip", "Sums", "by_halves", "halves"]

WHOLE: tuple[type[Grouping], ...] = (Batch, Sign, Balanced)
FLAT: tuple[type[PairLoss], ...] = (Hinge, Logistic, Squared)
"""Pair losses that are nonnegative and have slope 0 where they are 0."""


def halves(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if not exactly(product.groups, *WHOLE) or product.miner is not None or layout.weights is not None:
        return False
    if not layout.square and int(layout.orders) != 1:  # each pair twice, in places that nobody knows
        return False
    if form_of(product.similarity) is None or (
        product.link is not None and any(True for _ in product.link.parameters())
    ):
        return False
    if product.positive is not product.negative and any(True for pair in _both(product) for _ in pair.parameters()):
        return False  # the gradient of a threshold is one sum over both signs
    sides = ((product.positive, product.over_positive), (product.negative, product.over_negative))
    return all(exactly(pair, *FLAT) and solver(of, torch.zeros(1), 1) is not None for pair, of in sides)


def _both(product: Product) -> tuple[PairLoss, PairLoss]:
    """The pair losses of positive and negative pairs."""
    return product.positive, product.negative


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
        """Multiply the accumulated gradient by a factor; None for 1."""
        if by is not None:
            for total in (self.rows, self.cols, self.learned):
                total.mul_(by.to(total.dtype))


class _Half:
    """State of one call: rows and columns sorted by label, buffers, and the strips of the half matrix."""

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        form, layout = form_of(strips.product.similarity), strips.layout
        assert layout is not None  # noqa: S101 - checked by `halves`
        assert form is not None  # noqa: S101
        self.product, self.slopes, self.square = strips.product, slopes, layout.square
        # the square block at the start of a strip is computed in full: low strips waste less
        least = 2048 if strips.rows.is_cuda else 256
        tall = strips.wanted if strips.given else min(strips.wanted, max(least, len(strips.cols) // 16))
        if strips.ranks.world > 1:  # at least two strips for each process, to balance long and short ones
            tall = min(tall, -(-len(strips.rows) // (2 * strips.ranks.world)))
        self.ranks, self.cuts = strips.ranks, cuts(len(strips.rows), tall, strips.ranks)
        self.tall = max(here.stop - here.start for here in self.cuts)
        self.labels = layout.row_labels, layout.col_labels
        self.by_row = layout.row_labels.sort(stable=True).indices
        self.runs = Runs(layout, self.by_row)
        strips.had_positive[self.by_row], strips.had_negative[self.by_row] = (
            self.runs.has_positive(),
            self.runs.has_negative(),
        )
        self.rows = strips.rows[self.by_row]
        self.form: Form = form(strips.cols[self.runs.order])
        size = min(self.tall, len(self.rows)) * len(strips.cols)
        self.buffer, self.spare, self.third = (strips.rows.new_empty(size) for _ in range(3))
        self.upper, self.hide = _corners(min(self.tall, len(self.rows)), strips.rows.dtype, strips.rows.device)

    def __iter__(self) -> Iterator[Strip]:
        n, m = len(self.rows), len(self.form.cols)
        for here in self.cuts:
            if self.square and 0 < here.start == n - 1:
                continue  # all pairs of the last row have been seen
            first = here.start if self.square else 0
            shape = (here.stop - here.start, m - first)
            scores = self.form.scores(self.rows[here], self.buffer[: shape[0] * shape[1]].view(shape), first)
            place, run, positive = self._narrow(here, first)
            near = scores.gather(1, place)
            losses = write_losses(self.product.negative, scores, self.spare[: shape[0] * shape[1]].view(shape))
            third = self.third[: shape[0] * shape[1]].view(shape)
            yield Strip(here, first, scores, losses, third, place, positive, run & ~positive, near)

    def _narrow(self, here: slice, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Columns near each row's class, which have its label, and which are positive pairs, [t, P] each."""
        if not self.square:
            narrow = self.runs.narrow(here)
            return narrow.place, narrow.run, narrow.positive
        start, end, m = self.runs.start[here, None], self.runs.end[here, None], len(self.form.cols)
        width = min(self.runs.width, m - first)
        place = start.clamp(first, m - width) + torch.arange(width, device=start.device)
        run = (place >= start) & (place < end)
        row = torch.arange(here.start, here.stop, device=start.device)[:, None]
        return place - first, run, run & (place > row)

    def members(self, strip: Strip) -> tuple[Tensor, Tensor]:
        """Number of positive and of negative pairs in a strip."""
        t, u = strip.losses.shape
        positive = strip.positive.sum()
        if self.square:
            return positive, t * u - t * (t + 1) // 2 - positive
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
        place = strip.place + strip.first
        by_row, by_col = self.form.directions(self.rows[strip.rows], self.form.cols[place])
        sums.rows[strip.rows] += torch.bmm(slope[:, None, :], by_row)[:, 0]
        parts = slope[:, :, None] * by_col
        sums.cols.index_add_(0, place.reshape(-1), parts.reshape(-1, parts.shape[-1]))

    def merge(self, found: Solver, sums: Sums | None) -> None:
        """Merge a solver over processes: after its first sweep if it needs two (`sums` None), else after its last."""
        if self.ranks.world == 1 or isinstance(found, Online) == (sums is None):
            return
        by = found.merge(self.ranks)
        if sums is not None:
            sums.shrink(by)

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

    def support(self, starts: list[Start], place: Tensor, weights: Tensor, *, near: bool) -> Support:
        """Map members, by their index in order of arrival (`near`: among positive pairs), to flat indices i·m + j."""
        i, j = torch.zeros_like(place), torch.zeros_like(place)
        for offset, here, first in starts:
            columns = self._narrow(here, first)[0] if near else None
            width = len(self.form.cols) - first if columns is None else columns.shape[1]
            mine = ((place >= offset) & (place < offset + (here.stop - here.start) * width)).nonzero()[:, 0]
            row, col = (place[mine] - offset) // width, (place[mine] - offset) % width
            i[mine], j[mine] = row + here.start, first + (col if columns is None else columns[row, col])
        i, j = self.by_row[i], self.runs.order[j]
        return Support(i * len(self.form.cols) + j, weights, self.labels[0][i] == self.labels[1][j])


def by_halves(strips: Strips, new_slopes: Ask) -> Made | None:
    """Value and gradient of the loss; None if ties or a boundary solution need the general path."""
    slopes = new_slopes()
    half = _Half(strips, slopes)
    value = _together(half, strips) if exactly(strips.product.groups, Batch) else _apart(half, strips)
    return None if value is None else (value.to(strips.rows.dtype), slopes.sums)


def _wide(half: _Half, strip: Strip, absent: float, *, together: bool) -> tuple[Tensor, Tensor]:
    """Losses [t, u] of the negative (`together`: all) pairs of a strip, `absent` elsewhere, and their number."""
    positive, negative = half.members(strip)
    near = half.product.positive(strip.near, +1) if together else torch.full_like(strip.near, absent)
    return half.fill_(strip.losses, strip, near, absent), positive + negative if together else negative


def _weigh(half: _Half, strip: Strip, found: Online | Variance, sums: Sums, *, together: bool) -> None:
    """Turn the losses of a strip into weights by a solver, and add their gradient to `sums`."""
    pairs = half.product
    # weights vanish where a hinge is 0, so that its slope may be taken as 1 everywhere
    flat = found.vanishes and plain_hinge(pairs.negative)
    dl_ds = None
    if half.slopes.any and not flat:
        dl_ds = write_slopes(pairs.negative, strip.scores, strip.losses, strip.free)
    losses, members = _wide(half, strip, found.absent, together=together)
    sums.shrink(found.absorb_(losses, members, None if dl_ds is not None else strip.free))
    if not half.slopes.any:
        return
    near = pairs.positive.slope(strip.near, +1) if together else torch.zeros_like(strip.near)
    assert isinstance(near, Tensor)  # noqa: S101 - of the kinds in FLAT
    if dl_ds is not None:
        half.fill_(dl_ds, strip, near, 0.0)
        half.pull(strip, dl_ds if found.even else losses.mul_(dl_ds), sums)
        return
    raw = losses.gather(1, strip.place)
    raw = torch.where(strip.positive, raw * near, torch.where(strip.absent, 0.0, raw))
    half.pull(strip, losses.scatter_(1, strip.place, raw), sums)


def _weigh_near(half: _Half, strip: Strip, found: Online | Variance, sums: Sums) -> None:
    """Like `_weigh`, for a group of positive pairs only."""
    losses = torch.where(strip.positive, half.product.positive(strip.near, +1), found.absent)
    sums.shrink(found.absorb_(losses, strip.positive.sum()))
    dl_ds = half.product.positive.slope(strip.near, +1)
    assert isinstance(dl_ds, Tensor)  # noqa: S101 - of the kinds in FLAT
    if half.slopes.any:
        dl_ds = torch.where(strip.positive, dl_ds, 0.0)
        half.pull_near(strip, dl_ds if found.even else dl_ds * losses, sums)


def _together(half: _Half, strips: Strips) -> Tensor | None:
    """Value of one group of all pairs, and its gradient; None if the general path is needed."""
    found = solver(half.product.over_positive, strips.rows, 2 if half.square else 1)
    assert found is not None  # noqa: S101 - checked by `halves`
    if isinstance(found, Few | Variance):
        starts = list[Start]()
        for strip in half:
            starts.append((found.seen, strip.rows, strip.first))
            found.look(*_wide(half, strip, found.absent, together=True))
        half.merge(found, None)
        if isinstance(found, Few):
            solved = found.solved(None)
            return None if solved is None else _named(half, strips, solved, starts, near=False)
        if not found.ready():
            return None
    sums = Sums(half.rows, half.form.cols)
    for strip in half:
        _weigh(half, strip, found, sums, together=True)
    half.merge(found, sums)
    value, scale = found.finish()
    half.gather(sums, scale)
    return value


def _named(
    half: _Half, strips: Strips, solved: Named, starts: list[Start], *, near: bool, share: Tensor | None = None
) -> Tensor:
    """Value of a group in which few pairs carry the weight; adds its gradient times `share`."""
    value, place, weights = solved
    if half.slopes.any:
        share = torch.ones_like(value[0]) if share is None else share
        few(strips, half.slopes, half.support(starts, place, weights, near=near), share.to(weights.dtype))
    return value[0]


def _apart(half: _Half, strips: Strips) -> Tensor | None:
    """Value of a group of positive pairs and one of negative pairs; None if the general path is needed."""
    orders, product = 2 if half.square else 1, half.product
    near, wide = solver(product.over_positive, strips.rows, orders), solver(product.over_negative, strips.rows, orders)
    assert near is not None  # noqa: S101 - checked by `halves`
    assert wide is not None  # noqa: S101
    starts = _first_look(half, near, wide)
    balanced = exactly(product.groups, Balanced)
    if (isinstance(near, Variance) and not near.ready()) or (isinstance(wide, Variance) and not wide.ready()):
        return None
    few_near = near.solved(None) if isinstance(near, Few) else None
    cap = near.taken() if balanced and isinstance(near, Few) else None
    few_wide = wide.solved(cap) if isinstance(wide, Few) else None
    if (isinstance(near, Few) and few_near is None) or (isinstance(wide, Few) and few_wide is None):
        return None
    value_near, value_wide = _second_look(half, near, wide)
    share_near = share_wide = torch.ones_like(half.rows[0, 0], dtype=torch.float64)
    if cap is not None and isinstance(wide, Few):
        a, b = cap[0], torch.minimum(wide.taken(), cap)[0]
        share_near, share_wide = over(a, a + b), over(b, a + b)
    if few_near is not None:
        value_near = _named(half, strips, few_near, starts[0], near=True, share=share_near)
    if few_wide is not None:
        value_wide = _named(half, strips, few_wide, starts[1], near=False, share=share_wide)
    return value_near * share_near + value_wide * share_wide


def _first_look(half: _Half, near: Solver, wide: Solver) -> tuple[list[Start], list[Start]]:
    """First sweep of the solvers that need all losses before they can compute weights."""
    starts: tuple[list[Start], list[Start]] = [], []
    if not isinstance(near, Few | Variance) and not isinstance(wide, Few | Variance):
        return starts
    for strip in half:
        if isinstance(near, Few | Variance):
            starts[0].append((near.seen, strip.rows, strip.first))
            near.look(
                torch.where(strip.positive, half.product.positive(strip.near, +1), near.absent), strip.positive.sum()
            )
        if isinstance(wide, Few | Variance):
            starts[1].append((wide.seen, strip.rows, strip.first))
            wide.look(*_wide(half, strip, wide.absent, together=False))
    half.merge(near, None)
    half.merge(wide, None)
    return starts


def _second_look(half: _Half, near: Solver, wide: Solver) -> tuple[Tensor, Tensor]:
    """The sweep that computes weights and gradients; solvers that select few pairs skip it."""
    values = [half.rows.new_zeros((), dtype=torch.float64) for _ in range(2)]
    sums = [Sums(half.rows, half.form.cols) for _ in range(2)]
    if isinstance(near, Few) and isinstance(wide, Few):
        return values[0], values[1]
    for strip in half:
        if not isinstance(near, Few):
            _weigh_near(half, strip, near, sums[0])
        if not isinstance(wide, Few):
            _weigh(half, strip, wide, sums[1], together=False)
    for k, found in enumerate((near, wide)):
        if not isinstance(found, Few):
            half.merge(found, sums[k])
            values[k], scale = found.finish()
            half.gather(sums[k], scale)
    return values[0], values[1]

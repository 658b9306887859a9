"""Groups of the whole batch with plain labels: sorted by label, in place, and each unordered pair once when square.

Rows and columns are sorted by label, so the positive pairs of a row are a run of columns. A batch that is its own
reference is swept over the columns behind each strip's first row: half of the matrix, whose members count double.
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
from nearfar.relations.relation import Relation
from nearfar.sets.base import Support
from nearfar.sets.online import Online, Variance

__all__ = ["Start", "Strip", "Sums", "by_halves", "halves"]

WHOLE: tuple[type[Grouping], ...] = (Batch, Sign, Balanced)
FLAT: tuple[type[PairLoss], ...] = (Hinge, Logistic, Squared)
"""Pair losses that are never negative, and flat where they are 0."""


def halves(product: Product, relation: Relation) -> bool:
    """Whether this way can do a loss: what it asks of each factor."""
    if (
        not exactly(product.groups, *WHOLE)
        or relation.plain_labels() is None
        or product.miner is not None
        or relation.reference_starts_with_batch
    ):
        return False
    if form_of(product.similarity) is None or (
        product.link is not None and any(True for _ in product.link.parameters())
    ):
        return False
    if product.positive is not product.negative and any(True for pair in _both(product) for _ in pair.parameters()):
        return False  # one sum serves one threshold, that of both signs
    sides = ((product.positive, product.over_positive), (product.negative, product.over_negative))
    return all(exactly(pair, *FLAT) and solver(of, torch.zeros(1), 1) is not None for pair, of in sides)


def _both(product: Product) -> tuple[PairLoss, PairLoss]:
    return product.positive, product.negative


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows of the half: scores, losses and a free buffer [t, u], positive pairs [t, P] by their columns in it."""

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
"""The number of a strip's first member, its rows, and its first column."""


@lru_cache(maxsize=4)
def _corners(tall: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 above the diagonal and 0 elsewhere; 0 above the diagonal and -inf elsewhere."""
    upper = torch.ones(tall, tall, dtype=dtype, device=device).triu(1)
    return upper, torch.where(upper > 0, 0.0, -math.inf).to(dtype)


class Sums:
    """A gradient that grows: of sorted rows and columns, and of a learned threshold λ.

    λ moves every loss as -s does, so that its gradient is -Σ dF/ds.
    """

    def __init__(self, rows: Tensor, cols: Tensor) -> None:
        self.rows, self.cols = torch.zeros_like(rows), torch.zeros_like(cols)
        self.learned = rows.new_zeros(())

    def shrink(self, by: Tensor | None) -> None:
        """Multiply all that was added so far."""
        if by is not None:
            for total in (self.rows, self.cols, self.learned):
                total.mul_(by.to(total.dtype))


class _Half:
    """One call: rows and columns sorted by label, buffers, and the strips of the half."""

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        labels, form = strips.relation.plain_labels(), form_of(strips.product.similarity)
        assert labels is not None  # noqa: S101 - `halves` said so
        assert form is not None  # noqa: S101
        self.product, self.slopes, self.square = strips.product, slopes, strips.relation.square
        # a strip's own corner is swept whole: strips that are low beside the matrix waste less of it
        least = 2048 if strips.rows.is_cuda else 256
        tall = strips.wanted if strips.given else min(strips.wanted, max(least, len(strips.cols) // 16))
        if strips.ranks.world > 1:  # a long strip and a short one for each
            tall = min(tall, -(-len(strips.rows) // (2 * strips.ranks.world)))
        self.ranks, self.cuts = strips.ranks, cuts(len(strips.rows), tall, strips.ranks)
        self.tall = max(here.stop - here.start for here in self.cuts)
        self.labels = labels
        self.by_row = labels[0].sort(stable=True).indices
        self.runs = Runs(strips.relation, (labels[0][self.by_row], labels[1]))
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
                continue  # the last row has met all others
            first = here.start if self.square else 0
            shape = (here.stop - here.start, m - first)
            scores = self.form.scores(self.rows[here], self.buffer[: shape[0] * shape[1]].view(shape), first)
            place, run, positive = self._narrow(here, first)
            near = scores.gather(1, place)
            losses = write_losses(self.product.negative, scores, self.spare[: shape[0] * shape[1]].view(shape))
            third = self.third[: shape[0] * shape[1]].view(shape)
            yield Strip(here, first, scores, losses, third, place, positive, run & ~positive, near)

    def _narrow(self, here: slice, first: int) -> tuple[Tensor, Tensor, Tensor]:
        start, end, m = self.runs.start[here, None], self.runs.end[here, None], len(self.form.cols)
        width = min(self.runs.width, m - first)
        place = start.clamp(first, m - width) + torch.arange(width, device=start.device)
        run = (place >= start) & (place < end)
        row = torch.arange(here.start, here.stop, device=start.device)[:, None]
        return place - first, run, run & (place > row) if self.square else run

    def members(self, strip: Strip) -> tuple[Tensor, Tensor]:
        """How many positive and negative pairs a strip holds."""
        t, u = strip.losses.shape
        positive = strip.positive.sum()
        return positive, (t * u - t * (t + 1) // 2 if self.square else t * u) - positive

    def fill_(self, x: Tensor, strip: Strip, near: Tensor, absent: float) -> Tensor:
        """`near` [t, P] in place of positive pairs, `absent` in place of what is no pair."""
        if self.square:
            t = len(x)
            if absent:
                x[:, :t].add_(self.hide[:t, :t])
            else:
                x[:, :t].mul_(self.upper[:t, :t])
        old = x.gather(1, strip.place)
        return x.scatter_(1, strip.place, torch.where(strip.positive, near, torch.where(strip.absent, absent, old)))

    def pull(self, strip: Strip, slope: Tensor, sums: Sums) -> None:
        """Add the gradient of dF/ds [t, u]."""
        sums.learned -= slope.sum()
        slope = self.form.descend_(slope, strip.scores)
        rows, cols = self.rows[strip.rows], self.form.cols[strip.first :]
        self.form.pull_(sums.rows[strip.rows], slope, rows, cols)
        self.form.pull_(sums.cols[strip.first :], slope.T, cols, rows)

    def pull_near(self, strip: Strip, slope: Tensor, sums: Sums) -> None:
        """Add the gradient of dF/ds [t, P] of positive pairs."""
        sums.learned -= slope.sum()
        slope = self.form.descend_(slope, strip.near)
        place = strip.place + strip.first
        by_row, by_col = self.form.directions(self.rows[strip.rows], self.form.cols[place])
        sums.rows[strip.rows] += torch.bmm(slope[:, None, :], by_row)[:, 0]
        parts = slope[:, :, None] * by_col
        sums.cols.index_add_(0, place.reshape(-1), parts.reshape(-1, parts.shape[-1]))

    def merge(self, found: Solver, sums: Sums | None) -> None:
        """Let a solver take in what all ranks found: after the first look those that need one, else after the last."""
        if self.ranks.world == 1 or isinstance(found, Online) == (sums is None):
            return
        by = found.merge(self.ranks)
        if sums is not None:
            sums.shrink(by)

    def gather(self, sums: Sums, scale: Tensor) -> None:
        """Hand a gradient over, times `scale`, in the order the rows and columns came."""
        scale = scale.to(self.rows.dtype)
        found = (self.by_row, sums.rows), (self.runs.order, sums.cols)
        for total, (order, part) in zip(self.slopes.sums[:2], found, strict=True):
            if total is not None:
                total.index_add_(0, order, part * scale)
        for total in self.slopes.sums[2:]:
            if total is not None:
                total += sums.learned * scale

    def support(self, starts: list[Start], place: Tensor, weights: Tensor, *, near: bool) -> Support:
        """Pairs named by their place in the strips (`near`: among positive pairs), as pairs of rows and columns."""
        i, j = torch.zeros_like(place), torch.zeros_like(place)
        for offset, here, first in starts:
            columns = self._narrow(here, first)[0] if near else None
            width = len(self.form.cols) - first if columns is None else columns.shape[1]
            mine = ((place >= offset) & (place < offset + (here.stop - here.start) * width)).nonzero()[:, 0]
            row, col = (place[mine] - offset) // width, (place[mine] - offset) % width
            i[mine], j[mine] = row + here.start, first + (col if columns is None else columns[row, col])
        i, j = self.by_row[i], self.runs.order[j]
        return Support(i * len(self.form.cols) + j, weights, self.labels[0][i] == self.labels[1][j])


def by_halves(strips: Strips, ask: Ask) -> Made | None:
    """Value and gradient; None if ties or a boundary solution need the generic path."""
    slopes = ask()
    half = _Half(strips, slopes)
    value = _together(half, strips) if exactly(strips.product.groups, Batch) else _apart(half, strips)
    return None if value is None else (value.to(strips.rows.dtype), slopes.sums)


def _wide(half: _Half, strip: Strip, absent: float, *, together: bool) -> tuple[Tensor, Tensor]:
    """Losses [t, u] of the wide side, ready for a solver, and how many members it has."""
    positive, negative = half.members(strip)
    near = half.product.positive(strip.near, +1) if together else torch.full_like(strip.near, absent)
    return half.fill_(strip.losses, strip, near, absent), positive + negative if together else negative


def _weigh(half: _Half, strip: Strip, found: Online | Variance, sums: Sums, *, together: bool) -> None:
    """Let a solver turn a strip's losses into weights, and add their gradient."""
    pairs = half.product
    # where a hinge is flat such weights are nothing, so that its slope of 1 may stand everywhere
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
    """The same for a group of the positive pairs alone."""
    losses = torch.where(strip.positive, half.product.positive(strip.near, +1), found.absent)
    sums.shrink(found.absorb_(losses, strip.positive.sum()))
    dl_ds = half.product.positive.slope(strip.near, +1)
    assert isinstance(dl_ds, Tensor)  # noqa: S101 - of the kinds in FLAT
    if half.slopes.any:
        dl_ds = torch.where(strip.positive, dl_ds, 0.0)
        half.pull_near(strip, dl_ds if found.even else dl_ds * losses, sums)


def _together(half: _Half, strips: Strips) -> Tensor | None:
    """Positive and negative pairs in one group."""
    found = solver(half.product.over_positive, strips.rows, 2 if half.square else 1)
    assert found is not None  # noqa: S101 - `halves` said so
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
    """The value of a group whose weight rests on few pairs, and its gradient."""
    value, place, weights = solved
    if half.slopes.any:
        share = torch.ones_like(value[0]) if share is None else share
        few(strips, half.slopes, half.support(starts, place, weights, near=near), share.to(weights.dtype))
    return value[0]


def _apart(half: _Half, strips: Strips) -> Tensor | None:
    """A group of the positive pairs and a group of the negative ones."""
    orders, product = 2 if half.square else 1, half.product
    near, wide = solver(product.over_positive, strips.rows, orders), solver(product.over_negative, strips.rows, orders)
    assert near is not None  # noqa: S101 - `halves` said so
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
    """The sweep of those solvers that must see all members before they can weigh any."""
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
    """The sweep that weighs; solvers that name few pairs need none."""
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

"""`Layout`: a relation as vectors over rows and columns, so that engines need no mask of all pairs.

A pair is positive if the labels of its row and column are equal, else negative. It is absent if a flag of its row
or column says so, if both are the same sample, or if its weight is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfar.relations.short_lists import ShortList, Weights, list_pairs, ranges

__all__ = ["ID", "NEGATIVE", "NOWHERE", "POSITION", "POSITION_THEN_ID", "POSITIVE", "Layout", "Positives", "Sorted",
           "flags_of", "list_own", "listed_layout"]  # fmt: skip

NOWHERE, POSITION, ID, POSITION_THEN_ID = range(4)  # how a row and a column are recognized as the same sample
POSITIVE, NEGATIVE = 1, 2  # bits of a flag: the row, or column, may be part of a positive, or negative, pair
Both = tuple[Tensor, Tensor]  # one tensor for rows and one for columns


class Positives(NamedTuple):
    """The positive pairs of each row, gathered: columns [n, P], and the measure [n, P], which is 0 for padding."""

    place: Tensor
    measure: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Vectors that describe the pairs of n rows and m columns."""

    labels: Both  # of rows and columns: small integers after `code`, arbitrary ones before
    square: bool  # the columns are the rows
    orders: int | Tensor = 1  # how often each unordered pair occurs, see `Relation`
    # bits (int8) of rows and columns (positive, negative pairs allowed), or None if all may be paired
    flags: Both | None = None
    ids: Both | None = None  # the sample id of each row and column, or None
    weights: Both | None = None  # sample weights, whose product is the weight of a pair; None if each pair counts once
    itself: int = NOWHERE  # how a row and a column are recognized as the same sample
    symmetric: bool = False  # the pairs (j, i) and (i, j) are alike
    width: int | None = None  # the largest number of positive columns of a row, if the caller knows it
    # the pairs that are not negative, as a list, if labels do not determine them (only for strips)
    listed: ShortList | None = None

    def ranked(self) -> Layout:
        """The layout with labels as int32 ranks, which `count` needs; reads nothing."""
        return self._with(labels=rank(*self.labels))

    def code(self) -> Layout:
        """The layout with labels and ids as int32 ranks and weights as float32, for kernels; reads nothing."""
        weights = None if self.weights is None else tuple(x.detach().float() for x in self.weights)
        return self.ranked()._with(ids=None if self.ids is None else rank(*self.ids), weights=weights)

    def turn(self) -> Layout:
        """The layout with rows and columns exchanged; not for `POSITION_THEN_ID`, which looks at the first columns."""
        both = ((name, getattr(self, name)) for name in ("labels", "flags", "ids", "weights"))
        return self._with(**{name: None if pair is None else pair[::-1] for name, pair in both})

    def _with(self, **changes: Any) -> Layout:
        # `dataclasses.replace` cannot be traced by torch.compile of torch 2.11
        return Layout(**{**{name: getattr(self, name) for name in Layout.__dataclass_fields__}, **changes})

    def tensors(self) -> list[Tensor]:
        """The vectors that are present: labels, flags, ids and weights, each of rows, then of columns."""
        return [x for pair in (self.labels, self.flags, self.ids, self.weights) if pair is not None for x in pair]

    @property
    def given(self) -> int:
        """Which of `tensors` are present besides labels: bits 1 flags, 2 ids, 4 weights."""
        return sum(bit for bit, pair in ((1, self.flags), (2, self.ids), (4, self.weights)) if pair is not None)

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column.

        A sample that occurs twice, with two labels, counts as its own negative here, and nowhere else.
        """
        return self.count(NEGATIVE) > 0

    def count(self, bit: int, *, own: bool = False, weighed: bool = False) -> Tensor:
        """Count each row's POSITIVE or NEGATIVE members, or with `weighed` sum their weights, [n] float64.

        Labels are ranks (`ranked`). With `own` the first columns are the rows, and a row is not its own positive.
        """
        (row, col), able = self.labels, []
        for side, codes in enumerate(self.labels):
            x = torch.ones(len(codes), dtype=torch.float64, device=codes.device)
            x = x if self.flags is None else x * ((self.flags[side] & bit) != 0)
            if self.weights is not None:
                x = x * (self.weights[side] if weighed else self.weights[side] > 0)
            able.append(x)
        mine, others = able
        same = torch.zeros(len(row) + len(col), dtype=torch.float64, device=row.device).index_add_(0, col, others)[row]
        if bit == NEGATIVE:
            rest = others.sum() - same
            if weighed:  # a difference of equal sums is not always 0
                rest = torch.where(self.count(bit) > 0, rest, 0.0)
            return mine * rest
        if own:
            same = same - torch.where(row == col[: len(row)], others[: len(row)], 0.0)
        return mine * same

    def runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Columns sorted by label [m], and where the run of each row's label begins and ends, [n] and [n]."""
        row, col = self.labels
        ranked, order = col.sort(stable=True)
        start, end = torch.searchsorted(ranked, row), torch.searchsorted(ranked, row, right=True)
        if self.flags is not None:  # a row without positive pairs must not widen the matrix of the others
            end = torch.where((self.flags[0] & POSITIVE) != 0, end, start)
        return order, start, end

    def positives(self, runs: tuple[Tensor, Tensor, Tensor], width: int) -> Positives:
        """Gather the positive pairs, with room for `width` columns of a row's label."""
        order, start, end = runs
        rows = torch.arange(len(start), device=start.device)[:, None]
        if self.itself == POSITION:  # one of them is the row itself, which the others skip
            width -= 1
        spots = start[:, None] + torch.arange(max(1, width), device=start.device)
        if self.itself == POSITION:
            every = torch.arange(len(order), device=order.device)
            own = torch.empty_like(order).scatter_(0, order, every)[: len(start)]
            own = torch.where((own >= start) & (own < end), own, len(order))
            spots = spots + (spots >= own[:, None])
        real = spots < end[:, None]
        place = order[spots.clamp(max=len(order) - 1)]
        if self.ids is not None:
            same = self.ids[0][:, None] == self.ids[1][place]
            if self.itself == POSITION_THEN_ID:
                same = torch.where(place < len(start), place == rows, same)
            real = real & ~same
        if self.flags is not None:
            real = real & ((self.flags[0][:, None] & self.flags[1][place] & POSITIVE) != 0)
        if self.weights is None:
            return Positives(place, real)
        return Positives(place, torch.where(real, self.weights[0][:, None] * self.weights[1][place], 0.0))

    def sort(self, *, by_label: bool = True) -> Sorted:
        """The rows and columns that form pairs, sorted by label or in batch order, with the runs of equal labels."""
        (rows, row), (cols, col) = (self._chosen(side, by_label=by_label) for side in (0, 1))
        listed = None
        if self.listed is not None:
            edges = torch.arange(len(row) + 1, device=row.device) * len(col)
            edges = torch.searchsorted(self.listed.keys, edges)
            start, end = edges[:-1], edges[1:]
            listed = self.listed.keys % max(1, len(col)), self.listed.positive
        else:
            if not by_label:
                col, order = col.sort(stable=True)
                listed = order, torch.ones_like(order, dtype=torch.bool)
            start, end = torch.searchsorted(col, row), torch.searchsorted(col, row, right=True)
        weights = None
        if self.weights is not None:
            left, right = (x if at is None else x[at] for x, at in zip(self.weights, (rows, cols), strict=True))
            weights = left.detach().contiguous(), right.detach().contiguous()
        symmetric = self.symmetric and (self.listed is None or self.listed.symmetric)
        samples = None if self.listed is not None else self._samples(rows, cols)
        return Sorted(rows, cols, start, end, listed, samples, weights, symmetric, len(col))

    def _chosen(self, side: int, *, by_label: bool) -> tuple[Tensor | None, Tensor]:
        """Rows (side 0) or columns (1) that form pairs, in order (None: all, in batch order), and their labels."""
        labels, keep = self.labels[side], None
        if self.listed is not None:
            return None, labels
        if self.flags is not None:
            keep = self.flags[side] != 0
        if self.weights is not None:
            keep = self.weights[side] > 0 if keep is None else keep & (self.weights[side] > 0)
        chosen = None if keep is None else keep.nonzero()[:, 0]
        labels = labels if chosen is None else labels[chosen]
        if not by_label:
            return chosen, labels
        ranked, order = labels.sort(stable=True)
        return order if chosen is None else chosen[order], ranked

    def _samples(self, rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Codes [n, c] of rows, [m] of columns: a column is a row's own sample if its code is among the row's."""
        n, m = (len(x) for x in self.labels)
        device, found = self.labels[0].device, None
        row, col = torch.arange(n, device=device), torch.arange(m, device=device)
        if self.itself == POSITION:
            found = row[:, None], torch.where(col < n, col, -1)
        elif self.ids is not None:
            mine, theirs = (x.long() for x in rank(*self.ids))
            found = mine[:, None], theirs
            if self.itself == POSITION_THEN_ID:
                found = torch.stack([row, n + mine], dim=1), torch.where(col < n, col, n + theirs)
        apart = None if self.flags is None else self.flags[1] & POSITIVE == 0
        if apart is not None and bool(apart.any()):
            found = found or (row.new_full((n, 1), -2), col.new_full((m,), -1))
            found = found[0], torch.where(apart, APART, found[1])
        if found is None:
            return None
        mine, theirs = found
        return mine if rows is None else mine[rows], theirs if cols is None else theirs[cols]


APART = -3  # the code of a column that is positive for no row


@dataclass(frozen=True, eq=False)
class Sorted:
    """A layout sorted for engines that sweep strips: positive pairs lie close together, and most strips hold none."""

    rows: Tensor | None  # [n] indices of the rows that form pairs, by label; None for all, in batch order
    cols: Tensor | None  # [m] likewise of the columns
    # [n] start of each row's columns that are not negatives: a position among the columns, or in `listed`
    start: Tensor
    end: Tensor  # [n] their end
    # their columns [k], and which of them are positive [k]; None if they are runs of sorted columns
    listed: tuple[Tensor, Tensor] | None
    # codes [n, c] and [m] that are equal for the same sample, which forms no pair; `APART`: matches no row
    samples: tuple[Tensor, Tensor] | None
    weights: Both | None  # of rows [n] and columns [m], or None
    symmetric: bool  # the pairs (j, i) and (i, j) are alike
    size: int  # m

    def take(self, share: slice | Tensor) -> Sorted:
        """The layout of some of the rows, which may occur several times."""
        rows = None if self.rows is None else self.rows[share]
        start, end = self.start[share], self.end[share]
        samples, weights = (None if x is None else (x[0][share], x[1]) for x in (self.samples, self.weights))
        return replace(self, rows=rows, start=start, end=end, samples=samples, weights=weights, symmetric=False)

    def positives(self, most: int) -> Positives | None:
        """The positive pairs of each row, gathered; None if, with padding, there are more than `most`."""
        n, own = len(self.start), self.end - self.start
        if not n or int(own.amax()) * n > most:
            return None
        row, col, positive = list_own(self.start, self.end, self.listed, self.samples)
        row, col = row[positive], col[positive]
        count = torch.bincount(row, minlength=n)
        within = ranges(torch.zeros_like(count), count)[1]
        width = max(1, int(count.amax()))
        # padding repeats the row's first column, which is close to its others in memory
        place = self.start.clamp(max=max(0, self.size - 1)) if self.listed is None else torch.zeros_like(own)
        place = place[:, None].repeat(1, width)
        place[row, within] = col
        real = torch.zeros_like(place, dtype=torch.bool)
        real[row, within] = True
        if self.weights is None:
            return Positives(place, real)
        return Positives(place, torch.where(real, self.weights[0][:, None] * self.weights[1][place], 0.0))

    def tensors(self) -> list[Tensor]:
        """Start and end, then the tensors that `given` names."""
        pairs = (self.listed, self.samples, self.weights)
        return [self.start, self.end, *(x for pair in pairs if pair is not None for x in pair)]

    @property
    def given(self) -> int:
        """Which of `tensors` are present besides start and end: bits 1 listed, 2 samples, 4 weights."""
        pairs = (self.listed, self.samples, self.weights)
        return sum(bit for bit, pair in zip((1, 2, 4), pairs, strict=True) if pair is not None)


def list_own(start: Tensor, end: Tensor, listed: Both | None, samples: Both | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs that are not negative: rows [k], columns [k], and which are positive [k]; arguments as in `Sorted`."""
    row, col = ranges(start, end)
    positive = torch.ones_like(col, dtype=torch.bool)
    if listed is not None:
        col, positive = listed[0][col], listed[1][col]
    if samples is not None:
        mine, theirs = samples[0][row], samples[1][col]
        positive = positive & (theirs != APART) & (mine != theirs[:, None]).all(dim=1)
    return row, col, positive


def rank(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks (int32) of the distinct numbers in both vectors, equal for equal numbers; reads nothing from the device."""
    both = row if col is row else torch.cat([row, col])
    ranked, order = both.sort()
    new = torch.cat([torch.zeros_like(order[:1]), (ranked[1:] != ranked[:-1]).to(order.dtype)])
    both = torch.empty_like(order).scatter_(0, order, new.cumsum(0)).to(torch.int32)
    return (both, both) if col is row else (both[: len(row)].contiguous(), both[len(row) :].contiguous())


def flags_of(labels: Both, ignore: int | None, projection: Any, among: Both | None) -> Both | None:
    """Bits that say which pairs each row and column may be part of; None if all may be in all pairs.

    Samples with the label `ignore` form no pairs; `projection` is a `RepresentativeMask` or None; `among` are the bits
    that a relation of one positive per class allows.
    """
    if ignore is None and projection is None and among is None:
        return None
    rows, cols = (torch.full(x.shape, POSITIVE | NEGATIVE, dtype=torch.int8, device=x.device) for x in labels)
    if ignore is not None:
        rows, cols = rows * (labels[0] != ignore), cols * (labels[1] != ignore)
    if projection is not None:
        others = projection.anchors == "others"
        rows = rows * (projection.rows != others)
        # with `among`, a representative may be the column of a negative pair
        able = torch.where(projection.cols, NEGATIVE if projection.among else 0, POSITIVE | NEGATIVE).to(torch.int8)
        cols = cols * projection.cols if others else cols & able
    if among is not None:
        rows, cols = rows * among[0], cols * among[1]
    return rows, cols


def listed_layout(
    shape: tuple[int, int], square: bool, orders: int | Tensor, near: tuple[Any, ...], weights: Weights | None
) -> Layout | None:
    """The layout of a relation whose pairs that are not negative fit in a short list; None if there are too many.

    `near` has the pairs of one label, the pairs of one sample, and the valid pairs, as `list_pairs` takes them.
    """
    found = None if isinstance(weights, Tensor) else list_pairs(shape, near[0], near[1], near[2], weights)
    if found is None:
        return None
    device = found.keys.device
    rows, cols = (torch.arange(size, device=device) for size in shape)
    return Layout((rows, cols), square, orders, weights=weights, symmetric=square, listed=found)  # type: ignore[arg-type]

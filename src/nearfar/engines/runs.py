"""Columns in an order in which a row's positives are consecutive (a run), or listed row by row: no mask is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engines.forms import Form, form_of
from nearfar.engines.strips import Slopes, Strips
from nearfar.relations.layout import Layout

__all__ = ["Columns", "Narrow", "Sorted", "columns", "place_"]

FEW = 64
"""Positive pairs of a row that are few in any case; else one column in eight is the limit."""


@dataclass(frozen=True, eq=False)
class Narrow:
    """The columns of t rows that are not negative, padded to P columns per row.

    Args:
        place: [t, P] indices of columns in their order, all different within a row.
        run: [t, P] whether the column is not a negative of the row; False for padding.
        positive: [t, P] whether it is a positive of the row (and not its own sample).
        weight: [t, P] weights of the positive pairs, 0 elsewhere; None if each counts once.
    """

    place: Tensor
    run: Tensor
    positive: Tensor
    weight: Tensor | None = None


def place_(x: Tensor, narrow: Narrow, values: Tensor | float) -> Tensor:
    """Write `values` [t, P], or a number, into x [t, m] at the columns of each row's own label."""
    return x.scatter_(1, narrow.place, torch.where(narrow.run, values, x.gather(1, narrow.place)))


class Columns(ABC):
    """Rows and columns in the order in which an engine meets them, and the columns that are not negatives of a row.

    Args:
        layout: the relation.
        order: [m] indices of the columns.
        by_row: [n] indices of the rows; None for their own order.
        dtype: of the weights.

    Attributes:
        width: P, the largest number of columns of a row that are not negative; synchronizes with the device once.
        least: the smallest number of such columns of a row that are no positives of it.
        weights: weights of the rows [n] and columns [m] in their order, or of all pairs; None if each counts once.
    """

    width: int

    def __init__(self, layout: Layout, order: Tensor, by_row: Tensor | None, dtype: torch.dtype) -> None:
        self._layout, self.order, self.by_row, self._dtype = layout, order, by_row, dtype
        self.least = (layout.own or 0) if layout.apart is None else 0
        self.weights = layout.weights
        if isinstance(self.weights, tuple):
            u, v = self.weights
            self.weights = (u if by_row is None else u[by_row]).to(dtype), v[order].to(dtype)

    @abstractmethod
    def narrow(self, here: slice | Tensor) -> Narrow:
        """The columns that are not negatives of the rows `here`, a slice or indices."""

    @abstractmethod
    def above(self, here: slice, first: int) -> Narrow:
        """Like `narrow`, of a symmetric relation: places are counted from `first`, positives come after their row."""

    @abstractmethod
    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column."""

    @abstractmethod
    def has_positive(self) -> Tensor:
        """Which rows [n] have a positive column."""

    def weigh_(self, out: Tensor, here: slice | Tensor, first: int = 0) -> Tensor:
        """Write the weights [t, u] of the pairs of the rows `here` with the columns from `first` on."""
        if isinstance(self.weights, Tensor):
            return out.copy_(self.weights[here, first:])
        assert self.weights is not None  # noqa: S101 - the caller has asked
        return torch.outer(self.weights[0][here], self.weights[1][first:], out=out)

    def weigh_wide_(
        self,
        out: Tensor,
        here: slice | Tensor,
        narrow: Narrow,
        inside: Tensor | float = 0.0,
        fence: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Like `weigh_`, but 0 outside a miner's fence, and `inside` at the columns of `narrow`."""
        self.weigh_(out, here, first)
        return place_(out if fence is None else out.mul_(fence == 0), narrow, inside)

    @property
    def few(self) -> bool:
        """Whether rows have so few positive columns that those of all rows may be held at once."""
        return self.width <= max(FEW, len(self.order) // 8)

    def sums(self, x: Tensor, here: slice) -> Tensor:
        """Sums Σ_j w_ij x_ij [t] over the rows of x [t, m], those `here`."""
        if self.weights is None:
            return x.sum(dim=1)
        if isinstance(self.weights, Tensor):
            return torch.bmm(x[:, None, :], self.weights[here].to(x.dtype)[:, :, None])[:, 0, 0]
        return (x @ self.weights[1]) * self.weights[0][here]

    def _weights(self, here: slice | Tensor, place: Tensor, positive: Tensor) -> Tensor | None:
        """Weights [t, P] of the positive pairs at the columns `place` of the rows `here`."""
        if self.weights is None:
            return None
        if isinstance(self.weights, Tensor):
            found = self.weights[here].gather(1, place).to(self._dtype)
        else:
            found = self.weights[0][here][:, None] * self.weights[1][place]
        return torch.where(positive, found, 0.0)


def columns(layout: Layout, dtype: torch.dtype, *, sort_rows: bool = False) -> Columns:
    """The columns of a layout: sorted by label, and the rows too if asked, or as its list names them."""
    return Runs(layout, dtype, sort_rows=sort_rows) if layout.near is None else Lists(layout, dtype)


class Runs(Columns):
    """Columns sorted by label: those of a row's own label are consecutive."""

    def __init__(self, layout: Layout, dtype: torch.dtype, *, sort_rows: bool = False) -> None:
        ranked, order = layout.col_labels.sort(stable=True)
        by_row = layout.row_labels.sort(stable=True).indices if sort_rows else None
        super().__init__(layout, order, by_row, dtype)
        row = layout.row_labels if by_row is None else layout.row_labels[by_row]
        self._start = torch.searchsorted(ranked, row.contiguous())
        self._end = torch.searchsorted(ranked, row.contiguous(), right=True)
        self.width = max(1, int((self._end - self._start).amax()))

    def narrow(self, here: slice | Tensor) -> Narrow:
        place, run = self._run(here, 0)
        row = torch.arange(len(self._start), device=place.device)[here][:, None]
        counts = self._layout.counts(row if self.by_row is None else self.by_row[row], self.order[place])
        positive = run if counts is None else run & counts
        return Narrow(place, run, positive, self._weights(here, place, positive))

    def above(self, here: slice, first: int) -> Narrow:
        place, run = self._run(here, first)
        row = torch.arange(here.start, here.stop, device=place.device)[:, None]
        positive = run & (place > row)
        return Narrow(place - first, run, positive, self._weights(here, place, positive))

    def _run(self, here: slice | Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Columns [t, P] from `first` on around each row's own label, and which of them have it."""
        start, end, m = self._start[here][:, None], self._end[here][:, None], len(self.order)
        width = min(self.width, m - first)
        place = start.clamp(first, m - width) + torch.arange(width, device=start.device)
        return place, (place >= start) & (place < end)

    def has_negative(self) -> Tensor:
        return self._end - self._start < len(self.order)

    def has_positive(self) -> Tensor:
        if self._layout.apart is None and self._layout.own is not None:
            return self._end - self._start > self._layout.own
        tall = max(1, 2**20 // self.width)
        parts = [self.narrow(slice(i, i + tall)).positive.any(dim=1) for i in range(0, len(self._start), tall)]
        return torch.cat(parts)


class Lists(Columns):
    """Rows and columns in their own order, with a list of the pairs that are not negative."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        assert layout.near is not None  # noqa: S101 - checked by the caller
        super().__init__(layout, layout.col_labels, None, dtype)
        keys, self._positive, m = layout.near.keys, layout.near.positive, len(layout.col_labels)
        self._row, self._col = keys // m, keys % m
        self._end = torch.searchsorted(self._row, layout.row_labels, right=True)
        self._start = torch.searchsorted(self._row, layout.row_labels)
        self.width = max(1, int((self._end - self._start).amax()))

    def narrow(self, here: slice | Tensor) -> Narrow:
        return self._listed(here, self._start[here], 0)

    def above(self, here: slice, first: int) -> Narrow:
        row = torch.arange(here.start, here.stop, device=self._col.device)
        m = len(self.order)
        after = torch.searchsorted(self._row * m + self._col, row * m + row, right=True)
        return self._listed(here, after, first)

    def _listed(self, here: slice | Tensor, start: Tensor, first: int) -> Narrow:
        """The pairs of the rows `here` from `start` [t] in the list on, with columns counted from `first`."""
        count = (self._end[here] - start)[:, None]
        within = torch.arange(min(self.width, len(self.order) - first), device=start.device)
        run = within < count
        at = (start[:, None] + within).clamp(max=max(0, len(self._col) - 1))
        if not len(self._col):  # no pair is listed at all
            at, run = torch.zeros_like(at), torch.zeros_like(run)
        col = (self._col if len(self._col) else self.order)[at] - first
        # padding: the k-th column that is not listed is k plus the number of listed ones before it
        spare = (within - count).clamp(min=0)
        before = torch.searchsorted(torch.where(run, col - within, len(self.order)), spare, right=True)
        place = torch.where(run, col, spare + before)
        positive = run & self._positive[at] if len(self._col) else run
        return Narrow(place, run, positive, self._weights(here, place + first, positive))

    def has_negative(self) -> Tensor:
        return self._end - self._start < len(self.order)

    def has_positive(self) -> Tensor:
        found = torch.zeros(len(self._start), dtype=torch.bool, device=self._row.device)
        return found.index_fill(0, self._row[self._positive], True)


class Sorted:
    """State of one call with columns sorted by label: scores in strips, and the accumulated gradient.

    Attributes:
        rows: [n, d] in their original order.
        form: the similarity with the sorted columns.
        runs: the columns of each row that are not negative.
        slopes: the accumulated gradient of rows and parameters.
        cols: [m, d] the accumulated gradient of the sorted columns, or None if it is not needed.
        shape: shape of the largest strip.
    """

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        form = form_of(strips.product.similarity)
        assert strips.layout is not None  # noqa: S101 - checked by the caller
        assert form is not None  # noqa: S101
        self.rows, self.slopes = strips.rows, slopes
        self.runs = columns(strips.layout, strips.rows.dtype)
        self.form: Form = form(strips.cols[self.runs.order])
        self.shape = min(strips.tall, len(strips.rows)), len(strips.cols)
        self.cols = torch.zeros_like(self.form.cols) if slopes.wants[1] else None
        strips.had_positive, strips.had_negative = self.runs.has_positive(), self.runs.has_negative()

    def finished(self, share: Tensor) -> list[Tensor | None]:
        """The accumulated gradient times `share`, with columns in their original order."""
        if self.cols is not None and self.slopes.sums[1] is not None:
            self.slopes.sums[1][self.runs.order] = self.cols
        return self.slopes.scaled(share)

    def many(self, here: slice, slope: Tensor) -> None:
        """Back-propagate dF/d⟨x, y⟩ [t, m] of the rows `here` and all columns."""
        if self.slopes.sums[0] is not None:
            self.form.pull_(self.slopes.sums[0][here], slope, self.rows[here], self.form.cols)
        if self.cols is not None:
            self.form.pull_(self.cols, slope.T, self.form.cols, self.rows[here])

    def few(self, here: slice, place: Tensor, slope: Tensor) -> None:
        """Back-propagate dF/d⟨x, y⟩ [t, P] of the rows `here` and the columns `place` [t, P]."""
        total = self.slopes.sums[0]
        self.form.pull_few_((None if total is None else total[here], self.cols), slope, self.rows[here], place)

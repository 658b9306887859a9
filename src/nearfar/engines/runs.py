"""Columns sorted by label: the positive columns of a row are then consecutive (a run), and no mask is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engines.forms import Form, form_of
from nearfar.engines.strips import Slopes, Strips
from nearfar.relations.layout import Layout

__all__ = ["Narrow", "Runs", "Sorted"]


@dataclass(frozen=True, eq=False)
class Narrow:
    """The positive columns of t rows, padded to P columns per row.

    Args:
        place: [t, P] indices of sorted columns, all different within a row.
        run: [t, P] whether the column has the row's label.
        positive: [t, P] whether it is a positive of the row, and not its own sample.
        weight: [t, P] weights of the positive pairs, 0 elsewhere; None if each counts once.
    """

    place: Tensor
    run: Tensor
    positive: Tensor
    weight: Tensor | None = None


class Runs:
    """Where each row's class begins and ends among the columns sorted by label.

    Attributes:
        order: [m] indices of the columns, sorted by label.
        width: P, the largest number of columns with a row's label; synchronizes with the device once.
        weights: weights of the rows [n] and of the sorted columns [m]; None if each counts once.
        least: the smallest number of columns of a row's own label that are no positives of it.
    """

    def __init__(self, layout: Layout, by_row: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self._layout, self._by_row = layout, by_row
        row = layout.row_labels if by_row is None else layout.row_labels[by_row]
        ranked, self.order = layout.col_labels.sort(stable=True)
        self.start = torch.searchsorted(ranked, row.contiguous())
        self.end = torch.searchsorted(ranked, row.contiguous(), right=True)
        self.width = max(1, int((self.end - self.start).amax()))
        self.least = (layout.own or 0) if layout.apart is None else 0
        self._last = len(self.order) - self.width
        self.weights: tuple[Tensor, Tensor] | None = None
        if layout.weights is not None:
            u, v = layout.weights
            self.weights = (u if by_row is None else u[by_row]).to(dtype), v[self.order].to(dtype)

    def narrow(self, here: slice | Tensor) -> Narrow:
        """The positive columns of the rows `here`, a slice or indices."""
        start, end = self.start[here][:, None], self.end[here][:, None]
        place = start.clamp(max=self._last) + torch.arange(self.width, device=start.device)
        run = (place >= start) & (place < end)
        row = torch.arange(len(self.start), device=start.device)[here][:, None]
        counts = self._layout.counts(row if self._by_row is None else self._by_row[row], self.order[place])
        positive = run if counts is None else run & counts
        if self.weights is None:
            return Narrow(place, run, positive)
        u, v = self.weights
        return Narrow(place, run, positive, torch.where(positive, u[here][:, None] * v[place], 0.0))

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column."""
        return self.end - self.start < len(self.order)

    def has_positive(self) -> Tensor:
        """Which rows [n] have a positive column."""
        if self._layout.apart is None and self._layout.own is not None:
            return self.end - self.start > self._layout.own
        tall = max(1, 2**20 // self.width)
        parts = [self.narrow(slice(i, i + tall)).positive.any(dim=1) for i in range(0, len(self.start), tall)]
        return torch.cat(parts)


class Sorted:
    """State of one call with columns sorted by label: scores in strips, and the accumulated gradient.

    Attributes:
        rows: [n, d] in their original order.
        form: the similarity with the sorted columns.
        runs: the positive columns of each row.
        slopes: the accumulated gradient of rows and parameters.
        cols: [m, d] the accumulated gradient of the sorted columns, or None if it is not needed.
        shape: shape of the largest strip.
    """

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        form = form_of(strips.product.similarity)
        assert strips.layout is not None  # noqa: S101 - checked by the caller
        assert form is not None  # noqa: S101
        self.rows, self.slopes = strips.rows, slopes
        self.runs = Runs(strips.layout, dtype=strips.rows.dtype)
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
        by_row, by_col = self.form.directions(self.rows[here], self.form.cols[place])
        if self.slopes.sums[0] is not None:
            self.slopes.sums[0][here] += torch.bmm(slope[:, None, :], by_row)[:, 0]
        if self.cols is not None:
            parts = slope[:, :, None] * by_col
            self.cols.index_add_(0, place.reshape(-1), parts.reshape(-1, parts.shape[-1]))

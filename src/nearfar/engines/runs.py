"""Columns sorted by label: the positive columns of a row are then consecutive (a run), and no mask is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engines.forms import Form, form_of
from nearfar.engines.strips import Slopes, Strips
from nearfar.relations.relation import Relation

__all__ = ["Narrow", "Runs", "Sorted"]


@dataclass(frozen=True, eq=False)
class Narrow:
    """The positive columns of t rows, padded to P columns per row.

    Args:
        place: [t, P] indices of sorted columns, all different within a row.
        run: [t, P] whether the column has the row's label (it may be the row itself).
        positive: [t, P] whether the column is a positive of the row, and not the row itself.
    """

    place: Tensor
    run: Tensor
    positive: Tensor


class Runs:
    """Where each row's class begins and ends among the columns sorted by label.

    Attributes:
        order: [m] indices of the columns, sorted by label.
        width: P, the largest number of columns with a row's label; synchronizes with the device once.
        itself: 1 if each row is also one of the columns, else 0.
    """

    def __init__(self, relation: Relation, labels: tuple[Tensor, Tensor]) -> None:
        row, col = labels
        ranked, self.order = col.sort(stable=True)
        self.start = torch.searchsorted(ranked, row.contiguous())
        self.end = torch.searchsorted(ranked, row.contiguous(), right=True)
        self.width = max(1, int((self.end - self.start).amax()))
        self.own: Tensor | None = None
        if relation.square or relation.reference_starts_with_batch:
            self.own = torch.empty_like(self.order)
            self.own[self.order] = torch.arange(len(col), device=col.device)
        self.itself = int(self.own is not None)
        self._last = len(col) - self.width

    def narrow(self, here: slice | Tensor) -> Narrow:
        """The positive columns of the rows `here`, a slice or indices."""
        start, end = self.start[here][:, None], self.end[here][:, None]
        place = start.clamp(max=self._last) + torch.arange(self.width, device=start.device)
        run = (place >= start) & (place < end)
        positive = run if self.own is None else run & (place != self.own[here][:, None])
        return Narrow(place, run, positive)

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column."""
        return self.end - self.start < len(self.order)

    def has_positive(self) -> Tensor:
        """Which rows [n] have a positive column."""
        return self.end - self.start > self.itself


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
        labels, form = strips.relation.plain_labels(), form_of(strips.product.similarity)
        assert labels is not None  # noqa: S101 - checked by the caller
        assert form is not None  # noqa: S101
        self.rows, self.slopes = strips.rows, slopes
        self.runs = Runs(strips.relation, labels)
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

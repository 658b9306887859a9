"""A relation of labels as vectors: what a kernel needs to tell positive, negative and absent pairs apart.

No mask is made. A pair is positive where two label codes agree; it is absent where a flag of its row or column says so,
where both are the same sample, or where its weight is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.relations.relation import Relation

__all__ = ["Narrow", "PairVectors", "number", "pair_vectors"]

NOWHERE, POSITION, ID, POSITION_THEN_ID = range(4)
POSITIVE, NEGATIVE = 1, 2
"""Bits of a flag: the row, or column, may be part of a positive, or negative, pair."""


@dataclass(frozen=True, eq=False)
class Narrow:
    """The positive pairs of each row, gathered: columns [n, P], and the measure [n, P] of those that are real."""

    place: Tensor
    measure: Tensor


@dataclass(frozen=True, eq=False)
class PairVectors:
    """What is known of rows [n] and of columns [m].

    Args:
        labels: codes (int32) of rows and columns.
        flags: bits (int8) of rows and columns, or None where all may be paired.
        ids: codes of samples (int32), or None.
        weights: sample weights (float32), or None.
        itself: how a row and a column are known to be the same sample.
        square: the columns are the rows.
        symmetric: the pair (j, i) is what (i, j) is.
        width: the most positive columns of a row, if the caller said so.
    """

    labels: tuple[Tensor, Tensor]
    flags: tuple[Tensor, Tensor] | None
    ids: tuple[Tensor, Tensor] | None
    weights: tuple[Tensor, Tensor] | None
    itself: int
    square: bool
    symmetric: bool
    width: int | None = None

    def tensors(self) -> list[Tensor]:
        """Labels, flags, ids and weights, each of rows, then of columns; those that there are."""
        return [x for pair in (self.labels, self.flags, self.ids, self.weights) if pair is not None for x in pair]

    @property
    def given(self) -> int:
        """Which of `tensors` there are beside labels: bits 1 flags, 2 ids, 4 weights."""
        return sum(bit for bit, pair in ((1, self.flags), (2, self.ids), (4, self.weights)) if pair is not None)

    def turned(self) -> PairVectors:
        """The same with rows and columns exchanged; a sample must not be known by its position among others."""
        return PairVectors(
            self.labels[::-1],
            None if self.flags is None else self.flags[::-1],
            None if self.ids is None else self.ids[::-1],
            None if self.weights is None else self.weights[::-1],
            self.itself,
            self.square,
            self.symmetric,
        )

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column.

        A sample that comes twice, under two labels, counts as its own negative here, and nowhere else.
        """
        return number(self.labels, self.flags, self.weights, NEGATIVE) > 0

    def runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Columns sorted by label [m], and where each row's label begins and ends among them, [n] and [n]."""
        row, col = self.labels
        ranked, order = col.sort(stable=True)
        start, end = torch.searchsorted(ranked, row), torch.searchsorted(ranked, row, right=True)
        if self.flags is not None:  # a row without positive pairs must not widen the others'
            end = torch.where((self.flags[0] & POSITIVE) != 0, end, start)
        return order, start, end

    def narrow(self, runs: tuple[Tensor, Tensor, Tensor], width: int) -> Narrow:
        """Gather the positive pairs, with room for `width` columns of a row's label."""
        order, start, end = runs
        rows = torch.arange(len(start), device=start.device)[:, None]
        if self.itself == POSITION:  # one of them is the row itself, over which the others step
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
            return Narrow(place, real)
        return Narrow(place, torch.where(real, self.weights[0][:, None] * self.weights[1][place], 0.0))


Both = tuple[Tensor, Tensor]
"""Of rows and of columns."""


def number(
    labels: Both, flags: Both | None, weights: Both | None, bit: int, *, own: bool = False, weighed: bool = False
) -> Tensor:
    """The number of each row's members of one sign, or with `weighed` their weights' sum, [n] float64.

    Args:
        labels: ranks of the labels of rows and columns.
        flags: see `PairVectors`.
        weights: see `PairVectors`.
        bit: POSITIVE or NEGATIVE.
        own: a row is the column of its position, which is not its own positive.
        weighed: Σ w instead of their number.
    """
    (row, col), able = labels, []
    for side, codes in enumerate(labels):
        x = torch.ones(len(codes), dtype=torch.float64, device=codes.device)
        x = x if flags is None else x * ((flags[side] & bit) != 0)
        if weights is not None:
            x = x * (weights[side] if weighed else weights[side] > 0)
        able.append(x)
    mine, others = able
    same = torch.zeros(len(row) + len(col), dtype=torch.float64, device=row.device).index_add_(0, col, others)[row]
    if bit == NEGATIVE:
        return mine * (others.sum() - same)
    if own:
        same = same - torch.where(row == col[: len(row)], others[: len(row)], 0.0)
    return mine * same


def pair_vectors(relation: Relation, *, coded: bool = True) -> PairVectors | None:
    """The vectors of a relation; None where a matrix says which pairs there are, or what they count for.

    Without `coded`, labels and ids stay as they were given, which costs nothing and tells which vectors there are.
    """
    codes = _codes if coded else _as_given
    row, col = getattr(relation, "_row", None), getattr(relation, "_col", None)
    weights = relation._weights
    if row is None or col is None or row.ndim != 1 or (weights is not None and weights.ndim == 2):
        return None  # a matrix, or multi-hot labels
    ids, pairs = None, relation._weights
    itself = POSITION if relation.square or relation.reference_starts_with_batch else NOWHERE
    if relation._ids is not None and relation._ref_ids is not None and not relation.square:
        ids = codes(relation._ids, relation._ref_ids)
        itself = POSITION_THEN_ID if relation.reference_starts_with_batch else ID
    found = None
    if pairs is not None and relation._ref_weights is not None:
        found = (pairs.detach().float(), relation._ref_weights.detach().float())
    return PairVectors(
        codes(row, row if relation.square else col),
        _flags(relation, row, col),
        ids,
        found,
        itself,
        relation.square,
        relation.square and relation._projection is None and relation._among is None,
        relation._width if ids is None else None,
    )


def _as_given(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    return row, col


def _codes(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Small integers that are equal where the given ones are; ranks, so that nothing is read from the device."""
    both = row if col is row else torch.cat([row, col])
    ranked, order = both.sort()
    new = torch.cat([torch.zeros_like(order[:1]), (ranked[1:] != ranked[:-1]).to(order.dtype)])
    both = torch.empty_like(order).scatter_(0, order, new.cumsum(0)).to(torch.int32)
    return (both, both) if col is row else (both[: len(row)].contiguous(), both[len(row) :].contiguous())


def _flags(relation: Relation, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor] | None:
    """Bits of rows and of columns: which pairs they may be part of; None where they may be in all."""
    ignore, projection, among = getattr(relation, "_ignore", None), relation._projection, relation._among
    if ignore is None and projection is None and among is None:
        return None
    rows, cols = (torch.full(x.shape, POSITIVE | NEGATIVE, dtype=torch.int8, device=x.device) for x in (row, col))
    if ignore is not None:
        rows, cols = rows * (row != ignore), cols * (col != ignore)
    if projection is not None:
        others = projection.anchors == "others"
        rows = rows * (projection.rows != others)
        # with `among`, a representative may be the column of a negative pair
        kept = torch.where(projection.cols, NEGATIVE if projection.among else 0, POSITIVE | NEGATIVE).to(torch.int8)
        cols = cols * projection.cols if others else cols & kept
    if among is not None:
        rows, cols = rows * among[0], cols * among[1]
    return rows, cols

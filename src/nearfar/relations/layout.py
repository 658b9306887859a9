"""`Layout`: a relation of labels as vectors, from which an engine tells any pair without a mask of all of them.

Rows and columns that form no pair (ignored, or not asked for) are left out. Among those that stay,

    another label           a negative pair
    the same label          a positive pair, unless the column is the row's own sample or is held `apart`

Relations that no labels tell have a list of the pairs that are not negative instead (see `Near`), where it is short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.relations.near import Near, Weights
from nearfar.relations.representatives import RepresentativeMask

__all__ = ["Layout", "consistent", "kept"]

Itself = Callable[[Tensor, Tensor], Tensor]
"""Whether a row and a column are the same sample, for broadcastable indices of the relation."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows and columns of a relation that form pairs, and what decides about each pair.

    Args:
        rows: [n] indices of the rows that stay; None for all.
        cols: [m] indices of the columns that stay; None for all.
        row_labels: [n] labels of those rows.
        col_labels: [m] labels of those columns.
        square: whether the columns are the rows.
        orders: see `Relation`.
        itself: tells the row's own sample, by indices of the relation; None where no column is one.
        own: how many columns are the row's own sample: the same number for all rows, or None where it differs.
        apart: [m] columns that are nobody's positive (representatives among themselves); None for none.
        weights: weights of the rows [n] and columns [m], whose product is that of a pair, or one matrix [n, m] of them;
            None where each pair counts once.
        near: the pairs that are not negative, where labels do not tell; rows and columns then have their positions as
            labels.
    """

    rows: Tensor | None
    cols: Tensor | None
    row_labels: Tensor
    col_labels: Tensor
    square: bool
    orders: int | Tensor
    itself: Itself | None = None
    own: int | None = 0
    apart: Tensor | None = None
    weights: Weights | None = None
    near: Near | None = None

    @staticmethod
    def listed(
        near: Near, shape: tuple[int, int], square: bool, orders: int | Tensor, weights: Weights | None
    ) -> Layout:
        """The layout of a list of pairs of n rows and m columns."""
        n, m = (torch.arange(size, device=near.keys.device) for size in shape)
        same = square and near.symmetric and not isinstance(weights, Tensor)
        return Layout(None, None, n, m, same, orders, own=int(square), weights=weights, near=near)

    @staticmethod
    def of(
        labels: tuple[Tensor, Tensor],
        keep: tuple[Tensor | None, Tensor | None],
        square: bool,
        orders: int | Tensor,
        itself: tuple[Itself | None, int | None],
        apart: Tensor | None = None,
        weights: tuple[Tensor, Tensor] | None = None,
    ) -> Layout:
        """Leave out the rows and columns that `keep` ([n] and [m] masks, None for all) does not name."""
        rows, cols = (None if mask is None else mask.nonzero()[:, 0] for mask in keep)
        row, col = (x if at is None else x[at] for x, at in zip(labels, (rows, cols), strict=True))
        same = square and (keep[0] is keep[1])
        tells, own = itself
        if own and cols is not None and not same:
            own = None  # some rows meet their own sample among the columns that stay, others do not
        apart = apart if cols is None or apart is None else apart[cols]
        if weights is not None:
            u, v = (x if at is None else x[at] for x, at in zip(weights, (rows, cols), strict=True))
            weights = u, v
        return Layout(rows, cols, row, col, same, orders, tells, own, apart, weights)

    @property
    def empty(self) -> bool:
        """Whether no row or no column forms a pair."""
        return not len(self.row_labels) or not len(self.col_labels)

    def taken(self, x: Tensor, side: int) -> Tensor:
        """The entries of x [n, ...] that stay; side 0 for rows, 1 for columns."""
        at = (self.rows, self.cols)[side]
        return x if at is None else x[at]

    def back(self, x: Tensor, side: int, size: int) -> Tensor:
        """The reverse of `taken`: x of all rows or columns, 0 for those that were left out."""
        at = (self.rows, self.cols)[side]
        return x if at is None else x.new_zeros(size, *x.shape[1:]).index_copy_(0, at, x)

    def same(self, row: Tensor, col: Tensor) -> Tensor:
        """Which pairs are of one label, for indices [k] and [k]; of a list, which are positive."""
        if self.near is not None:
            return self.near.tells(row * len(self.col_labels) + col)
        return self.row_labels[row] == self.col_labels[col]

    def counts(self, row: Tensor, col: Tensor) -> Tensor | None:
        """Which pairs of equal label are positive, for broadcastable indices [n] and [m]; None for all."""
        found = None
        if self.itself is not None:
            here, there = (x if at is None else at[x] for x, at in ((row, self.rows), (col, self.cols)))
            found = ~self.itself(here, there)
        if self.apart is not None:
            found = ~self.apart[col] if found is None else found & ~self.apart[col]
        return found


def consistent(ids: Tensor | None, ref_ids: Tensor | None, labels: tuple[Tensor, Tensor]) -> bool:
    """Whether rows of equal id always have equal labels, as the same sample has; reads the device."""
    if ids is None or ref_ids is None:
        return True
    ids, order = torch.cat([ids, ref_ids]).sort(stable=True)
    found = torch.cat(labels)[order]
    return not bool(((ids[1:] == ids[:-1]) & (found[1:] != found[:-1])).any())


Masks = tuple[Tensor | None, Tensor | None]


def kept(
    labels: tuple[Tensor, Tensor],
    square: bool,
    ignore: int | None,
    projection: RepresentativeMask | None,
    among: tuple[Tensor, Tensor] | None,
    weights: tuple[Tensor, Tensor] | None,
) -> tuple[Masks, Tensor | None]:
    """Masks [n] and [m] of the rows and columns that form pairs (None: all), and the columns held apart.

    Args:
        labels: labels of the rows [n] and of the columns [m].
        square: whether the columns are the rows.
        ignore: rows and columns with this label form no pairs.
        projection: class representatives.
        among: masks of the rows and columns between which pairs are formed.
        weights: weights of the rows [n] and columns [m]; those of weight 0 form no pairs.
    """
    apart, sides = None, (list[Tensor](), list[Tensor]())
    for side, masks in enumerate(sides):
        if ignore is not None:
            masks.append(labels[side] != ignore)
        if weights is not None:
            masks.append(weights[side] > 0)
        if among is not None:
            masks.append(among[side])
    if projection is not None:
        row, col, apart = projection.kept()
        sides[0].append(row)
        sides[1].extend([] if col is None else [col])
    left, right = (None if not masks else torch.stack(masks).all(dim=0) for masks in sides)
    return (left, left if square and projection is None and among is None else right), apart

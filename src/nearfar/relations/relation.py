"""`Relation`: which pairs are positive and which are negative, from labels, multi-hot labels, or a matrix.

Masks are computed tile by tile (rows i0:i1, columns j0:j1), so that no n x m mask is needed. Rows are queries; columns
are the same samples (`square`: no reference) or a reference set (a memory, a gallery, other processes). A sample is
never paired with itself. It is recognized by its position if square, by equal ids with a reference, and never by
whether two tensors are the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.tensors import check_class_numbers
from nearfar.relations import options
from nearfar.relations.grades import Grades, Matrix, MultiHot, make_pairs, make_scores, make_tree
from nearfar.relations.layout import ID, NOWHERE, POSITION, POSITION_THEN_ID, Layout, flags_of, listed_layout
from nearfar.relations.one_a_class import first_of_each
from nearfar.relations.options import RelationOptions
from nearfar.relations.representatives import Anchors, Join, check_projection
from nearfar.relations.short_lists import consistent, meetings, own_pairs, together
from nearfar.relations.tile import Tile

__all__ = ["EVERYTHING", "Relation", "Tile"]
EVERYTHING = slice(None)


class Relation(ABC):
    """Which pairs of n query rows and m reference rows are positive, negative, or ignored.

    Construct one by a method whose name begins with `from_`, and pass it to a loss in place of labels.

    Attributes:
        shape: (n, m).
        square: whether the columns are the rows themselves (no reference).
        orders: 2 if each unordered pair occurs in both orders (square, or a reference with exactly the same samples by
            id), else 1 (also with representatives); a number or a 0-dim tensor.
        anchors: which rows are anchors if representatives are marked: "representatives" or "others"; else None.
        reference_starts_with_batch: whether the first n columns are the rows themselves, followed by others (a memory).

    >>> relation = Relation.from_labels(torch.tensor([0, 0, 1]))
    >>> relation.dense().positive.int()
    tensor([[0, 1, 0],
            [1, 0, 0],
            [0, 0, 0]], dtype=torch.int32)
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, square: bool, given: RelationOptions) -> None:
        self.shape = shape
        self.device = device
        self.square = square
        if given.width is not None:
            check_whole("Relation", "width", given.width)
        self._width = given.width
        self._ids = self._ref_ids = self._weights = self._ref_weights = None
        if given.ids is not None or given.ref_ids is not None:
            self._ids, self._ref_ids = options.check_ids(shape, square, given.ids, given.ref_ids)
        if given.weights is not None or given.ref_weights is not None:
            self._weights, self._ref_weights = options.check_weights(shape, square, given.weights, given.ref_weights)
        self._projection = given.projection
        self.reference_starts_with_batch = given.reference_starts_with_batch
        self._given = given
        self._among: tuple[Tensor, Tensor] | None = None
        self.orders: int | Tensor = 2 if square else options.count_orders(self._ids, self._ref_ids)
        if given.projection is not None or given.reference_starts_with_batch:
            self.orders = 1  # with representatives or a memory, each pair occurs once

    @property
    def anchors(self) -> Anchors | None:
        """Which rows act as anchors when class representatives are marked."""
        return None if self._projection is None else self._projection.anchors

    weighted = property(lambda self: self._weights is not None, doc="Whether pairs or samples have weights.")

    def projected(self, anchors: Anchors, *, among: bool = False) -> Relation:
        """The relation with another choice of anchors; the same relation if there are no representatives.

        Args:
            anchors: "representatives" (their rows, with the others as columns) or "others" (the reverse).
            among: also count pairs of representatives of different classes, whatever the constructor was given.
        """
        if self._projection is None:
            return self
        seen = copy(self)
        seen._projection = replace(self._projection, anchors=anchors, among=among or self._projection.among)
        return seen

    @abstractmethod
    def gathered(self, rows: Join, cols: Join) -> Relation:
        """The relation of the rows and columns of all processes; `rows` and `cols` gather tensors from them."""

    def one_a_class(self) -> Relation:
        """Pair the first row of each class with its first positive column, or with all columns if there is none."""
        raise TypeError("NPair: labels must be a 1-D integer tensor, or a Relation made of labels.")

    @staticmethod
    def from_labels(
        labels: Tensor,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        ignore: int | None = None,
        weights: Tensor | None = None,
        ref_weights: Tensor | None = None,
        width: int | None = None,
        representatives: Tensor | None = None,
        ref_representatives: Tensor | None = None,
        among_representatives: bool = False,
        reference_starts_with_batch: bool = False,
    ) -> Relation:
        """A relation in which pairs with equal labels are positive.

        Args:
            labels: [n] integers.
            ref_labels: [m] integers of the reference rows, or None if the columns are the rows themselves.
            ids: [n] integer sample ids; with a reference, rows with equal ids are the same sample and form no pair.
            ref_ids: [m] sample ids of the reference.
            ignore: rows and columns with this label form no pairs.
            weights: [n, m] pair weights, or [n] sample weights (the weight of a pair is their product).
            ref_weights: [m] sample weights of the reference, if `weights` is [n].
            width: the largest number of positive columns in a row, if known (saves memory for triplets on a GPU).
            representatives: [n] boolean, rows that represent their class (Can et al. 2019): each pair then contains
                one representative. They are the anchors, except in `NPair` and `Angular`.
            ref_representatives: [m] boolean, likewise for the reference.
            among_representatives: also count negative pairs of two representatives (Can et al. 2019, eq. 4.2, but not
                Alg. 1). `LiftedStructure` always counts them.
            reference_starts_with_batch: the first n reference rows are the rows themselves and not paired with them.
        """
        check_class_numbers("Relation.from_labels", "labels", labels)
        if ref_labels is not None:
            check_class_numbers("Relation.from_labels", "ref_labels", ref_labels)
        masks, projection = (representatives, ref_representatives), None
        if among_representatives or any(mask is not None for mask in masks):
            projection = check_projection(labels, ref_labels, *masks, among_representatives)
        given = RelationOptions(ids, ref_ids, weights, ref_weights, width, projection, reference_starts_with_batch)
        return _Labels(labels, ref_labels, ignore, given)

    @staticmethod
    def from_multilabel(
        hot: Tensor,
        ref_hot: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        weights: Tensor | None = None,
        ref_weights: Tensor | None = None,
    ) -> Relation:
        """A relation in which samples with a common label are positive; hot [n, c] and ref_hot [m, c] are 0 or 1."""
        options.check_hot(hot, ref_hot)
        return _Graded(MultiHot(hot, ref_hot), 0, RelationOptions(ids, ref_ids, weights, ref_weights))

    @staticmethod
    def from_matrix(
        same: Tensor,
        valid: Tensor | None = None,
        *,
        square: bool = True,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        weights: Tensor | None = None,
        ref_weights: Tensor | None = None,
    ) -> Relation:
        """A relation whose positive pairs are given by a boolean matrix `same` [n, m].

        `valid` [n, m] says which pairs count; None for all. With `square` the columns are the rows themselves, and the
        diagonal is left out; False for a reference. Other options as in `from_labels`.
        """
        options.check_matrix(same, valid, square)
        return _Graded(Matrix(same, valid, square), 0, RelationOptions(ids, ref_ids, weights, ref_weights))

    @staticmethod
    def from_scores(
        scores: Tensor,
        labels: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        square: bool = True,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Relation:
        """A graded relation: the relevance of a pair is a number, or NaN if unknown; `at` chooses a rung.

        `scores` [n, m] holds the relevance of each pair; with `labels` [n] and perhaps `ref_labels` [m], it is a table
        between labels instead. Other options as in `from_matrix`.
        """
        return _Graded(make_scores(scores, labels, ref_labels, square), 0, RelationOptions(ids, ref_ids))

    @staticmethod
    def from_tree(
        parents: Tensor,
        labels: Tensor,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Relation:
        """A graded relation of nested classes: the relevance counts the common ancestors, including the class itself.

        `parents` holds the parent of each node, -1 for a root; `labels` [n] and `ref_labels` [m] are nodes. A node that
        ends above the lowest level counts as its own only child there. Other options as in `from_labels`.
        """
        return _Graded(make_tree(parents, labels, ref_labels), 0, RelationOptions(ids, ref_ids))

    @staticmethod
    def from_pairs(positives: Tensor, negatives: Tensor, ids: Tensor, ref_ids: Tensor | None = None) -> Relation:
        """A relation of listed pairs; all other pairs are ignored.

        `positives` [p, 2] and `negatives` [q, 2] hold sample ids, in either order; `ids` [n] and `ref_ids` [m] are
        those of the rows and of the reference rows.
        """
        return _Graded(make_pairs(positives, negatives, ids, ref_ids), 0, RelationOptions(ids, ref_ids))

    def at(self, rung: float) -> Relation:
        """The binary relation of a rung: a pair is positive if its relevance is above `rung`, else negative."""
        if not 0 <= rung < 1:
            raise ValueError(f"Relation.at: labels have relevance 0 or 1, so rung must be 0, but came as {rung!r}.")
        return self

    @abstractmethod
    def _same(self, rows: slice, cols: slice) -> Tensor:
        """Which pairs [t, u] of a tile are positive, including a sample with itself."""

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        """Which pairs [t, u] of a tile are not ignored; None for all."""
        return None

    def plain_labels(self) -> tuple[Tensor, Tensor] | None:
        """Labels of rows [n] and columns [m], if they (with positions) determine the relation; else None."""
        return None

    def layout(self) -> Layout | None:
        """The relation as vectors; None if it cannot be written so (a matrix, multi-hot labels, pair weights)."""
        return None

    def sorted_layout(self) -> Layout | None:
        """Like `layout`, or else a list of the pairs that are not negative if it is short; reads values."""
        return self._listed()

    def _listed(self) -> Layout | None:
        ids, own = (self._ids, self._ref_ids), self.square or self.reference_starts_with_batch
        met = own_pairs(self.shape, self.device, ids, own, self._is_itself)
        near, weights = (self._same_pairs(), met, self._known(EVERYTHING, EVERYTHING)), self._weights
        return listed_layout(self.shape, self.square, self.orders, near, together(weights, self._ref_weights))

    def _same_pairs(self) -> Tensor | None:
        """Flat indices i·m + j of the pairs with a common label, in any order; None if there are too many to list."""
        return None

    def tile(self, rows: slice, cols: slice) -> Tile:
        """The masks for rows i0:i1 and columns j0:j1; needs the memory of the tile only."""
        same, valid, known = self._same(rows, cols), ~self._itself(rows, cols), self._known(rows, cols)
        valid = valid if known is None else valid & known
        if self._projection is not None:
            valid = valid & self._projection.allowed(rows, cols, same)
        if self._among is not None:
            valid = valid & self._among[0][rows, None] & self._among[1][None, cols]
        return Tile(same, valid, self._weight(rows, cols), self.square and self.plain_labels() is not None)

    def dense(self) -> Tile:
        """The masks of all n x m pairs."""
        return self.tile(EVERYTHING, EVERYTHING)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Total measure of the positive and of the negative pairs of each row, [n] and [n]; computed in strips."""
        n, tall = self.shape[0], max(1, 2**20 // max(self.shape[1], 1))
        tiles = (self.tile(slice(i, min(i + tall, n)), EVERYTHING) for i in range(0, max(1, n), tall))
        positive, negative = zip(*((tile.positive.sum(dim=1), tile.negative.sum(dim=1)) for tile in tiles), strict=True)
        return torch.cat(positive), torch.cat(negative)

    def width(self, positive: Tensor) -> int:
        """Maximum number of positives per row in the measure `positive`: counted on a CPU, else `width`, else m."""
        return options.count_width(positive, self.shape[1], self._width)

    def _itself(self, rows: slice, cols: slice) -> Tensor:
        if self.square and rows == cols == EVERYTHING:
            return torch.eye(self.shape[0], dtype=torch.bool, device=self.device)
        here, there = (torch.arange(count, device=self.device) for count in self.shape)
        return self._is_itself(here[rows, None], there[None, cols])

    def _is_itself(self, row: Tensor, col: Tensor) -> Tensor:
        """Whether a row and a column are the same sample, for broadcastable indices."""
        if self.square:
            return row == col
        if self._ids is None or self._ref_ids is None:
            return (row == col) & (col < self.shape[0]) & self.reference_starts_with_batch
        same = self._ids[row] == self._ref_ids[col]
        # the first n columns are compared by position, the others by id
        return torch.where(col < self.shape[0], row == col, same) if self.reference_starts_with_batch else same

    def _weight(self, rows: slice, cols: slice) -> Tensor | None:
        if self._weights is None:
            return None
        if self._weights.ndim == 2:
            return self._weights[rows, cols]
        assert self._ref_weights is not None  # noqa: S101 - ensured by `check_weights`
        return self._weights[rows, None] * self._ref_weights[None, cols]

    def __repr__(self) -> str:
        kind = type(self).__name__.strip("_").lower()
        return f"Relation({kind}, {self.shape[0]} x {self.shape[1]}{', square' if self.square else ''})"


class _Labels(Relation):
    """Relation of integer labels; see `Relation.from_labels`."""

    def __init__(self, labels: Tensor, ref_labels: Tensor | None, ignore: int | None, given: RelationOptions) -> None:
        self._row = labels
        self._col = labels if ref_labels is None else ref_labels
        self._ignore = ignore
        if given.reference_starts_with_batch:
            options.check_memory(labels, ref_labels)
        super().__init__((len(labels), len(self._col)), labels.device, ref_labels is None, given)

    def plain_labels(self) -> tuple[Tensor, Tensor] | None:
        more = (self._ignore, self._weights, self._ids, self._projection, self._among)
        return (self._row, self._col) if all(x is None for x in more) else None

    def layout(self) -> Layout | None:
        weights = together(self._weights, self._ref_weights)
        if isinstance(weights, Tensor):
            return None  # weights [n, m] of pairs
        itself, ids = POSITION if self.square or self.reference_starts_with_batch else NOWHERE, None
        if self._ids is not None and self._ref_ids is not None:
            ids = self._ids, self._ref_ids
            itself = POSITION_THEN_ID if self.reference_starts_with_batch else ID
        return Layout(
            (self._row, self._col),
            self.square,
            self.orders,
            flags=flags_of((self._row, self._col), self._ignore, self._projection, self._among),
            ids=ids,
            weights=weights,
            itself=itself,
            symmetric=self.square and self._projection is None and self._among is None,
            width=self._width if ids is None else None,
        )

    def sorted_layout(self) -> Layout | None:
        found = self.layout()
        if found is None or not consistent(self._ids, self._ref_ids, (self._row, self._col)):
            return super().sorted_layout()  # weights [n, m] of pairs, or one sample under two labels
        return found

    def _same_pairs(self) -> Tensor | None:
        if self._projection is not None or self._among is not None:
            return None
        row, col = (torch.arange(size, device=self.device) for size in self.shape)
        return meetings((row, self._row), (col, self._col), self.shape)

    def gathered(self, rows: Join, cols: Join) -> Relation:
        given = self._given.gathered(rows, cols, self.square)
        return _Labels(rows(self._row), None if self.square else cols(self._col), self._ignore, given)

    def one_a_class(self) -> Relation:
        theirs = None if self.square else self._col
        anchors, positive = first_of_each(self._row, theirs, self._ignore, self._is_itself)
        # constructed anew, because `torch.compile` of torch 2.11 cannot trace `copy`
        seen = _Labels(self._row, None if self.square else self._col, self._ignore, self._given)
        seen._projection = self._projection
        seen._among = anchors, positive
        return seen

    def _same(self, rows: slice, cols: slice) -> Tensor:
        return self._row[rows, None] == self._col[None, cols]

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        if self._ignore is None:
            return None
        return (self._row[rows, None] != self._ignore) & (self._col[None, cols] != self._ignore)


class _Graded(Relation):
    """Relation of relevances: positive above a rung, negative up to it, ignored if unknown."""

    def __init__(self, grades: Grades, rung: float, given: RelationOptions) -> None:
        self._grades, self._rung = grades, rung
        super().__init__(grades.shape, grades.device, grades.square, given)

    def at(self, rung: float) -> Relation:
        labels = self._grades.labels(rung)
        return _Graded(self._grades, rung, self._given) if labels is None else _Labels(*labels, None, self._given)

    def gathered(self, rows: Join, cols: Join) -> Relation:
        return _Graded(self._grades.gathered(rows, cols), self._rung, self._given.gathered(rows, cols, self.square))

    def _same_pairs(self) -> Tensor | None:
        return self._grades.pairs(self._rung)

    def _same(self, rows: slice, cols: slice) -> Tensor:
        return self._grades.above(rows, cols, self._rung)

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        return self._grades.known(rows, cols)

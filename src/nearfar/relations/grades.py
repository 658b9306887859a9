"""`Grades`: how relevant rows and columns are to each other, computed tile by tile; a rung divides them in two.

A relevance is a number; NaN says that it is unknown. A pair is positive on rung r if its relevance is above r, and
negative if it is r or below (see `Relation.at`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nearfar._utils.tensors import check_class_numbers, check_tensor, readable
from nearfar.relations.representatives import Join
from nearfar.relations.short_lists import entries, meetings

__all__ = ["Grades", "Matrix", "MultiHot", "PairList", "Scores", "Tree"]

EVERYTHING = slice(None)


class Grades(ABC):
    """The relevance of n rows and m columns to each other.

    Attributes:
        shape: (n, m).
        square: whether the columns are the rows themselves.
    """

    shape: tuple[int, int]
    device: torch.device
    square: bool

    @abstractmethod
    def tile(self, rows: slice, cols: slice) -> Tensor:
        """The relevance [t, u] of a tile."""

    def above(self, rows: slice, cols: slice, rung: float) -> Tensor:
        """Which pairs [t, u] of a tile are positive on a rung."""
        return self.tile(rows, cols) > rung

    def known(self, rows: slice, cols: slice) -> Tensor | None:
        """Which pairs [t, u] of a tile have a relevance; None for all."""
        return ~self.tile(rows, cols).isnan()

    def pairs(self, rung: float) -> Tensor | None:
        """Flat indices i·m + j of the positive pairs, in any order; None if they are too many to list."""
        return entries(self.above(EVERYTHING, EVERYTHING, rung))

    def labels(self, rung: float) -> tuple[Tensor, Tensor | None] | None:
        """Labels [n] of the rows and [m] of the reference that are equal if a pair is positive; None without them."""
        return None

    def gathered(self, rows: Join, cols: Join) -> Grades:
        """The grades of the rows and columns of all processes."""
        raise ValueError(
            "Distributed: a relation of a matrix says nothing of rows on other ranks; give labels, or a relation of "
            "labels."
        )


class Matrix(Grades):
    """Grades 1 and 0, given by a boolean matrix [n, m], and which of them are known."""

    def __init__(self, same: Tensor, valid: Tensor | None, square: bool) -> None:
        self._same, self._valid, self.square = same, valid, square
        self.shape, self.device = (same.shape[0], same.shape[1]), same.device

    def tile(self, rows: slice, cols: slice) -> Tensor:  # noqa: D102
        return self._same[rows, cols].float()

    def above(self, rows: slice, cols: slice, rung: float) -> Tensor:  # noqa: D102
        return self._same[rows, cols]

    def known(self, rows: slice, cols: slice) -> Tensor | None:  # noqa: D102
        return None if self._valid is None else self._valid[rows, cols]


class MultiHot(Grades):
    """The number of classes that two samples share, from multi-hot rows [n, c]."""

    def __init__(self, hot: Tensor, ref_hot: Tensor | None) -> None:
        # float: integer matrix products do not exist on a GPU; counts of shared labels stay exact below 2^24
        self._row = (hot != 0).float()
        self._col = self._row if ref_hot is None else (ref_hot != 0).float()
        self.shape, self.device, self.square = (len(hot), len(self._col)), hot.device, ref_hot is None

    def tile(self, rows: slice, cols: slice) -> Tensor:  # noqa: D102
        return self._row[rows] @ self._col[cols].T

    def known(self, rows: slice, cols: slice) -> Tensor | None:  # noqa: D102
        return None

    def pairs(self, rung: float) -> Tensor | None:  # noqa: D102
        if rung:
            return super().pairs(rung)
        rows = self._row.nonzero(as_tuple=True)
        return meetings(rows, rows if self.square else self._col.nonzero(as_tuple=True), self.shape)

    def gathered(self, rows: Join, cols: Join) -> Grades:  # noqa: D102
        return MultiHot(rows(self._row), None if self.square else cols(self._col))


class Keyed(Grades):
    """Grades that depend on a whole number of each row and each column, its label or id."""

    def __init__(self, row: Tensor, col: Tensor | None) -> None:
        row, col = row.long(), None if col is None else col.long()
        self._row, self._col, self.square = row, row if col is None else col, col is None
        self.shape, self.device = (len(row), len(self._col)), row.device

    def gathered(self, rows: Join, cols: Join) -> Grades:
        return self._of(rows(self._row), None if self.square else cols(self._col))

    @abstractmethod
    def _of(self, row: Tensor, col: Tensor | None) -> Grades:
        """The grades of other rows and columns."""


class Scores(Keyed):
    """Grades from a table [c, c'] between the labels of rows and columns; without labels, the rows and columns."""

    def __init__(self, table: Tensor, row: Tensor, col: Tensor | None, *, labeled: bool = True) -> None:
        super().__init__(row, col)
        self._table, self._labeled = table, labeled

    def gathered(self, rows: Join, cols: Join) -> Grades:  # noqa: D102
        return super().gathered(rows, cols) if self._labeled else Grades.gathered(self, rows, cols)

    def tile(self, rows: slice, cols: slice) -> Tensor:  # noqa: D102
        return self._table[self._row[rows, None], self._col[None, cols]]

    def _of(self, row: Tensor, col: Tensor | None) -> Grades:
        return Scores(self._table, row, col)


class Tree(Keyed):
    """The number of levels of a tree, from the root down, on which two nodes have the same ancestor."""

    def __init__(self, levels: Tensor, row: Tensor, col: Tensor | None) -> None:
        super().__init__(row, col)
        self._levels = levels

    def tile(self, rows: slice, cols: slice) -> Tensor:  # noqa: D102
        shared = torch.zeros(len(self._row[rows]), len(self._col[cols]), device=self.device)
        for level in self._levels:
            shared += level[self._row[rows, None]] == level[self._col[None, cols]]
        return shared

    def known(self, rows: slice, cols: slice) -> Tensor | None:  # noqa: D102
        return None

    def labels(self, rung: float) -> tuple[Tensor, Tensor | None] | None:  # noqa: D102
        if not 0 <= rung < len(self._levels):
            most = len(self._levels) - 1
            raise ValueError(f"Relation.at: the rungs of this tree are 0 to {most}, but rung came as {rung!r}.")
        level = self._levels[int(rung)]
        return level[self._row], None if self.square else level[self._col]

    def _of(self, row: Tensor, col: Tensor | None) -> Grades:
        return Tree(self._levels, row, col)


class PairList(Keyed):
    """Grades 1 of listed positive and 0 of listed negative pairs of sample ids, in either order; others are unknown."""

    def __init__(self, listed: tuple[Tensor, Tensor, Tensor], row: Tensor, col: Tensor | None) -> None:
        super().__init__(row, col)
        self._listed = listed  # the ids [k], the codes [2p] of their pairs, both sorted, and the grades [2p]

    @staticmethod
    def list_pairs(positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sorted ids, the sorted codes of the pairs in both orders, and their grades."""
        pairs = torch.cat([positives, negatives]).long()
        ids, place = torch.unique(pairs, return_inverse=True)
        first, second = place.unbind(dim=1)
        codes = torch.cat([first * len(ids) + second, second * len(ids) + first])
        grade = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))]).to(pairs.device).repeat(2)
        codes, order = codes.sort(stable=True)
        return ids, codes, grade[order]

    def tile(self, rows: slice, cols: slice) -> Tensor:  # noqa: D102
        ids, codes, grade = self._listed
        row, col = self._row[rows], self._col[cols]
        unknown = torch.full((len(row), len(col)), torch.nan, device=self.device)
        if not len(codes):
            return unknown
        (at, seen), (place, met) = (_find(ids, x) for x in (row, col))
        where, listed = _find(codes, at[:, None] * len(ids) + place[None, :])
        return torch.where(listed & seen[:, None] & met[None, :], grade[where], unknown)

    def _of(self, row: Tensor, col: Tensor | None) -> Grades:
        return PairList(self._listed, row, col)


def _find(among: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The places of x in sorted numbers, and whether it is there."""
    place = torch.searchsorted(among, x.contiguous()).clamp_max(len(among) - 1)
    return place, among[place] == x


def make_scores(scores: Tensor, labels: Tensor | None, ref_labels: Tensor | None, square: bool) -> Grades:
    """Validate the arguments of `Relation.from_scores`."""
    owner = "Relation.from_scores"
    check_tensor(owner, "scores", scores)
    if scores.ndim != 2 or scores.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise ValueError(
            f"{owner}: scores must be a matrix of numbers, NaN where unknown, but came as {scores.dtype} "
            f"{list(scores.shape)}; a boolean matrix goes to Relation.from_matrix."
        )
    if labels is None:
        if ref_labels is not None or (square and scores.shape[0] != scores.shape[1]):
            raise ValueError(
                f"{owner}: scores of shape {list(scores.shape)} must be square, or come with square=False for a "
                "reference; ref_labels go with labels."
            )
        row, col = (torch.arange(size, device=scores.device) for size in scores.shape)
        return Scores(scores, row, None if square else col, labeled=False)
    _check_keys(owner, "labels", labels, scores.shape[0])
    _check_keys(owner, "ref_labels", labels if ref_labels is None else ref_labels, scores.shape[1])
    return Scores(scores, labels, ref_labels)


def make_tree(parents: Tensor, labels: Tensor, ref_labels: Tensor | None) -> Grades:
    """Validate the arguments of `Relation.from_tree`, and list the ancestors of each node from the root down."""
    owner = "Relation.from_tree"
    check_class_numbers(owner, "parents", parents)
    nodes = torch.arange(len(parents), device=parents.device)
    if len(nodes) and readable(parents) and not bool(((parents >= -1) & (parents < len(nodes))).all()):
        raise ValueError(f"{owner}: parents must be -1 for a root, or a node from 0 to {len(nodes) - 1}.")
    for name, x in (("labels", labels), ("ref_labels", labels if ref_labels is None else ref_labels)):
        _check_keys(owner, name, x, len(nodes))
    return Tree(_levels(parents.long(), nodes), labels, ref_labels)


def _levels(parents: Tensor, nodes: Tensor) -> Tensor:
    """The ancestors [levels, nodes] of each node from its root to itself, which then repeats."""
    paths, now = [nodes], nodes
    while bool((parents[now] >= 0).any()):
        if len(paths) > len(nodes):
            raise ValueError(
                "Relation.from_tree: parents has a cycle; each node must lead to a root, whose parent is -1."
            )
        now = torch.where(parents[now] >= 0, parents[now], now)
        paths.append(now)
    upward = torch.stack(paths)  # row k: the ancestor k steps up, or the root
    depth = (upward[1:] != upward[:-1]).sum(dim=0)
    steps = (depth[None] - torch.arange(len(upward), device=nodes.device)[:, None]).clamp_min(0)
    return upward.gather(0, steps)


def make_pairs(positives: Tensor, negatives: Tensor, ids: Tensor, ref_ids: Tensor | None) -> Grades:
    """Validate the arguments of `Relation.from_pairs`."""
    owner = "Relation.from_pairs"
    for name, x in (("positives", positives), ("negatives", negatives)):
        check_tensor(owner, name, x)
        if x.ndim != 2 or x.shape[1] != 2 or x.is_floating_point() or x.dtype == torch.bool:
            raise ValueError(
                f"{owner}: {name} must hold two sample ids a row, as integers [pairs, 2], but came as {x.dtype} "
                f"{list(x.shape)}."
            )
    check_class_numbers(owner, "ids", ids)
    if ref_ids is not None:
        check_class_numbers(owner, "ref_ids", ref_ids)
    listed = PairList.list_pairs(positives, negatives)
    _, codes, grade = listed
    if readable(codes) and bool(((codes[1:] == codes[:-1]) & (grade[1:] != grade[:-1])).any()):
        raise ValueError(f"{owner}: a pair is listed both as positive and as negative; leave it out of one list.")
    return PairList(listed, ids, ref_ids)


def _check_keys(owner: str, name: str, x: Tensor, size: int) -> None:
    """Require labels [n] from 0 to size - 1."""
    check_class_numbers(owner, name, x)
    if x.numel() and readable(x) and not bool(((x >= 0) & (x < size)).all()):
        raise ValueError(f"{owner}: {name} must lie between 0 and {size - 1}, a row or column of what is given.")

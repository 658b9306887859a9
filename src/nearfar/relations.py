"""Who is alike whom: `Relation`, the one answer to labels, multi-labels, given pairs, ignore masks and references.

A relation is asked tile by tile (rows i0:i1 against columns j0:j1), so that no n x m mask need ever exist. Rows are
queries; columns are the same samples (no reference given: `square`) or a reference set (a memory, a gallery, other
ranks). A sample is never paired with itself: told by position when square, by equal ids with a reference, and never
by whether two tensors are the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar._checks import INTEGERS, check_tensor, check_whole, readable
from nearfar.projection import Anchors, Projection, check_projection

EVERYTHING = slice(None)


@dataclass(frozen=True, eq=False)
class Tile:
    """What a relation says about t rows against u columns.

    Args:
        same: [t, u] alike where true.
        valid: [t, u] pairs that count at all (not a sample with itself, nothing ignored).
        weight: [t, u] how much each pair counts, or None for once each.
    """

    same: Tensor
    valid: Tensor
    weight: Tensor | None = None

    @property
    def alike(self) -> Tensor:
        """Base measure [t, u] of the alike pairs: a mask, or weights."""
        return self._measure(self.same & self.valid)

    @property
    def unlike(self) -> Tensor:
        """Base measure [t, u] of the unlike pairs: a mask, or weights."""
        return self._measure(~self.same & self.valid)

    def _measure(self, mask: Tensor) -> Tensor:
        return mask if self.weight is None else torch.where(mask, self.weight, torch.zeros_like(self.weight))


@dataclass(frozen=True, eq=False)
class _Given:
    """What every constructor of a relation also takes."""

    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    weights: Tensor | None = None
    ref_weights: Tensor | None = None
    width: int | None = None
    projection: Projection | None = None


class Relation(ABC):
    """Alike, unlike or no matter, for n query rows against m reference rows.

    Make one with `from_labels`, `from_multilabel` or `from_matrix`, and pass it wherever labels are taken.

    Attributes:
        shape: (n, m).
        square: no reference was given: columns are the rows themselves.
        orders: 2 where each unordered pair stands in both orders (square, or a reference that holds exactly the same
            samples by id), else 1 (also with representatives); a number or a 0-dim tensor.
        anchors: with representatives, whose rows are anchors: "representatives" or "others"; else None.

    >>> relation = Relation.from_labels(torch.tensor([0, 0, 1]))
    >>> relation.dense().alike.int()
    tensor([[0, 1, 0],
            [1, 0, 0],
            [0, 0, 0]], dtype=torch.int32)
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        square: bool,
        given: _Given,
    ) -> None:
        self.shape = shape
        self.device = device
        self.square = square
        if given.width is not None:
            check_whole("Relation", "width", given.width)
        self._width = given.width
        self._ids, self._ref_ids = _check_ids(shape, square, given.ids, given.ref_ids)
        self._weights, self._ref_weights = _check_weights(shape, square, given.weights, given.ref_weights)
        self._projection = given.projection
        self.orders: int | Tensor = 2 if square else _orders(self._ids, self._ref_ids)
        if given.projection is not None:
            self.orders = 1  # a pair stands in the row of its anchor alone

    @property
    def anchors(self) -> Anchors | None:
        """Whose rows are anchors, where there are representatives."""
        return None if self._projection is None else self._projection.anchors

    def projected(self, anchors: Anchors, *, among: bool = False) -> Relation:
        """The same relation as a loss wants it: see `from_labels`; without representatives nothing changes.

        Args:
            anchors: "representatives": their rows against the others; "others": the rows of the others against them.
            among: pairs of representatives of different classes count too, whatever was said before.
        """
        if self._projection is None:
            return self
        seen = copy(self)
        seen._projection = replace(self._projection, anchors=anchors, among=among or self._projection.among)
        return seen

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
    ) -> Relation:
        """Alike when the labels are equal.

        Args:
            labels: [n] integers.
            ref_labels: [m] integers of the reference rows, or None for the rows themselves.
            ids: [n] integers that say which sample a row is; with a reference, equal ids are the same sample, unpaired.
            ref_ids: [m] likewise for the reference.
            ignore: rows and columns with this label take part in no pair.
            weights: [n, m] pair weights, or [n] sample weights (a pair counts their product).
            ref_weights: [m] sample weights of the reference, where `weights` is [n].
            width: the most alike columns any row has, where the caller knows (triplets on a GPU are leaner for it).
            representatives: [n] boolean, rows that stand for their class (004): each pair must join one of them to a
                row that is none. They are the anchors; in `NPair` and `Angular` the others are.
            ref_representatives: [m] likewise for the reference.
            among_representatives: unlike pairs of two representatives count too (004, eq. 4.2; its Alg. 1 has none).
                `LiftedStructure` always has them.
        """
        _demand_integers("Relation.from_labels", "labels", labels)
        if ref_labels is not None:
            _demand_integers("Relation.from_labels", "ref_labels", ref_labels)
        projection = check_projection(labels, ref_labels, representatives, ref_representatives, among_representatives)
        return _Labels(labels, ref_labels, ignore, _Given(ids, ref_ids, weights, ref_weights, width, projection))

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
        """Alike when two samples share at least one label; hot [n, c] holds 0 and 1 (or booleans), ref_hot [m, c]."""
        for name, x in (("hot", hot), ("ref_hot", ref_hot)):
            if x is not None:
                check_tensor("Relation.from_multilabel", name, x)
            if x is not None and x.ndim != 2:
                raise ValueError(
                    f"Relation.from_multilabel: {name} must have shape [n, classes], but came with {list(x.shape)}."
                )
        if ref_hot is not None and ref_hot.shape[1] != hot.shape[1]:
            raise ValueError(
                f"Relation.from_multilabel: hot and ref_hot must have the same classes, but came with "
                f"{hot.shape[1]} and {ref_hot.shape[1]} columns."
            )
        return _MultiLabel(hot, ref_hot, _Given(ids, ref_ids, weights, ref_weights))

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
        """Alike where a boolean matrix same [n, m] says so.

        Args:
            same: [n, m] boolean.
            valid: [n, m] boolean, pairs that count; None for all.
            square: columns are the rows themselves, so the diagonal is left out; False for a reference.
            ids: see `from_labels`.
            ref_ids: see `from_labels`.
            weights: see `from_labels`.
            ref_weights: see `from_labels`.
        """
        for name, x in (("same", same), ("valid", valid)):
            if x is not None:
                check_tensor("Relation.from_matrix", name, x)
            if x is not None and (x.dtype != torch.bool or x.ndim != 2 or x.shape != same.shape):
                raise ValueError(
                    f"Relation.from_matrix: {name} must be a boolean [n, m] matrix like same {list(same.shape)}, "
                    f"but came as {x.dtype} {list(x.shape)}."
                )
        if square and same.shape[0] != same.shape[1]:
            raise ValueError(
                f"Relation.from_matrix: same must be square, but came with shape {list(same.shape)}; "
                "pass square=False when the columns are a reference."
            )
        return _Matrix(same, valid, square, _Given(ids, ref_ids, weights, ref_weights))

    @abstractmethod
    def _same(self, rows: slice, cols: slice) -> Tensor: ...

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        return None

    def plain_labels(self) -> tuple[Tensor, Tensor] | None:
        """Labels of rows [n] and columns [m], where these (and position, when square) say everything; else None."""
        return None

    def tile(self, rows: slice, cols: slice) -> Tile:
        """The answer for rows i0:i1 against columns j0:j1; memory is that of the tile alone."""
        same = self._same(rows, cols)
        valid = ~self._itself(rows, cols)
        known = self._known(rows, cols)
        valid = valid if known is None else valid & known
        if self._projection is not None:
            valid = valid & self._projection.allowed(rows, cols, same)
        return Tile(same, valid, self._weight(rows, cols))

    def dense(self) -> Tile:
        """The whole n x m answer: the one method that makes it."""
        return self.tile(EVERYTHING, EVERYTHING)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Measure of the alike and of the unlike pairs of each row, [n] and [n], swept in strips of rows."""
        strips = [(tile.alike.sum(dim=1), tile.unlike.sum(dim=1)) for tile in self._strips()]
        if not strips:
            empty = torch.zeros(0, dtype=torch.int64, device=self.device)
            return empty, empty
        return torch.cat([alike for alike, _ in strips]), torch.cat([unlike for _, unlike in strips])

    def _strips(self) -> Iterator[Tile]:
        n, m = self.shape
        tall = max(1, 2**20 // max(m, 1))
        return (self.tile(slice(i, min(i + tall, n)), EVERYTHING) for i in range(0, n, tall))

    def width(self, alike: Tensor) -> int:
        """The most alike columns of any row of the measure `alike`: read on a CPU, else what was given, else m."""
        told = self.shape[1] if self._width is None else min(self._width, self.shape[1])
        if not readable(alike) or not alike.numel():
            return told
        widest = int((alike > 0).sum(dim=1).amax())
        if told < widest:
            raise ValueError(
                f"Relation: width is {told}, but a row has {widest} alike columns; raise it, or leave it out on a CPU."
            )
        return widest if self._width is None else told

    def _itself(self, rows: slice, cols: slice) -> Tensor:
        if self._ids is not None and self._ref_ids is not None:
            return self._ids[rows, None] == self._ref_ids[None, cols]
        n, m = self.shape
        here = torch.arange(n, device=self.device)[rows]
        there = torch.arange(m, device=self.device)[cols]
        if self.square:
            return here[:, None] == there[None, :]
        return torch.zeros(len(here), len(there), dtype=torch.bool, device=self.device)

    def _weight(self, rows: slice, cols: slice) -> Tensor | None:
        if self._weights is None:
            return None
        if self._weights.ndim == 2:
            return self._weights[rows, cols]
        assert self._ref_weights is not None  # noqa: S101 - _check_weights saw to it
        return self._weights[rows, None] * self._ref_weights[None, cols]

    def __repr__(self) -> str:
        kind = type(self).__name__.strip("_").lower()
        return f"Relation({kind}, {self.shape[0]} x {self.shape[1]}{', square' if self.square else ''})"


class _Labels(Relation):
    def __init__(self, labels: Tensor, ref_labels: Tensor | None, ignore: int | None, given: _Given) -> None:
        self._row = labels
        self._col = labels if ref_labels is None else ref_labels
        self._ignore = ignore
        super().__init__((len(labels), len(self._col)), labels.device, ref_labels is None, given)

    def plain_labels(self) -> tuple[Tensor, Tensor] | None:
        more = (self._ignore, self._weights, self._ids, self._projection)
        return (self._row, self._col) if all(x is None for x in more) else None

    def _same(self, rows: slice, cols: slice) -> Tensor:
        return self._row[rows, None] == self._col[None, cols]

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        if self._ignore is None:
            return None
        return (self._row[rows, None] != self._ignore) & (self._col[None, cols] != self._ignore)


class _MultiLabel(Relation):
    def __init__(self, hot: Tensor, ref_hot: Tensor | None, given: _Given) -> None:
        # float: integer matrix products do not exist on a GPU; counts of shared labels stay exact below 2^24
        self._row = (hot != 0).float()
        self._col = self._row if ref_hot is None else (ref_hot != 0).float()
        super().__init__((len(hot), len(self._col)), hot.device, ref_hot is None, given)

    def _same(self, rows: slice, cols: slice) -> Tensor:
        return (self._row[rows] @ self._col[cols].T) > 0.5


class _Matrix(Relation):
    def __init__(self, same: Tensor, valid: Tensor | None, square: bool, given: _Given) -> None:
        self._matrix = same
        self._valid = valid
        super().__init__((same.shape[0], same.shape[1]), same.device, square, given)

    def _same(self, rows: slice, cols: slice) -> Tensor:
        return self._matrix[rows, cols]

    def _known(self, rows: slice, cols: slice) -> Tensor | None:
        return None if self._valid is None else self._valid[rows, cols]


def _demand_integers(owner: str, name: str, labels: Tensor) -> None:
    check_tensor(owner, name, labels)
    if labels.dtype not in INTEGERS or labels.ndim != 1:
        raise ValueError(
            f"{owner}: {name} must be a 1-D integer tensor, but came as {labels.dtype} {list(labels.shape)}; "
            "for multi-hot rows use nf.Relation.from_multilabel."
        )


def _check_ids(
    shape: tuple[int, int], square: bool, ids: Tensor | None, ref_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if square and ref_ids is not None:
        raise ValueError(
            "Relation: ref_ids came without a reference; pass ref_labels (or ref_emb) too, or leave it out."
        )
    if square:
        return None, None  # position already says which row is which
    if (ids is None) != (ref_ids is None):
        raise ValueError("Relation: ids and ref_ids belong together, but only one of them came; pass both or neither.")
    if ids is not None and ref_ids is not None and (len(ids), len(ref_ids)) != shape:
        raise ValueError(
            f"Relation: ids and ref_ids must have {shape[0]} and {shape[1]} entries, "
            f"but came with {len(ids)} and {len(ref_ids)}."
        )
    return ids, ref_ids


def _check_weights(
    shape: tuple[int, int], square: bool, weights: Tensor | None, ref_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if weights is None:
        if ref_weights is not None:
            raise ValueError("Relation: ref_weights came without weights; pass both, or neither.")
        return None, None
    if ref_weights is not None and (square or weights.ndim == 2):
        raise ValueError("Relation: ref_weights go with sample weights [n] and a reference; leave them out here.")
    if weights.ndim == 1 and square:
        ref_weights = weights
    sizes = tuple(weights.shape) if weights.ndim == 2 or ref_weights is None else (len(weights), len(ref_weights))
    floating = weights.is_floating_point() and (ref_weights is None or ref_weights.is_floating_point())
    if sizes != shape or not floating:
        raise ValueError(
            f"Relation: weights must be floating, of shape {list(shape)} for pairs or [{shape[0]}] for samples "
            f"(with ref_weights [{shape[1]}]), but came as {weights.dtype} {list(weights.shape)}."
        )
    for given in (weights, ref_weights):
        if given is not None and readable(given) and bool((given < 0).any() | ~torch.isfinite(given).all()):
            raise ValueError("Relation: weights must be finite and not negative; a pair without weight is absent.")
    return weights, ref_weights


def _orders(ids: Tensor | None, ref_ids: Tensor | None) -> int | Tensor:
    """2 where the reference holds exactly the query samples, told on the device so that nothing is read."""
    if ids is None or ref_ids is None or len(ids) != len(ref_ids):
        return 1
    return 1 + (ids.sort().values == ref_ids.sort().values).all().to(torch.int64)

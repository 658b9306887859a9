"""Random batches: rows, references, which rows form positive pairs, and the same told to the oracle as two measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import nearfar as nf

WEIGHTS = np.array([0.0, 0.5, 1.0, 1.0, 1.25, 2.0, 3.0])
"""Exact in every precision, some of them 0: absent."""
LARGE = 100
"""From so many rows on, a class has few of them: triplets are n x P x m."""


@dataclass(frozen=True)
class Batch:
    """Rows, references (None: the rows themselves), the relation, and what the oracle is told of it.

    `place`: the references are the rows themselves in this order. A pair and its mirror image are then tied, and only
    what both get together is told.
    """

    rows: np.ndarray
    references: np.ndarray | None
    relation: Callable[..., nf.Relation]
    A: np.ndarray
    U: np.ndarray
    orders: int
    place: np.ndarray | None = None

    def crowded(self, unit: bool) -> float:
        """The largest (|x|^2 + |y|^2) / |x - y|^2 of all rows: what a distance made of products loses in precision."""
        X = self.rows if self.references is None else np.concatenate([self.rows, self.references])
        X = X / np.linalg.norm(X, axis=1, keepdims=True) if unit else X
        apart = ((X[:, None] - X[None, :]) ** 2).sum(axis=2)
        size = (X**2).sum(axis=1)[:, None] + (X**2).sum(axis=1)[None, :]
        return float((size[apart > 0] / apart[apart > 0]).max(initial=0.0))


@dataclass
class Draft:
    """A relation as it is drawn: labels of rows and columns, what the constructor also takes, and what that means."""

    y: np.ndarray
    z: np.ndarray
    square: bool
    same: np.ndarray
    valid: np.ndarray
    weight: np.ndarray
    orders: int
    call: dict[str, Any] = field(default_factory=dict)
    way: Any = nf.Relation.from_labels
    place: np.ndarray | None = None

    def relation(self, lay: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> nf.Relation:
        """As the package takes it, each tensor as `lay` puts it into memory."""
        more = {key: lay(torch.tensor(x)) if isinstance(x, np.ndarray) else x for key, x in self.call.items()}
        told = [self.y] if self.square or self.way is nf.Relation.from_matrix else [self.y, self.z]
        return self.way(*(lay(torch.tensor(x)) for x in told), **more)


def _labels(rng: np.random.Generator, n: int) -> np.ndarray:
    kind = rng.choice(["few", "many", "one", "alone"], p=[0.6, 0.28, 0.06, 0.06])
    if n >= LARGE:
        return rng.integers(0, n // 4, size=n)
    if kind == "one":
        return np.zeros(n, dtype=np.int64)
    if kind == "alone":
        return rng.permutation(n)
    return rng.integers(0, 3 if kind == "few" else max(2, n // 2), size=n)


def _rows(rng: np.random.Generator, n: int, dim: int, kind: str, dtype: torch.dtype) -> np.ndarray:
    """Rows in general position, or ("lattice", "axes") such that scores are exact and many of them equal."""
    if kind == "axes":
        return np.eye(dim)[rng.integers(0, dim, size=n)] * 1.0
    if kind == "lattice":
        return rng.integers(-1, 2, size=(n, dim)) * 1.0
    rows = rng.normal(size=(n, dim)) * rng.choice([0.3, 1.0, 4.0])
    return torch.tensor(rows).to(dtype).double().numpy()


# ---------------------------------------------------------------- relations


def _plain(rng: np.random.Generator, draft: Draft) -> None:
    pass


def _ids(rng: np.random.Generator, draft: Draft) -> None:
    n, m = draft.same.shape
    ids, others = rng.integers(0, n + m, size=n), rng.integers(0, n + m, size=m)
    if draft.place is not None:
        ids = rng.permutation(n)
        others = ids[draft.place]
    draft.call = {"ids": ids, "ref_ids": others}
    draft.valid = ids[:, None] != others[None, :]
    draft.orders = 2 if np.array_equal(np.sort(ids), np.sort(others)) else 1


def _ignore(rng: np.random.Generator, draft: Draft) -> None:
    left = int(rng.choice(draft.y))
    draft.call = {"ignore": left}
    draft.valid = draft.valid & (draft.y[:, None] != left) & (draft.z[None, :] != left)


def _samples(rng: np.random.Generator, draft: Draft) -> None:
    weights = others = rng.choice(WEIGHTS, size=len(draft.y))
    draft.call = {"weights": weights}
    if not draft.square:
        others = draft.call["ref_weights"] = rng.choice(WEIGHTS, size=len(draft.z))
    draft.weight = weights[:, None] * others[None, :]


def _pairs(rng: np.random.Generator, draft: Draft) -> None:
    draft.weight = draft.call["weights"] = rng.choice(WEIGHTS, size=draft.same.shape)


def _representatives(rng: np.random.Generator, draft: Draft, among: bool = False) -> None:
    stand = others = rng.random(len(draft.y)) < 0.5
    draft.call = {"representatives": stand, "among_representatives": among}
    if not draft.square:
        others = draft.call["ref_representatives"] = rng.random(len(draft.z)) < 0.5
    draft.valid = draft.valid & stand[:, None] & (~others[None, :] | (~draft.same if among else False))
    draft.orders = 1


def _among(rng: np.random.Generator, draft: Draft) -> None:
    _representatives(rng, draft, among=True)


def _multi(rng: np.random.Generator, draft: Draft) -> None:
    many = 40 if len(draft.y) >= LARGE else 4
    hot = others = rng.random((len(draft.y), many)) < 1.2 / many
    if not draft.square:
        others = rng.random((len(draft.z), many)) < 1.2 / many
    draft.same = (hot[:, None, :] & others[None, :, :]).any(axis=2)
    draft.y, draft.z, draft.way = hot, others, nf.Relation.from_multilabel


def _matrix(rng: np.random.Generator, draft: Draft) -> None:
    shape = draft.same.shape
    draft.same = draft.y = rng.random(shape) < (0.02 if len(draft.y) >= LARGE else 0.3)
    known = rng.random(shape) < 0.8
    draft.call = {"square": draft.square, "valid": known}
    draft.valid, draft.way = draft.valid & known, nf.Relation.from_matrix


KINDS = {
    "plain": _plain, "ids": _ids, "twins": _ids, "ignore": _ignore, "samples": _samples, "pairs": _pairs,
    "multi": _multi, "matrix": _matrix, "representatives": _representatives, "among": _among,
}  # fmt: skip
SQUARE = ("plain", "plain", "plain", "ignore", "samples", "pairs", "multi", "matrix", "representatives", "among")
AGAINST = ("plain", "plain", "ids", "twins", "samples", "pairs", "multi", "matrix", "representatives", "among")


def draw_batch(rng: np.random.Generator, n: int, dim: int, rows: str, dtype: torch.dtype) -> tuple[Batch, str]:
    """A batch of n rows [n, dim], and the name of its relation."""
    square = bool(rng.random() < 0.6)
    kind = str(rng.choice(SQUARE if square else AGAINST))
    m = n if square or kind == "twins" else int(rng.integers(1, max(21, n)))
    E, y = _rows(rng, n, dim, rows, dtype), _labels(rng, n)
    R, z = (None, y) if square else (_rows(rng, m, dim, rows, dtype), _labels(rng, m))
    place = rng.permutation(n) if kind == "twins" else None
    if place is not None:
        R, z = E[place], y[place]
    valid = ~np.eye(n, dtype=bool) if square else np.ones((n, m), dtype=bool)
    same = y[:, None] == z[None, :]
    draft = Draft(y, z, square, same, valid, np.ones((n, m)), 2 if square else 1, place=place)
    KINDS[kind](rng, draft)
    A, U = draft.weight * (draft.same & draft.valid), draft.weight * (~draft.same & draft.valid)
    return Batch(E, R, draft.relation, A, U, draft.orders, place), f"{kind}{'' if square else ' against references'}"

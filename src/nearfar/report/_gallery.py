"""Choose the queries of the gallery, and find their nearest neighbors.

Failures are sorted by the rank of the first right answer, then by the gap: the best wrong score minus the best right
score. Half of the gallery are the worst failures, a quarter are failures of the ten worst classes, and a quarter are
right answers drawn at random.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearfar.evaluation._neighbors import neighbors
from nearfar.evaluation._retrieval import PerQuery
from nearfar.report._similarities import SIMILARITIES, Metric, prepare

TILE = 2**22  # entries of one tile of scores: 16 MB in float32


@dataclass(frozen=True)
class Query:
    """One query and its nearest neighbors."""

    row: int  # the row of the query
    rank: int  # rank of the first right answer, from 1
    # best wrong score minus best right score, above 0 for a failure; None if there is no wrong answer
    gap: float | None
    near: tuple[int, ...]  # the neighbors' rows, nearest first
    scores: tuple[float, ...]  # their scores
    right: int  # the row of the first right answer
    right_score: float  # its score


def gallery(
    x: Tensor, found: PerQuery, worst: list[int], *, queries: int, near: int, similarity: Metric, seed: int
) -> list[Query]:
    """Choose queries for the gallery, worst first, and find their neighbors.

    Args:
        x: [n, d] vectors.
        found: the per-query results of `evaluate`.
        worst: labels of the worst classes.
        queries: how many to choose.
        near: how many neighbors to list.
        similarity: "cosine", "dot" or "euclidean".
        seed: seed for drawing right answers.
    """
    shown = [
        query
        for rows, scores in _strips(x, _choose(found, worst, queries, seed, x, similarity), similarity)
        for query in _queries(rows, scores, found.labels, near)
    ]
    return sorted(shown, key=lambda query: (-query.rank, math.inf if query.gap is None else -query.gap, query.row))


def nearest(x: Tensor, rows: np.ndarray, similarity: Metric) -> np.ndarray:
    """The nearest other row of each of some rows."""
    if len(x) < 2 or not len(rows):
        return np.zeros(0, dtype=np.int64)
    chosen = torch.from_numpy(rows)
    places = neighbors(x[chosen], x, k=2, similarity=similarity).places
    # the row itself comes first, unless an equal row precedes it
    other: np.ndarray = torch.where(places[:, 0] == chosen, places[:, 1], places[:, 0]).numpy()
    return other


def _choose(found: PerQuery, worst: list[int], queries: int, seed: int, x: Tensor, similarity: Metric) -> np.ndarray:
    counted = ~found.lone.numpy()
    rank, labels = found.rank.numpy(), found.labels.numpy()
    wrong, right = np.flatnonzero(counted & (rank > 1)), np.flatnonzero(counted & (rank == 1))
    places = min(len(wrong), max(queries - queries // 4, queries - len(right)))
    share = min(queries // 4, places) // max(len(worst), 1)
    chosen: list[int] = []
    for label in worst:
        chosen += _worst_first(wrong[labels[wrong] == label], rank, share, x, found.labels, similarity)
    rest = np.setdiff1d(wrong, chosen)
    chosen += _worst_first(rest, rank, places - len(chosen), x, found.labels, similarity)
    drawn = np.random.default_rng(seed).permutation(right)[: queries - len(chosen)]
    return np.sort(np.concatenate([np.asarray(chosen, dtype=np.int64), drawn]))


def _worst_first(
    rows: np.ndarray, rank: np.ndarray, count: int, x: Tensor, labels: Tensor, similarity: Metric
) -> list[int]:
    """The `count` worst rows; gaps are computed only for rows whose rank can be among them."""
    if count <= 0 or not len(rows):
        return []
    cut = np.sort(rank[rows])[::-1][min(count, len(rows)) - 1]
    rows = rows[rank[rows] >= cut]
    gaps = np.concatenate([_gaps(part, scores, labels) for part, scores in _strips(x, rows, similarity)])
    order = np.lexsort((rows, -gaps, -rank[rows]))
    chosen: list[int] = rows[order][:count].tolist()
    return chosen


def _strips(x: Tensor, rows: np.ndarray, similarity: Metric) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of some rows against all others, a few rows at a time."""
    measure = SIMILARITIES[similarity]
    with torch.no_grad():
        ready = prepare(x, similarity)
        for part in torch.split(torch.from_numpy(rows), max(1, TILE // len(x))):
            scores = measure.scores(ready[part], ready)
            scores[torch.arange(len(part)), part] = -torch.inf
            yield part, scores


def _gaps(rows: Tensor, scores: Tensor, labels: Tensor) -> np.ndarray:
    same = labels[rows][:, None] == labels
    right = torch.where(same, scores, -torch.inf).amax(dim=1)
    wrong = torch.where(same, -torch.inf, scores).amax(dim=1)
    gaps: np.ndarray = (wrong - right).numpy()
    return gaps


def _queries(rows: Tensor, scores: Tensor, labels: Tensor, near: int) -> list[Query]:
    """The `Query` of each row; rank and neighbors come from one sorted list, with ties by position."""
    gaps = _gaps(rows, scores, labels)
    ranked = scores.sort(dim=1, descending=True, stable=True)
    found = []
    for i, row in enumerate(rows.tolist()):
        order, values = ranked.indices[i], ranked.values[i]
        first = int((labels[order] == labels[row]).int().argmax())
        if int(order[first]) == row:  # alone in its class: there is no right answer
            continue
        listed = min(near, scores.shape[1] - 1)
        found.append(
            Query(
                row=row,
                rank=first + 1,
                gap=float(gaps[i]) if math.isfinite(gaps[i]) else None,
                near=tuple(order[:listed].tolist()),
                scores=tuple(values[:listed].tolist()),
                right=int(order[first]),
                right_score=float(values[first]),
            )
        )
    return found

"""Exact nearest neighbours, tile by tile: any number of rows, memory of one tile, CPU or GPU, no index to build.

    scores, places = neighbours(queries, references, k=10)          [n, k] and [n, k], best first

Ties are resolved by place: of two references with equal scores the one that comes first wins. Rows that are compared
with themselves (no references given) never find themselves, told by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearfar._checks import check_choice, check_embeddings
from nearfar.similarity import Cosine, Dot, NegEuclidean, Similarity

Metric = Literal["cosine", "dot", "euclidean"]
METRICS: dict[str, Similarity] = {"cosine": Cosine(), "dot": Dot(), "euclidean": NegEuclidean(normalize=False)}
TILE = 2**22
"""Entries of one tile of scores: 16 MB in float32."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The k nearest references of each query.

    Attributes:
        scores: [n, k] similarities, larger = nearer (Euclidean: the negative distance), best first.
        places: [n, k] which reference rows they are.
    """

    scores: Tensor
    places: Tensor


def neighbours(
    queries: Tensor,
    references: Tensor | None = None,
    *,
    k: int = 1,
    similarity: Metric = "cosine",
    backend: Literal["torch", "faiss"] = "torch",
    tile: int = TILE,
) -> Neighbours:
    """The k nearest references of each query, exactly.

    Args:
        queries: [n, d].
        references: [m, d]; None compares the queries with each other, no row with itself.
        k: how many; no more than there are references.
        similarity: "cosine", "dot" or "euclidean".
        backend: "torch", or "faiss" for its flat index where it is installed (the same answer).
        tile: entries of a tile of scores; memory grows with it and with nothing else.

    >>> found = neighbours(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), k=1)
    >>> found.places.flatten().tolist()
    [1, 0, 1]
    """
    _check(queries, references, k, similarity)
    check_choice("neighbours", "backend", backend, ("torch", "faiss"))
    if backend == "faiss":
        from nearfar.evaluation.faiss_backend import faiss_neighbours

        return faiss_neighbours(queries, references, k, similarity)
    found = list(strips(queries, references, k=k, similarity=similarity, tile=tile))
    scores = torch.cat([strip.scores for _, strip in found]) if found else queries.new_zeros(0, k)
    places = torch.cat([strip.places for _, strip in found]) if found else torch.zeros(0, k, dtype=torch.long)
    return Neighbours(scores, places)


def strips(
    queries: Tensor, references: Tensor | None, *, k: int, similarity: Metric, tile: int = TILE
) -> Iterator[tuple[slice, Neighbours]]:
    """The same, a strip of queries at a time: for callers that reduce each strip and keep no [n, k] list."""
    measure = METRICS[similarity]
    with torch.no_grad():
        rows = measure.prepare(_wide(queries))
        cols = rows if references is None else measure.prepare(_wide(references))
        tall = _tall(cols, tile)
        for start in range(0, len(rows), tall):
            end = min(start + tall, len(rows))
            yield (
                slice(start, end),
                _strip(measure, rows[start:end], cols, k, None if references is not None else start, tile),
            )


def _check(queries: Tensor, references: Tensor | None, k: int, similarity: str) -> None:
    check_choice("neighbours", "similarity", similarity, METRICS)
    check_embeddings("neighbours", "queries", queries)
    if references is not None:
        check_embeddings("neighbours", "references", references)
        if references.shape[1] != queries.shape[1]:
            raise ValueError(
                f"neighbours: references must be {queries.shape[1]} wide like queries, but are {references.shape[1]}."
            )
    most = len(queries) - 1 if references is None else len(references)
    if not isinstance(k, int) or not 1 <= k <= max(most, 1) or (most < 1 and len(queries)):
        raise ValueError(f"neighbours: k must lie in 1..{most}, the references a query can find, but came as {k!r}.")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tall(cols: Tensor, tile: int) -> int:
    """Rows of a strip: square tiles where both sides are long, whole rows where the references are few."""
    return max(1, min(1024, tile // max(1, min(len(cols), 16384))))


def _strip(measure: Similarity, x: Tensor, cols: Tensor, k: int, position: int | None, tile: int) -> Neighbours:
    """The best k of a strip of rows, merged over tiles of columns from left to right.

    `position`: the strip's first row among the columns, where the columns are the rows themselves.
    """
    wide = max(k + 1, tile // len(x))
    best: tuple[Tensor, Tensor] | None = None
    for left in range(0, len(cols), wide):
        scores = measure.scores(x, cols[left : left + wide])
        if position is not None:
            _hide_itself(scores, position, left)
        values, places = _top(scores, min(k, scores.shape[1]))
        found = values, places + left
        best = found if best is None else _merge(best, found, k)
    assert best is not None  # noqa: S101 - there is at least one reference
    return Neighbours(*best)


def _hide_itself(scores: Tensor, top: int, left: int) -> None:
    """Overwrite the diagonal of the whole matrix where it crosses this tile."""
    first, last = max(top, left), min(top + scores.shape[0], left + scores.shape[1])
    if first < last:
        place = torch.arange(first, last, device=scores.device)
        scores[place - top, place - left] = -torch.inf


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, ties by place. `topk` alone leaves the order of ties open."""
    more = min(k + 1, scores.shape[1])
    values, places = scores.topk(more, dim=1)
    values, places = _ordered(values, places)
    if more > k:
        unclear = (values[:, k - 1] == values[:, k]).nonzero().flatten()
        if len(unclear):  # a tie across the cut: only a full stable sort says who comes first
            whole = scores[unclear].sort(dim=1, descending=True, stable=True)
            values[unclear, :k], places[unclear, :k] = whole.values[:, :k], whole.indices[:, :k]
    return values[:, :k], places[:, :k]


def _ordered(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """By score, and by place among equal scores: sort by place first, then stably by score."""
    places, order = places.sort(dim=1)
    values, again = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, places.gather(1, again)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The best k of two lists, a's places all before b's, so that a stable sort keeps ties in order."""
    values, order = torch.cat([a[0], b[0]], dim=1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], torch.cat([a[1], b[1]], dim=1).gather(1, order)[:, :k]

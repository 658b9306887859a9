"""Exact nearest neighbors, tile by tile: any number of rows, memory of one tile, CPU or GPU, no index to build.

    scores, places = neighbors(queries, references, k=10)          [n, k] and [n, k], best first

Ties are resolved by position: of two references with equal scores the first one wins. Without references the queries
are searched among themselves, and no row is its own neighbor (by position, not by value).
"""

from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar.evaluation._exact_search import TILE, Neighbors, strips
from nearfar.evaluation._faiss import faiss_neighbors
from nearfar.evaluation._ranking_keys import METRICS, Metric, wide
from nearfar.evaluation.parallel import check_rows, current_group, merge_rows, single_process


def neighbors(
    queries: Tensor,
    references: Tensor | None = None,
    *,
    k: int = 1,
    similarity: Metric = "cosine",
    backend: Literal["torch", "faiss"] = "torch",
    tile: int = TILE,
) -> Neighbors:
    """Find the k nearest references of each query, exactly.

    Args:
        queries: [n, d].
        references: [m, d]; None compares the queries with each other, no row with itself.
        k: number of neighbors; at most the number of references.
        similarity: "cosine", "dot" or "euclidean".
        backend: "torch", or "faiss" for its flat index where it is installed (the same answer).
        tile: entries of a tile of scores; memory grows with it and with n·k.

    >>> found = neighbors(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), k=1)
    >>> found.places.flatten().tolist()
    [1, 0, 1]
    """
    _check(queries, references, k, similarity)
    check_choice("neighbors", "backend", backend, ("torch", "faiss"))
    if backend == "faiss":
        with single_process():
            return faiss_neighbors(queries, references, k, similarity)
    group, scores = current_group(), wide(queries[:0]).new_empty(len(queries), k)
    places, found = (
        torch.empty_like(scores, dtype=torch.long),
        strips(queries, references, k=k, similarity=similarity, tile=tile),
    )
    if group.world == 1:
        for rows, strip in found:
            scores[rows], places[rows] = strip.scores, strip.places
        return Neighbors(scores, places)
    parts = list(found)
    return Neighbors(
        merge_rows(group, scores, [(rows, strip.scores) for rows, strip in parts]),
        merge_rows(group, places, [(rows, strip.places) for rows, strip in parts]),
    )


def _check(queries: Tensor, references: Tensor | None, k: int, similarity: str) -> None:
    check_choice("neighbors", "similarity", similarity, METRICS)
    check_rows("neighbors", "queries", queries)
    if references is not None:
        check_rows("neighbors", "references", references)
        if references.shape[1] != queries.shape[1]:
            raise ValueError(
                f"neighbors: references must be {queries.shape[1]} wide like queries, but are {references.shape[1]}."
            )
    most = len(queries) - 1 if references is None else len(references)
    if not isinstance(k, int) or not 1 <= k <= max(most, 1) or (most < 1 and len(queries)):
        raise ValueError(f"neighbors: k must lie in 1..{most}, the references a query can find, but came as {k!r}.")

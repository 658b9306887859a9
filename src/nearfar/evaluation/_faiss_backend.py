"""Nearest neighbors by faiss's flat indexes, where faiss is installed: the same answer as the torch backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfar._utils.extras import need
from nearfar.evaluation._exact_search import Neighbors, strips
from nearfar.evaluation._ranking_keys import Metric, Rows, spaces, wide
from nearfar.similarity import unit


def faiss(remedy: str = 'leave backend="torch"') -> Any:
    """Import faiss, or raise an error that says how to install it or what to do without it."""
    return need("faiss", "this search", "faiss", instead=remedy)


def faiss_neighbors(queries: Tensor, references: Tensor | None, k: int, similarity: Metric) -> Neighbors:
    """The k nearest references by faiss's flat index; see `neighbors`.

    faiss leaves the order of ties open and rounds differently. Rows whose order depends on that (two scores of the
    list, or the last and the first left out, closer than rounding) are searched again here, so that ties are resolved
    by position.
    """
    module = faiss()
    x, y = spaces(queries, references, similarity)
    rows = _plain(x)
    cols = rows if references is None else _plain(y)
    index = module.IndexFlatL2(cols.shape[1]) if similarity == "euclidean" else module.IndexFlatIP(cols.shape[1])
    index.add(cols.numpy())
    more = min(k + 1, len(cols) - (references is None))
    found, listed = index.search(rows.numpy(), more + (references is None))
    keys, places = torch.from_numpy(found), torch.from_numpy(listed)
    if similarity == "euclidean":
        keys = -keys
    if references is None:
        keys, places = _without_itself(keys, places, torch.arange(len(places)))
    scores = keys if similarity != "euclidean" else -(-keys).clamp_min(0).sqrt()
    scores, places = scores[:, :k].to(x.side), places[:, :k].to(queries.device)
    again = _unclear(keys, rows, cols, similarity).nonzero().flatten().to(queries.device)
    if len(again):
        exact = _again(queries, references, again, k, similarity)
        scores[again], places[again] = exact.scores, exact.places
    return Neighbors(scores.clamp(-1, 1) if similarity == "cosine" else scores, places)


def _plain(rows: Rows) -> Tensor:
    """Convert rows for faiss: float32 on the CPU, of unit length for the cosine."""
    x = wide(rows.x)
    return (unit(x) if rows.similarity == "cosine" else x).float().cpu().contiguous()


def _without_itself(keys: Tensor, places: Tensor, itself: Tensor) -> tuple[Tensor, Tensor]:
    """Drop each row itself from its list, or the last entry if duplicates pushed the row off the list."""
    own = places == itself[:, None]
    own[~own.any(dim=1), -1] = True
    keep = (~own).nonzero()[:, 1].reshape(len(places), -1)
    return keys.gather(1, keep), places.gather(1, keep)


def _unclear(keys: Tensor, rows: Tensor, cols: Tensor, similarity: Metric) -> Tensor:
    """Which rows have neighbors in their list whose keys are closer than rounding errors."""
    size, largest = torch.linalg.vector_norm(rows, dim=1), float(torch.linalg.vector_norm(cols, dim=1).max())
    scale = size * largest if similarity != "euclidean" else size.square() + largest**2
    close: Tensor = keys[:, :-1] - keys[:, 1:] <= 2e-6 * scale[:, None]
    return close.any(dim=1)


def _again(queries: Tensor, references: Tensor | None, chosen: Tensor, k: int, similarity: Metric) -> Neighbors:
    """Search some rows with the torch backend; without references each row finds itself too, and drops it."""
    extra = references is None
    cols = queries if references is None else references
    found = list(strips(queries[chosen], cols, k=k + extra, similarity=similarity))
    scores = torch.cat([strip.scores for _, strip in found])
    places = torch.cat([strip.places for _, strip in found])
    return Neighbors(*(_without_itself(scores, places, chosen) if extra else (scores, places)))

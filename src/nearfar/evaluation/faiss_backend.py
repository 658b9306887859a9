"""Neighbours through faiss's flat indexes: the same answer as ours, for people who have it installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfar.evaluation.neighbours import METRICS, Metric, Neighbours, _ordered, _wide


def faiss() -> Any:
    """The faiss module, or one sentence that says how to get it."""
    try:
        import faiss as module
    except ImportError:
        raise ImportError(
            'faiss is not installed; run pip install "nearfar[faiss]", or leave backend="torch".'
        ) from None
    return module


def faiss_neighbours(queries: Tensor, references: Tensor | None, k: int, similarity: Metric) -> Neighbours:
    """The k nearest references by faiss's flat index; see `neighbours`."""
    module = faiss()
    measure = METRICS[similarity]
    rows = measure.prepare(_wide(queries.detach())).float().cpu()
    cols = rows if references is None else measure.prepare(_wide(references.detach())).float().cpu()
    index = module.IndexFlatL2(cols.shape[1]) if similarity == "euclidean" else module.IndexFlatIP(cols.shape[1])
    index.add(cols.numpy())
    found, places = index.search(rows.numpy(), k + (references is None))
    scores, places = torch.from_numpy(found), torch.from_numpy(places)
    if similarity == "euclidean":
        scores = -scores.clamp_min(0).sqrt()
    if references is None:
        scores, places = _without_itself(scores, places)
    scores, places = _ordered(scores, places)
    return Neighbours(scores.to(queries.device), places.to(queries.device))


def _without_itself(scores: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Drop each row's own place, or the last where duplicates pushed it off the list."""
    own = places == torch.arange(len(places))[:, None]
    own[~own.any(dim=1), -1] = True
    keep = (~own).nonzero()[:, 1].reshape(len(places), -1)
    return scores.gather(1, keep), places.gather(1, keep)

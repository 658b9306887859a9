"""Retrieval scored by a relation: several labels per sample, a matrix, ignored pairs.

For each query the references that count are ranked, without those that the relation leaves out (itself, ignored pairs).
R, rank, R-precision and AP@R are then as in `nearfar.evaluation.retrieval`. No query has a class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.progress import Watch
from nearfar.evaluation.retrieval import PerQuery, Ties, scored
from nearfar.evaluation.spaces import Metric, keys, spaces
from nearfar.evaluation.sweep import TILE
from nearfar.relations.relation import Relation

__all__ = ["retrieve_related"]

NO_CLASS = -1
"""The label of a query that has none."""


def retrieve_related(
    embeddings: Tensor,
    relation: Relation,
    ref_emb: Tensor | None,
    *,
    similarity: Metric,
    ties: Ties,
    watch: Watch | None,
) -> PerQuery:
    """Rank every reference that counts for every query, a strip of queries at a time.

    Args:
        embeddings: [n, d] queries.
        relation: n x m, which references are relevant.
        ref_emb: [m, d] gallery; None searches the queries themselves.
        similarity: "cosine", "dot" or "euclidean".
        ties: as in `retrieve`.
        watch: called as watch(what, done, total) during the work.
    """
    x, y = spaces(embeddings, ref_emb, similarity)
    labels = torch.full((len(x),), NO_CLASS, dtype=torch.int64, device=embeddings.device)
    nothing = torch.zeros(len(x), dtype=torch.float64, device=embeddings.device)
    found = PerQuery(torch.zeros_like(labels), nothing, nothing.clone(), torch.zeros_like(labels), labels)
    tall = max(1, TILE // max(len(y), 1))
    for start in range(0, len(x) if len(y) else 0, tall):
        rows = slice(start, min(start + tall, len(x)))
        tile = relation.tile(rows, slice(None))
        key = torch.where(tile.valid, keys(x[rows], y[:]), -torch.inf)
        ranked = key.sort(dim=1, descending=True, stable=True)
        right = tile.positive.gather(1, ranked.indices)
        relevant = right.sum(dim=1)
        found.rank[rows], found.r_precision[rows], found.ap_at_r[rows] = scored(right, ranked.values, relevant, ties)
        found.relevant[rows] = relevant
        if watch is not None:
            watch("ranking references of queries", rows.stop, len(x))
    return found

"""Retrieval scored by a relation: several labels per sample, a matrix, ignored pairs.

For each query the references that count are ranked, without those that the relation leaves out (itself, ignored pairs).
R, rank, R-precision and AP@R are then as in `nearfar.evaluation.retrieval`. No query has a class.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nearfar._utils.progress import Watch
from nearfar.evaluation.dealing import filled, paced, ranks, share
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
    group, labels = ranks(), torch.full((len(x),), NO_CLASS, dtype=torch.int64, device=embeddings.device)
    tall = max(1, TILE // max(len(y), 1))
    strips = -(-len(x) // tall) if len(y) else 0
    parts: list[tuple[slice | Tensor, Tensor]] = []
    mine, work = share(strips, group.rank, group.world), tall * len(y) * embeddings.shape[1]
    for number in paced(mine, -(-strips // group.world), work, partial(group.beat, labels.device)):
        rows = slice(number * tall, min((number + 1) * tall, len(x)))
        tile = relation.tile(rows, slice(None))
        key = torch.where(tile.valid, keys(x[rows], y[:]), -torch.inf)
        ranked = key.sort(dim=1, descending=True, stable=True)
        right = tile.positive.gather(1, ranked.indices)
        relevant = right.sum(dim=1)
        found = (*scored(right, ranked.values, relevant, ties), relevant)
        parts.append((rows, torch.stack([column.double() for column in found], dim=1)))
        if watch is not None:
            first, last = mine.start * tall, min(mine.stop * tall, len(x))
            watch("ranking references of queries", rows.stop - first, last - first)
    like = torch.empty(len(x), 4, dtype=torch.float64, device=labels.device)
    rank, r_precision, ap, relevant = filled(group, like, parts).unbind(dim=1)
    return PerQuery(rank.long(), r_precision, ap, relevant.long(), labels)

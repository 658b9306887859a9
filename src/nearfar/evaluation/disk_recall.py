"""How much of exact search an approximate index finds: measured on a sample of its own rows when it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.evaluation.exact_search import Neighbors
from nearfar.evaluation.faiss_engine import Plan, best
from nearfar.evaluation.neighbors import neighbors
from nearfar.evaluation.ranking_keys import Metric

__all__ = ["QUERIES", "K", "exact", "judged"]

K = 10
QUERIES = 500
"""Rows that are searched for, at most."""
Search = Callable[[Tensor, int, int], Neighbors]
"""From queries, k and an effort to neighbors."""


def judged(
    plan: Plan, rows: Callable[[slice], np.ndarray], search: Search, target: float
) -> tuple[int, dict[str, Any]]:
    """Choose the smallest effort that reaches a recall, and tell what was measured.

    Args:
        plan: of the index.
        rows: chunk -> its rows, as they are compared.
        search: the index, searched with a given effort.
        target: the recall that is wanted.

    Returns:
        The effort, and k, queries, recall and [effort, recall] for each effort that was tried.
    """
    k = min(K, plan.rows - 1)
    if not plan.efforts or not k:
        return 0 if not plan.efforts else plan.efforts[-1], {"k": k, "queries": 0, "recall": 1.0, "curve": []}
    chosen = np.sort(np.random.default_rng(plan.seed + 1).permutation(plan.rows)[:QUERIES])
    queries, wanted = exact(plan, rows, chosen, k)
    curve: list[list[float]] = []
    for effort in plan.efforts:
        found = _without_itself(search(queries, k + 1, effort).places, chosen)
        hits = [len(a & b) / k for a, b in zip(wanted, (set(row[:k]) for row in found), strict=True)]
        curve.append([effort, round(float(np.mean(hits)), 4)])
        if curve[-1][1] >= target:
            break
    tried, recall = curve[-1]
    return int(tried), {"k": k, "queries": len(chosen), "recall": recall, "curve": curve}


def exact(plan: Plan, rows: Callable[[slice], np.ndarray], chosen: np.ndarray, k: int) -> tuple[Tensor, list[set[int]]]:
    """The chosen rows, and the exact k nearest others of each, one chunk in memory at a time."""
    first = [np.searchsorted(chosen, [part.start, part.stop]) for part in plan.chunks]
    parts = zip(plan.chunks, first, strict=True)
    queries = torch.from_numpy(np.concatenate([rows(part)[chosen[a:b] - part.start] for part, (a, b) in parts]))
    similarity: Metric = "dot" if plan.inner else "euclidean"
    found: list[Neighbors] = []
    for part in plan.chunks:
        x = torch.from_numpy(rows(part))
        near = neighbors(queries, x, k=min(k + 1, len(x)), similarity=similarity)
        found = [best([*found, Neighbors(near.scores, near.places + part.start)], k + 1)]
    return queries, [set(row[:k]) for row in _without_itself(found[0].places, chosen)]


def _without_itself(places: Tensor, chosen: np.ndarray) -> list[list[int]]:
    """Lists of rows found, without the row that was searched for and without what was not found."""
    pairs = zip(places.tolist(), chosen.tolist(), strict=True)
    return [[place for place in row if place not in (own, -1)] for row, own in pairs]

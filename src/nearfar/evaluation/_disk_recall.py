"""Measure the recall of an approximate index on a sample of its own rows, and choose the effort of its searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.evaluation._disk_index import DiskIndex
from nearfar.evaluation._exact_search import Neighbors
from nearfar.evaluation._faiss import Plan, merge
from nearfar.evaluation._neighbors import neighbors

K = 10
QUERIES = 500
"""Maximum number of rows used as queries."""


def choose_effort(index: DiskIndex, rows: Callable[[slice], np.ndarray], target: float) -> tuple[int, dict[str, Any]]:
    """Choose the smallest effort that reaches a recall.

    Args:
        index: the index to measure.
        rows: maps a chunk to its rows, in the form in which they are compared.
        target: the wanted recall.

    Returns:
        The effort, and the measurements: k, queries, recall, and [effort, recall] for each effort tried.
    """
    plan = index.plan
    k = min(K, plan.rows - 1)
    if not plan.efforts or not k:
        return 0 if not plan.efforts else plan.efforts[-1], {"k": k, "queries": 0, "recall": 1.0, "curve": []}
    chosen = np.sort(np.random.default_rng(plan.seed + 1).permutation(plan.rows)[:QUERIES])
    queries, wanted = _exact(plan, rows, chosen, k)
    curve: list[list[float]] = []
    for effort in plan.efforts:
        found = _without_itself(index.search(queries, k + 1, effort=effort).places, chosen)
        hits = [len(a & b) / k for a, b in zip(wanted, (set(row[:k]) for row in found), strict=True)]
        curve.append([effort, round(float(np.mean(hits)), 4)])
        if curve[-1][1] >= target:
            break
    tried, recall = curve[-1]
    return int(tried), {"k": k, "queries": len(chosen), "recall": recall, "curve": curve}


def _exact(
    plan: Plan, rows: Callable[[slice], np.ndarray], chosen: np.ndarray, k: int
) -> tuple[Tensor, list[set[int]]]:
    """The chosen rows, and the k nearest other rows of each by exact search, with one chunk in memory at a time."""
    first = [np.searchsorted(chosen, [part.start, part.stop]) for part in plan.chunks]
    parts = zip(plan.chunks, first, strict=True)
    queries = torch.from_numpy(np.concatenate([rows(part)[chosen[a:b] - part.start] for part, (a, b) in parts]))
    found: list[Neighbors] = []
    for part in plan.chunks:
        x = torch.from_numpy(rows(part))
        near = neighbors(queries, x, k=min(k + 1, len(x)), similarity="dot" if plan.inner else "euclidean")
        found = [merge([*found, Neighbors(near.scores, near.places + part.start)], k + 1)]
    return queries, [set(row[:k]) for row in _without_itself(found[0].places, chosen)]


def _without_itself(places: Tensor, chosen: np.ndarray) -> list[list[int]]:
    """The rows found for each query, without the query itself and without missing entries."""
    pairs = zip(places.tolist(), chosen.tolist(), strict=True)
    return [[place for place in row if place not in (own, -1)] for row, own in pairs]

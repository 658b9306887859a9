"""The metrics of PML's `AccuracyCalculator` as functions, over the scores of a ranked list in `nearfar.evaluation`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nearfar.evaluation.retrieval import scored

__all__ = [
    "Comparison",
    "Counts",
    "Score",
    "get_label_match_counts",
    "maybe_get_avg_of_avgs",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "not_lone",
    "precision_at_k",
    "r_precision",
]

Comparison = Callable[[Tensor, Tensor], Tensor]
"""Labels [..., 1] and [..., k] -> whether each two belong together; labels of several columns have one axis more."""
Counts = tuple[Tensor, Tensor]
"""The distinct labels of the queries [u] or [u, c], and how many references belong to each [u]."""
Score = float | list[float]


def same_rows(a: Tensor, b: Tensor) -> Tensor:
    """Which labels [n] or [n, c] are equal to which [u] or [u, c]: [n, u]."""
    equal = a[:, None] == b[None]
    return equal if equal.ndim == 2 else equal.flatten(start_dim=2).all(dim=2)


def maybe_get_avg_of_avgs(
    accuracy_per_sample: Tensor, sample_labels: Tensor, avg_of_avgs: bool, return_per_class: bool
) -> Score:
    """The mean over queries [n], over the means of the classes, or the list of these means by ascending label."""
    if not (avg_of_avgs or return_per_class):
        return float(accuracy_per_sample.mean())
    _, which = torch.unique(sample_labels, dim=0, return_inverse=True)
    counts = torch.bincount(which.flatten())
    sums = torch.zeros(len(counts), dtype=accuracy_per_sample.dtype, device=counts.device)
    means = sums.index_add_(0, which.flatten(), accuracy_per_sample) / counts
    listed: list[float] = means.tolist()
    return listed if return_per_class else float(means.mean())


def get_label_match_counts(query_labels: Tensor, reference_labels: Tensor, label_comparison_fn: Comparison) -> Counts:
    """The distinct labels of the queries, and how many references belong to each."""
    names = torch.unique(query_labels, dim=0)
    if label_comparison_fn is torch.eq and names.ndim == 1:
        ranked = reference_labels.sort().values
        return names, torch.searchsorted(ranked, names, right=True) - torch.searchsorted(ranked, names)
    if label_comparison_fn is torch.eq:
        return names, same_rows(names, reference_labels).sum(dim=1)
    found = [label_comparison_fn(names[i : i + 1], reference_labels).sum() for i in range(len(names))]
    return names, torch.stack(found).long()


def _relevant(labels: Tensor, counts: Counts, includes_query: bool, compare: Comparison) -> Tensor:
    """R of each query [n]: its right answers, without itself where its own label belongs to it."""
    names, many = counts
    if includes_query:
        itself = compare(names, names)
        many = many - (itself if itself.ndim == 1 else itself.flatten(start_dim=1).all(dim=1)).long()
    flat = labels.squeeze(1)
    if names.ndim == 1:
        return many[torch.searchsorted(names, flat.contiguous()).clamp(max=len(names) - 1)]
    return many[same_rows(flat, names).to(torch.uint8).argmax(dim=1)]


def not_lone(query_labels: Tensor, counts: Counts, includes_query: bool, compare: Comparison) -> Tensor:
    """Which queries [n] have a right answer."""
    return _relevant(query_labels[:, None], counts, includes_query, compare) > 0


def _by_rank(right: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rank of the first right answer (0 for none), R-precision and AP@R of each query, from [n, k] right answers."""
    return scored(right.bool(), right.double(), relevant, "place")


def precision_at_k(
    knn_labels: Tensor,
    gt_labels: Tensor,
    k: int,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
) -> Score:
    """The share of right answers among the first k.

    Args:
        knn_labels: [n, K] labels of the neighbors, nearest first; [n, K, c] where a label has several columns.
        gt_labels: [n, 1] labels of the queries, or [n, 1, c].
        k: how many neighbors count.
        avg_of_avgs: the mean over classes of the mean over their queries.
        return_per_class: a list of these means.
        label_comparison_fn: which labels belong together.
    """
    right = label_comparison_fn(gt_labels, knn_labels[:, :k])
    return maybe_get_avg_of_avgs(right.sum(dim=1).double() / k, gt_labels, avg_of_avgs, return_per_class)


def r_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: Counts,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
) -> Score:
    """The share of right answers among the first R; of the first K where fewer neighbors were searched."""
    right = label_comparison_fn(gt_labels, knn_labels)
    relevant = _relevant(gt_labels, label_counts, ref_includes_query, label_comparison_fn)
    found = _by_rank(right, relevant.clamp(max=right.shape[1]))[1]
    return maybe_get_avg_of_avgs(found, gt_labels, avg_of_avgs, return_per_class)


def mean_average_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: Counts,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
    at_r: bool = False,
) -> Score:
    """(1/R) Σ precision@i over the places i of right answers: among the first R, or among all neighbors."""
    right = label_comparison_fn(gt_labels, knn_labels)
    relevant = _relevant(gt_labels, label_counts, ref_includes_query, label_comparison_fn)
    if at_r:
        found = _by_rank(right, relevant)[2]
    else:
        depth = torch.full_like(relevant, right.shape[1])
        found = _by_rank(right, depth)[2] * depth / relevant
    return maybe_get_avg_of_avgs(found, gt_labels, avg_of_avgs, return_per_class)


def mean_reciprocal_rank(
    knn_labels: Tensor,
    gt_labels: Tensor,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
) -> Score:
    """1 / rank of the first right answer, 0 for none among the neighbors."""
    right = label_comparison_fn(gt_labels, knn_labels)
    place = torch.arange(1, right.shape[1] + 1, device=right.device, dtype=torch.float64)
    best = torch.where(right.bool(), 1 / place, 0.0).amax(dim=1)
    return maybe_get_avg_of_avgs(best, gt_labels, avg_of_avgs, return_per_class)


def nothing(counts: Counts, return_per_class: bool) -> Score:
    """The score where no query has a right answer."""
    return [math.nan] * len(counts[0]) if return_per_class else math.nan

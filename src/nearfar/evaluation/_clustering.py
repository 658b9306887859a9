"""Clustering scores: k-means on the embedding, then NMI, AMI and pairwise F1 of its clusters against the classes.

k is the number of classes. The scores depend on how k-means is initialized: k-means++ with a seed runs `restarts`
times, and the run of least inertia is scored. The range over the restarts is reported too; it is not a sampling error.
"""

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.extras import need
from nearfar._utils.progress import Watch
from nearfar.evaluation._bootstrap import Interval
from nearfar.evaluation._k_means import runs
from nearfar.similarity import unit


@dataclass(frozen=True)
class Clustering:
    """NMI, AMI and F1 of the run of least inertia, and the lowest and highest of each score over the restarts."""

    nmi: float
    ami: float
    f1: float
    spread: dict[str, Interval]


def clustering_scores(
    embeddings: Tensor,
    labels: Tensor,
    *,
    normalize: bool = True,
    seed: int = 0,
    restarts: int = 3,
    watch: Watch | None = None,
) -> Clustering:
    """Cluster by k-means, with as many clusters as classes, and score the clusters against the classes."""
    x = unit(embeddings.detach().float()) if normalize else embeddings.detach().float()
    k = len(torch.unique(labels))
    solutions = list(runs(x, k, seed=seed, restarts=restarts, watch=watch))
    scores = [nmi_ami_f1(solution.assignment, labels) for solution in solutions]
    best = scores[min(range(restarts), key=lambda i: solutions[i].inertia)]
    spread = {}
    for name, value, column in zip(("nmi", "ami", "f1"), best, zip(*scores, strict=True), strict=True):
        spread[name] = Interval(value, min(column), max(column), statistics.stdev(column) if restarts > 1 else 0.0)
    return Clustering(*best, spread)


def demand_scores() -> Any:
    """Import scikit-learn's scores; called before k-means, so that a missing package is reported at once."""
    return need("sklearn.metrics", "evaluate: clustering (nmi, ami, f1)", "clustering", instead="leave clustering out")


def nmi_ami_f1(assignment: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Normalized and adjusted mutual information (arithmetic mean) and pairwise F1 of clusters against classes.

    F1 = 2PR/(P+R) over pairs of rows: P, the share of pairs within a cluster that share their class; R, the share of
    pairs within a class that share their cluster (Oh Song et al.).
    """
    scores = demand_scores()
    found, wanted = assignment.cpu().numpy(), labels.cpu().numpy()
    nmi = float(scores.normalized_mutual_info_score(wanted, found))
    ami = float(scores.adjusted_mutual_info_score(wanted, found))
    return nmi, ami, pair_f1(found, wanted)


def pair_f1(found: np.ndarray, wanted: np.ndarray) -> float:
    """F1 over pairs of rows, from the sizes of clusters, classes and their intersections."""
    both = np.unique(np.stack([found, wanted]), axis=1, return_counts=True)[1]
    sizes = (both, np.unique(found, return_counts=True)[1], np.unique(wanted, return_counts=True)[1])
    together, in_clusters, in_classes = map(_pairs, sizes)
    if in_clusters + in_classes == 0:
        return 0.0
    return 2 * together / (in_clusters + in_classes)


def _pairs(sizes: np.ndarray) -> int:
    sizes = sizes.astype(object)  # Python integers: squares of counts overflow int64
    return int((sizes * (sizes - 1) // 2).sum())

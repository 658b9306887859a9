"""Clustering scores: k-means on the embedding, then NMI, AMI and pairwise F1 of its clusters against the classes.

They depend on where k-means starts, so the start is part of the score: k-means++ (Arthur & Vassilvitskii), seeded,
`restarts` times, the run of least inertia counts. k is the number of classes. Their spread over seeds is reported as
such; it is not a sampling error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearfar.similarity import unit

Watch = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Clusters:
    """One k-means solution: the cluster [n] of each row, its centres [k, d] and the sum of squared distances."""

    assignment: Tensor
    centres: Tensor
    inertia: float


def k_means(
    x: Tensor, k: int, *, seed: int = 0, restarts: int = 3, steps: int = 50, watch: Watch | None = None
) -> Clusters:
    """Lloyd's algorithm from k-means++ starts; the best of `restarts` runs.

    Args:
        x: [n, d].
        k: how many clusters, 1..n.
        seed: of the starts.
        restarts: how many starts.
        steps: the most steps of each run; it stops earlier when no row moves.
        watch: told in words how far it is.
    """
    if not 1 <= k <= len(x):
        raise ValueError(f"k_means: k must lie in 1..{len(x)}, the number of rows, but came as {k!r}.")
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    runs = [_lloyd(x, _plus_plus(x, k, generator), steps, f"run {i + 1} of {restarts}", watch) for i in range(restarts)]
    return min(runs, key=lambda run: run.inertia)


def _plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Starts drawn one by one with chance ∝ squared distance to the nearest start so far."""
    square = (x * x).sum(dim=1)
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    nearest = torch.full_like(square, torch.inf)
    draws = torch.rand(k, dtype=torch.float64, generator=generator).tolist()
    for i in range(1, k):
        last = x[chosen[-1]]
        nearest = torch.minimum(nearest, (square - 2 * (x @ last) + square[chosen[-1]]).clamp_min(0))
        nearest[chosen[-1]] = 0
        heights = nearest.cumsum(dim=0, dtype=torch.float64)
        spot = torch.tensor(draws[i], dtype=torch.float64, device=x.device) * heights[-1]
        chosen.append(min(int(torch.searchsorted(heights, spot, right=True)), len(x) - 1))
    return x[torch.tensor(chosen, device=x.device)].clone()


def _lloyd(x: Tensor, centres: Tensor, steps: int, name: str, watch: Watch | None) -> Clusters:
    assignment = torch.full((len(x),), -1, device=x.device)
    for step in range(steps):
        nearest, distance = _assign(x, centres)
        moved = int((nearest != assignment).sum())
        assignment = nearest
        if watch is not None:
            watch(f"k-means {name}: step {step + 1}, {moved} rows moved")
        if not moved:
            break
        centres = _centres(x, assignment, distance, len(centres))
    return Clusters(assignment, centres, float(distance.double().sum()))


def _assign(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each row and the squared distance to it, a strip of rows at a time."""
    half = (centres * centres).sum(dim=1) / 2
    best, place = [], []
    for strip in torch.split(x, max(1, 2**22 // len(centres))):
        gain = torch.addmm(half, strip, centres.T, beta=-1).max(dim=1)
        best.append(gain.values)
        place.append(gain.indices)
    square = (x * x).sum(dim=1)
    return torch.cat(place), (square - 2 * torch.cat(best)).clamp_min(0)


def _centres(x: Tensor, assignment: Tensor, distance: Tensor, k: int) -> Tensor:
    """Means of the clusters; an empty cluster restarts at one of the rows that are farthest from their centres."""
    sums = torch.zeros(k, x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, assignment, x)
    counts = torch.bincount(assignment, minlength=k)
    empty = (counts == 0).nonzero().flatten()
    means = sums / counts.clamp(min=1)[:, None]
    if len(empty):
        means[empty] = x[distance.topk(len(empty)).indices]
    return means


def nmi_ami_f1(assignment: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Normalised and adjusted mutual information (arithmetic mean) and pairwise F1 of clusters against classes.

    F1 = 2PR/(P+R) over pairs of rows: P, the share of pairs within a cluster that share their class; R, the share of
    pairs within a class that share their cluster (Oh Song et al.).
    """
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    found, wanted = assignment.cpu().numpy(), labels.cpu().numpy()
    nmi = float(normalized_mutual_info_score(wanted, found))
    ami = float(adjusted_mutual_info_score(wanted, found))
    return nmi, ami, pair_f1(found, wanted)


def pair_f1(found: np.ndarray, wanted: np.ndarray) -> float:
    """F1 over pairs of rows, from the sizes of clusters, classes and their intersections."""
    both = np.unique(np.stack([found, wanted]), axis=1, return_counts=True)[1]
    together = _pairs(both)
    in_clusters, in_classes = (
        _pairs(np.unique(found, return_counts=True)[1]),
        _pairs(np.unique(wanted, return_counts=True)[1]),
    )
    if in_clusters + in_classes == 0:
        return 0.0
    return 2 * together / (in_clusters + in_classes)


def _pairs(sizes: np.ndarray) -> int:
    sizes = sizes.astype(object)  # whole numbers of any length: squares of counts overflow otherwise
    return int((sizes * (sizes - 1) // 2).sum())


@dataclass(frozen=True)
class Clustering:
    """NMI, AMI and F1 of the seeded solution, and each score's lowest and highest over single starts."""

    nmi: float
    ami: float
    f1: float
    spread: dict[str, tuple[float, float]]


def clustering_scores(
    embeddings: Tensor,
    labels: Tensor,
    *,
    normalize: bool = True,
    seed: int = 0,
    restarts: int = 3,
    watch: Watch | None = None,
) -> Clustering:
    """Cluster into as many clusters as there are classes and score against them."""
    x = unit(embeddings.detach().float()) if normalize else embeddings.detach().float()
    k = len(torch.unique(labels))
    generator = torch.Generator().manual_seed(seed)
    runs = [_lloyd(x, _plus_plus(x, k, generator), 50, f"run {i + 1} of {restarts}", watch) for i in range(restarts)]
    scores = [nmi_ami_f1(run.assignment, labels) for run in runs]
    best = min(range(restarts), key=lambda i: runs[i].inertia)
    spread = {
        name: (min(column), max(column))
        for name, column in zip(("nmi", "ami", "f1"), zip(*scores, strict=True), strict=True)
    }
    return Clustering(*scores[best], spread)

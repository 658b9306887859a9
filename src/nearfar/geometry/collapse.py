"""Measures of collapse: spread, spread within classes, effective rank, neural collapse, active triplets, gradient.

Each is computed on a sample of rows, so its cost does not grow with the number of vectors.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_positive, check_seed, check_whole
from nearfar._utils.tensors import check_labels
from nearfar.geometry.repair import class_means, repair
from nearfar.geometry.separation import check_inputs
from nearfar.geometry.spaces import SPACES, distances
from nearfar.similarity import unit

__all__ = ["Collapse", "Pull", "active_triplets", "collapse", "effective_rank", "pull", "sample"]

PAIRWISE = 512  # rows used for measures of pairs and triplets
SHRUNK = 256  # rows used for s*, which is computed to three digits


@dataclass(frozen=True)
class Collapse:
    """Measures of an embedding space that change when it collapses; `nearfar.doctor` interprets them.

    Attributes:
        rows: rows in the sample.
        classes: classes among them.
        norm: root mean square of |x|, before any normalization.
        total: root mean square distance to the mean (of unit rows with metric="cosine": 1 is wide, 0 is one point).
        within: root mean square distance to the class mean, over `total`: 0 where every class is a point.
        between: share of the variance that lies between classes; (C-1)/(N-1) is expected by chance.
        effective_rank: exp of the entropy of the covariance's eigenvalues: how many dimensions are in use.
        shrink: s*, the smallest shrink of the classes that separates all triplets; None if not asked for.
        alignment: mean |x - z|² of positive pairs of unit rows; small is good.
        uniformity: log mean exp(-2|x - z|²) of all pairs of unit rows; -4 is spread out, 0 is one point.
        nc1: trace(Σ_within Σ_between⁺) / C; 0 where every class is a point.
        nc2: mean |cos + 1/(C-1)| between centered class means; 0 at a simplex, which needs C ≤ d + 1.
        nc2_norms: standard deviation over mean of the centered class means' lengths.
        active: share of triplets with d(a, p) - d(a, n) + margin > 0.
    """

    rows: int
    classes: int
    norm: float
    total: float
    within: float
    between: float
    effective_rank: float
    shrink: float | None
    alignment: float
    uniformity: float
    nc1: float
    nc2: float
    nc2_norms: float
    active: float

    def against(self, start: "Collapse") -> dict[str, float]:
        """The rms ratios of Xu et al. 2022: the total spread and that within classes, relative to the start."""
        inside, before = self.within * self.total, start.within * start.total
        return {"total": _ratio(self.total, start.total), "within": _ratio(inside, before)}

    def to_dict(self) -> dict[str, Any]:
        """The measures as plain numbers by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@torch.no_grad()
def collapse(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.0,
    metric: str = "cosine",
    shrink: bool = True,
    rows: int = 2000,
    seed: int = 0,
) -> Collapse:
    """Compute the measures of `Collapse` on at most `rows` rows (pairs and triplets on 512, s* on 256).

    With random f and α = 0, more rows in few dimensions mean that the nearest separated map keeps less of f. This was
    observed without the jump at n = N that Xu et al. 2022 suggests (docs/papers/xu-2022.md).

    Args:
        embeddings: [n, d].
        labels: [n] integers.
        margin: the margin of `active`.
        metric: "cosine" uses unit rows, "euclidean" the rows as given.
        shrink: whether to compute s*.
        rows: the largest number of rows to sample.
        seed: seed of the sample.
    """
    check_choice("collapse", "metric", metric, ("cosine", "euclidean"))
    check_positive("collapse", "margin", margin, zero=True)
    check_whole("collapse", "rows", rows)
    check_seed("collapse", seed)
    check_labels("collapse", "labels", labels, len(embeddings), embeddings.device)
    chosen = sample(labels, rows, seed).to(embeddings.device)
    embeddings, labels = embeddings[chosen], labels[chosen]
    raw = embeddings.detach().double()
    shown = unit(raw) if metric == "cosine" else raw
    x, y = check_inputs("collapse", shown, labels, SPACES["euclidean"])
    means = class_means(x, y)
    few, fewer = (sample(labels, count, seed).to(x.device) for count in (PAIRWISE, SHRUNK))
    total, within = _rms(x), _rms(x - means[y])
    alignment, uniformity = _alignment_and_uniformity(unit(raw[few]), y[few])
    nc1, nc2, norms = _neural_collapse(x, y, means)
    return Collapse(
        rows=len(x),
        classes=len(means),
        norm=_rms(raw),
        total=total,
        within=_ratio(within, total),
        between=1 - _ratio(within, total) ** 2 if total > 0 else 0.0,
        effective_rank=effective_rank(x),
        shrink=repair(x[fewer], y[fewer], halvings=12).shrink if shrink else None,
        alignment=alignment,
        uniformity=uniformity,
        nc1=nc1,
        nc2=nc2,
        nc2_norms=norms,
        active=active_triplets(x[few], y[few], margin=margin),
    )


def sample(labels: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Draw at most `rows` row numbers, class by class in random order, first at most 32 rows of each class."""
    if len(labels) <= rows:
        return torch.arange(len(labels))
    labels = labels.cpu()
    noise = torch.Generator().manual_seed(seed)
    _, y = torch.unique(labels, return_inverse=True)
    order = torch.randperm(len(y), generator=noise)
    order = order[torch.argsort(y[order], stable=True)]  # by class, shuffled inside
    sorted_y = y[order]
    place = torch.arange(len(y)) - torch.searchsorted(sorted_y, sorted_y)  # first, second, ... of its class
    turn = torch.randperm(int(y.max()) + 1, generator=noise)[sorted_y]
    return order[torch.argsort((place // 32) * (len(turn) + 1) + turn, stable=True)[:rows]].sort().values


def effective_rank(x: Tensor) -> float:
    """The effective rank: the exponential of the entropy of the shares of variance along principal axes.

    Rows [n, d] must be centered; a single point has 0.

    >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 6)
    2.0
    """
    gram = x.T @ x if x.shape[1] <= len(x) else x @ x.T
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    if not float(values.sum()) > 0:
        return 0.0
    shares = values / values.sum()
    return math.exp(float(-torch.xlogy(shares, shares).sum()))


def active_triplets(x: Tensor, y: Tensor, *, margin: float = 0.0) -> float:
    """The share of all triplets with d(a, p) - d(a, n) + margin > 0; 0 without triplets. O(n² log n)."""
    apart, same = distances(x, x), y[:, None] == y[None, :]
    negatives = apart.masked_fill(same, math.inf).sort(dim=1).values
    nearer = torch.searchsorted(negatives, apart + margin)  # number of negatives nearer than each positive
    same.fill_diagonal_(False)
    others = (y[:, None] != y[None, :]).sum(dim=1)
    triplets = float((same.sum(dim=1) * others).sum())
    return float(nearer.clamp(max=others[:, None])[same].sum()) / triplets if triplets else 0.0


@dataclass(frozen=True)
class Pull:
    """How the gradient of a loss is distributed over pairs and rows.

    Attributes:
        hardest: share of Σ|dF/ds| of the strongest pair.
        rows: the rows with the largest shares, largest first.
        shares: their shares; a pair counts half for each of its rows.
        positive: share of Σ|dF/ds| on positive pairs.
        active: number of pairs with a gradient.
        effective: effective number of pairs that share the weight.
    """

    hardest: float
    rows: tuple[int, ...]
    shares: tuple[float, ...]
    positive: float
    active: int
    effective: float


def pull(embeddings: Tensor, labels: Tensor, loss: Any, *, top: int = 3) -> Pull:
    """Compute from `loss.explain` how the gradient is distributed over pairs and rows."""
    why = loss.explain(embeddings.detach(), labels)
    force = why.pull.abs().double()
    if force.shape != (len(labels), len(labels)) or not float(force.sum()) > 0:
        return Pull(0.0, (), (), 0.0, 0, 0.0)
    force = force / force.sum()
    load = (force.sum(dim=0) + force.sum(dim=1)) / 2
    most = torch.topk(load, min(top, len(load)))
    both = torch.triu(force + force.T)
    return Pull(
        hardest=float(both.max()),
        rows=tuple(most.indices.tolist()),
        shares=tuple(most.values.tolist()),
        positive=float(force[labels[:, None] == labels[None, :]].sum()),
        active=why.active_positives + why.active_negatives,
        effective=why.effective_pairs,
    )


def _rms(x: Tensor) -> float:
    return float((x * x).sum(dim=1).mean().sqrt()) if len(x) else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _alignment_and_uniformity(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Alignment and uniformity of unit rows."""
    square = distances(x, x) ** 2
    off = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    same = (y[:, None] == y[None, :]) & off
    alignment = float(square[same].mean()) if bool(same.any()) else 0.0
    uniformity = float(torch.exp(-2 * square[off]).mean().log()) if bool(off.any()) else 0.0
    return alignment, uniformity


def _neural_collapse(x: Tensor, y: Tensor, means: Tensor) -> tuple[float, float, float]:
    """NC1 and the two parts of NC2 of centered rows."""
    count = len(means)
    if count < 2:
        return 0.0, 0.0, 0.0
    middle = means.mean(dim=0)
    toward = means - middle
    inside = x - means[y]
    # Σ_between⁺ without forming it: trace(Σ_W Σ_B⁺) = C · mean |M⁺ᵀ(x - c)|², M [C, d] the means
    between = torch.linalg.pinv(toward)  # [d, C]
    nc1 = float(((inside @ between) ** 2).sum() / len(x))
    lengths = toward.norm(dim=1)
    norms = float(lengths.std(unbiased=False) / lengths.mean()) if float(lengths.mean()) > 0 else 0.0
    off = ~torch.eye(count, dtype=torch.bool, device=x.device)
    u = unit(toward)
    nc2 = float(((u @ u.T)[off] + 1 / (count - 1)).abs().mean())
    return nc1, nc2, norms

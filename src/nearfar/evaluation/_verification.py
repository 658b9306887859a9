"""Verification: do two samples have the same class? ROC AUC and the true accept rate at given false accept rates.

TAR at FAR = f: the share of positive pairs that are accepted by the lowest threshold that accepts at most a share f of
the negative pairs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_seed
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.evaluation._ranking_keys import METRICS, Metric, Rows, keys, pair_keys, scores, spaces
from nearfar.evaluation._retrieval import check_sides


@dataclass(frozen=True)
class Verification:
    """How well a threshold on the score separates positive from negative pairs.

    Attributes:
        auc: area under the ROC curve; ties count half.
        tar: true accept rate for each false accept rate.
        threshold: for each false accept rate, the score above which a pair is accepted.
        positive: number of positive pairs.
        negative: number of negative pairs.
        sampled: whether pairs were drawn at random; otherwise all were scored.
    """

    auc: float
    tar: dict[float, float]
    threshold: dict[float, float]
    positive: int
    negative: int
    sampled: bool


def verification(
    embeddings: Any,
    labels: Any = None,
    *,
    far: tuple[float, ...] = (0.1, 0.01, 0.001),
    pairs: int | None = None,
    similarity: Metric = "cosine",
    seed: int = 0,
) -> Verification:
    """ROC AUC and TAR at FAR over all unordered pairs, or over `pairs` random positive and `pairs` negative pairs.

    Args:
        embeddings: [n, d], a tensor, an array, lists or `Vectors`.
        labels: [n] integers; by default the y of `Vectors`.
        far: false accept rates.
        pairs: number of pairs of each kind to draw with replacement; None scores all n(n-1)/2 (n up to 20,000).
        similarity: "cosine", "dot" or "euclidean".
        seed: seed of the draw.

    >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.2, 0.9]])
    >>> verification(x, torch.tensor([0, 0, 1, 1]), far=(0.1,)).tar
    {0.1: 1.0}
    """
    check_choice("verification", "similarity", similarity, METRICS)
    given = read_inputs("verification", embeddings, labels)
    embeddings, labels = given.x, demand_classes("verification", given.y)
    check_sides("verification", embeddings, labels, None, None)
    if any(not 0 <= rate <= 1 for rate in far):
        raise ValueError(f"verification: far must hold shares in 0..1, such as (0.1, 0.01), but came as {far!r}.")
    if pairs is not None and pairs < 1:
        raise ValueError(f"verification: pairs must be 1 or more, or None for all, but came as {pairs!r}.")
    check_seed("verification", seed)
    if pairs is None and len(labels) > 20_000:
        raise ValueError(
            f"verification: all pairs of {len(labels)} rows are too many to sort; pass pairs=1_000_000 to draw some."
        )
    if pairs is None:
        positive, negative = _all_pairs(embeddings, labels, similarity)
    else:
        positive, negative = _draw_pairs(embeddings, labels, pairs, similarity, seed)
    if not len(positive) or not len(negative):
        kind = "positive" if not len(positive) else "negative"
        raise ValueError(f"verification: there are no {kind} pairs; pass two classes or more, one with two samples.")
    ranked = np.sort(negative)[::-1]
    tar, threshold = {}, {}
    for rate in far:
        allowed = int(np.floor(rate * len(ranked) + 1e-9))  # 0.29 * 100 is a hair below 29
        # accept strictly above the first score to refuse
        cut = ranked[allowed] if allowed < len(ranked) else -np.inf
        tar[rate] = float((positive > cut).mean())
        threshold[rate] = float(cut)
    return Verification(_auc(positive, negative), tar, threshold, len(positive), len(negative), pairs is not None)


def _all_pairs(embeddings: Tensor, labels: Tensor, similarity: Metric) -> tuple[np.ndarray, np.ndarray]:
    rows, _ = spaces(embeddings, None, similarity)
    place = torch.arange(len(rows), device=labels.device)
    positive, negative = [], []
    for start in range(0, len(rows), 512):
        strip = slice(start, start + 512)
        found = scores(keys(rows[strip], rows[start:]), similarity)
        later = place[None, start:] > place[strip, None]
        same = labels[strip, None] == labels[None, start:]
        positive.append(found[later & same].float().cpu().numpy())
        negative.append(found[later & ~same].float().cpu().numpy())
    return np.concatenate(positive), np.concatenate(negative)


def _draw_pairs(
    embeddings: Tensor, labels: Tensor, count: int, similarity: Metric, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of `count` positive and `count` negative pairs, each drawn uniformly from all pairs of its kind."""
    rng = np.random.default_rng(seed)
    names, place, sizes = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    order = np.argsort(place, kind="stable")
    start = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    weight = sizes * (sizes - 1.0)
    if weight.sum() == 0 or len(names) < 2:
        return np.zeros(int(weight.sum() > 0)), np.zeros(int(len(names) > 1))
    group = rng.choice(len(names), size=count, p=weight / weight.sum())
    first = rng.integers(sizes[group])
    second = (first + 1 + rng.integers(sizes[group] - 1)) % sizes[group]
    one = rng.choice(len(place), size=count, p=(len(place) - sizes[place]) / (len(place) - sizes[place]).sum())
    # the k-th row of other classes: in label order, skip the rows of the own class
    k = rng.integers(len(place) - sizes[place[one]])
    other = order[k + np.where(k >= start[place[one]], sizes[place[one]], 0)]
    positive = (order[start[group] + first], order[start[group] + second])
    rows, _ = spaces(embeddings, None, similarity)
    return _scores(rows, positive), _scores(rows, (one, other))


def _scores(rows: Rows, pairs: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    found = []
    for start in range(0, len(pairs[0]), 8192):
        a, b = (rows[torch.from_numpy(side[start : start + 8192]).to(rows.x.device)] for side in pairs)
        found.append(scores(pair_keys(a, b), rows.similarity).float().cpu().numpy())
    return np.concatenate(found)


def _auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """The probability that a positive pair scores above a negative one; ties count half."""
    ranked = np.sort(negative)
    below = np.searchsorted(ranked, positive, side="left").astype(np.float64)
    upto = np.searchsorted(ranked, positive, side="right")
    return float(((below + upto) / 2).mean() / len(ranked))

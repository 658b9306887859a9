"""Two-dimensional maps of the space: PCA and t-SNE of up to a few thousand points.

Both maps show the same points. If there are more than the limit, whole classes are sampled, the worst ten and others
at random, because a few points do not show a class.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.extras import command, is_there
from nearfar.report._similarities import Metric, prepare

MOST_FOR_TSNE = 3000
GRID = 10_000  # coordinates are integers from 0 to this: finer than a screen, and short as text


@dataclass(frozen=True, eq=False)
class Map:
    """Points of the map."""

    rows: np.ndarray  # [p] the rows that are shown
    pca: np.ndarray  # [p, 2] coordinates along the principal axes, 0..GRID
    # [p, 2] coordinates of t-SNE, 0..GRID; None if there are too few or too many points, or no scikit-learn
    tsne: np.ndarray | None
    explained: float  # share of the variance that the two principal axes explain


def flat_map(x: Tensor, y: Tensor, worst: list[int], *, points: int, similarity: Metric, seed: int) -> Map:
    """Choose the points and compute both maps, for cosine of unit vectors, otherwise of the vectors as given."""
    rows = sample(y.numpy(), worst, points, seed)
    axes, explained = principal(prepare(x[torch.from_numpy(rows)], similarity).double().numpy(), 50)
    layout = _tsne(axes, seed) if 10 <= len(rows) <= MOST_FOR_TSNE and not without_tsne() else None
    return Map(rows, on_grid(axes[:, :2]), None if layout is None else on_grid(layout), explained)


def without_tsne() -> str:
    """A sentence that says why t-SNE is not available; empty if it is."""
    if all(map(is_there, ("sklearn", "threadpoolctl"))):
        return ""
    return f"The map shows principal axes alone: t-SNE needs scikit-learn, {command('report')}."


def sample(y: np.ndarray, worst: list[int], points: int, seed: int) -> np.ndarray:
    """The rows to show, ascending: all, or whole classes up to `points` rows, the worst classes first."""
    if len(y) <= points:
        return np.arange(len(y))
    others = np.random.default_rng(seed).permutation(np.setdiff1d(np.unique(y), worst))
    place = {int(label): i for i, label in enumerate([*worst, *others.tolist()])}
    order = np.argsort(np.array([place[int(label)] for label in y]), kind="stable")
    return np.sort(order[:points])


def principal(x: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Coordinates [n, min(count, d)] along the principal axes, and the share of variance of the first two.

    The eigenvectors come from the smaller of the covariance [d, d] and the Gram matrix [n, n]. The largest coordinate
    on each axis is positive, so that the same data give the same picture.
    """
    centered = x - x.mean(axis=0)
    scale = np.abs(centered).max(initial=0.0)
    centered = centered / scale if scale > 0 else centered
    n, d = centered.shape
    count = min(count, n, d)
    if d <= n:
        values, vectors = np.linalg.eigh(centered.T @ centered)
        axes = centered @ vectors[:, ::-1][:, :count]
    else:
        values, vectors = np.linalg.eigh(centered @ centered.T)
        axes = vectors[:, ::-1][:, :count] * np.sqrt(np.clip(values[::-1][:count], 0, None))
    flip = np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(count)]) if n else np.ones(count)
    axes = axes * np.where(flip == 0, 1, flip)
    if count < 2:
        axes = np.concatenate([axes, np.zeros((n, 2 - count))], axis=1)
    total = float(np.clip(values, 0, None).sum())
    return axes, float(np.clip(values[::-1][:2], 0, None).sum() / total) if total > 0 else 0.0


def _tsne(axes: np.ndarray, seed: int) -> np.ndarray | None:
    """t-SNE of the first principal axes, on one thread, because several threads sum in another order."""
    if not np.ptp(axes, axis=0).any():  # all points coincide
        return None
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    start = axes[:, :2] / max(float(axes[:, 0].std()), 1e-12) * 1e-4
    perplexity = min(30.0, (len(axes) - 1) / 3)
    with threadpool_limits(limits=1):
        model = TSNE(2, init=start.astype(np.float32), perplexity=perplexity, max_iter=500, random_state=seed % 2**32)
        layout: np.ndarray = model.fit_transform(axes.astype(np.float32))
    return layout


def on_grid(points: np.ndarray) -> np.ndarray:
    """Scale points to integers in 0..GRID, both axes alike, centered."""
    low, high = points.min(axis=0), points.max(axis=0)
    span = float((high - low).max()) or 1.0
    placed: np.ndarray = np.rint((points - (low + high) / 2) / span * GRID + GRID / 2).astype(np.int64)
    return placed

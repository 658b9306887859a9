"""Compare triplet and contrastive loss with linear SVMs (hinge, logistic): accuracy on three data sets."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.linear import ContrastiveObjective, TripletObjective, descend
from nearfar.linear._objective import Objective

METHODS = ("3-NN, raw", "3-NN, contrastive", "3-NN, triplet", "SVM, hinge", "SVM, logistic")
NEIGHBORS = 3
RIDGE = 1e-2


def rivals(
    splits: int = 10, sets: tuple[str, ...] = ("wine", "breast cancer", "digits"), steps: int = 60
) -> dict[str, Any]:
    """Accuracy of each method on each set: the value of each split, the mean, and a 95% t-interval over splits.

    The intervals are over splits, not over data sets: splits of one set overlap, so they are a little too narrow.
    """
    return {name: _on(name, splits, steps) for name in sets}


def _on(name: str, splits: int, steps: int) -> dict[str, Any]:
    found = [_compare(*parts, steps) for parts in _splits(name, splits)]
    return {method: interval([each[method] for each in found]) for method in METHODS}


def _splits(name: str, splits: int) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Standardized training and test rows, and their labels."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    load = {"wine": datasets.load_wine, "breast cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = load[name](return_X_y=True)
    for split in range(splits):
        train, test, given, truth = train_test_split(x, y, test_size=0.3, stratify=y, random_state=split)
        scaler = StandardScaler().fit(train)
        yield scaler.transform(train), scaler.transform(test), given, truth


def hyperplanes(splits: int = 10, steps: int = 60) -> dict[str, Any]:
    """|cos| of the normals of linear SVMs and of the w of a triplet loss with d = 1, on the breast cancer data."""
    found: dict[str, list[float]] = {}
    for train, _, y, _ in _splits("breast cancer", splits):
        u, v = near_triplets(train, y)
        objective = TripletObjective(u, v, margin=1.0, mu=0.1, ridge=RIDGE)
        w = descend(objective, torch.as_tensor(_principal(train, 1)), steps=steps).A.numpy()[0]
        hinge, logistic = (machine.coef_[0] for machine in _machines(train, y))
        for name, a, b in (
            ("triplet, hinge", w, hinge),
            ("triplet, logistic", w, logistic),
            ("hinge, logistic", hinge, logistic),
        ):
            found.setdefault(name, []).append(float(abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)))
    return {name: interval(values) for name, values in found.items()}


def _machines(train: NDArray[Any], y: NDArray[Any]) -> tuple[Any, Any]:
    """Linear machines with the hinge and with the logistic loss."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    hinge = LinearSVC(loss="hinge", max_iter=5000, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return hinge.fit(train, y), LogisticRegression(max_iter=2000).fit(train, y)


def interval(values: list[float]) -> dict[str, Any]:
    """Mean and half the width of a 95% t-interval."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {"values": values, "mean": float(np.mean(values)), "half": half}


def _compare(
    train: NDArray[Any], test: NDArray[Any], y: NDArray[Any], truth: NDArray[Any], steps: int
) -> dict[str, float]:
    from sklearn.neighbors import KNeighborsClassifier

    def nearest(A: NDArray[Any]) -> float:
        return float(KNeighborsClassifier(NEIGHBORS).fit(train @ A.T, y).score(test @ A.T, truth))

    found = {METHODS[0]: nearest(np.eye(train.shape[1]))}
    u, v = near_triplets(train, y)
    start = torch.as_tensor(_principal(train, min(10, train.shape[1])))
    with_margin: tuple[tuple[str, Objective], ...] = (
        (METHODS[1], ContrastiveObjective(u, v, margin=1.0, mu=0.1, ridge=RIDGE)),
        (METHODS[2], TripletObjective(u, v, margin=1.0, mu=0.1, ridge=RIDGE)),
    )
    for method, objective in with_margin:
        found[method] = nearest(descend(objective, start, steps=steps).A.numpy())
    for method, machine in zip(METHODS[3:], _machines(train, y), strict=True):
        found[method] = machine.score(test, truth)
    return {method: float(value) for method, value in found.items()}


def near_triplets(x: NDArray[Any], y: NDArray[Any], targets: int = 3, impostors: int = 3) -> tuple[Tensor, Tensor]:
    """Differences to the nearest rows of the same class and of other classes, every target with every impostor."""
    rows = torch.as_tensor(x, dtype=torch.float64)
    labels = torch.as_tensor(y)
    distance = torch.cdist(rows, rows)
    same = labels[:, None] == labels
    positive = distance.masked_fill(~same, math.inf).fill_diagonal_(math.inf).topk(targets, largest=False).indices
    negative = distance.masked_fill(same, math.inf).topk(impostors, largest=False).indices
    u = (rows[:, None] - rows[positive])[:, :, None].expand(-1, -1, impostors, -1)
    v = (rows[:, None] - rows[negative])[:, None].expand(-1, targets, -1, -1)
    return u.reshape(-1, rows.shape[1]), v.reshape(-1, rows.shape[1])


def _principal(x: NDArray[Any], components: int) -> NDArray[Any]:
    """PCA directions as a start of moderate norm: |A|_F² is the number of directions over the number of features."""
    from sklearn.decomposition import PCA

    found: NDArray[Any] = PCA(components).fit(x).components_ / math.sqrt(x.shape[1])
    return found

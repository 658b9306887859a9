"""Initialize a linear map A [d, m] from the data.

    "pca"       the d directions of largest variance
    "lda"       the directions that maximize between-class over within-class variance, filled up with "pca"
    "identity"  the first d features

A = 0 is stationary for every triplet loss, so no row of A is initialized to 0. "pca" may stay in directions of large
variance that carry no information about the classes, because the loss does not couple them with others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

Matrix = NDArray[np.float64]

INITS = ("lda", "pca", "identity")
FILL = 0.3  # length of the rows that fill up "lda", relative to its own: LDA found their directions of no use


def initialize(init: str, X: Matrix, labels: NDArray[np.int64], components: int) -> Matrix:
    """Compute the initial A [components, m] for centered rows X [n, m] with classes 0, 1, ...

    >>> initialize("pca", np.array([[3.0, 0.1], [-3.0, -0.1], [0.0, 0.0]]), np.array([0, 1, 1]), 1).round(2)
    array([[1.  , 0.03]])
    """
    if init == "identity":
        return np.eye(components, X.shape[1])
    return principal(X, components) if init == "pca" else discriminant(X, labels, components)


def principal(X: Matrix, components: int) -> Matrix:
    """Eigenvectors of X'X with the largest eigenvalues, as rows; signs such that the largest entry is positive."""
    _, vectors = np.linalg.eigh(X.T @ X)
    rows = vectors.T[::-1][:components]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return np.asarray(rows * np.where(largest < 0, -1.0, 1.0))


def discriminant(X: Matrix, labels: NDArray[np.int64], components: int) -> Matrix:
    """Fisher's discriminant directions, followed by principal ones scaled to `FILL` times the mean length."""
    rows = X[:0]
    if X.any():
        rows = LinearDiscriminantAnalysis().fit(X, labels).scalings_.T[:components]
    rows = rows[np.isfinite(rows).all(axis=1) & (np.abs(rows).max(axis=1, initial=0.0) > 0)]
    if len(rows) == components:
        return np.asarray(rows, dtype=np.float64)
    length = FILL * np.linalg.norm(rows, axis=1).mean() if len(rows) else 1.0
    return np.concatenate([rows, length * principal(X, components - len(rows))])

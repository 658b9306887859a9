"""Similarities of two vectors (larger = more similar), and the matrix of them by a double loop."""

import numpy as np


def unit(x):
    """x / |x|; the zero vector stays zero."""
    length = np.sqrt(np.sum(x * x))
    return x / length if length > 0 else x


def dot(x, y):
    """<x, y>, without normalization."""
    return np.sum(x * y)


def cosine(x, y):
    """<x/|x|, y/|y|>."""
    return dot(unit(x), unit(y))


def quantized(x, y, dtype):
    """<q(x), q(y)> of unit vectors: a whole number of -127..127 per coordinate (int8), or its sign (bits)."""
    codes = []
    for z in (x, y):
        if dtype == "bits":
            codes.append(np.array([1.0 if value > 0 else -1.0 for value in z]))
        else:
            top = max(abs(value) for value in z)
            codes.append(np.array([np.rint(127 * value / top) if top > 0 else 0.0 for value in z]))
    return cosine(*codes)


def neg_euclidean(x, y, normalize=True):
    """-|x - y|, of the unit vectors unless normalize=False."""
    difference = unit(x) - unit(y) if normalize else x - y
    return -np.sqrt(np.sum(difference * difference))


def neg_squared_euclidean(x, y, normalize=True):
    """-|x - y|^2, of the unit vectors unless normalize=False."""
    difference = unit(x) - unit(y) if normalize else x - y
    return -np.sum(difference * difference)


def angle(x, y):
    """theta in [0, pi] with cos(theta) = cosine(x, y).

    Written as 2 atan2(|u - v|, |u + v|) of the unit vectors: arccos loses half of the digits near 0 and pi.
    A zero vector has cosine 0 with everything, hence the angle pi/2.
    """
    u, v = unit(x), unit(y)
    difference, total = u - v, u + v
    near, far = np.sqrt(np.sum(total * total)), np.sqrt(np.sum(difference * difference))
    if near == 0 and far == 0:
        return 2 * np.arctan(near + 1)
    return 2 * np.arctan2(far, near)


SIMILARITIES = {
    "cosine": cosine,
    "dot": dot,
    "neg_euclidean": neg_euclidean,
    "neg_squared_euclidean": neg_squared_euclidean,
}


def scores(E, R, similarity, **options):
    """s_ij = similarity(E_i, R_j), where similarity is a function or one of the names in SIMILARITIES."""
    function = SIMILARITIES[similarity] if isinstance(similarity, str) else similarity
    E, R = np.asarray(E, dtype=np.longdouble), np.asarray(R, dtype=np.longdouble)
    S = np.zeros((len(E), len(R)), dtype=np.longdouble)
    for i in range(len(E)):
        for j in range(len(R)):
            S[i, j] = function(E[i], R[j], **options)
    return S

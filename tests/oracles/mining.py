"""Miners by loops over rows. S are the scores; A and U how often each pair is there as positive and as negative (0:
not).

Each function returns A and U after mining.
"""

import numpy as np


def _there(measure, i):
    return [j for j in range(measure.shape[1]) if measure[i, j] > 0]


def _kept(measure, keep):
    """The measure with zeros where keep(i, j) is false."""
    result = np.zeros_like(measure)
    for i in range(len(measure)):
        for j in _there(measure, i):
            if keep(i, j):
                result[i, j] = measure[i, j]
    return result


def multi_similarity(S, A, U, epsilon=0.1):
    """Positive j is kept iff s_ij - eps < max_k s_ik over negative k; negative k iff s_ik + eps > min_j s_ij over
    positive j.
    """

    def keep_positive(i, j):
        return any(S[i, j] - epsilon < S[i, k] for k in _there(U, i))

    def keep_negative(i, k):
        return any(S[i, k] + epsilon > S[i, j] for j in _there(A, i))

    return _kept(A, keep_positive), _kept(U, keep_negative)


def hard(S, A, U):
    """The positive pairs of the smallest score of a row, and its negative pairs of the greatest."""

    def keep_positive(i, j):
        return all(S[i, j] <= S[i, other] for other in _there(A, i))

    def keep_negative(i, k):
        return all(S[i, k] >= S[i, other] for other in _there(U, i))

    return _kept(A, keep_positive), _kept(U, keep_negative)


def semi_hard(S, A, U, threshold=0.5, margin=0.2):
    """All positive pairs, and the negative ones with threshold - margin < s < threshold; below only, if margin is
    None.
    """

    def keep_negative(i, k):
        return S[i, k] < threshold and (margin is None or S[i, k] > threshold - margin)

    return A, _kept(U, keep_negative)


def balanced_hard(S, A, U):
    """All positive pairs, and those negative pairs that have fewer harder ones than the row has positive pairs.

    Counted by measure: a pair of weight 2 is two pairs.
    """

    def keep_negative(i, k):
        harder = sum(U[i, other] for other in _there(U, i) if S[i, other] > S[i, k])
        return harder < np.sum(A[i])

    return A, _kept(U, keep_negative)


def distance_weighted(D, U, dim, cutoff=0.5, upper=1.4):
    """p_ik ~ u_ik d^(2-dim) (1 - d^2/4)^((3-dim)/2) over negative k with d < upper, d clamped below at cutoff.

    Rows sum to 1, or to 0 where no pair qualifies.
    """
    p = np.zeros(U.shape, dtype=np.longdouble)
    for i in range(len(U)):
        logs = {}
        for k in _there(U, i):
            d = np.maximum(np.longdouble(D[i, k]), cutoff)
            if d < upper:
                logs[k] = (2 - dim) * np.log(d) - (np.longdouble(dim) - 3) / 2 * np.log(1 - d * d / 4)
        largest = max(logs.values(), default=0)
        for k, x in logs.items():
            p[i, k] = U[i, k] * np.exp(x - largest)
        if logs:
            p[i] = p[i] / np.sum(p[i])
    return p

"""Hard negatives by a loop over all pairs."""

import math

import numpy as np


def mine(S, y, z, k, ranks=(1, 100), scores=(None, None), margin=None, T=None, itself=False):
    """For each query the columns of the k hardest negatives that the rule keeps, and the positive's score (or NaN).

    S [n, m] are the scores, T [n, m] those of a teacher (by default S); y [n] and z [m] are the classes. Of equal
    scores the first column is the harder one.
    """
    T = S if T is None else T
    low, high = (-math.inf if scores[0] is None else scores[0]), (math.inf if scores[1] is None else scores[1])
    found, best = [], []
    for i in range(len(y)):
        positives = [T[i][j] for j in range(len(z)) if z[j] == y[i] and not (itself and i == j)]
        best.append(max(positives) if positives else math.nan)
        negatives = sorted((j for j in range(len(z)) if z[j] != y[i]), key=lambda j: (-S[i][j], j))
        kept = []
        for rank, j in enumerate(negatives, start=1):
            if not ranks[0] <= rank <= ranks[1] or not low <= S[i][j] <= high:
                continue
            if margin is not None and positives and T[i][j] >= max(positives) - margin:
                continue
            kept.append(j)
        found.append(kept[:k])
    return found, np.array(best)

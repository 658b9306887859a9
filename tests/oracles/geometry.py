"""The geometry of Xu et al. 2022 as slow loops over its definitions."""

from __future__ import annotations

import numpy as np


def hardness(E, y, margin=0.0):
    """max over triplets (a, p, n) of [|a - p| - |a - n| + margin]_+."""
    E, worst = np.asarray(E, dtype=np.longdouble), 0.0
    for a in range(len(E)):
        for p in range(len(E)):
            for n in range(len(E)):
                if p != a and y[p] == y[a] and y[n] != y[a]:
                    gap = np.sqrt(((E[a] - E[p]) ** 2).sum()) - np.sqrt(((E[a] - E[n]) ** 2).sum()) + margin
                    worst = max(worst, float(gap))
    return worst


def angle(a, b):
    """The angle of two rows, in radians: 2 atan2(|u - v|, |u + v|) of the unit rows."""
    u, v = a / np.sqrt((a * a).sum()), b / np.sqrt((b * b).sum())
    return 2 * np.arctan2(np.sqrt(((u - v) ** 2).sum()), np.sqrt(((u + v) ** 2).sum()))


def length(a, b):
    """|a - b|."""
    return np.sqrt(((a - b) ** 2).sum())


def ladder_hardness(E, relevance, margin=0.0, apart=length):
    """max over a, j, k with relevance(a, j) > relevance(a, k) of [d(a, j) - d(a, k) + margin]_+."""
    E, worst = np.asarray(E, dtype=np.longdouble), 0.0
    for a in range(len(E)):
        for j in range(len(E)):
            for k in range(len(E)):
                if a not in (j, k) and relevance[a][j] > relevance[a][k]:
                    worst = max(worst, float(apart(E[a], E[j]) - apart(E[a], E[k]) + margin))
    return worst


def active(E, y, margin=0.0):
    """Share of triplets whose violation is above zero."""
    count = broken = 0
    for a in range(len(E)):
        for p in range(len(E)):
            for n in range(len(E)):
                if p != a and y[p] == y[a] and y[n] != y[a]:
                    count += 1
                    broken += np.linalg.norm(E[a] - E[p]) - np.linalg.norm(E[a] - E[n]) + margin > 0
    return broken / count if count else 0.0


def isometric_error_between(f, g):
    """max over pairs of | |f_i - f_j| - |g_i - g_j| |."""
    worst = 0.0
    for i in range(len(f)):
        for j in range(len(f)):
            worst = max(worst, abs(np.linalg.norm(f[i] - f[j]) - np.linalg.norm(g[i] - g[j])))
    return worst


def hausdorff_between(f, g, y):
    """max over classes of the larger of the two directed Hausdorff distances."""
    worst = 0.0
    for label in set(y.tolist()):
        a, b = f[y == label], g[y == label]
        for one, other in ((a, b), (b, a)):
            for x in one:
                worst = max(worst, min(np.linalg.norm(x - z) for z in other))
    return worst


def nc1(E, y):
    """trace(S_W S_B^+) / C, S_B of the class means around their own mean."""
    labels = sorted(set(y.tolist()))
    means = np.stack([E[y == label].mean(axis=0) for label in labels])
    within = sum(np.outer(x - means[k], x - means[k]) for k, label in enumerate(labels) for x in E[y == label]) / len(E)
    between = sum(np.outer(m - means.mean(axis=0), m - means.mean(axis=0)) for m in means) / len(means)
    return float(np.trace(within @ np.linalg.pinv(between)) / len(means))


def thickness(E, directions=20000, seed=0):
    """The least width over many random directions: an upper bound that comes near in few dimensions."""
    e = np.random.default_rng(seed).normal(size=(directions, E.shape[1]))
    return float(np.ptp(E @ (e / np.linalg.norm(e, axis=1, keepdims=True)).T, axis=0).min())

"""The isometric error of constrained metrics as a dense linear program over its definition."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import linprog


def metric_error(D, constraints):
    """The smallest t such that a metric d' with |d' - D| <= t keeps the constraints, as one dense linear program.

    A constraint is (high, {pair: value, ...}): the sum of value * d'(pair) is at most high. NaN if there is no metric.
    """
    n = len(D)
    number = {frozenset(pair): k for k, pair in enumerate((i, j) for i in range(n) for j in range(i))}
    t, rows, highs = len(number), [], []

    def add(high, entries, slack=0):
        rows.append(np.zeros(t + 1))
        rows[-1][t] = slack
        for pair, value in entries.items():
            rows[-1][number[frozenset(pair)]] += value
        highs.append(float(high))

    for i, j in itertools.permutations(range(n), 2):
        add(D[i][j], {(i, j): 1}, -1)
        add(-D[i][j], {(i, j): -1}, -1)
    for i, j, k in itertools.permutations(range(n), 3):
        add(0, {(i, j): 1, (i, k): -1, (k, j): -1})
    for high, entries in constraints:
        add(high, entries)
    if not rows:
        return 0.0
    found = linprog(np.eye(t + 1)[t], np.array(rows), np.array(highs))
    return float(found.fun) if found.status == 0 else float("nan")


def separated(relevance, margin=0.0):
    """The constraints d'(a, j) + margin <= d'(a, k) where j is more relevant to a than k."""
    triples = itertools.permutations(range(len(relevance)), 3)
    return [(-margin, {(a, j): 1, (a, k): -1}) for a, j, k in triples if relevance[a][j] > relevance[a][k]]


def within_bounds(same, near, far):
    """The constraints d' <= near of two rows of a class and d' >= far of others."""
    pairs = itertools.combinations(range(len(same)), 2)
    return [(near, {(i, j): 1}) if same[i][j] else (-far, {(i, j): -1}) for i, j in pairs]

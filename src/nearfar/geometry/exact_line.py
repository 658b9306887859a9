"""Exact d_iso and d_haus on a line, by a mixed-integer program with a binary variable for the order of each pair."""

from typing import Any

import numpy as np

from nearfar.geometry.constraints import Kind, splits

__all__ = ["ROWS", "solve"]

ROWS = 10
"""The program is solved for at most this many rows, which have 45 binary variables."""


class _Rows:
    """Sparse constraints  low ≤ Σ a_k z_k ≤ high  of a linear program in z."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: list[tuple[dict[int, float], float, float]] = []

    def add(self, entries: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.entries.append((entries, low, high))

    def constraint(self) -> Any:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        cells = [(value, row, column) for row, (each, *_) in enumerate(self.entries) for column, value in each.items()]
        values, rows, columns = zip(*cells, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.entries), self.size))
        return LinearConstraint(matrix.tocsr(), [low for _, low, _ in self.entries], [h for _, _, h in self.entries])


def solve(kind: Kind, f: Any, y: Any, margin: float, upper: float, *, seconds: float = 60.0) -> tuple[Any, float]:
    """Solve for rows g [N, 1] and a lower bound, given rows f [N, 1] of diameter about 1 and an upper bound.

    The variables are z = (g, D, b, r, t). With a binary b for the order of each pair, D = |g_i - g_j| is linear: D is
    at least both differences and at most the one that b selects. The lower bound is the solver's minus its tolerance.
    """
    from scipy.optimize import Bounds, milp

    n = len(f)
    parts = splits(y)
    i, j = parts["i"], parts["j"]
    many = len(i)
    reach = float(np.ptp(f)) + 2 * upper + margin
    D, b, r, t = n, n + many, n + 2 * many, n + 2 * many + parts["radii"]
    rows = _Rows(t + 1)
    _add_absolute(rows, i, j, (D, b), 2 * reach)
    _add_separation(rows, parts, (D, r), margin)
    if kind == "haus":
        for k in range(n):
            rows.add({k: 1, t: -1}, high=f[k, 0])
            rows.add({k: 1, t: 1}, low=f[k, 0])
    else:
        for p, apart in enumerate(np.abs(f[i, 0] - f[j, 0])):
            rows.add({D + p: 1, t: -1}, high=apart)
            rows.add({D + p: 1, t: 1}, low=apart)
    low, high = np.zeros(t + 1), np.full(t + 1, reach)
    low[:n], high[:n] = f.min() - reach, f.max() + reach
    high[b:r] = 1
    high[t] = upper * (1 + 1e-6) + 1e-9
    if kind == "iso":  # only distances count: fix one row and one order
        low[0] = high[0] = f[0, 0]
        high[b] = 0
    cost = np.zeros(t + 1)
    cost[t] = 1
    whole = np.zeros(t + 1)
    whole[b:r] = 1
    limits = {"mip_rel_gap": 1e-9, "time_limit": seconds}
    found = milp(cost, constraints=rows.constraint(), bounds=Bounds(low, high), integrality=whole, options=limits)
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
    g = None if found.x is None else found.x[:n, None]
    return g, max(0.0, float(bound) - 1e-6)


def _add_absolute(rows: _Rows, i: Any, j: Any, at: tuple[int, int], big: float) -> None:
    """Add the constraints of D = |g_i - g_j|."""
    D, b = at
    for p in range(len(i)):
        for sign in (1, -1):
            rows.add({D + p: 1, int(i[p]): -sign, int(j[p]): sign}, low=0)
        rows.add({D + p: 1, int(i[p]): -1, int(j[p]): 1, b + p: -big}, high=0)
        rows.add({D + p: 1, int(i[p]): 1, int(j[p]): -1, b + p: big}, high=big)


def _add_separation(rows: _Rows, parts: dict[str, Any], at: tuple[int, int], margin: float) -> None:
    """Add D ≤ r for the rows that an anchor's radius must contain, and D ≥ r + α for the others."""
    D, r = at
    for pair, radius, sign in zip(parts["pairs"], parts["radius"], parts["sign"], strict=True):
        bounds = {"high": 0.0} if sign < 0 else {"low": margin}
        rows.add({D + int(pair): 1, r + int(radius): -1}, **bounds)

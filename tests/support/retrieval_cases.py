"""Small retrieval problems with ties, lone queries and galleries."""

from __future__ import annotations

import numpy as np
import torch
from oracles import retrieval as oracle

PROBLEMS = ("random", "tied", "lone", "gallery", "tied gallery")


def problem(kind, seed=0):
    """Queries, labels, and a gallery or None; whole numbers of equal norm where ties are wanted."""
    rng = np.random.default_rng(seed)
    n, m = 30, 25
    if "tied" in kind:
        x, g = rng.integers(0, 2, (n, 3)) * 2 - 1, rng.integers(0, 2, (m, 3)) * 2 - 1
    else:
        x, g = rng.standard_normal((n, 4)), rng.standard_normal((m, 4))
    y, z = rng.integers(0, 6, n), rng.integers(1, 7, m)  # class 0 has no gallery, class 6 no query
    if kind == "lone":
        y[:5] = np.arange(100, 105)
    x, g, y, z = (torch.from_numpy(a) for a in (x, g, y, z))
    return x.double(), y, *((g.double(), z) if "gallery" in kind else (None, None))


def judged(x, y, g, z, similarity):
    S = oracle.scores(x.tolist(), (x if g is None else g).tolist(), similarity)
    return S, y.tolist(), (y if z is None else z).tolist(), g is None

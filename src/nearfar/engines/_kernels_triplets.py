"""Triton kernels of the fused engine for triplets: a pass per positive over each tile of scores.

A triplet's score is s_an - s_ap, so that the positive scores [n, P] of a row shift the scores of its negatives. The
derivative in s_ap is minus the sum of those in s_an, which the fold adds up as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearfar.engines._kernels import _by_product, _loss, _pairs, _scores, _slope

__all__ = ["fold_triplets", "weigh_triplets"]


@triton.jit
def fold_triplets(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, NEAR, REAL, OFFSET, SUM, SIZE, SEEN, PULL,
                  n, m, P, a, b, k, scale, center, power, low, high,
                  D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
                  ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, LEARNED: tl.constexpr,
                  BAND: tl.constexpr, DROP: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """Σ l and Σ w over the triplets of each row in one chunk of columns, and Σ dl/ds of each of its P positives."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * TILES * BN
    if LEARNED:
        b += k * tl.load(OFFSET)
    chunk = tl.program_id(1).to(tl.int64) * n + rm
    total = tl.zeros((BM,), tl.float32)
    size = tl.zeros((BM,), tl.float32)
    seen = tl.zeros((BM,), tl.float32)
    for j in range(TILES):
        start = first + j * BN
        if start < m:
            rn = start + tl.arange(0, BN)
            s = _scores(X, Y, NX, NY, rm, rn, n, m, D, SIM, PREC, BK)
            _, negative, w = _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, 0)
            seen += tl.sum(negative.to(tl.float32), 1)
            p = 0
            while p < P:
                at = rm.to(tl.int64) * P + p
                z = s - tl.load(NEAR + at, mask=rm < n, other=0.0)[:, None]
                real = tl.load(REAL + at, mask=rm < n, other=0.0)
                there = _triplets(z, negative, real, low, high, BAND)
                l = _loss(z, a, b, scale, center, power, SHAPE, POWER)
                if DROP:
                    there = there & ((l <= 0.0) == 0)
                total += real * tl.sum(tl.where(there, w * l, 0.0), 1)
                size += real * tl.sum(tl.where(there, w, 0.0), 1)
                pull = real * tl.sum(tl.where(there, w * _slope(z, a, b, scale, power, SHAPE, POWER), 0.0), 1)
                into = PULL + chunk * P + p
                tl.store(into, tl.load(into, mask=rm < n, other=0.0) + pull, mask=rm < n)
                p += 1
    tl.store(SUM + chunk, total, mask=rm < n)
    tl.store(SIZE + chunk, size, mask=rm < n)
    tl.store(SEEN + chunk, seen, mask=rm < n)


@triton.jit
def _triplets(z, negative, real, low, high, BAND: tl.constexpr):
    """Which triplets of a tile count, by their score z; BAND: those with low < z < high."""
    there = negative & (real > 0.0)[:, None]
    if BAND:
        there = there & (((z > low) & (z < high)) | (z != z))
    return there


@triton.jit
def weigh_triplets(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, NEAR, REAL, OFFSET, COEF, G,
                   n, m, P, r0, H, a, b, k, scale, center, power, low, high,
                   D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
                   ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, LEARNED: tl.constexpr,
                   BAND: tl.constexpr, DROP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr):  # fmt: skip
    """A tile of dF/d⟨x, y⟩ of the negatives, summed over the P positives of each row."""
    rm = r0 + tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    if LEARNED:
        b += k * tl.load(OFFSET)
    s = _scores(X, Y, NX, NY, rm, rn, n, m, D, SIM, PREC, BK)
    _, negative, w = _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, 0)
    g = tl.zeros((BM, BN), tl.float32)
    p = 0
    while p < P:
        at = rm.to(tl.int64) * P + p
        z = s - tl.load(NEAR + at, mask=rm < n, other=0.0)[:, None]
        real = tl.load(REAL + at, mask=rm < n, other=0.0)
        there = _triplets(z, negative, real, low, high, BAND)
        if DROP:
            there = there & ((_loss(z, a, b, scale, center, power, SHAPE, POWER) <= 0.0) == 0)
        g += tl.where(there, real[:, None] * _slope(z, a, b, scale, power, SHAPE, POWER), 0.0)
        p += 1
    g = tl.where(negative, g * w * tl.load(COEF + rm, mask=rm < n, other=0.0)[:, None] * _by_product(s, SIM), 0.0)
    out = G + (rm - r0)[:, None].to(tl.int64) * m + rn[None, :]
    tl.store(out, g.to(G.dtype.element_ty), mask=(rm < r0 + H)[:, None] & (rn < m)[None, :])

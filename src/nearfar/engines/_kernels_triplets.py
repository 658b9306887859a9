"""Triton kernels of the fused engine for triplets: one pass per positive over each tile of scores.

The score of a triplet is s_an - s_ap: each of the positive scores [n, P] of a row shifts the scores of its negatives.
The derivative in s_ap is minus the sum of the derivatives in s_an, which the fold accumulates as well.
"""

import triton
import triton.language as tl

from nearfar.engines._kernels import _loss, _measured, _members, _scores, _slope, _spot

__all__ = ["fold_triplets", "weigh_triplets"]


@triton.jit
def fold_triplets(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, NEAR, REAL, ROWS,
                  n, m, r0, c0, H, W, a, b, k, scale, center, power, P, low, high,
                  D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
                  ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr,
                  LEARNED: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Write Σ l, Σ w, number of negatives, and Σ dl/ds of each positive, per row and tile: ROWS [3 + P, W/BN, H].

    STEP positives are unrolled; P is a multiple of it.
    """
    i, j = _spot(H // BM, W // BN, GROUP)
    rm = r0 + i * BM + tl.arange(0, BM)
    rn = c0 + j * BN + tl.arange(0, BN)
    if LEARNED:
        b += k * tl.load(OFFSET)
    s, _ = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
    negative = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, 0)
    total = tl.zeros((BM,), tl.float32)
    size = tl.zeros((BM,), tl.float32)
    at = (j * H + i * BM + tl.arange(0, BM)).to(tl.int64)
    state = (W // BN).to(tl.int64) * H
    one = _measured(tl.full(s.shape, 1.0, tl.float32), rm, rn, n, m, RW, CW, WEIGHTS)
    every = tl.sum(tl.where(negative, one, 0.0), 1)
    p = 0
    while p < P:  # the interpreter does not support range() with a runtime bound
        for q in tl.static_range(STEP):
            near = rm.to(tl.int64) * P + p + q
            z = s - tl.load(NEAR + near, mask=rm < n, other=0.0)[:, None]
            real = tl.load(REAL + near, mask=rm < n, other=0.0)
            l = _loss(z, a, b, scale, center, power, SHAPE, POWER)
            there = _triplets(z, l, negative, low, high, BAND, DROP)
            total += tl.where(real > 0.0, real * tl.sum(tl.where(there, one * l, 0.0), 1), 0.0)
            here = every
            if BAND | DROP:
                here = tl.sum(tl.where(there, one, 0.0), 1)
            size += real * here
            if (SHAPE == 1) & (POWER == 1) & DROP:  # a hinge has the same slope wherever its loss is positive
                pull = scale * a * here
            else:
                pull = tl.sum(tl.where(there, one * _slope(z, a, b, scale, power, SHAPE, POWER), 0.0), 1)
            tl.store(ROWS + (3 + p + q) * state + at, tl.where(real > 0.0, real * pull, 0.0))
        p += STEP
    tl.store(ROWS + at, total)
    tl.store(ROWS + state + at, size)
    tl.store(ROWS + 2 * state + at, tl.sum(negative.to(tl.float32), 1))


@triton.jit
def _triplets(z, l, negative, low, high, BAND: tl.constexpr, DROP: tl.constexpr):
    """Mask of the triplets of a tile that count, by score z and loss l; BAND: only low < z < high."""
    there = negative
    if BAND:
        there = there & (((z > low) & (z < high)) | (z != z))
    if DROP:
        there = there & ((l <= 0.0) == 0)
    return there


@triton.jit
def weigh_triplets(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, NEAR, REAL, COEF, G, ROWS, COLS,
                   n, m, r0, c0, H, W, a, b, k, scale, center, power, P, low, high,
                   D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
                   ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr,
                   LEARNED: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, STEP: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """A tile of G = dF/d⟨x, y⟩ of the negatives, summed over the P positives of each row; see `weigh`."""
    i, j = _spot(H // BM, W // BN, GROUP)
    rows = i * BM + tl.arange(0, BM)
    cols = j * BN + tl.arange(0, BN)
    rm, rn = r0 + rows, c0 + cols
    if LEARNED:
        b += k * tl.load(OFFSET)
    s, by_dot = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
    negative = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, 0)
    g = tl.zeros((BM, BN), tl.float32)
    p = 0
    while p < P:
        for q in tl.static_range(STEP):
            near = rm.to(tl.int64) * P + p + q
            z = s - tl.load(NEAR + near, mask=rm < n, other=0.0)[:, None]
            real = tl.load(REAL + near, mask=rm < n, other=0.0)
            l = _loss(z, a, b, scale, center, power, SHAPE, POWER)
            # a hinge with loss 0 has slope 0
            there = _triplets(z, l, negative & (real > 0.0)[:, None], low, high, BAND, DROP & (SHAPE != 1))
            g += tl.where(there, real[:, None] * _slope(z, a, b, scale, power, SHAPE, POWER), 0.0)
        p += STEP
    g = _measured(g * tl.load(COEF + rm, mask=rm < n, other=0.0)[:, None], rm, rn, n, m, RW, CW, WEIGHTS)
    g = tl.where(negative, g * by_dot, 0.0).to(G.dtype.element_ty)
    tl.store(G + rows[:, None].to(tl.int64) * W + cols[None, :], g)
    if FAR:  # sum the rounded numbers, which the products use too
        tl.store(ROWS + (j * H + rows).to(tl.int64), tl.sum(g.to(tl.float32), 1))
        tl.store(COLS + i.to(tl.int64) * W + cols, tl.sum(g.to(tl.float32), 0))

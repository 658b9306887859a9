"""Triton kernels of the fused engine for single pairs: each row with P columns of its own.

A program does some rows. Each row atomically adds to its positives' gradients. With FAR a pair is the square of its
distance instead of its product, from x - y; with REST rows and columns are sums of two float32 numbers, so that the
difference of near rows keeps its digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["near", "near_back"]


@triton.jit
def _gap(x, y, REST_X, REST_Y, at, to, mask, REST: tl.constexpr):
    """Differences of rows and columns."""
    gap = x - y
    if REST:
        gap += tl.load(REST_X + at, mask=mask, other=0.0) - tl.load(REST_Y + to, mask=mask, other=0.0)
    return gap


@triton.jit
def near(X, Y, REST_X, REST_Y, PLACE, OUT, n, P, D, FAR: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr,
         BK: tl.constexpr):  # fmt: skip
    """Products, or squared distances, OUT [n, P] of rows X [n, D] and the columns PLACE [n, P] of Y [m, D]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n
    p = 0
    while p < P:  # the interpreter has no range of a number that is not known
        place = tl.load(PLACE + rows.to(tl.int64) * P + p, mask=inside, other=0)
        total = tl.zeros((BM,), tl.float32)
        k = 0
        while k < D:
            rk = k + tl.arange(0, BK)
            mask = inside[:, None] & (rk < D)[None, :]
            at = rows[:, None].to(tl.int64) * D + rk[None, :]
            to = place[:, None] * D + rk[None, :]
            x = tl.load(X + at, mask=mask, other=0.0)
            y = tl.load(Y + to, mask=mask, other=0.0)
            if FAR:
                gap = _gap(x, y, REST_X, REST_Y, at, to, mask, REST)
                total += tl.sum(gap * gap, 1)
            else:
                total += tl.sum(x * y, 1)
            k += BK
        tl.store(OUT + rows.to(tl.int64) * P + p, total, mask=inside)
        p += 1


@triton.jit
def near_back(X, Y, REST_X, REST_Y, PLACE, SLOPE, DX, DY, n, P, D, FAR: tl.constexpr, REST: tl.constexpr,
              BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Gradients from those of what `near` gave, SLOPE [n, P], added to DX [n, D] and DY [m, D], which may be one."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    rk = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = rows < n
    mask = inside[:, None] & (rk < D)[None, :]
    at = rows[:, None].to(tl.int64) * D + rk[None, :]
    x = tl.load(X + at, mask=mask, other=0.0)
    total = tl.zeros((BM, BK), tl.float32)
    p = 0
    while p < P:
        place = tl.load(PLACE + rows.to(tl.int64) * P + p, mask=inside, other=0)
        slope = tl.load(SLOPE + rows.to(tl.int64) * P + p, mask=inside, other=0.0)[:, None]
        to = place[:, None] * D + rk[None, :]
        y = tl.load(Y + to, mask=mask, other=0.0)
        if FAR:
            gap = 2.0 * slope * _gap(x, y, REST_X, REST_Y, at, to, mask, REST)
            total += gap
            tl.atomic_add(DY + to, -gap, mask=mask & (slope != 0.0), sem="relaxed")
        else:
            total += slope * y
            tl.atomic_add(DY + to, slope * x, mask=mask & (slope != 0.0), sem="relaxed")
        p += 1
    tl.atomic_add(DX + at, total, mask=mask, sem="relaxed")

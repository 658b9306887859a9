"""Triton kernels of the fused engine for single pairs: each row is paired with P columns of its own.

A program handles some rows, and atomically adds to their positives' gradients. FAR computes squared distances from
differences x - y instead of products. REST gives rows and columns as sums of two float32 numbers, so that differences
of near rows keep their digits.
"""

import triton
import triton.language as tl

__all__ = ["near", "near_back"]


@triton.jit
def _gap(x, y, REST_X, REST_Y, at, to, mask, REST: tl.constexpr):
    """Differences x - y of rows and columns."""
    gap = x - y
    if REST:
        gap += tl.load(REST_X + at, mask=mask, other=0.0) - tl.load(REST_Y + to, mask=mask, other=0.0)
    return gap


@triton.jit
def near(X, Y, REST_X, REST_Y, PLACE, OUT, n, P, D, FAR: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr,
         BK: tl.constexpr):  # fmt: skip
    """Write products or squared distances of rows X [n, D] and columns PLACE [n, P] of Y [m, D] to OUT [n, P]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n
    p = 0
    while p < P:  # the interpreter does not support range() with a runtime bound
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
    """Back-propagate SLOPE [n, P], the gradient of OUT of `near`, into DX [n, D] and DY [m, D] (may be the same)."""
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

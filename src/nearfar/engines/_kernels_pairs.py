"""Triton kernels of the fused engine for single pairs: the products of each row with P columns of its own.

A program does some rows. In the backward pass the gradient of a column is added by whoever has it as a positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["near", "near_back"]


@triton.jit
def near(X, Y, PLACE, OUT, n, P, D, BM: tl.constexpr, BK: tl.constexpr):
    """Products OUT [n, P] of rows X [n, D] with the columns PLACE [n, P] of Y [m, D]."""
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
            x = tl.load(X + rows[:, None].to(tl.int64) * D + rk[None, :], mask=mask, other=0.0)
            y = tl.load(Y + place[:, None] * D + rk[None, :], mask=mask, other=0.0)
            total += tl.sum(x * y, 1)
            k += BK
        tl.store(OUT + rows.to(tl.int64) * P + p, total, mask=inside)
        p += 1


@triton.jit
def near_back(X, Y, PLACE, SLOPE, DX, DY, n, P, D, BM: tl.constexpr, BK: tl.constexpr):
    """Gradients from those of the products, SLOPE [n, P], added to DX [n, D] and DY [m, D], which may be one."""
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
        slope = tl.load(SLOPE + rows.to(tl.int64) * P + p, mask=inside, other=0.0)
        to = place[:, None] * D + rk[None, :]
        total += slope[:, None] * tl.load(Y + to, mask=mask, other=0.0)
        tl.atomic_add(DY + to, slope[:, None] * x, mask=mask & (slope != 0.0)[:, None], sem="relaxed")
        p += 1
    tl.atomic_add(DX + at, total, mask=mask, sem="relaxed")

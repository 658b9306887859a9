"""Triton kernels of the fused engine for single pairs: those of each row with P columns, and the K hardest of all.

In `near`, a program handles some rows, and atomically adds to their positives' gradients. FAR takes squared distances
from differences x - y instead of products. REST gives rows and columns as sums of two float32 numbers, so that
differences of near rows keep their digits.
"""

import triton
import triton.language as tl

from nearfar.engines._kernels import LEAST, _loss, _members, _scores, _spot

__all__ = ["collect", "near", "near_back"]


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


@triton.jit
def collect(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, LEVEL, TOPS, COUNT, FOUND, TIES,
            n, m, r0, c0, H, W, a, b, k, scale, center, power, most, most_ties,
            D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
            ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr,
            LEARNED: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            GROUP: tl.constexpr):  # fmt: skip
    """Write positions row·m + col of losses above LEVEL into FOUND, and of losses equal to it into TIES, in any order.

    COUNT [2] receives their numbers; at most `most` and `most_ties` positions are written. TOPS [H/BM, W/BN] holds
    the largest loss of each tile: tiles whose largest loss is below the level are skipped.
    """
    i, j = _spot(H // BM, W // BN, GROUP)
    level = tl.load(LEVEL)
    if tl.load(TOPS + i.to(tl.int64) * (W // BN) + j) >= level:
        rm = r0 + i * BM + tl.arange(0, BM)
        rn = c0 + j * BN + tl.arange(0, BN)
        if LEARNED:
            b += k * tl.load(OFFSET)
        s, _ = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
        there = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, SIDE)
        if HALF:
            there = there & (rm[:, None] < rn[None, :])
        l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
        l = tl.where(l != l, float("inf"), tl.maximum(l, LEAST))
        place = rm[:, None].to(tl.int64) * m + rn[None, :]
        _append(there & (l > level), place, COUNT, FOUND, most)
        if tl.load(COUNT + 1) < most_ties:  # no more ties are needed
            _append(there & (l == level), place, COUNT + 1, TIES, most_ties)


@triton.jit
def _append(there, place, COUNT, INTO, most):
    """Append the positions of the marked entries of a tile; usually there are few."""
    if tl.max(tl.max(there.to(tl.int32), 1), 0) > 0:
        spot = tl.atomic_add(COUNT + tl.zeros(there.shape, tl.int32), 1, mask=there, sem="relaxed")
        tl.store(INTO + spot, place, mask=there & (spot < most))

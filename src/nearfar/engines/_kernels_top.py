"""Triton kernel of the fused engine for the K hardest pairs: collects the positions of all losses above a level."""

import triton
import triton.language as tl

from nearfar.engines._kernels import LEAST, _loss, _members, _scores, _spot

__all__ = ["collect"]


@triton.jit
def collect(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, LEVEL, TOPS, COUNT, FOUND, TIES,
            n, m, r0, c0, H, W, most, most_ties, a, b, k, scale, center, power,
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

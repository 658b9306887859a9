"""Triton kernels of the fused engine: a product whose tile goes straight into a reduction, or into weights.

    fold      tile of scores -> losses -> state of each row          one program per row tile and chunk of columns
    hardest   tile of scores -> largest loss of each row, and its column
    weigh     tile of scores -> weight x slope = dF/d⟨x, y⟩           a strip of it, in the dtype of the rows

What a pair is (positive, negative, none) and counts for follows from vectors: labels, flags, ids, sample weights. This
module imports Triton; `fused` imports it when it is needed. Numbers that choose code are `tl.constexpr`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fold", "hardest", "weigh"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(X, Y, NX, NY, rm, rn, n, m, D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, BK: tl.constexpr):
    """Scores of a tile: product (SIM 0), minus squared distance (1), minus distance (2)."""
    rk = tl.arange(0, BK)
    left = X + rm[:, None].to(tl.int64) * D
    right = Y + rn[None, :].to(tl.int64) * D
    dot = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    for k in range(0, D, BK):
        inside = k + rk < D
        x = tl.load(left + (k + rk)[None, :], mask=(rm < n)[:, None] & inside[None, :], other=0.0)
        y = tl.load(right + (k + rk)[:, None], mask=(rn < m)[None, :] & inside[:, None], other=0.0)
        dot = tl.dot(x, y, dot, input_precision=PREC)
    s = dot
    if SIM > 0:
        norms = tl.load(NX + rm, mask=rm < n, other=0.0)[:, None] + tl.load(NY + rn, mask=rn < m, other=0.0)[None, :]
        s = 2.0 * dot - norms
    if SIM == 2:
        s = -tl.sqrt(tl.where(s >= 0.0, 0.0, -s))  # NaN stays
    return s


@triton.jit
def _by_product(s, SIM: tl.constexpr):
    """ds/d⟨x, y⟩; at distance 0 it is 0."""
    if SIM == 0:
        found = tl.full(s.shape, 1.0, tl.float32)
    elif SIM == 1:
        found = tl.full(s.shape, 2.0, tl.float32)
    else:
        found = tl.where(s == 0.0, 0.0, -1.0 / tl.where(s == 0.0, 1.0, s))
    return found


@triton.jit
def _power(r, power, POWER: tl.constexpr):
    """r^power of r >= 0; POWER names the whole powers 0, 1 and 2, -1 is any other."""
    if POWER == 0:
        found = tl.full(r.shape, 1.0, tl.float32)
    elif POWER == 1:
        found = r
    elif POWER == 2:
        found = r * r
    else:
        found = tl.where(r == 0.0, 0.0, tl.exp(power * tl.log(tl.where(r == 0.0, 1.0, r))))
    return found


@triton.jit
def _small_log1p(e):
    """log(1 + e) of e in [0, 1], above 0 where e is: a loss that is not 0 is not dropped."""
    series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)))
    return tl.where(e < 0.02, series, tl.log(1.0 + e))


@triton.jit
def _loss(s, a, b, scale, center, power, SHAPE: tl.constexpr, POWER: tl.constexpr):
    """Pair losses of a tile; see `PairForm`. SHAPE 0 line, 1 power, 2 softplus, 3 pace."""
    z = a * s + b
    if SHAPE == 0:
        l = scale * z
    elif SHAPE == 1:
        l = scale * _power(tl.where(z <= 0.0, 0.0, z), power, POWER)
    elif SHAPE == 2:
        l = scale * (tl.where(z <= 0.0, 0.0, z) + _small_log1p(tl.exp(-tl.abs(z))))
    else:
        l = scale * tl.where(z <= 0.0, 0.0, z) * (s - center)
    return l


@triton.jit
def _slope(s, a, b, scale, power, SHAPE: tl.constexpr, POWER: tl.constexpr):
    """dl/ds of a tile."""
    z = a * s + b
    if SHAPE == 0:
        found = tl.full(s.shape, 1.0, tl.float32) * (scale * a)
    elif SHAPE == 1:
        lower: tl.constexpr = -1 if POWER == -1 else POWER - 1
        found = tl.where(z <= 0.0, 0.0, scale * a * power * _power(tl.where(z <= 0.0, 0.0, z), power - 1.0, lower))
    elif SHAPE == 2:
        found = scale * a / (1.0 + tl.exp(-z))
    else:
        found = scale * tl.where(z <= 0.0, 0.0, z)
    return found


@triton.jit
def _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF: tl.constexpr, FLAGS: tl.constexpr,
           WEIGHTS: tl.constexpr, UPPER: tl.constexpr):  # fmt: skip
    """Which pairs of a tile are positive and which are negative, and their weights.

    ITSELF 0: no row is a column; 1: those of equal position; 2: of equal id; 3: by position among the first n, then id.
    FLAGS: bit 1 of a row and of a column allow them in positive pairs, bit 2 in negative pairs.
    """
    inside = (rm < n)[:, None] & (rn < m)[None, :]
    same = tl.load(RY + rm, mask=rm < n, other=0)[:, None] == tl.load(CY + rn, mask=rn < m, other=0)[None, :]
    if ITSELF == 1:
        inside = inside & (rm[:, None] != rn[None, :])
    if ITSELF >= 2:
        equal = tl.load(RI + rm, mask=rm < n, other=0)[:, None] == tl.load(CI + rn, mask=rn < m, other=0)[None, :]
        if ITSELF == 3:
            equal = tl.where((rn < n)[None, :], rm[:, None] == rn[None, :], equal)
        inside = inside & (equal == 0)
    if UPPER:
        inside = inside & (rm[:, None] < rn[None, :])
    positive = inside & same
    negative = inside & (same == 0)
    if FLAGS:
        both = tl.load(RF + rm, mask=rm < n, other=0)[:, None] & tl.load(CF + rn, mask=rn < m, other=0)[None, :]
        positive = positive & ((both & 1) != 0)
        negative = negative & ((both & 2) != 0)
    if WEIGHTS:
        w = tl.load(RW + rm, mask=rm < n, other=0.0)[:, None] * tl.load(CW + rn, mask=rn < m, other=0.0)[None, :]
        positive = positive & (w > 0.0)
        negative = negative & (w > 0.0)
    else:
        w = tl.full(same.shape, 1.0, tl.float32)
    return positive, negative, w


@triton.jit
def _side(positive, negative, SIDE: tl.constexpr):
    """The pairs of one side: 0 negative, 1 positive, 2 both."""
    if SIDE == 0:
        found = negative
    elif SIDE == 1:
        found = positive
    else:
        found = positive | negative
    return found


@triton.jit
def _small_expm1(z, e):
    """e^z - 1 from z and e = e^z, without cancellation near 0."""
    series = z * (1.0 + z * (0.5 + z * (0.16666667 + z * 0.041666668)))
    return tl.where(tl.abs(z) < 0.05, series, e - 1.0)


@triton.jit
def _online(l, there, w, top, total, rise, held, size, per_gamma, FLAT: tl.constexpr, HOLD: tl.constexpr):
    """Add a tile to Σ w·e^z, Σ w·(e^z - 1) and Σ w·z·e^z, z = (l - top)/γ, whose top may rise with the tile."""
    new = tl.maximum(top, tl.max(tl.where(there, l, float("-inf")), 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    gap = tl.where(top == float("-inf"), 0.0, (top - safe) * per_gamma)
    shrink = tl.exp2(gap * LOG2E)
    z = tl.where(there, (l - safe[:, None]) * per_gamma, 0.0)
    e = tl.exp2(z * LOG2E)
    if FLAT:
        rise = shrink * rise + size * _small_expm1(gap, shrink)
        rise += tl.sum(tl.where(there, w * _small_expm1(z, e), 0.0), 1)
    e = tl.where(there, w * e, 0.0)
    if HOLD:
        held = shrink * (held + gap * total) + tl.sum(e * z, 1)
    total = shrink * total + tl.sum(e, 1)
    return new, total, rise, held


@triton.jit
def fold(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, TOP, SUM, RISE, HELD, SIZE, SEEN,
         n, m, a, b, k, scale, center, power, high, per_gamma,
         D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
         ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, UPPER: tl.constexpr, SIDE: tl.constexpr,
         LEARNED: tl.constexpr, MINED: tl.constexpr, DROP: tl.constexpr, EXP: tl.constexpr, FLAT: tl.constexpr,
         HOLD: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """State of each row over one chunk of TILES column tiles: Σ w·l, or top and Σ w·e^{(l - top)/γ} (online)."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * TILES * BN
    if LEARNED:
        b += k * tl.load(OFFSET)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    rise = tl.zeros((BM,), tl.float32)
    held = tl.zeros((BM,), tl.float32)
    size = tl.zeros((BM,), tl.float32)
    seen = tl.zeros((BM,), tl.float32)
    for j in range(TILES):
        start = first + j * BN
        # above the diagonal, tiles that lie below it hold no pair
        if (start < m) & (start + BN > tl.program_id(0) * BM * UPPER):
            rn = start + tl.arange(0, BN)
            s = _scores(X, Y, NX, NY, rm, rn, n, m, D, SIM, PREC, BK)
            positive, negative, w = _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, UPPER)
            there = _side(positive, negative, SIDE)
            if MINED:
                kept = ((s > tl.load(FLOOR + rm, mask=rm < n, other=0.0)[:, None]) & (s < high)) | (s != s)
                there = there & kept
                negative = negative & kept
            seen += tl.sum(_side(positive, negative, SIDE % 2).to(tl.float32), 1)
            l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
            if DROP:
                there = there & ((l <= 0.0) == 0)
            if EXP:
                top, total, rise, held = _online(l, there, w, top, total, rise, held, size, per_gamma, FLAT, HOLD)
            else:
                total += tl.sum(tl.where(there, w * l, 0.0), 1)
            size += tl.sum(tl.where(there, w, 0.0), 1)
    out = tl.program_id(1).to(tl.int64) * n + rm
    tl.store(SUM + out, total, mask=rm < n)
    tl.store(SIZE + out, size, mask=rm < n)
    tl.store(SEEN + out, seen, mask=rm < n)
    if EXP:
        tl.store(TOP + out, top, mask=rm < n)
    if FLAT:
        tl.store(RISE + out, rise, mask=rm < n)
    if HOLD:
        tl.store(HELD + out, held, mask=rm < n)


@triton.jit
def hardest(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, TOP, PLACE, SEEN,
            n, m, a, b, k, scale, center, power, high,
            D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
            ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, UPPER: tl.constexpr, SIDE: tl.constexpr,
            LEARNED: tl.constexpr, MINED: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """The largest loss of each row in one chunk of columns, its column (-1: none), and the number of members.

    A loss that is NaN counts as larger than all others.
    """
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * TILES * BN
    if LEARNED:
        b += k * tl.load(OFFSET)
    top = tl.full((BM,), float("-inf"), tl.float32)
    place = tl.full((BM,), -1, tl.int32)
    seen = tl.zeros((BM,), tl.float32)
    for j in range(TILES):
        start = first + j * BN
        # above the diagonal, tiles that lie below it hold no pair
        if (start < m) & (start + BN > tl.program_id(0) * BM * UPPER):
            rn = start + tl.arange(0, BN)
            s = _scores(X, Y, NX, NY, rm, rn, n, m, D, SIM, PREC, BK)
            positive, negative, _ = _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, UPPER)
            there = _side(positive, negative, SIDE)
            if MINED:
                kept = ((s > tl.load(FLOOR + rm, mask=rm < n, other=0.0)[:, None]) & (s < high)) | (s != s)
                there = there & kept
                negative = negative & kept
            seen += tl.sum(_side(positive, negative, SIDE % 2).to(tl.float32), 1)
            l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
            l = tl.where(there, tl.where(l != l, float("inf"), l), float("-inf"))
            here = tl.max(l, 1)
            spot = tl.argmax(l, 1).to(tl.int32) + start
            place = tl.where((here > top) | ((place < 0) & (tl.max(there.to(tl.int32), 1) > 0)), spot, place)
            top = tl.maximum(top, here)
    out = tl.program_id(1).to(tl.int64) * n + rm
    tl.store(TOP + out, top, mask=rm < n)
    tl.store(PLACE + out, place, mask=rm < n)
    tl.store(SEEN + out, seen, mask=rm < n)


@triton.jit
def weigh(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, LEVEL, COEF, G, LEARN,
          n, m, r0, c0, H, W, a, b, k, scale, center, power, high, per_gamma,
          D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
          ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, UPPER: tl.constexpr, SIDE: tl.constexpr,
          LEARNED: tl.constexpr, MINED: tl.constexpr, DROP: tl.constexpr, EXP: tl.constexpr, BOTH: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile of dF/d⟨x, y⟩ for the strip of H rows from r0 and W columns from c0; BOTH: each pair in both orders."""
    rm = r0 + tl.program_id(0) * BM + tl.arange(0, BM)
    rn = c0 + tl.program_id(1) * BN + tl.arange(0, BN)
    out = G + (rm - r0)[:, None].to(tl.int64) * W + (rn - c0)[None, :]
    inside = (rm < r0 + H)[:, None] & (rn < c0 + W)[None, :]
    if LEARNED:
        b += k * tl.load(OFFSET)
    learned = tl.zeros((BM,), tl.float32)
    if c0 + (tl.program_id(1) + 1) * BN > (r0 + tl.program_id(0) * BM) * UPPER:
        s = _scores(X, Y, NX, NY, rm, rn, n, m, D, SIM, PREC, BK)
        positive, negative, w = _pairs(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, UPPER)
        there = _side(positive, negative, SIDE)
        l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
        if DROP:
            there = there & ((l <= 0.0) == 0)
        p = _weight(l, s, rm, n, LEVEL, COEF, FLOOR, high, per_gamma, EXP, MINED, 1)
        if BOTH:
            p += _weight(l, s, rn, m, LEVEL, COEF, FLOOR, high, per_gamma, EXP, MINED, 0)
        g = tl.where(there, w * p * _slope(s, a, b, scale, power, SHAPE, POWER), 0.0)
        learned = tl.sum(tl.where(inside, g, 0.0), 1)
        g = tl.where(there, g * _by_product(s, SIM), 0.0)
        tl.store(out, g.to(G.dtype.element_ty), mask=inside)
    else:
        tl.store(out, tl.zeros((BM, BN), G.dtype.element_ty), mask=inside)
    if LEARNED:
        tl.store(LEARN + tl.program_id(1).to(tl.int64) * H + rm - r0, learned, mask=rm < r0 + H)


@triton.jit
def _weight(l, s, r, n, LEVEL, COEF, FLOOR, high, per_gamma, EXP: tl.constexpr, MINED: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    """Coefficient of the group of r (rows, or columns) times e^{(l - level)/γ}."""
    p = tl.load(COEF + r, mask=r < n, other=0.0)
    p = p[:, None] if ROWS else p[None, :]
    if EXP:
        level = tl.load(LEVEL + r, mask=r < n, other=0.0)
        level = level[:, None] if ROWS else level[None, :]
        z = (l - level) * per_gamma
        p = p * tl.exp2(tl.where(z > 0.0, 0.0, z) * LOG2E)  # above the level are absent pairs only
    else:
        p = p + tl.zeros(l.shape, tl.float32)
    if MINED:
        floor = tl.load(FLOOR + r, mask=r < n, other=0.0)
        floor = floor[:, None] if ROWS else floor[None, :]
        p = tl.where(((s > floor) & (s < high)) | (s != s), p, 0.0)
    return p

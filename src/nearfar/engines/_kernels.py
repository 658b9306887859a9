"""Triton kernels of the fused engine: each tile of a matrix product goes straight into a reduction, or into weights.

    fold      tile of scores -> losses -> state of each row
    hardest   tile of scores -> largest loss of each row, and its column
    weigh     tile of scores -> weight x slope = dF/d⟨x, y⟩           a strip of it, in the dtype of the rows

A program computes one tile. If pairs are symmetric, only tiles on and above the diagonal are computed: each is reduced
along its rows and along its columns, which costs far less than its product.

Whether a pair is positive, negative or absent, and its weight, follow from vectors: labels, flags, ids, sample weights.
This module imports Triton, so it is imported only when needed. Numbers that select code are `tl.constexpr`.
"""

import triton
import triton.language as tl

__all__ = ["fold", "hardest", "weigh"]

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.0e38)


@triton.jit
def _spot(tall, wide, GROUP: tl.constexpr):
    """Row tile and column tile of this program; GROUP rows of tiles run together, so that they share loaded data."""
    program = tl.program_id(0)
    group = program // (GROUP * wide)
    first = group * GROUP
    here = min(tall - first, GROUP)
    rest = program - group * GROUP * wide
    return first + rest % here, rest // here


@triton.jit
def _scores(X, Y, NX, NY, rm, rn, D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, BK: tl.constexpr):
    """Scores s of a tile, and ds/d⟨x, y⟩. SIM selects product (0), minus squared distance (1) or minus distance (2).

    At distance 0 the derivative is 0. Rows, columns and their width are padded with zeros to whole tiles, so that no
    load needs a mask.
    """
    rk = tl.arange(0, BK)
    left = X + rm[:, None].to(tl.int64) * D + rk[None, :]
    right = Y + rn[None, :].to(tl.int64) * D + rk[:, None]
    dot = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    for _ in range(0, D, BK):
        dot = tl.dot(tl.load(left), tl.load(right), dot, input_precision=PREC)
        left += BK
        right += BK
    s, by_dot = dot, 1.0
    if SIM > 0:
        s = 2.0 * dot - (tl.load(NX + rm)[:, None] + tl.load(NY + rn)[None, :])
        by_dot = 2.0
    if SIM == 2:  # a reciprocal square root is one instruction, a root and a quotient are many; NaN propagates
        by_dot = tl.where(s >= 0.0, 0.0, tl.rsqrt(tl.where(s >= 0.0, 1.0, -s)))
        s = s * by_dot
    return s, by_dot


@triton.jit
def _power(r, power, POWER: tl.constexpr):
    """r^power for r >= 0; POWER is 0, 1 or 2 for these powers, and -1 for any other."""
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
    """log(1 + e) for e in [0, 1], positive wherever e is, so that a positive loss is not mistaken for 0."""
    series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)))
    return tl.where(e < 0.02, series, tl.log(1.0 + e))


@triton.jit
def _loss(s, a, b, scale, center, power, SHAPE: tl.constexpr, POWER: tl.constexpr):
    """Pair losses of a tile; see `PairForm`. SHAPE: 0 line (with scale 1), 1 power, 2 softplus, 3 pace."""
    z = a * s + b
    if SHAPE == 0:
        l = z
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
        found = tl.full(s.shape, 1.0, tl.float32) * a
    elif SHAPE == 1:
        lower: tl.constexpr = -1 if POWER == -1 else POWER - 1
        found = tl.where(z <= 0.0, 0.0, scale * a * power * _power(tl.where(z <= 0.0, 0.0, z), power - 1.0, lower))
    elif SHAPE == 2:
        found = scale * a / (1.0 + tl.exp(-z))
    else:
        found = scale * tl.where(z <= 0.0, 0.0, z)
    return found


@triton.jit
def _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF: tl.constexpr, FLAGS: tl.constexpr,
             WEIGHTS: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    """Mask of the pairs of a tile that belong to SIDE: 0 negative, 1 positive, 2 both.

    ITSELF: own column of a row. 0: none; 1: by position; 2: by id; 3: by position among the first n, else by id.
    FLAGS: bit 1 of a row and of a column allows them in positive pairs, bit 2 in negative pairs.
    EVEN: rows and columns fill whole tiles, so that no bounds are checked.
    """
    same = tl.load(RY + rm, mask=rm < n, other=0)[:, None] == tl.load(CY + rn, mask=rn < m, other=0)[None, :]
    if SIDE == 0:
        there = same == 0
    elif SIDE == 1:
        there = same
    else:
        there = tl.full(same.shape, 1, tl.int1)
    if FLAGS:
        both = tl.load(RF + rm, mask=rm < n, other=0)[:, None] & tl.load(CF + rn, mask=rn < m, other=0)[None, :]
        there = there & (tl.where(same, both & 1, both & 2) != 0)
    if ITSELF == 1:
        there = there & (rm[:, None] != rn[None, :])
    if ITSELF >= 2:
        equal = tl.load(RI + rm, mask=rm < n, other=0)[:, None] == tl.load(CI + rn, mask=rn < m, other=0)[None, :]
        if ITSELF == 3:
            equal = tl.where((rn < n)[None, :], rm[:, None] == rn[None, :], equal)
        there = there & (equal == 0)
    if WEIGHTS:
        there = there & (tl.load(RW + rm, mask=rm < n, other=0.0) > 0.0)[:, None]
        there = there & (tl.load(CW + rn, mask=rn < m, other=0.0) > 0.0)[None, :]
    if EVEN == 0:
        there = there & (rm < n)[:, None] & (rn < m)[None, :]
    return there


@triton.jit
def _measured(x, rm, rn, n, m, RW, CW, WEIGHTS: tl.constexpr):
    """Entries of a tile times the weights of their pairs."""
    if WEIGHTS:
        x = x * tl.load(RW + rm, mask=rm < n, other=0.0)[:, None] * tl.load(CW + rn, mask=rn < m, other=0.0)[None, :]
    return x


@triton.jit
def _mined(s, r, n, FLOOR, high, AXIS: tl.constexpr):
    """Mask of the scores that the miner keeps, for the rows r (AXIS 1) or the columns r (AXIS 0); NaN is kept."""
    floor = tl.expand_dims(tl.load(FLOOR + r, mask=r < n, other=0.0), AXIS)
    return ((s > floor) & (s < high)) | (s != s)


@triton.jit
def _small_expm1(z, e):
    """e^z - 1, given z and e = e^z, without cancellation near 0."""
    series = z * (1.0 + z * (0.5 + z * (0.16666667 + z * 0.041666668)))
    return tl.where(tl.abs(z) < 0.05, series, e - 1.0)


@triton.jit
def _reduce(l, there, rm, rn, n, m, RW, CW, seen, INTO, at, size, level, per_gamma, about, WEIGHTS: tl.constexpr,
            EXP: tl.constexpr, FLAT: tl.constexpr, HOLD: tl.constexpr, SIZED: tl.constexpr, COUNTED: tl.constexpr,
            AXIS: tl.constexpr):  # fmt: skip
    """Reduce a tile along its columns (AXIS 1) or rows (0): see `fold`."""
    rise: tl.constexpr = 1 + (EXP == 2) + 2 * (EXP == 3)
    held: tl.constexpr = rise + FLAT
    sized: tl.constexpr = held + HOLD
    counted: tl.constexpr = sized + SIZED
    if EXP == 0:
        x = l
    elif EXP == 3:
        x = l - about
        more = _measured(x * x, rm, rn, n, m, RW, CW, WEIGHTS)
        tl.store(INTO + size + at, tl.sum(tl.where(there, more, 0.0), AXIS))
        tl.store(INTO + 2 * size + at, tl.min(tl.where(there, l, float("inf")), AXIS))
    else:
        if EXP == 2:
            top = tl.max(tl.where(there, l, float("-inf")), AXIS)
            tl.store(INTO + size + at, top)
            level = tl.expand_dims(tl.where(top == float("-inf"), 0.0, top), AXIS)
            l = tl.where(there, l, level)  # absent entries must not overflow
        x = tl.exp2((l - level) * (per_gamma * LOG2E))
        z = (l - level) * per_gamma
        if FLAT:
            more = _measured(_small_expm1(z, x), rm, rn, n, m, RW, CW, WEIGHTS)
            tl.store(INTO + rise * size + at, tl.sum(tl.where(there, more, 0.0), AXIS))
        if HOLD:
            more = _measured(x * z, rm, rn, n, m, RW, CW, WEIGHTS)
            tl.store(INTO + held * size + at, tl.sum(tl.where(there, more, 0.0), AXIS))
    x = _measured(x, rm, rn, n, m, RW, CW, WEIGHTS)
    tl.store(INTO + at, tl.sum(tl.where(there, x, 0.0), AXIS))
    if SIZED:
        one = _measured(tl.full(there.shape, 1.0, tl.float32), rm, rn, n, m, RW, CW, WEIGHTS)
        tl.store(INTO + sized * size + at, tl.sum(tl.where(there, one, 0.0), AXIS))
    if COUNTED:
        tl.store(INTO + counted * size + at, tl.sum(seen.to(tl.float32), AXIS))


@triton.jit
def fold(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, LIVE, ROWS, COLS,
         n, m, r0, c0, H, W, a, b, k, scale, center, power, high, level, per_gamma, about,
         D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
         ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr,
         LEARNED: tl.constexpr, MINED: tl.constexpr, HALF: tl.constexpr, DROP: tl.constexpr, EXP: tl.constexpr,
         FLAT: tl.constexpr, HOLD: tl.constexpr, SIZED: tl.constexpr, COUNTED: tl.constexpr, MARK: tl.constexpr,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Write the state of each row of a strip (H rows from r0, W columns from c0) for each tile: ROWS [states, W/BN, H].

    States: Σ w·l (EXP 0), or Σ w·e^z with z = (l - level)/γ (EXP 1); EXP 2 uses the tile's largest loss as level, and
    writes it next; EXP 3 writes Σ w·(l - about), Σ w·(l - about)² and the least loss of the pairs above the level. Then
    Σ w·(e^z - 1) if FLAT; Σ w·z·e^z if HOLD; Σ w if SIZED; the number of pairs, whatever their loss, if COUNTED. HALF:
    the tile also stands for its transpose, whose states go into COLS [states, H/BM, W]; tiles below the diagonal are
    skipped. MARK: also write whether any pair of the tile has a weight and a slope into LIVE, by tiles of the matrix.
    """
    i, j = _spot(H // BM, W // BN, GROUP)
    if (HALF == 0) | (c0 + j * BN >= r0 + i * BM):
        rm = r0 + i * BM + tl.arange(0, BM)
        rn = c0 + j * BN + tl.arange(0, BN)
        if LEARNED:
            b += k * tl.load(OFFSET)
        s, _ = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
        there = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, SIDE)
        seen = there
        if COUNTED & (SIDE == 2):  # with both sides, only the negative pairs are counted
            seen = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, 0)
        l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
        there = _counted(there, l, level, DROP, EXP)
        at = (j * H + i * BM + tl.arange(0, BM)).to(tl.int64)
        size = (W // BN).to(tl.int64) * H
        mine, counted = there, seen
        if MINED:
            kept = _mined(s, rm, n, FLOOR, high, 1)
            mine, counted = there & kept, seen & kept
        live = _any(mine, l, SHAPE, MARK)
        _reduce(l, mine, rm, rn, n, m, RW, CW, counted, ROWS, at, size, level, per_gamma, about, WEIGHTS, EXP, FLAT,
                HOLD, SIZED, COUNTED, 1)  # fmt: skip
        if HALF:  # noqa: SIM102 - known when the kernel is compiled
            if c0 + j * BN > r0 + i * BM:  # a tile on the diagonal already holds both orders
                at = i.to(tl.int64) * W + j * BN + tl.arange(0, BN)
                size = (H // BM).to(tl.int64) * W
                mine, counted = there, seen
                if MINED:
                    kept = _mined(s, rn, n, FLOOR, high, 0)
                    mine, counted = there & kept, seen & kept
                    if MARK:
                        live = tl.maximum(live, _any(mine, l, SHAPE, MARK))
                _reduce(l, mine, rm, rn, n, m, RW, CW, counted, COLS, at, size, level, per_gamma, about, WEIGHTS, EXP,
                        FLAT, HOLD, SIZED, COUNTED, 0)  # fmt: skip
        if MARK:
            tl.store(LIVE + _tile(r0, c0, i, j, m, BM, BN), live)


@triton.jit
def _counted(there, l, level, DROP: tl.constexpr, EXP: tl.constexpr):
    """Mask of the pairs that count by their loss l."""
    if DROP:
        there = there & ((l <= 0.0) == 0)
    if EXP == 3:
        there = there & (l > level)
    return there


@triton.jit
def _any(there, l, SHAPE: tl.constexpr, MARK: tl.constexpr):
    """1 if a pair of the tile has a weight and a slope, else 0."""
    live = 1.0
    if MARK:
        if SHAPE == 1:
            there = there & ((l == 0.0) == 0)
        live = tl.max(tl.max(there.to(tl.float32), 1), 0)
    return live


@triton.jit
def _tile(r0, c0, i, j, m, BM: tl.constexpr, BN: tl.constexpr):
    """Index of a tile of a strip among the tiles of the matrix."""
    return (r0 // BM + i).to(tl.int64) * tl.cdiv(m, BN) + c0 // BN + j


@triton.jit
def hardest(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, TOPS, PLACES, TURNED, TURNED_PLACES,
            n, m, r0, c0, H, W, a, b, k, scale, center, power, high,
            D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
            ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr,
            LEARNED: tl.constexpr, MINED: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Largest loss of each row in each tile (-inf without pairs) and its column; laid out as by `fold`.

    NaN losses count as infinite, -inf as the smallest finite number. HALF 2: only pairs above the diagonal.
    """
    i, j = _spot(H // BM, W // BN, GROUP)
    if (HALF == 0) | (c0 + j * BN >= r0 + i * BM):
        rm = r0 + i * BM + tl.arange(0, BM)
        rn = c0 + j * BN + tl.arange(0, BN)
        if LEARNED:
            b += k * tl.load(OFFSET)
        s, _ = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
        there = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, SIDE)
        l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
        l = tl.where(l != l, float("inf"), tl.maximum(l, LEAST))
        if HALF == 2:
            there = there & (rm[:, None] < rn[None, :])
        mine = there
        if MINED:
            mine = there & _mined(s, rm, n, FLOOR, high, 1)
        top, place = tl.max(tl.where(mine, l, float("-inf")), 1, return_indices=True)
        at = (j * H + i * BM + tl.arange(0, BM)).to(tl.int64)
        tl.store(TOPS + at, top)
        tl.store(PLACES + at, place + c0 + j * BN)
        if HALF == 1:  # noqa: SIM102
            if c0 + j * BN > r0 + i * BM:
                mine = there
                if MINED:
                    mine = there & _mined(s, rn, n, FLOOR, high, 0)
                top, place = tl.max(tl.where(mine, l, float("-inf")), 0, return_indices=True)
                at = i.to(tl.int64) * W + j * BN + tl.arange(0, BN)
                tl.store(TURNED + at, top)
                tl.store(TURNED_PLACES + at, place + r0 + i * BM)


@triton.jit
def weigh(X, Y, NX, NY, RY, CY, RF, CF, RI, CI, RW, CW, FLOOR, OFFSET, LIVE, LEVEL, COEF, G, ROWS, COLS, LEARN,
          n, m, r0, c0, H, W, a, b, k, scale, center, power, high, level, per_gamma, about, first, second,
          D: tl.constexpr, SIM: tl.constexpr, PREC: tl.constexpr, SHAPE: tl.constexpr, POWER: tl.constexpr,
          ITSELF: tl.constexpr, FLAGS: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr,
          LEARNED: tl.constexpr, MINED: tl.constexpr, HALF: tl.constexpr, DROP: tl.constexpr, EXP: tl.constexpr,
          FAR: tl.constexpr, MARK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          GROUP: tl.constexpr):  # fmt: skip
    """Compute a tile of G = dF/d⟨x, y⟩ for a strip of H rows from r0 and W columns from c0.

    HALF: a pair stands for both of its orders, except in a tile on the diagonal, which holds both. FAR: also write
    the row and column sums of G, by tiles, into ROWS [W/BN, H] and COLS [H/BM, W]. LEARN: also Σ dF/dl·dl/ds. MARK:
    tiles that are 0 in LIVE, and those below the diagonal, are 0: only that is written.
    """
    i, j = _spot(H // BM, W // BN, GROUP)
    rows = i * BM + tl.arange(0, BM)
    cols = j * BN + tl.arange(0, BN)
    out = G + rows[:, None].to(tl.int64) * W + cols[None, :]
    live = (HALF == 0) | (c0 + j * BN >= r0 + i * BM)
    if MARK:
        live = live & (tl.load(LIVE + _tile(r0, c0, i, j, m, BM, BN)) > 0.0)
    if live:
        rm, rn = r0 + rows, c0 + cols
        if LEARNED:
            b += k * tl.load(OFFSET)
        s, by_dot = _scores(X, Y, NX, NY, rm, rn, D, SIM, PREC, BK)
        there = _members(rm, rn, n, m, RY, CY, RF, CF, RI, CI, RW, CW, ITSELF, FLAGS, WEIGHTS, EVEN, SIDE)
        l = _loss(s, a, b, scale, center, power, SHAPE, POWER)
        there = _counted(there, l, level, DROP & (SHAPE != 1), EXP)  # a hinge with loss 0 has slope 0
        p = _weight(l, s, rm, n, 1.0, LEVEL, COEF, FLOOR, high, per_gamma, EXP, MINED, 1)
        if HALF:
            # a tile on the diagonal holds both orders, whose scores may differ in the last digit: each gets the weight
            # that its own score had in the fold
            part = tl.where(c0 + j * BN == r0 + i * BM, 0.0, 1.0)
            p += _weight(l, s, rn, n, part, LEVEL, COEF, FLOOR, high, per_gamma, EXP, MINED, 0)
        if EXP == 1:
            p = p * tl.exp2((l - level) * (per_gamma * LOG2E))
        if EXP == 3:
            p = p * (first + second * (l - about))
        p = _measured(p * _slope(s, a, b, scale, power, SHAPE, POWER), rm, rn, n, m, RW, CW, WEIGHTS)
        if LEARNED:
            tl.store(LEARN + (j * H + rows).to(tl.int64), tl.sum(tl.where(there, p, 0.0), 1))
        g = tl.where(there, p * by_dot, 0.0).to(G.dtype.element_ty)
        tl.store(out, g)
        if FAR:  # sum the rounded numbers, which the products use too
            tl.store(ROWS + (j * H + rows).to(tl.int64), tl.sum(g.to(tl.float32), 1))
            tl.store(COLS + i.to(tl.int64) * W + cols, tl.sum(g.to(tl.float32), 0))
    else:
        tl.store(out, tl.zeros((BM, BN), G.dtype.element_ty))


@triton.jit
def _weight(l, s, r, n, part, LEVEL, COEF, FLOOR, high, per_gamma, EXP: tl.constexpr, MINED: tl.constexpr,
            AXIS: tl.constexpr):  # fmt: skip
    """Coefficient of the group of r (rows with AXIS 1, columns with 0), times e^{(l - its level)/γ} if EXP is 2."""
    p = tl.expand_dims(tl.load(COEF + r, mask=r < n, other=0.0) * part, AXIS)
    if EXP == 2:
        level = tl.expand_dims(tl.load(LEVEL + r, mask=r < n, other=0.0), AXIS)
        z = (l - level) * per_gamma
        p = p * tl.exp2(tl.where(z > 0.0, 0.0, z) * LOG2E)  # only absent pairs exceed the level
    if MINED:
        p = tl.where(_mined(s, r, n, FLOOR, high, AXIS), p, 0.0)
    return p

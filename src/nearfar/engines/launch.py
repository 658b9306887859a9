"""Launches of the fused kernels: numbers and vectors in, states of rows and strips of gradients out.

A strip of dF/d⟨x, y⟩ is written in the dtype of the products, and two matrix products turn it into gradients of rows
and columns; the n x m matrix is never held. On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1),
which tests use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nearfar.pairs import PairForm

__all__ = ["LOW", "SHAPES", "SIDES", "SIMILARITIES", "Spec", "Work", "merged"]

SIMILARITIES = ("dot", "squared", "distance")
SHAPES = ("line", "power", "softplus", "pace")
SIDES = ("negative", "positive", "all")
LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Types that products are taken in."""
STRIP = 2**25
"""Entries of a strip of gradients."""
CHUNKS = 16
"""Most parts of a row that are folded side by side."""
FLOATS = 9
States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Spec:
    """The numbers of one fold; those above `FLOATS` are floats, the others choose code.

    Args:
        a: see `PairForm`, as all up to `by_offset`.
        gamma: temperature of an exponential fold.
        low: scores of triplets that count lie above it, with `band`.
        high: and below this one; mined pairs lie between their row's floor and it.
        similarity: index in `SIMILARITIES`.
        shape: index in `SHAPES`.
        side: index in `SIDES`: the pairs that are folded.
        itself: see `PairVectors`.
        upper: only pairs above the diagonal.
        both: the gradient of a pair (i, j) is that of (j, i) too: `weigh` takes the half above the diagonal for both.
        drop: members without loss are absent.
        exp: fold exponentials; else sums.
        flat: keep Σ w(e^z - 1) too, for means of exponentials near 1.
        held: keep Σ w·z·e^z too, for values with weights held constant.
        band: triplets count by their score.
        dtype: index in `LOW`.
        given: which vectors of the pairs came beside labels: bits 1 flags, 2 ids, 4 weights.
    """

    a: float
    b: float
    scale: float = 1.0
    power: float = 1.0
    center: float = 0.0
    by_offset: float = 0.0
    gamma: float = 1.0
    low: float = 0.0
    high: float = math.inf
    similarity: int = 0
    shape: int = 0
    side: int = 0
    itself: int = 0
    upper: int = 0
    both: int = 0
    drop: int = 0
    exp: int = 0
    flat: int = 0
    held: int = 0
    band: int = 0
    dtype: int = 0
    given: int = 0

    @staticmethod
    def of(form: PairForm, **more: Any) -> Spec:
        """The numbers of a pair loss, and `more`."""
        numbers: dict[str, Any] = {
            name: float(getattr(form, name)) for name in ("a", "b", "scale", "power", "center", "by_offset")
        }
        return Spec(**numbers, shape=SHAPES.index(form.shape), **more)

    def said(self) -> tuple[list[float], list[int]]:
        """As two lists, which an operator takes."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [float(x) for x in values[:FLOATS]], [int(x) for x in values[FLOATS:]]

    @staticmethod
    def read(numbers: Sequence[float], codes: Sequence[int]) -> Spec:
        """From the two lists of `said`."""
        values: list[Any] = [*numbers, *codes]
        return Spec(*values)

    def vectors(self, pairs: Sequence[Tensor]) -> list[Tensor | None]:
        """Labels, flags, ids and weights of rows and columns, None where they did not come."""
        left = iter(pairs)
        there = [True, *(bool(self.given & bit) for bit in (1, 2, 4))]
        return [next(left).contiguous() if here else None for here in there for _ in range(2)]


def merged(spec: Spec, top: Tensor, total: Tensor, rise: Tensor, held: Tensor, size: Tensor, seen: Tensor) -> States:
    """States [chunks, n] of rows as one: t, Σ w, members, level, Σ w·e^z, Σ p·l, all float64."""
    sizes = size.double()
    all_sizes, all_seen = sizes.sum(dim=0), seen.sum(dim=0, dtype=torch.float64)
    if not spec.exp:
        sums = total.sum(dim=0, dtype=torch.float64)
        return sums, all_sizes, all_seen, torch.zeros_like(sums), torch.ones_like(sums), torch.zeros_like(sums)
    empty = all_sizes == 0
    tops = top.double()
    level = torch.where(empty, 0.0, tops.amax(dim=0))
    gap = torch.where(sizes == 0, 0.0, (tops - level) / spec.gamma)
    shrink = torch.exp(gap)
    norm = (total.double() * shrink).sum(dim=0)
    if spec.flat:
        rises = (rise.double() * shrink + sizes * torch.expm1(gap)).sum(dim=0)
        norm = torch.where(rises > -0.5 * all_sizes, all_sizes + rises, norm)
    t = torch.where(empty, 0.0, level + spec.gamma * torch.where(empty, 1.0, norm).log())
    value = torch.zeros_like(t)
    if spec.held:
        moment = ((held.double() + gap * total.double()) * shrink).sum(dim=0)
        value = torch.where(empty, 0.0, level + spec.gamma * moment / torch.where(empty, 1.0, norm))
    return t, all_sizes, all_seen, level, norm, value


class Work:
    """One call of the kernels on rows [n, d] and columns [m, d] (None: the rows)."""

    def __init__(
        self, spec: Spec, rows: Tensor, cols: Tensor | None, pairs: Sequence[Tensor], floor: Any, offset: Any
    ) -> None:
        self.spec, self.square = spec, cols is None
        self.rows, self.type = rows, LOW[spec.dtype]
        self.x = rows.detach().to(self.type).contiguous()
        self.y = self.x if cols is None else cols.detach().to(self.type).contiguous()
        self.n, self.m, self.width = len(self.x), len(self.y), self.x.shape[1]
        self.floor = None if floor is None else floor.detach().float().contiguous()
        self.offset = None if offset is None else offset.detach().float()
        self.pairs = spec.vectors(pairs)
        self.norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if spec.similarity:
            by_row = self.x.float().square().sum(dim=1)
            self.norms = (by_row, by_row if self.square else self.y.float().square().sum(dim=1))
        self.blocks = _blocks(self.x)

    def _given(self) -> tuple[Any, ...]:
        return (self.x, self.y, *self.norms, *self.pairs)

    def _choices(self) -> dict[str, Any]:
        """What chooses code in every kernel."""
        spec = self.spec
        tf32 = self.x.is_cuda and torch.backends.cuda.matmul.allow_tf32
        power = int(spec.power) if spec.power in (1.0, 2.0) else -1
        return {
            "D": self.width, "SIM": spec.similarity, "PREC": "tf32" if tf32 else "ieee", "SHAPE": spec.shape,
            "POWER": power, "ITSELF": spec.itself, "FLAGS": int(self.pairs[2] is not None),
            "WEIGHTS": int(self.pairs[6] is not None), "LEARNED": int(self.offset is not None), **self.blocks,
        }  # fmt: skip

    def _numbers(self) -> tuple[float, ...]:
        spec = self.spec
        return spec.a, spec.b, spec.by_offset, spec.scale, spec.center, spec.power

    def _chunks(self) -> tuple[tuple[int, int], int, int]:
        """The grid of a fold, the column tiles of a chunk, and the number of chunks."""
        tiles = -(-self.m // self.blocks["BN"])
        each = 1
        while each * CHUNKS < tiles:  # powers of two: each is code of its own
            each *= 2
        chunks = max(1, -(-tiles // each))
        return (-(-self.n // self.blocks["BM"]), chunks), each, chunks

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def fold(self) -> tuple[Tensor, ...]:
        """States of the rows [chunks, n]: top, sum, rise, held, size, seen; those that are not kept are empty."""
        from nearfar.engines._kernels import fold

        spec, (grid, tiles, chunks) = self.spec, self._chunks()
        kept = (spec.exp, 1, spec.exp and spec.flat, spec.exp and spec.held, 1, 1)
        state = tuple(self._empty(chunks, self.n if keep else 0) for keep in kept)
        with _on(self.x):
            fold[grid](
                *self._given(), self.floor, self.offset, *state, self.n, self.m, *self._numbers(), spec.high,
                1 / spec.gamma, UPPER=spec.upper, SIDE=spec.side, MINED=int(self.floor is not None), DROP=spec.drop,
                EXP=spec.exp, FLAT=int(bool(kept[2])), HOLD=int(bool(kept[3])), TILES=tiles, **self._choices(),
            )  # fmt: skip
        return state

    def hardest(self) -> tuple[Tensor, ...]:
        """Largest loss of each row, its column, and the number of members, [chunks, n] each."""
        from nearfar.engines._kernels import hardest

        spec, (grid, tiles, chunks) = self.spec, self._chunks()
        found = tuple(self._empty(chunks, self.n, dtype=x) for x in (torch.float32, torch.int32, torch.float32))
        with _on(self.x):
            hardest[grid](
                *self._given(), self.floor, self.offset, *found, self.n, self.m, *self._numbers(), spec.high,
                UPPER=spec.upper, SIDE=spec.side, MINED=int(self.floor is not None), TILES=tiles, **self._choices(),
            )  # fmt: skip
        return found

    def weigh(self, level: Tensor, coef: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, columns and offset."""
        from nearfar.engines._kernels import weigh

        spec, unit, coef = self.spec, *self._unit(coef)
        level = level.float().contiguous()
        upper = spec.upper or spec.both
        learned = self.rows.new_zeros((), dtype=torch.float64)
        sums = _Sums(self)
        for r0, high in self._strips():
            c0 = r0 if upper else 0
            strip = self._empty(high, self.m - c0, dtype=self.type)
            grid = (-(-high // self.blocks["BM"]), -(-strip.shape[1] // self.blocks["BN"]))
            parts = self._empty(grid[1], high if self.offset is not None else 0)
            with _on(self.x):
                weigh[grid](
                    *self._given(), self.floor, self.offset, level, coef, strip, parts, self.n, self.m, r0, c0,
                    *strip.shape, *self._numbers(), spec.high, 1 / spec.gamma, UPPER=upper, SIDE=spec.side,
                    MINED=int(self.floor is not None), DROP=spec.drop, EXP=spec.exp, BOTH=spec.both,
                    **self._choices(),
                )  # fmt: skip
            sums.add(strip, r0, c0)
            learned = learned + parts.sum(dtype=torch.float64)
        by_row, by_col = sums.found(unit)
        return by_row, by_col, (learned * unit * (spec.by_offset / spec.a)).to(self.rows.dtype)

    def fold_triplets(self, scores: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """Σ l, Σ w and number of negatives [chunks, n] of each row's triplets, and Σ dl/ds [chunks, n, P]."""
        from nearfar.engines._kernels_triplets import fold_triplets

        spec, (grid, tiles, chunks), wide = self.spec, self._chunks(), scores.shape[1]
        found = tuple(self._empty(chunks, self.n) for _ in range(3))
        pull = self._empty(chunks, self.n, wide).zero_()
        with _on(self.x):
            fold_triplets[grid](
                *self._given(), scores.float().contiguous(), real.float().contiguous(), self.offset, *found, pull,
                self.n, self.m, wide, *self._numbers(), spec.low, spec.high, BAND=spec.band, DROP=spec.drop,
                TILES=tiles, **self._choices(),
            )  # fmt: skip
        return *found, pull

    def weigh_triplets(self, scores: Tensor, real: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of rows and columns through the scores of the negatives."""
        from nearfar.engines._kernels_triplets import weigh_triplets

        spec, unit, coef = self.spec, *self._unit(coef)
        scores, real, sums = scores.float().contiguous(), real.float().contiguous(), _Sums(self)
        for r0, high in self._strips():
            strip = self._empty(high, self.m, dtype=self.type)
            grid = (-(-high // self.blocks["BM"]), -(-self.m // self.blocks["BN"]))
            with _on(self.x):
                weigh_triplets[grid](
                    *self._given(), scores, real, self.offset, coef, strip, self.n, self.m, scores.shape[1], r0, high,
                    *self._numbers(), spec.low, spec.high, BAND=spec.band, DROP=spec.drop, **self._choices(),
                )  # fmt: skip
            sums.add(strip, r0, 0)
        return sums.found(unit)

    def _strips(self) -> list[tuple[int, int]]:
        """First row and number of rows of each strip."""
        block = self.blocks["BM"]
        tall = max(block, STRIP // max(1, self.m) // block * block)
        return [(r0, min(tall, self.n - r0)) for r0 in range(0, self.n, tall)]

    def _unit(self, coef: Tensor) -> tuple[Tensor, Tensor]:
        """A factor, and coefficients divided by it, so that their products keep their digits in half precision."""
        if self.type == torch.float32:
            return coef.new_ones(()), coef.float().contiguous()
        most = coef.abs().amax()
        unit = torch.where(most == 0, 1.0, torch.exp2(most.log2().ceil()))
        return unit, (coef / unit).float().contiguous()


class _Sums:
    """Gradients of rows and columns, summed over strips; one for both where the columns are the rows."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.rows = torch.zeros(work.x.shape, dtype=torch.float32, device=work.x.device)
        self.cols = self.rows if work.square else torch.zeros(work.y.shape, dtype=torch.float32, device=work.x.device)

    def add(self, strip: Tensor, r0: int, c0: int) -> None:
        """Back-propagate dF/d⟨x, y⟩ of the rows from r0 and the columns from c0."""
        x, y = self.work.x[r0 : r0 + len(strip)], self.work.y[c0:]
        for sums, slope, mine, others in (
            (self.rows[r0 : r0 + len(strip)], strip, x, y),
            (self.cols[c0:], strip.T, y, x),
        ):
            sums += _product(slope, others)
            if self.work.spec.similarity:  # the norms are part of a distance
                sums -= slope.sum(dim=1, dtype=torch.float32)[:, None] * mine.float()

    def found(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """The sums times a factor, in the dtype of the rows; no columns where they are the rows."""
        kind, by = self.work.rows.dtype, unit.float()
        rows = (self.rows * by).to(kind)
        return rows, rows.new_empty(0) if self.work.square else (self.cols * by).to(kind)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Product a @ b in float32; half precision goes to the tensor cores as it is."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _blocks(x: Tensor) -> dict[str, int]:
    """Sizes of a tile; untuned."""
    if not x.is_cuda:
        return {"BM": 32, "BN": 32, "BK": 32}
    if x.dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def _on(x: Tensor) -> Any:
    """The device of x as the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()

"""Launches of the fused kernels: numbers and vectors in, states of rows out; fused_weigh.py has the way back.

On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1), which tests use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.tensors import uses_tf32
from nearfar.pairs import PairForm

__all__ = ["LOW", "SHAPES", "SIDES", "SIMILARITIES", "Spec", "Strip", "Work", "on_device", "stepped"]

SIMILARITIES = ("dot", "squared", "distance")
SHAPES = ("line", "power", "softplus", "pace")
SIDES = ("negative", "positive", "all")
LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Types that products are taken in."""
STATES = 2**23
"""Numbers that a strip of tiles leaves behind when it is folded."""
STEP = 4
"""Positives whose triplets a kernel does without a loop: each such number is a kernel of its own."""
REACH = 68.0
"""Exponents within ±REACH of a level need no largest loss: their sums over 2^20 pairs fit into float32."""
FLOATS = 10


@dataclass(frozen=True)
class Spec:
    """The numbers of one fold; those above `FLOATS` are floats, the others choose code.

    Args:
        a: see `PairForm`, as all up to `by_offset`.
        gamma: temperature of an exponential fold.
        low: scores of triplets that count lie above it, with `band`.
        high: and below this one; mined pairs lie between their row's floor and it.
        level: exponentials are of (l - level)/γ, with `exp` 1.
        similarity: index in `SIMILARITIES`.
        shape: index in `SHAPES`.
        side: index in `SIDES`: the pairs that are folded.
        itself: see `PairVectors`.
        half: pairs are symmetric, and those above the diagonal stand for both orders.
        drop: members without loss are absent.
        exp: 0 fold sums; 1 exponentials around a level that is known; 2 around the largest loss.
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
    level: float = 0.0
    similarity: int = 0
    shape: int = 0
    side: int = 0
    itself: int = 0
    half: int = 0
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
        if form.shape == "line":  # one number less to multiply with
            scale, numbers["scale"] = numbers["scale"], 1.0
            numbers |= {name: scale * numbers[name] for name in ("a", "b", "by_offset")}
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


@dataclass(frozen=True)
class Strip:
    """Some rows and columns: where they begin, how many they are, and how many tiles they fill."""

    r0: int
    c0: int
    high: int
    width: int
    tall: int
    wide: int

    @property
    def where(self) -> tuple[int, int, int, int]:
        """First row and column, and numbers of rows and columns."""
        return self.r0, self.c0, self.high, self.width


class Work:
    """One call of the kernels on rows [n, d] and columns [m, d] (None: the rows)."""

    def __init__(
        self, spec: Spec, rows: Tensor, cols: Tensor | None, pairs: Sequence[Tensor], floor: Any, offset: Any
    ) -> None:
        self.spec, self.square = spec, cols is None
        self.rows, self.type = rows, LOW[spec.dtype]
        self.blocks = _blocks(rows, self.type)
        self.n, self.m = len(rows), len(rows if cols is None else cols)
        self.x = self._filled(rows)
        self.y = self.x if cols is None else self._filled(cols)
        self.floor = None if floor is None else floor.detach().float().contiguous()
        self.offset = None if offset is None else offset.detach().float()
        self.pairs = spec.vectors(pairs)
        self.norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if spec.similarity:
            by_row = self.x.float().square().sum(dim=1)
            self.norms = (by_row, by_row if self.square else self.y.float().square().sum(dim=1))

    def _filled(self, x: Tensor) -> Tensor:
        """Rows in the type of the products, filled up with zeros to whole tiles."""
        tall, wide = (-size % self.blocks[name] for size, name in zip(x.shape, ("BM", "BK"), strict=True))
        x = x.detach().to(self.type)
        return torch.nn.functional.pad(x, (0, wide, 0, tall)) if tall or wide else x.contiguous()

    def _given(self) -> tuple[Any, ...]:
        return (self.x, self.y, *self.norms, *self.pairs, self.floor, self.offset)

    def choices(self) -> dict[str, Any]:
        """What chooses code in every kernel."""
        spec = self.spec
        power = int(spec.power) if spec.power in (1.0, 2.0) else -1
        # a sample has its own label, so that it is no negative of itself
        apart = spec.itself == 1 and spec.side == 0 and self.square
        return {
            "D": self.x.shape[1], "SIM": spec.similarity, "PREC": _precision(self.x), "SHAPE": spec.shape,
            "POWER": power, "ITSELF": 0 if apart else spec.itself, "FLAGS": int(self.pairs[2] is not None),
            "WEIGHTS": int(self.pairs[6] is not None), "EVEN": int(self.even), "LEARNED": int(self.offset is not None),
            **self.blocks, "GROUP": 8,
        }  # fmt: skip

    @property
    def even(self) -> bool:
        """Whether rows and columns fill their tiles."""
        return len(self.x) == self.n and len(self.y) == self.m

    @property
    def far(self) -> bool:
        """Whether gradients need the sums of dF/d⟨x, y⟩ over rows and columns: scores are distances."""
        return bool(self.spec.similarity)

    @property
    def counted(self) -> bool:
        """Whether members must be counted pair by pair: labels, flags and weights do not tell their number."""
        return self.floor is not None or self.spec.itself >= 2

    def numbers(self) -> tuple[float, ...]:
        """The numbers of the pair loss, in the order of the kernels."""
        spec = self.spec
        return spec.a, spec.b, spec.by_offset, spec.scale, spec.center, spec.power

    def strips(self, entries: int, *, half: bool, least: int = 0) -> Iterator[Strip]:
        """Strips of whole tiles with about so many pairs each, and `least` rows; half: those from the diagonal on."""
        tall, wide, block = len(self.x), len(self.y), self.blocks["BM"]
        r0 = 0
        while r0 < tall:
            c0 = r0 if half else 0
            high = min(tall - r0, max(block, least // block * block, entries // (wide - c0) // block * block))
            yield Strip(r0, c0, high, wide - c0, high // block, (wide - c0) // self.blocks["BN"])
            r0 += high

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor beside the rows."""
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def start(self, kernel: Any, strip: Strip, *more: Any, **choices: Any) -> None:
        """Start a kernel, one program a tile of the strip."""
        with on_device(self.x):
            kernel[(strip.tall * strip.wide,)](*self._given(), *more, **(self.choices() | choices))

    def fold(self, states: Any) -> None:
        """Add what the kernel says of each row to the `States`."""
        from nearfar.engines._kernels import fold

        spec = self.spec
        for strip in self.strips(STATES * self.blocks["BM"] // (2 * states.number), half=bool(spec.half)):
            rows, cols = states.empty(strip)
            self.start(
                fold, strip, rows, cols, self.n, self.m, *strip.where, *self.numbers(), spec.high, spec.level,
                1 / spec.gamma, SIDE=spec.side, MINED=int(self.floor is not None), HALF=spec.half, DROP=spec.drop,
                EXP=spec.exp, **states.kept,
            )  # fmt: skip
            states.add(rows, strip.r0)
            if spec.half:
                states.add(cols, strip.c0)

    def maxima(self) -> Iterator[tuple[Strip, Tensor, Tensor, Tensor, Tensor]]:
        """By strips: largest loss of each row in each tile and its column, then those of each column if pairs turn."""
        from nearfar.engines._kernels import hardest

        spec = self.spec
        for strip in self.strips(STATES * self.blocks["BM"] // 4, half=bool(spec.half)):
            shapes = (strip.wide, strip.high), (strip.tall, strip.width if spec.half == 1 else 0)
            tops, turned = (self.empty(*shape) for shape in shapes)
            if spec.half:  # tiles below the diagonal are not written
                tops, turned = tops.fill_(-torch.inf), turned.fill_(-torch.inf)
            places, turned_places = (self.empty(*shape, dtype=torch.int32) for shape in shapes)
            self.start(
                hardest, strip, tops, places, turned, turned_places, self.n, self.m, *strip.where, *self.numbers(),
                spec.high, SIDE=spec.side, MINED=int(self.floor is not None), HALF=spec.half,
            )  # fmt: skip
            yield strip, tops, places, turned, turned_places

    def hardest(self) -> tuple[Tensor, Tensor]:
        """Largest loss of each row, -inf where it has no pair, and its column."""
        best = self.empty(len(self.x)).fill_(-torch.inf)
        place = self.empty(len(self.x), dtype=torch.int64).zero_()
        for strip, mine, at_mine, turned, at_turned in self.maxima():
            for tops, places, first in ((mine, at_mine, strip.r0), (turned, at_turned, strip.c0)):
                if not tops.numel():
                    continue
                here = slice(first, first + tops.shape[1])
                top, tile = tops.max(dim=0)
                at = places.gather(0, tile[None])[0].long()
                place[here] = torch.where(top > best[here], at, place[here])
                best[here] = torch.maximum(best[here], top)
        return best[: self.n], place[: self.n]

    def collect(self, strip: Strip, level: Tensor, tops: Tensor, into: Sequence[Tensor], most: Sequence[int]) -> None:
        """Write down the places of all losses of a strip that reach a level; see the kernel."""
        from nearfar.engines._kernels_top import collect

        self.start(
            collect, strip, level, tops, *into, self.n, self.m, *strip.where, *most, *self.numbers(),
            SIDE=self.spec.side, HALF=self.spec.half,
        )  # fmt: skip

    def fold_triplets(self, scores: Tensor, real: Tensor) -> Tensor:
        """Σ l, Σ w, number of negatives and Σ dl/ds of P positives of each row, [3 + P, n] float64."""
        from nearfar.engines._kernels_triplets import fold_triplets

        spec, many = self.spec, scores.shape[1]
        scores, real, step = stepped(scores, real)
        found = self.empty(scores.shape[1] + 3, len(self.x), dtype=torch.float64)
        for strip in self.strips(STATES * self.blocks["BM"] // len(found), half=False):
            states = self.empty(len(found), strip.wide, strip.high)
            self.start(
                fold_triplets, strip, scores, real, states, self.n, self.m, scores.shape[1], *strip.where,
                *self.numbers(), spec.low, spec.high, BAND=spec.band, DROP=spec.drop, STEP=step,
            )  # fmt: skip
            found[:, strip.r0 : strip.r0 + strip.high] = states.sum(dim=1, dtype=torch.float64)
        return found[: 3 + many, : self.n]


def stepped(scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor, int]:
    """Scores of positives and their measure [n, P] in float32, filled up to whole steps, and how many a step takes."""
    step = min(STEP, scores.shape[1])
    more = (0, -scores.shape[1] % step)
    first, second = (torch.nn.functional.pad(x.detach().float(), more).contiguous() for x in (scores, real))
    return first, second, step


def _precision(x: Tensor) -> str:
    """How products of float32 are taken: as torch's own setting says; three TF32 products are as exact as one."""
    if not x.is_cuda:
        return "ieee"
    return "tf32" if uses_tf32() else "tf32x3"


def _blocks(x: Tensor, kind: torch.dtype) -> dict[str, int]:
    """Sizes of a tile, measured on an H200."""
    if not x.is_cuda:
        return {"BM": 32, "BN": 32, "BK": 32}
    if kind == torch.float32:
        return {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3}
    # with no more registers two programs share a processor, and one's product hides the other's reduction
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128}


def on_device(x: Tensor) -> Any:
    """The device of x as the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()

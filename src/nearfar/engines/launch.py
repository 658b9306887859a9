"""`Launch`: starts Triton kernels over the tiles of a matrix product, with the arguments that all kernels share."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfar._utils.tensors import uses_tf32
from nearfar.engines.spec import LOW, SIDES, Inputs, Spec
from nearfar.relations.layout import NEGATIVE, POSITION, POSITIVE, Layout

__all__ = ["Area", "Launch", "on_device"]


class Area(NamedTuple):
    """A range of rows and columns: where they begin, how many they are, and how many tiles they fill."""

    r0: int
    c0: int
    high: int
    width: int
    tall: int
    wide: int


class Launch:
    """One call of the kernels on rows [n, d] and columns [m, d] (None: the columns are the rows); see `Operator`."""

    def __init__(self, spec: Spec, *inputs: *Inputs) -> None:
        rows, cols, offset, self.score, floor, vectors = inputs
        self.spec, self.square = spec, cols is None
        self.rows, self.cols, self.type = rows, rows if cols is None else cols, LOW[spec.dtype]
        self.blocks = _blocks(rows, self.type)
        self.n, self.m = len(rows), len(self.cols)
        self.floor = None if floor is None else floor.detach().float().contiguous()
        self.offset = None if offset is None else offset.detach().float()
        left = iter(vectors)
        there = [True, *(bool(spec.given & bit) for bit in (1, 2, 4))]
        self.pairs = [next(left).contiguous() if here else None for here in there for _ in range(2)]
        self.more = list(left)
        self.far = bool(spec.similarity)
        """Whether gradients need the row and column sums of dF/d⟨x, y⟩, as they do for distances."""
        self.counted = self.floor is not None or spec.itself >= 2
        """Whether members must be counted pair by pair: labels, flags and weights do not determine their number."""

    @cached_property
    def x(self) -> Tensor:
        """The rows for products."""
        return self._filled(self.rows)

    @cached_property
    def y(self) -> Tensor:
        """The columns for products."""
        return self.x if self.square else self._filled(self.cols)

    @cached_property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Squared norms of rows and columns, for distances."""
        if not self.spec.similarity:
            return None, None
        by_row = self.x.float().square().sum(dim=1)
        return by_row, by_row if self.square else self.y.float().square().sum(dim=1)

    def _filled(self, x: Tensor) -> Tensor:
        """Rows in the dtype of the products, padded with zeros to whole tiles."""
        tall, wide = (-size % self.blocks[name] for size, name in zip(x.shape, ("BM", "BK"), strict=True))
        x = x.detach().to(self.type)
        return torch.nn.functional.pad(x, (0, wide, 0, tall)) if tall or wide else x.contiguous()

    def choices(self) -> dict[str, Any]:
        """Compile-time constants common to all kernels."""
        spec = self.spec
        power = int(spec.power) if spec.power in (1.0, 2.0) else -1
        # each sample has its own label, so that it is not its own negative
        apart = spec.itself == 1 and spec.side == 0 and self.square
        return {
            "D": self.x.shape[1], "SIM": spec.similarity, "PREC": _precision(self.x), "SHAPE": spec.shape,
            "POWER": power, "ITSELF": 0 if apart else spec.itself, "FLAGS": int(self.pairs[2] is not None),
            "WEIGHTS": int(self.pairs[6] is not None), "EVEN": int((len(self.x), len(self.y)) == (self.n, self.m)),
            "LEARNED": int(self.offset is not None),
            **self.blocks, "GROUP": 8,
        }  # fmt: skip

    def members(self) -> tuple[Tensor, Tensor]:
        """Σ w and number of each row's members, from labels alone; with all pairs, the number of negatives."""
        labels, flags, _, weights = ((self.pairs[at], self.pairs[at + 1]) for at in (0, 2, 4, 6))
        layout: Any = Layout(
            labels,  # type: ignore[arg-type]
            self.square,
            flags=None if flags[0] is None else flags,  # type: ignore[arg-type]
            weights=None if weights[0] is None else weights,  # type: ignore[arg-type]
        )
        own, side = self.spec.itself == POSITION, SIDES[self.spec.side]
        bits = {"negative": (NEGATIVE,), "positive": (POSITIVE,), "all": (NEGATIVE, POSITIVE)}[side]
        sizes = [layout.count(bit, own=own, weighed=True) for bit in bits]
        size = sizes[0] if len(sizes) == 1 else sizes[0] + sizes[1]
        if layout.weights is None and len(bits) == 1:
            return size, size.clone()
        return size, layout.count(bits[0], own=own)

    def areas(self, entries: int, *, half: bool, least: int = 0) -> Iterator[Area]:
        """Areas of whole tiles with about `entries` pairs each, at least `least` rows; half: from the diagonal on."""
        tall, wide, block = len(self.x), len(self.y), self.blocks["BM"]
        r0 = 0
        while r0 < tall:
            c0 = r0 if half else 0
            high = min(tall - r0, max(block, least // block * block, entries // (wide - c0) // block * block))
            yield Area(r0, c0, high, wide - c0, high // block, (wide - c0) // self.blocks["BN"])
            r0 += high

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized tensor on the device of the rows."""
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def start(self, kernel: Any, area: Area, tensors: Sequence[Tensor], *numbers: float, **choices: Any) -> None:
        """Start a kernel with one program per tile of the area; `tensors` and `numbers` are its own arguments."""
        spec = self.spec
        given = (self.x, self.y, *self.norms, *self.pairs, self.floor, self.offset, *tensors)
        sizes = (self.n, self.m, *area[:4])
        pair = (spec.a, spec.b, spec.by_offset, spec.scale, spec.center, spec.power)
        with on_device(self.x):
            kernel[(area.tall * area.wide,)](*given, *sizes, *pair, *numbers, **(self.choices() | choices))


def _precision(x: Tensor) -> str:
    """Precision of float32 products, by torch's own setting; three TF32 products are as exact as one."""
    if not x.is_cuda:
        return "ieee"
    return "tf32" if uses_tf32() else "tf32x3"


def _blocks(x: Tensor, kind: torch.dtype) -> dict[str, int]:
    """Tile sizes, measured on an H200."""
    if not x.is_cuda:
        return {"BM": 32, "BN": 32, "BK": 32}
    if kind == torch.float32:
        return {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3}
    # with few enough registers, two programs share a processor: one multiplies while the other reduces
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128}


def on_device(x: Tensor) -> Any:
    """Context manager that makes the device of x the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()

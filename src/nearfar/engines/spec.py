"""`Spec`: the numeric arguments of one operator call, as two lists that torch.library accepts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.pairs import PairForm

__all__ = ["ALL", "AROUND", "BELOW_TOP", "LINE", "LOSSES", "LOW", "MOMENTS", "NEGATIVE", "PACE", "POSITIVE", "POWER",
           "REACH", "SHAPES", "SIDES", "SIMILARITIES", "SOFTPLUS", "Inputs", "Spec", "fold_outputs"]  # fmt: skip

SIMILARITIES = ("dot", "squared", "distance")
SHAPES = ("line", "power", "softplus", "pace")
LINE, POWER, SOFTPLUS, PACE = range(4)
SIDES = ("negative", "positive", "all")
NEGATIVE, POSITIVE, ALL = range(3)
LOSSES, AROUND, BELOW_TOP, MOMENTS = range(4)
"""What a fold sums: losses, exponentials relative to a known level or to the largest loss of the row, or moments."""
LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the kernels' matrix products."""
REACH = 68.0
"""Exponents within ±REACH need no largest loss as level: their sums over 2^20 pairs fit in float32."""
FLOATS = 15
Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Sequence[Tensor]]
"""Rows, columns (None: the rows), learned offset, scores of positives, floor, vectors; see `Operator`."""


@dataclass(frozen=True)
class Spec:
    """The numeric arguments of one operator call; the first `FLOATS` fields are floats, the others select code."""

    a: float  # see `PairForm`, like all up to `by_offset`
    b: float
    scale: float = 1.0
    power: float = 1.0
    center: float = 0.0
    by_offset: float = 0.0
    gamma: float = 1.0  # temperature of an exponential fold
    low: float = 0.0  # lower bound of the scores of triplets that count, with `band`
    high: float = math.inf  # their upper bound; mined pairs lie between their row's floor and it
    level: float = 0.0  # subtracted from losses in exponentials `AROUND` it; losses above it count in `MOMENTS`
    about: float = 0.0  # subtracted from losses in moments
    first: float = 0.0  # weights in moments are first + second·(l - about)
    second: float = 0.0  # see `first`
    base: float = 0.0  # exponentials are e^{h - level} of heights h = raised·log(1 + l/base) instead, if it is not 0
    raised: float = 1.0  # see `base`
    similarity: int = 0  # index in `SIMILARITIES`
    shape: int = 0  # index in `SHAPES`
    side: int = 0  # index in `SIDES`: which pairs are folded
    itself: int = 0  # see `Layout`
    half: int = 0  # pairs are symmetric, and those above the diagonal stand for both orders (2: for one order only)
    drop: int = 0  # members without loss count as absent
    sums: int = LOSSES  # what is summed: `LOSSES`, `AROUND`, `BELOW_TOP` or `MOMENTS`
    flat: int = 0  # also compute Σ w(e^z - 1), for means of exponentials near 1
    held: int = 0  # also compute Σ w·z·e^z, for values with weights held constant
    band: int = 0  # select triplets by their score
    dtype: int = -1  # index in `LOW` for Triton (cuda.py); -1 for PyTorch (strips.py)
    given: int = 0  # which vectors of the pairs are present, see `Layout.given` and `Sorted.given`
    tile: int = 0  # rows per strip; 0 for a height that suits the device
    full: int = 0  # tiles span whole rows, because a row's largest losses are needed first
    keep: int = 0  # a gradient will be needed: keep unscaled weights for it if they are few
    one_group: int = 0  # all rows are one group, so that the gradient up to a factor can be computed during the fold

    @staticmethod
    def of(form: PairForm, **more: Any) -> "Spec":
        """A `Spec` with the parameters of a pair loss, and `more` fields."""
        numbers: dict[str, Any] = {
            name: float(getattr(form, name)) for name in ("a", "b", "scale", "power", "center", "by_offset")
        }
        if form.shape == "line":  # saves a multiplication
            scale, numbers["scale"] = numbers["scale"], 1.0
            numbers |= {name: scale * numbers[name] for name in ("a", "b", "by_offset")}
        return Spec(**numbers, shape=SHAPES.index(form.shape), **more)

    def lists(self) -> tuple[list[float], list[int]]:
        """The two lists that an operator takes."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [float(x) for x in values[:FLOATS]], [int(x) for x in values[FLOATS:]]

    @property
    def strips(self) -> bool:
        """Whether the call runs in strips in PyTorch, not in a kernel."""
        return self.dtype < 0

    @staticmethod
    def read(numbers: Sequence[float], codes: Sequence[int]) -> "Spec":
        """The inverse of `lists`."""
        values: list[Any] = [*numbers, *codes]
        return Spec(*values)


def fold_outputs(
    spec: Spec, total: Tensor, size: Tensor, seen: Tensor, level: Tensor, second: Tensor, held: Tensor
) -> list[Tensor]:
    """The outputs of a fold, see operators.py, from sums [n] in float64 over each row's members.

    Args:
        spec: the arguments of the fold.
        total: Σ w·l, or Σ w·e^z with z = (l - level)/γ, or Σ w(l - about).
        size: Σ w.
        seen: number of members.
        level: what is subtracted from losses in exponentials; in moments the least loss.
        second: Σ w(e^z - 1) if `flat`, or Σ w(l - about)².
        held: Σ w·z·e^z, or with `base` Σ w·l·e^z, if `held`.
    """
    zero = torch.zeros_like(total)
    if spec.sums == LOSSES:
        return [total, size, seen, zero, torch.ones_like(total), zero.clone()]
    if spec.sums == MOMENTS:
        return [spec.first * total + 0.5 * spec.second * second, size, seen, level, total, second]
    empty = size == 0
    level = torch.where(empty, 0.0, level)
    norm, log = total, torch.where(empty, 1.0, over(total, size)).log()
    if spec.flat and not spec.held:  # a mean of exponentials near 1
        rise = over(second, size)
        flat = rise > -0.5
        norm = torch.where(flat, size + second, total)
        log = torch.where(flat, torch.log1p(torch.where(flat, rise, 0.0)), log)
    t = torch.where(empty, 0.0, level + spec.gamma * log)
    if not spec.held:
        return [t, size, seen, level, norm, zero]
    mean = over(held, norm)
    return [t, size, seen, level, norm, torch.where(empty, 0.0, mean if spec.base else level + spec.gamma * mean)]

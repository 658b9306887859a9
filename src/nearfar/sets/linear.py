"""`Mean` and `Worst`: even weights, or all the weight on the largest loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, over, readable, total, weighted
from nearfar.sets.base import Fold, Solved, UncertaintySet
from nearfar.sets.stream import Cap, Dual, Orders, Stream, Support

__all__ = ["Mean", "Worst", "first_two"]


@dataclass(frozen=True, eq=False)
class Mean(UncertaintySet, swift=True):
    """Mean: every member has the same weight, in proportion to its measure.

        U = {w/W},    F = Σ wᵢlᵢ / W

    Relations: KL(γ→∞), TopK(fraction=1), ChiSquare(0).

    >>> Mean().value(torch.tensor([[1.0, 3.0]]))
    tensor([2.])
    """

    def per(self, unit: Tensor) -> UncertaintySet:  # noqa: D102
        return self

    def fold(self) -> Fold:  # noqa: D102
        return Fold("sum")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _MeanStream(self, groups, like, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return (total(w, l),)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return over(w.to(l.dtype), dual[0][:, None])

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        # losses of absent members are 0 already
        return over((l if w.dtype == torch.bool else l * w).sum(dim=1), mass)


class _MeanStream(Stream):
    """Stream of `Mean`: running Σ w and Σ wl."""

    single = True
    absent = 0.0
    even = True

    def _start(self) -> None:
        self._sum = self._full(0.0, wide=True)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self._sum += weighted(l, w).sum(dim=1, dtype=torch.float64)

    def _weigh_(self, l: Tensor, size: Tensor, w: Tensor | None) -> Tensor | None:
        self._sum += (l if w is None else l.mul_(w)).sum(dim=1)
        return None

    def _merge(self, ranks: ProcessGroup) -> None:
        self._sum = ranks.sum(self._sum)

    def value(self) -> Tensor:
        return self._narrow(over(self._sum, self.size))

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return over(w.to(l.dtype), self.size.to(l.dtype)[:, None])

    def _scale(self) -> Tensor:
        return over(torch.ones_like(self.size), self.size)


@dataclass(frozen=True, eq=False)
class Worst(UncertaintySet, swift=True):
    """Worst case: the largest loss has all the weight (hard mining); ties share it evenly.

        U = {p ≥ 0, Σp = 1},    F = max l

    Xu et al. 2022; Qi et al. 2020, section 3.1.

    Relations: KL(γ→0), TopK(1), ChiSquare(ρ ≥ n(n-1)/2).

    >>> Worst().weights(torch.tensor([[1.0, 3.0, 3.0]]))
    tensor([[0.0000, 0.5000, 0.5000]])
    """

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved | None:  # noqa: D102
        if self.zero_member or self.zero == "drop":
            return None
        top, place, behind = first_two(l)
        there = size > 0
        value, scale = torch.where(there, top, 0.0), there.to(l.dtype)
        if not readable(l):
            return Solved(value, over(scale, _ties_(l, top, w)))
        if not bool(((behind == top) & there).any()):
            return Solved(value, scale, place)
        return Solved(value, over(scale, _ties_(l, top, w)))

    def per(self, unit: Tensor) -> UncertaintySet:  # noqa: D102
        return self

    def fold(self) -> Fold:  # noqa: D102
        return Fold("max")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _WorstStream(self, groups, like, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top = hidden(l, w).amax(dim=1)
        return top, total(w * (l == top[:, None]), l)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        top, ties = dual
        return over(w * (l == top[:, None]).to(l.dtype), ties[:, None])

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        if w.dtype != torch.bool:
            return super()._value(l, w, mass)
        # amax splits its gradient evenly between ties, as `_weights` does, in fewer passes
        return torch.where(total(w, l) == 0, 0.0, hidden(l, w).amax(dim=1))


class _WorstStream(Stream):
    """Stream of `Worst`: running maximum, the measure of the members tied at it, and the place of one of them."""

    def _start(self) -> None:
        self._top, self._ties = self._full(-torch.inf), self._full(0.0, wide=True)
        self._seen, self._place = 0, torch.full_like(self.size, -1, dtype=torch.int64)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self._rise(hidden(l, w).amax(dim=1), lambda top: total(w * (l == top[:, None]), self._ties))

    def _look(self, l: Tensor, size: Tensor, w: Tensor | None) -> None:
        if w is not None or len(l) > 1:
            super()._look(l, size, w)
            return
        largest, place, behind = first_two(l)
        self._place = torch.where(largest > self._top, place + self._seen, self._place)
        alone = readable(l) and bool(behind < largest)
        self._rise(largest, lambda top: (largest == top).double() if alone else total(l == top[:, None], self._ties))
        self._seen += l.shape[1]

    def _rise(self, largest: Tensor, tied: Callable[[Tensor], Tensor]) -> None:
        """Raise the maximum to that of a chunk; `tied` counts the members of the chunk at the new maximum."""
        top = torch.maximum(self._top, largest)
        self._ties = torch.where(top > self._top, 0.0, self._ties) + tied(top)
        self._top = top

    def _merge(self, ranks: ProcessGroup) -> None:
        top = ranks.largest(self._top)
        self._ties = ranks.sum(torch.where(self._top == top, self._ties, 0.0))
        self._place = torch.where(self._top == top, self._place, -1)
        self._top = top

    def support(self) -> Support | None:
        """The largest member if it is alone, or none if it needs no weight; None if there are ties."""
        if not self._seen or self.over.zero_member:
            return None
        weighs = ~(self._top <= self.floor)  # NaN weighs
        if bool(weighs & (self._ties != 1)):
            return None
        place = self._place[weighs & (self._place >= 0)]
        return Support(place, torch.ones_like(place, dtype=self.like.dtype), torch.zeros_like(place, dtype=torch.bool))

    def _turn(self) -> bool:
        self.dual = self._top, self._ties.to(self.like.dtype)
        return False


def _ties_(l: Tensor, top: Tensor, w: Tensor | None) -> Tensor:
    """Overwrite losses [g, n] with the measure of the members at the largest loss `top` [g]; returns its sum [g]."""
    l.copy_(l == top[:, None])
    return (l if w is None else l.mul_(w)).sum(dim=1)


def first_two(l: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest entry of each row, its column, and the second largest entry.

    Takes the maxima over 16 parts of a row first, in one pass: an argmax over the row takes four times as long.
    """
    width = l.shape[1] // 16
    if width < 16:
        top, place = l.max(dim=1)
        return top, place, l.scatter(1, place[:, None], -math.inf).amax(dim=1)
    most = l[:, : 16 * width].reshape(len(l), 16, width).amax(dim=1)
    spots = torch.arange(16, device=l.device) * width
    rest = torch.arange(16 * width, l.shape[1], device=l.device).expand(len(l), -1)
    _, column = most.max(dim=1, keepdim=True)
    around = torch.cat([column + spots, rest], dim=1)
    near = l.gather(1, around)
    top, which = near.max(dim=1, keepdim=True)
    behind = near.scatter(1, which, -math.inf).amax(dim=1)
    others = most.scatter(1, column, -math.inf).amax(dim=1)
    return top[:, 0], around.gather(1, which)[:, 0], torch.maximum(behind, others)

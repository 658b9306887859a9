"""`Mean` and `Worst`: equal weights, or all weight on the largest loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import hidden, over, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.stream import Cap, Dual, Orders, Stream, Sums

__all__ = ["Mean", "Worst"]


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
    """Stream of `Mean`: Σ wl."""

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        return (weighted(l, w).sum(dim=1, dtype=torch.float64),)

    def _turn(self, *sums: Tensor) -> bool:
        self.dual, self._value = (self.size.to(self.like.dtype),), over(sums[0], self.size)
        return False


@dataclass(frozen=True, eq=False)
class Worst(UncertaintySet, swift=True):
    """Worst case: the largest loss has all the weight (hard mining); ties share it evenly.

        U = {p ≥ 0, Σp = 1},    F = max l

    Xu et al. 2022; Qi et al. 2020, section 3.1.

    Relations: KL(γ→0), TopK(1), ChiSquare(ρ ≥ n(n-1)/2).

    >>> Worst().weights(torch.tensor([[1.0, 3.0, 3.0]]))
    tensor([[0.0000, 0.5000, 0.5000]])
    """

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
    """Stream of `Worst`: the largest loss, and the measure of the members tied at it."""

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        top = hidden(l, w).amax(dim=1)
        return top, total(w * (l == top[:, None]), self.size)

    def _join(self, a: Sums, b: Sums) -> Sums:
        top = torch.maximum(a[0], b[0])
        return top, torch.where(a[0] == top, a[1], 0.0) + torch.where(b[0] == top, b[1], 0.0)

    def _turn(self, *sums: Tensor) -> bool:
        self.dual = sums[0], sums[1].to(self.like.dtype)
        return False

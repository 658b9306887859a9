"""Sets with corners: `Mean`, `Worst` and `TopK`, whose value is a (weighted) mean of the largest losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._checks import check_positive
from nearfar.sets.base import Dual, Orders, UncertaintySet, hidden, over, total, weighted


@dataclass(frozen=True, eq=False)
class Mean(UncertaintySet):
    """U = {w/W}: one point, so F = Σ wᵢlᵢ / W, the plain mean.

    Relations: KL(γ→∞), TopK(fraction=1), ChiSquare(0).

    >>> Mean().value(torch.tensor([[1.0, 3.0]]))
    tensor([2.])
    """

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return (total(w, l),)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return over(w.to(l.dtype), dual[0][:, None])

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return over(weighted(l, w).sum(dim=1), total(w, l))


@dataclass(frozen=True, eq=False)
class Worst(UncertaintySet):
    """U = {p ≥ 0, Σp = 1}: all weight may go anywhere, so F = max l (hard mining; 000, and 002 section 3.1).

    Ties share the weight. Relations: KL(γ→0), TopK(1), ChiSquare(ρ ≥ n(n-1)/2).

    >>> Worst().weights(torch.tensor([[1.0, 3.0, 3.0]]))
    tensor([[0.0000, 0.5000, 0.5000]])
    """

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top = hidden(l, w).amax(dim=1)
        return top, total(w * (l == top[:, None]), l)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        top, ties = dual
        return over(w * (l == top[:, None]).to(l.dtype), ties[:, None])

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        if w.dtype != torch.bool:
            return super()._value(l, w, mass)
        # amax sends its gradient to ties in equal shares, as `_weights` does, in fewer passes
        return torch.where(total(w, l) == 0, 0.0, hidden(l, w).amax(dim=1))


@dataclass(frozen=True, eq=False)
class TopK(UncertaintySet):
    """U = {Σp = 1, 0 ≤ pᵢ ≤ wᵢ/K}: F = the mean of the K largest losses (002 DRO-TopK; CVaR).

    K need not be whole: the last loss then counts in part. K above the number of members means all of them. Members
    tied at the threshold share what is left equally, so the weights do not depend on the order of the samples.

    Args:
        k: how many members, counted by their measure.
        fraction: or which share of the measure, in (0, 1]; CVaR at level 1 - fraction.

    Relations: TopK(1) = Worst, TopK(fraction=1) = Mean. Dual: min over t of t + Σ wᵢ(lᵢ-t)₊ / K.

    >>> TopK(2.5).value(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([3.2000])
    """

    k: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.k is None) == (self.fraction is None):
            raise ValueError(
                f"TopK: give k or fraction, exactly one of them, but k={self.k!r} and fraction={self.fraction!r} came."
            )
        if self.k is not None:
            check_positive("TopK", "k", self.k)
        elif self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: fraction must lie in (0, 1], but came as {self.fraction!r}.")

    def _mass(self, l: Tensor, w: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """K of each group: k·orders entries (k counts unordered pairs) or a fraction, never more than there is."""
        size = total(w, l)
        if self.k is None:
            mass = size * float(self.fraction or 1)
        else:
            mass = torch.minimum(torch.full_like(size, self.k) * orders, size)
        return mass if cap is None else torch.minimum(mass, cap)

    def _most(self, n: int) -> int:
        """The most entries that can be asked for, known without looking at the data: 2k covers both orders."""
        return min(n, math.ceil(2 * self.k if self.k is not None else n * float(self.fraction or 1)))

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        k = mass
        threshold = self._threshold(l, w, k)
        above = total(w * (l > threshold[:, None]), l)
        ties = total(w * (l == threshold[:, None]), l)
        return threshold, over(k - above, ties), k

    def _threshold(self, l: Tensor, w: Tensor, k: Tensor) -> Tensor:
        """The loss at which the mass k, spent on the largest losses first, runs out."""
        masked = hidden(l, w)
        if w.dtype == torch.bool and self._most(l.shape[1]) < l.shape[1]:
            largest = masked.topk(self._most(l.shape[1]), dim=1).values
            last = (torch.ceil(k).long() - 1).clamp(0, largest.shape[1] - 1)
            return largest.gather(1, last[:, None])[:, 0]
        largest, order = masked.sort(dim=1, descending=True)
        spent = w.to(torch.float64).gather(1, order).cumsum(dim=1)
        short = (spent < k[:, None] * (1 - 1e-12)).sum(dim=1).clamp(max=l.shape[1] - 1)
        return largest.gather(1, short[:, None])[:, 0]

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        threshold, share, k = (x[:, None] for x in dual)
        part = (l > threshold).to(l.dtype) + share * (l == threshold).to(l.dtype)
        return over(w * part, k)

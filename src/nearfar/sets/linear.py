"""Polyhedral sets `Mean`, `Worst` and `TopK`: the value is a (weighted) mean of the largest losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import hidden, over, readable, total
from nearfar.sets.base import Cap, Dual, Fold, Orders, Solved, Stream, UncertaintySet
from nearfar.sets.selection import TopKStream
from nearfar.sets.stream import MeanStream, WorstStream

__all__ = ["Mean", "TopK", "Worst", "first_two"]


@dataclass(frozen=True, eq=False)
class Mean(UncertaintySet, swift=True):
    """Mean: every member has the same weight, in proportion to its measure.

        U = {w/W},    F = Σ wᵢlᵢ / W

    Relations: KL(γ→∞), TopK(fraction=1), ChiSquare(0).

    >>> Mean().value(torch.tensor([[1.0, 3.0]]))
    tensor([2.])
    """

    def fold(self) -> Fold:  # noqa: D102
        return Fold("sum")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return MeanStream(self, groups, like, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return (total(w, l),)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return over(w.to(l.dtype), dual[0][:, None])

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        # losses of absent members are 0 already
        return over((l if w.dtype == torch.bool else l * w).sum(dim=1), mass)


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
            return Solved(value, scale / _ties_(l, top, w))
        if not bool(((behind == top) & there).any()):
            return Solved(value, scale, place)
        return Solved(value, scale / _ties_(l, top, w))

    def fold(self) -> Fold:  # noqa: D102
        return Fold("max")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return WorstStream(self, groups, like, orders, cap)

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


@dataclass(frozen=True, eq=False)
class TopK(UncertaintySet, swift=True):
    """Top-K: the K largest losses share the weight evenly (DRO-TopK of Qi et al. 2020; CVaR).

        U = {Σp = 1, 0 ≤ pᵢ ≤ wᵢ/K}
        F = mean of the K largest losses = min over t of t + Σ wᵢ(lᵢ-t)₊ / K

    If K is not an integer, the last loss counts in part; if K exceeds the number of members, all of them count. Members
    tied at the threshold t share the remaining weight evenly, so the weights do not depend on the order of the samples.

    Args:
        k: K, the number of members, counted by their measure. Give either `k` or `fraction`.
        fraction: K as a fraction of the measure, in (0, 1]; CVaR at level 1 - fraction.

    Relations: TopK(1) = Worst, TopK(fraction=1) = Mean.

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

    def fold(self) -> Fold:  # noqa: D102
        return Fold("top", most=self.k)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        most = None if self.k is None else math.ceil(2 * self.k)
        return TopKStream(self, groups, like, orders, cap, most)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """K of each group: k·orders entries (k counts unordered pairs) or a fraction, at most the total measure."""
        if self.k is None:
            mass = size * float(self.fraction or 1)
        else:
            mass = torch.minimum(torch.full_like(size, self.k) * orders, size)
        return mass if cap is None else torch.minimum(mass, cap)

    def _most(self, n: int) -> int:
        """Upper bound on K that does not depend on the data: 2k, for both orders of each pair."""
        return min(n, math.ceil(2 * self.k if self.k is not None else n * float(self.fraction or 1)))

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        k = mass
        threshold = self._threshold(l, w, k)
        above = total(w * (l > threshold[:, None]), l)
        ties = total(w * (l == threshold[:, None]), l)
        return threshold, over(k - above, ties), k

    def _threshold(self, l: Tensor, w: Tensor, k: Tensor) -> Tensor:
        """The K-th largest loss of each group, counted by measure."""
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

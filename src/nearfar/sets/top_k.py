"""`TopK` and `Trimmed`, which select by rank, and the radix search that finds the K-th largest loss chunk by chunk."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.tensors import hidden, over, readable, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.counts import Count, amount, check_amount, of_batch
from nearfar.sets.stream import Cap, Dual, Orders, Stream, Sums

__all__ = ["TopK", "Trimmed"]


@dataclass(frozen=True, eq=False)
class TopK(UncertaintySet, swift=True):
    """Top-K: the K largest losses share the weight evenly (DRO-TopK of Qi et al. 2020; CVaR).

        U = {Σp = 1, 0 ≤ pᵢ ≤ wᵢ/K}
        F = mean of the K largest losses = min over t of t + Σ wᵢ(lᵢ-t)₊ / K

    If K is not an integer, the last loss counts in part; if K exceeds the number of members, all of them count. Members
    tied at the threshold t share the remaining weight evenly, so the order of the samples does not matter.

    Args:
        k: K, the number of members, counted by their measure; or a multiple of the batch size, such as "8B" or "B/2".
        fraction: instead, K as a fraction of the measure, in (0, 1]; CVaR at level 1 - fraction.
        effective: instead, K in entries of the group (`UncertaintySet`): over a batch each pair is two entries.

    Relations: TopK(1) = Worst, TopK(fraction=1) = Mean.

    >>> TopK(2.5).value(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([3.2000])
    """

    k: Count | None = None
    fraction: float | None = None
    effective: Count | None = None

    keeps = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("TopK", self, "k", "fraction", "effective")

    def at(self, rows: int) -> "TopK":  # noqa: D102
        return of_batch(self, rows, "k", "effective")

    def fold(self) -> Fold | None:  # noqa: D102
        k = self.k or self.effective or 0.0  # `effective` counts entries: a bound that `_limit` halves
        return None if isinstance(k, str) else Fold("top", most=k, fraction=self.fraction or 0.0)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _RankedStream(self, groups, like, orders, cap)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        mass = amount("TopK", "k", self.k, self.fraction, size, orders, self.effective)
        return mass if cap is None else torch.minimum(mass, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return *edge(l, w, mass, self.fold()), mass

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        threshold, share, k = (x[:, None] for x in dual)
        return over(w * _within(l, threshold, share), k)

    def _keep(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, old: Tensor, share: Tensor) -> Tensor:
        # between the K-th loss and the next, so that K losses lie above
        first, second = (edge(l, w, k, None)[0] for k in (mass, torch.minimum(mass + 1, total(w, l))))
        return torch.lerp(old, ((first + second) / 2).to(old.dtype)[:, None], share[:, None])

    def _at(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, kept: Tensor) -> Tensor:
        return kept[:, 0] + over(weighted((l - kept).clamp_min(0.0), w).sum(dim=1), mass)


@dataclass(frozen=True, eq=False)
class Trimmed(UncertaintySet, swift=True):
    """Trimmed top-K: leave out the T largest losses, then the mean of the K largest of the rest.

        F = ((T + K)·TopK_{T+K}(l) - T·TopK_T(l)) / K
          = min over the T members struck out of  max over p ∈ TopK's U without them of  Σ pᵢ lᵢ

    A mislabeled pair is among the hardest of its batch, and a worst case gives it the most weight. Here the losses of T
    members may grow without a change of F and its weights.

    This is **no worst case over a set**, and not convex. What holds: p ≥ 0, Σp = 1, elementwise from two thresholds;
    F = Σ pᵢlᵢ; dF/dl = p wherever no two losses tie at a threshold (at ties, shared evenly, p is one of Clarke's
    generalized gradients); F grows with every loss, F(l + c) = F(l) + c, F(cl) = cF(l) for c ≥ 0. What does not:
    F ≥ Σ qᵢlᵢ for other weights q, F ≥ mean. A group of T members or less has value 0, as an empty one.

    Args:
        top: T, the number of members left out, as `TopK.k`.
        k: K, likewise.
        top_fraction: instead of `top`, T as a fraction of the measure, in [0, 1).
        fraction: instead of `k`, K as a fraction of the measure (of all members), in (0, 1].
        effective: instead of `k`, K in entries of the group, as in `TopK`.

    Relations: top = 0 is TopK(k). K·Trimmed(T, K) + T·TopK(T) = (T + K)·TopK(T + K), for at least T + K members.

    >>> Trimmed(1, 2).value(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([2.5000])
    """

    top: Count | None = None
    k: Count | None = None
    top_fraction: float | None = None
    fraction: float | None = None
    effective: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("Trimmed", self, "top", "top_fraction", zero=True)
        check_amount("Trimmed", self, "k", "fraction", "effective")

    def at(self, rows: int) -> "Trimmed":  # noqa: D102
        return of_batch(self, rows, "top", "k", "effective")

    def fold(self) -> Fold | None:  # noqa: D102
        k = self.k or self.effective or 0.0
        if isinstance(self.top, str) or isinstance(k, str):
            return None
        return Fold("top", most=(self.top or 0.0) + k,
                    fraction=(self.top_fraction or 0.0) + (self.fraction or 0.0))  # fmt: skip

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _RankedStream(self, groups, like, orders, cap)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """Measure T + K of the largest members up to the last one with weight, and T of those left out, [g, 2]."""
        top = amount("Trimmed", "top", self.top, self.top_fraction, size, orders)
        k = amount("Trimmed", "k", self.k, self.fraction, size, orders, self.effective)
        return torch.stack([torch.minimum(top + (k if cap is None else torch.minimum(k, cap)), size), top], dim=1)

    def _carried(self, mass: Tensor) -> Tensor:
        return mass[:, 0] - mass[:, 1]

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        (last, first), fold = mass.unbind(dim=1), self.fold()
        return *edge(l, w, last, fold), *edge(l, w, first, fold), last - first

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        end, tied, begin, spared, k = (x[:, None] for x in dual)
        part = _within(l, end, tied) - _within(l, begin, spared)
        return over(w * part.clamp_min(0.0), k)  # at equal thresholds, the difference of the shares is rounded


def _within(l: Tensor, threshold: Tensor, share: Tensor) -> Tensor:
    """The fraction of each member [g, n] among the largest: 1 above the threshold [g, 1], `share` at it, else 0."""
    return (l > threshold).to(l.dtype) + share * (l == threshold).to(l.dtype)


def edge(l: Tensor, w: Tensor, k: Tensor, fold: Fold | None) -> tuple[Tensor, Tensor]:
    """The K-th largest loss of each group [g], and the share of the members tied at it that count.

    K [g] counts by measure, and is at most that of the group; on devices where K is not read, `fold` bounds it.
    """
    masked, n = hidden(l, w), l.shape[1]
    most = n if fold is None or fold.fraction else 2 * fold.most  # both orders of each pair
    count = max(1, math.ceil(float(k.amax()) if readable(l) and len(k) else most))
    if w.dtype == torch.bool and count < n:
        largest = masked.topk(count, dim=1).values
        last = (torch.ceil(k).long() - 1).clamp(0, count - 1)
    else:
        largest, order = masked.sort(dim=1, descending=True)
        spent = w.to(torch.float64).gather(1, order).cumsum(dim=1)
        last = (spent < k[:, None] * (1 - 1e-12)).sum(dim=1).clamp(max=n - 1)
    threshold = largest.gather(1, last[:, None])
    above, ties = total(w * (l > threshold), l), total(w * (l == threshold), l)
    return threshold[:, 0], over(k - above, ties)


class _RankedStream(Stream):
    """Stream of `TopK` and `Trimmed`: a radix search for the K-th largest loss, one sweep per digit of its bits.

    Floats of one sign are ordered like their bits read as integers. Each sweep builds a histogram of the next digit,
    over the members that agree with the digits found so far. Its rows are ends x groups: `Trimmed` has two ends.
    """

    constant = True
    _prefix: Tensor | None = None
    """The digits found so far; None in the first sweep."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._width, self._bits = 16 if len(self.size) == 1 else 8, torch.finfo(self.like.dtype).bits
        self._shift, self._above = self._bits - self._width, torch.zeros_like(self.size[:1])

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        ends = 1 if self._prefix is None else len(self._prefix) // len(l)
        l, w = (x.repeat(ends, 1) for x in (l, w))
        # -0.0 + 0.0 = 0.0: equal losses have equal bits
        key = self._flip((l + 0.0).view(torch.int64 if self._bits == 64 else torch.int32)) >> self._shift
        if self._prefix is None:
            digit = key + 2 ** (self._width - 1)
        else:
            w, digit = w * (key >> self._width == self._prefix[:, None]), key & (2**self._width - 1)
        if len(l) == 1 and w.dtype == torch.bool and readable(l):  # a third of the time, but would synchronize a GPU
            chosen = torch.where(w, digit, 2**self._width)[0]
            return (torch.bincount(chosen, minlength=2**self._width + 1)[None, :-1].double(),)
        counts = self.size.new_zeros(len(l), 2**self._width)
        return (counts.scatter_add_(1, digit.long(), w.to(torch.float64)),)

    def _flip(self, key: Tensor) -> Tensor:
        """Map float bits to integers of the same order, or back: flips all bits but the sign of negative numbers."""
        return torch.bitwise_xor(key, (key >> (self._bits - 1)) & (2 ** (self._bits - 1) - 1))

    def _turn(self, *sums: Tensor) -> bool:
        """Find the next digit; after the last one, set the dual variables."""
        # the measure up to each end, [ends·g]: for `Trimmed`, T + K and T
        k = self._mass().reshape(len(self.size), -1).T.reshape(-1)
        counts = sums[0].repeat(len(k) // len(sums[0]), 1)
        tail = counts.flip(1).cumsum(dim=1).flip(1)
        # rounding may put k above the total measure
        wanted = torch.minimum(k.to(torch.float64) * (1 - 1e-12), self._above + tail[:, 0])
        digit = ((self._above[:, None] + tail >= wanted[:, None]).sum(dim=1, keepdim=True) - 1).clamp_min(0)
        ties = counts.gather(1, digit)[:, 0]
        self._above = self._above + tail.gather(1, digit)[:, 0] - ties
        digit = digit[:, 0]
        self._prefix = digit - 2 ** (self._width - 1) if self._prefix is None else (self._prefix << self._width) | digit
        self._shift -= self._width
        if self._shift >= 0:
            return True
        key = self._flip(self._prefix)
        threshold = key.view(torch.float64) if self._bits == 64 else key.to(torch.int32).view(torch.float32)
        share = over(k - self._above.to(k.dtype), ties.to(k.dtype))
        ends = torch.stack([threshold, share]).reshape(2, -1, len(self.size)).transpose(0, 1).flatten(0, 1)
        self.dual = *ends, self.taken()
        return False

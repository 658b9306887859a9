"""`Trimmed`: the largest losses are left out, and the next ones share the weight, so that wrong labels do not lead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import over
from nearfar.sets.base import UncertaintySet
from nearfar.sets.counts import Count, check_count, most_of, of_batch, unread
from nearfar.sets.stream import Cap, Dual, Orders, Stream
from nearfar.sets.top_k import Digits, Largest, TopKStream, edge

__all__ = ["Trimmed"]


@dataclass(frozen=True, eq=False)
class Trimmed(UncertaintySet, swift=True):
    """Trimmed top-K: leave out the T largest losses, then the mean of the K largest of the rest.

        F = ((T + K)·TopK_{T+K}(l) - T·TopK_T(l)) / K
          = min over the T members struck out of  max over p ∈ TopK's U without them of  Σ pᵢ lᵢ

    A mislabeled pair is among the hardest of its batch, and a worst case gives it the most weight. Here T members may
    be as wrong as they like: F and its weights do not change when losses that are left out grow.

    This is **no worst case over a set**: a difference of two convex functions, itself not convex. What holds: weights
    p ≥ 0 with Σp = 1, elementwise from two thresholds; F = Σ pᵢlᵢ; dF/dl = p wherever no two losses tie at a threshold
    (at ties, shared evenly, p is one of Clarke's generalized gradients); F grows with every loss, F(l + c) = F(l) + c,
    F(cl) = cF(l) for c ≥ 0. What does not: F ≥ Σ qᵢlᵢ for other weights q, convexity, F ≥ mean.

    Of fewer than T + K members, all but the T largest count; of T members or less, none, as in an empty group.

    Args:
        top: T, the number of members left out, counted by their measure; or a multiple of the batch size such as "B/2"
            (see `TopK`). Give either `top` or `top_fraction`.
        k: K, likewise. Give either `k` or `fraction`.
        top_fraction: T as a fraction of the measure, in [0, 1).
        fraction: K as a fraction of the measure (of all members, before any is left out), in (0, 1].

    Relations: top = 0 is TopK(k). K·Trimmed(T, K) + T·TopK(T) = (T + K)·TopK(T + K), for at least T + K members.

    >>> Trimmed(1, 2).value(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([2.5000])
    """

    top: Count | None = None
    k: Count | None = None
    top_fraction: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, part in (("top", "top_fraction"), ("k", "fraction")):
            count, share = getattr(self, name), getattr(self, part)
            if (count is None) == (share is None):
                raise ValueError(
                    f"Trimmed: give {name} or {part}, exactly one of them, but {name}={count!r} and {part}={share!r} "
                    "came."
                )
        if self.top is not None:
            check_count("Trimmed", "top", self.top, zero=True)
        elif self.top_fraction is not None and not 0 <= self.top_fraction < 1:
            raise ValueError(f"Trimmed: top_fraction must lie in [0, 1), but came as {self.top_fraction!r}.")
        if self.k is not None:
            check_count("Trimmed", "k", self.k)
        elif self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"Trimmed: fraction must lie in (0, 1], but came as {self.fraction!r}.")

    def at(self, rows: int) -> Trimmed:  # noqa: D102
        return of_batch(self, rows, "top", "k")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        top, k = most_of(self.top, orders), most_of(self.k, orders)
        return _TrimmedStream(self, groups, like, orders, cap, None if top is None or k is None else top + k)

    def taken(self, losses: Tensor, measure: Tensor, *, orders: Orders = 1, cap: Tensor | None = None) -> Tensor:  # noqa: D102
        first, last = super().taken(losses, measure, orders=orders, cap=cap).unbind(dim=1)
        return last - first

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """[g, 2]: the measure that is left out, and that with the members that carry weight: T and T + K."""
        first = torch.minimum(_mass("top", self.top, self.top_fraction, size, orders), size)
        k = _mass("k", self.k, self.fraction, size, orders)
        last = torch.minimum(first + (k if cap is None else torch.minimum(k, cap)), size)
        return torch.stack([first, last], dim=1)

    def _most(self, n: int) -> tuple[int, int]:
        """Upper bounds on T and T + K that do not depend on the data."""
        top, k = (
            n * float(part or 0) if count is None else 2 * unread("Trimmed", name, count)  # for both orders of a pair
            for name, count, part in (("top", self.top, self.top_fraction), ("k", self.k, self.fraction))
        )
        return min(n, math.ceil(top)), min(n, math.ceil(top + k))

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        (first, last), n = mass.unbind(dim=1), l.shape[1]
        begin, end = self._most(n)
        return *edge(l, w, last, end), *edge(l, w, first, begin), last - first

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return over(w * _middle(l, dual), dual[-1][:, None])


def _mass(name: str, count: Count | None, fraction: float | None, size: Tensor, orders: Orders) -> Tensor:
    """T or K of each group: a count for each order of a pair, or a fraction of the group's measure `size` [g]."""
    if count is None:
        return size * float(fraction or 0)
    return torch.full_like(size, unread("Trimmed", name, count)) * orders


def _middle(l: Tensor, dual: Dual) -> Tensor:
    """The part of each member [g, n] that counts: what is among the T + K largest, less what is among the T largest."""
    end, tied, begin, spared, _ = (x[:, None] for x in dual)
    within = (l > end).to(l.dtype) + tied * (l == end).to(l.dtype)
    before = (l > begin).to(l.dtype) + spared * (l == begin).to(l.dtype)
    return (within - before).clamp_min(0.0)  # at equal thresholds, of the shares' rounding


class _TrimmedStream(TopKStream):
    """Stream of `Trimmed`: that of the T + K largest, and where a radix search is used, a second one for the T-th."""

    over: Trimmed

    def __init__(
        self, over: Trimmed, groups: int, like: Tensor, orders: Orders, cap: Cap | None, most: int | None
    ) -> None:
        super().__init__(over, groups, like, orders, cap, most)
        self._before: Digits | None = None

    def _keeps(self, *, weighted: bool) -> bool:
        kept = super()._keeps(weighted=weighted)
        if not kept and self._before is None:
            self._before = Digits(len(self.size), self.like)
        return kept

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        super()._add(l, w, tag)
        if self._before is not None:
            self._before.add(l, w)

    def _merge(self, ranks: ProcessGroup) -> None:
        super()._merge(ranks)
        if self._before is not None:
            self._before.merge(ranks)

    def _turn(self) -> bool:
        first, last = self.taken().unbind(dim=1)
        if self._digits is not None and self._before is not None:
            again = self._digits.turn(last)
            if self._before.turn(first) and again:
                return True
            edges = self._digits.threshold(), self._before.threshold()
        else:
            assert self._kept is not None  # noqa: S101 - there was a chunk
            edges = self._kept.threshold(last), self._kept.threshold(first)
        (end, above, tied), (begin, higher, spared) = edges
        within, before = last - above.to(last.dtype), first - higher.to(first.dtype)
        self.dual = end, over(within, tied.to(last.dtype)), begin, over(before, spared.to(first.dtype)), last - first
        return False

    def _parts(self, kept: Largest) -> Tensor:
        part = _middle(kept.values, self.dual)
        return over(part * ((kept.values > self.floor) & torch.isfinite(kept.values)), self.dual[-1][:, None])

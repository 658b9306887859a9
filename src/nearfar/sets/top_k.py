"""`TopK`, the mean of the K largest losses: selected chunk by chunk by keeping them, or by a radix search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, over, readable, total
from nearfar.sets.base import Fold, Solved, UncertaintySet, in_blocks
from nearfar.sets.counts import Count, check_count, most_of, of_batch, unread
from nearfar.sets.stream import Cap, Dual, Orders, Stream, Support, Weighing

__all__ = ["KEPT", "Digits", "Largest", "TopK", "TopKStream", "edge"]

KEPT = 2**17
"""Maximum number of members kept; for a larger K, the threshold is found by a radix search in a few sweeps."""
STRETCH = 16
"""Members per block that are rejected together if the largest of them is too small."""
MANY = 2**14
"""Smallest chunk that is filtered by such blocks."""


@dataclass(frozen=True, eq=False)
class TopK(UncertaintySet, swift=True):
    """Top-K: the K largest losses share the weight evenly (DRO-TopK of Qi et al. 2020; CVaR).

        U = {Σp = 1, 0 ≤ pᵢ ≤ wᵢ/K}
        F = mean of the K largest losses = min over t of t + Σ wᵢ(lᵢ-t)₊ / K

    If K is not an integer, the last loss counts in part; if K exceeds the number of members, all of them count. Members
    tied at the threshold t share the remaining weight evenly, so the weights do not depend on the order of the samples.

    Args:
        k: K, the number of members, counted by their measure, or a multiple of the batch size such as "8B" or "B/2",
            which a loss makes a number before it computes. Give either `k` or `fraction`.
        fraction: K as a fraction of the measure, in (0, 1]; CVaR at level 1 - fraction.

    Relations: TopK(1) = Worst, TopK(fraction=1) = Mean.

    >>> TopK(2.5).value(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([3.2000])
    """

    k: Count | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.k is None) == (self.fraction is None):
            raise ValueError(
                f"TopK: give k or fraction, exactly one of them, but k={self.k!r} and fraction={self.fraction!r} came."
            )
        if self.k is not None:
            check_count("TopK", "k", self.k)
        elif self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: fraction must lie in (0, 1], but came as {self.fraction!r}.")

    def at(self, rows: int) -> TopK:  # noqa: D102
        return of_batch(self, rows, "k")

    def fold(self) -> Fold:  # noqa: D102
        return Fold("top", most=None if isinstance(self.k, str) else self.k)

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved | None:  # noqa: D102
        return None if self.zero_member or not readable(l) else in_blocks(self._solve_, l, self.zero, size, w)

    def _solve_(self, l: Tensor, size: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value and scale [g] of some groups; overwrites the losses."""
        k = self._limit(size, 1, None)
        values, mass, last = _first(l, k, w)
        t = torch.where(size > 0, values.gather(1, last)[:, 0], 0.0)[:, None]
        above = values > t
        ahead, ties = (torch.where(each, mass, 0.0).sum(dim=1) for each in (above, values == t))
        if values.shape[1] < l.shape[1]:  # members beyond these may be tied as well
            there = (values[:, -1:] == t).nonzero()[:, 0]
            same = l[there] == t[there]
            ties[there] = (same if w is None else same * w[there]).sum(dim=1).to(ties.dtype)
        value = over(torch.where(above, mass * values, 0.0).sum(dim=1) + (k - ahead) * t[:, 0], k)
        share = over(k - ahead, ties)[:, None].to(l.dtype)
        # sign 1, 0 and -1 become 1, the share of ties, and 0
        l.sub_(t).sign_().add_(share).clamp_(0.0, 1.0)
        if w is not None:
            l.mul_(w)
        return value.to(l.dtype), over(torch.ones_like(k), k).to(l.dtype)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return TopKStream(self, groups, like, orders, cap, most_of(self.k, orders))

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """K of each group: k·orders entries (k counts unordered pairs) or a fraction, at most the total measure."""
        if self.k is None:
            mass = size * float(self.fraction or 1)
        else:
            mass = torch.minimum(torch.full_like(size, unread("TopK", "k", self.k)) * orders, size)
        return mass if cap is None else torch.minimum(mass, cap)

    def _most(self, n: int) -> int:
        """Upper bound on K that does not depend on the data: 2k, for both orders of each pair."""
        k = n * float(self.fraction or 1) if self.k is None else 2 * unread("TopK", "k", self.k)
        return min(n, math.ceil(k))

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return *edge(l, w, mass, self._most(l.shape[1])), mass

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        threshold, share, k = (x[:, None] for x in dual)
        part = (l > threshold).to(l.dtype) + share * (l == threshold).to(l.dtype)
        return over(w * part, k)


def edge(l: Tensor, w: Tensor, k: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Where the K largest members of each group end: the K-th largest loss [g], and the share of its ties that count.

    Args:
        l: [g, n] losses of prepared members.
        w: [g, n] their measure, by which K counts.
        k: [g] K, at most the measure of the group; 0 gives a share of 0.
        most: an upper bound on K that does not depend on the data.
    """
    masked = hidden(l, w)
    if w.dtype == torch.bool and most < l.shape[1]:
        largest = masked.topk(max(1, most), dim=1).values
        last = (torch.ceil(k).long() - 1).clamp(0, largest.shape[1] - 1)
    else:
        largest, order = masked.sort(dim=1, descending=True)
        spent = w.to(torch.float64).gather(1, order).cumsum(dim=1)
        last = (spent < k[:, None] * (1 - 1e-12)).sum(dim=1).clamp(max=l.shape[1] - 1)
    threshold = largest.gather(1, last[:, None])
    above, ties = total(w * (l > threshold), l), total(w * (l == threshold), l)
    return threshold[:, 0], over(k - above, ties)


def _first(l: Tensor, k: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest members of each group, enough for the K-th, or all: losses and measures [g, c], place [g, 1] of it.

    Args:
        l: [g, n] losses, -inf for absent members.
        k: [g] K.
        w: [g, n] weights of the members, 0 for absent ones; None if every member counts once.
    """
    most, n = float(k.amax()), l.shape[1]
    if w is None:
        values = l.topk(min(n, math.ceil(most) + 1), dim=1).values
        return values, torch.ones_like(values), (torch.ceil(k).long() - 1).clamp_min(0)[:, None]
    count = math.ceil(most / max(float(w.mean()), 1e-30)) + 1
    while True:
        values, place = l.topk(min(n, count), dim=1)
        mass = w.gather(1, place)
        spent = mass.double().cumsum(dim=1)
        short = spent < k.double()[:, None] * (1 - 1e-12)
        if count >= n or not bool(short[:, -1].any()):
            return values, mass.to(k.dtype), short.sum(dim=1, keepdim=True).clamp_max(min(n, count) - 1)
        count *= 2


class Largest:
    """Running top-k: the `count` largest members of each group so far, and the number tied with the smallest of them.

    Ties that do not fit are counted without being kept: while the smallest kept value stays, new ties are added; when
    it rises, all members equal to the new one are among those kept or in the current chunk.

    Args:
        groups: g.
        count: members kept per group.
        like: a tensor of the losses' dtype and device.
        bottom: members that do not exceed it are neither kept nor counted.
    """

    def __init__(self, groups: int, count: int, like: Tensor, bottom: float = -torch.inf) -> None:
        self.bottom = bottom
        self.values = torch.full((groups, count), bottom, dtype=like.dtype, device=like.device)
        self.place = torch.zeros(groups, count, dtype=torch.int64, device=like.device)
        self.tag = torch.zeros(groups, count, dtype=torch.bool, device=like.device)
        self.ties = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self.seen = 0
        self._everyone: tuple[Tensor, Tensor] | None = None

    def look(self, masked: Tensor, tag: Tensor | None = None) -> None:
        """Add a chunk [g, c] in which absent members are -inf."""
        start, self.seen = self.seen, self.seen + masked.shape[1]
        place = None
        if readable(masked) and len(masked) == 1 and masked.shape[1] >= MANY:
            place = self._promising(masked[0])
            masked = masked[:, place]
        if not masked.shape[1]:
            return
        new = masked.topk(min(self.values.shape[1], masked.shape[1]), dim=1, sorted=False)
        found = new.indices if place is None else place[new.indices]
        tags = torch.zeros_like(found, dtype=torch.bool) if tag is None else tag.gather(1, found)
        last = self.values[:, -1:]
        kept = torch.cat([self.values, new.values], dim=1).topk(self.values.shape[1], dim=1)
        rises = kept.values[:, -1:] > last
        before = torch.where(rises, self.values == kept.values[:, -1:], False).sum(dim=1)
        self.ties = torch.where(rises[:, 0], before, self.ties) + (masked == kept.values[:, -1:]).sum(dim=1)
        self.values = kept.values
        self.place = torch.cat([self.place, found + start], dim=1).gather(1, kept.indices)
        self.tag = torch.cat([self.tag, tags], dim=1).gather(1, kept.indices)

    def _promising(self, masked: Tensor) -> Tensor:
        """Indices [k] of the members of a chunk that may be among the K largest; synchronizes with the device.

        Compares the maxima of blocks of 16 members. The K-th largest of these maxima has K members at or above it, so
        nothing below it can be among the K largest.
        """
        blocks = len(masked) // MANY
        most = masked[: blocks * MANY].view(blocks, STRETCH, -1).amax(dim=1)
        floor, count = self.values[0, -1], self.values.shape[1]
        if most.numel() >= count:
            floor = torch.maximum(floor, most.reshape(-1).topk(count, sorted=False).values.amin())
        # negated comparisons keep NaN
        block, column = (~(most < floor) & ~(most <= self.bottom)).nonzero(as_tuple=True)
        first = block * MANY + column
        inside = (first[:, None] + torch.arange(0, MANY, MANY // STRETCH, device=masked.device)).reshape(-1)
        rest = torch.arange(blocks * MANY, len(masked), device=masked.device)
        place = torch.cat([inside, rest])
        values = masked[place]
        return place[~(values < floor) & ~(values <= self.bottom)]

    def threshold(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k-th largest loss [g], the number of members above it, and the number tied with it."""
        values, ties = self._everyone or (self.values, self.ties)
        last = (torch.ceil(k).long() - 1).clamp(0, values.shape[1] - 1)
        found = values.gather(1, last[:, None])
        return found[:, 0], (values > found).sum(dim=1), _tied(values, ties, found)

    def merge(self, ranks: ProcessGroup) -> None:
        """Use the members of all processes for thresholds; the members kept remain those of this process."""
        values, ties = ranks.gather(self.values), ranks.gather(self.ties)
        largest = values.transpose(0, 1).flatten(1).topk(values.shape[2], dim=1).values
        at_last = torch.stack([_tied(*mine, largest[:, -1:]) for mine in zip(values, ties, strict=True)])
        self._everyone = largest, at_last.sum(dim=0)

    def complete(self, threshold: Tensor) -> bool:
        """Whether all of this process's members tied at the threshold [g] are kept, and `sound`; synchronizes."""
        tied = (self.values == threshold[:, None]).sum(dim=1)
        known = tied == _tied(self.values, self.ties, threshold[:, None])
        return bool(known.all()) and self.sound()

    def sound(self) -> bool:
        """Whether no member kept is NaN or infinite, which must show in the value even without weight; synchronizes."""
        return bool((self.values < torch.inf).all())


def _tied(values: Tensor, ties: Tensor, at: Tensor) -> Tensor:
    """Number of members [g] equal to `at` [g, 1], given the kept values [g, k] and the ties [g] with the last one."""
    return torch.where(at[:, 0] > values[:, -1], (values == at).sum(dim=1), ties)


class Digits:
    """Radix search for the K-th largest member of each group: one sweep per digit of its bits, whatever K is.

    Floats of one sign are ordered like their bits read as integers. Each sweep builds a histogram of the next digit
    over the members that agree with the digits found so far.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        self.bits = torch.finfo(like.dtype).bits
        self.width = 16 if groups == 1 else 8
        self.shift = self.bits - self.width
        self.like = like
        self.prefix: Tensor | None = None
        self.above = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self.counts = torch.zeros(groups, 2**self.width, dtype=torch.float64, device=like.device)

    def _flip(self, key: Tensor) -> Tensor:
        """Map float bits to integers of the same order, or back: flips all bits but the sign of negative numbers."""
        return torch.bitwise_xor(key, (key >> (self.bits - 1)) & (2 ** (self.bits - 1) - 1))

    def add(self, l: Tensor, w: Tensor) -> None:
        """Add a chunk [g, c] to the histograms."""
        integer = torch.int64 if self.bits == 64 else torch.int32
        key = self._flip((l + 0.0).view(integer))  # -0.0 + 0.0 = 0.0: equal losses have equal bits
        digit = key >> self.shift
        if self.prefix is None:
            digit = digit + 2 ** (self.width - 1)
        else:
            agrees = digit >> self.width == self.prefix[:, None]
            w = w & agrees if w.dtype == torch.bool else w * agrees
            digit = digit & (2**self.width - 1)
        if len(l) == 1 and w.dtype == torch.bool and readable(l):  # a third of the time, but a GPU would synchronize
            chosen = torch.where(w, digit, 2**self.width)[0]
            self.counts[0] += torch.bincount(chosen, minlength=2**self.width + 1)[:-1]
        else:
            self.counts.scatter_add_(1, digit.long(), w.to(torch.float64))

    def merge(self, ranks: ProcessGroup) -> None:
        """Sum the histograms of all processes."""
        self.counts = ranks.sum(self.counts)

    def turn(self, k: Tensor) -> bool:
        """Determine the next digit of the k-th largest; returns whether more digits are left."""
        tail = self.counts.flip(1).cumsum(dim=1).flip(1)
        # rounding may put k above the total measure
        wanted = torch.minimum(k.to(torch.float64) * (1 - 1e-12), self.above + tail[:, 0])
        enough = self.above[:, None] + tail >= wanted[:, None]
        digit = (enough.sum(dim=1) - 1).clamp_min(0)[:, None]
        here = self.counts.gather(1, digit)
        self.above = self.above + (tail.gather(1, digit) - here)[:, 0]
        self.ties = here[:, 0]
        digit = digit[:, 0]
        half = 2 ** (self.width - 1)
        self.prefix = digit - half if self.prefix is None else (self.prefix << self.width) | digit
        self.counts = torch.zeros_like(self.counts)
        self.shift -= self.width
        return self.shift >= 0

    def threshold(self) -> tuple[Tensor, Tensor, Tensor]:
        """The k-th largest loss [g], the measure above it, and the measure tied with it."""
        assert self.prefix is not None  # noqa: S101 - a turn was taken
        key = self._flip(self.prefix)
        found = key.view(torch.float64) if self.bits == 64 else key.to(torch.int32).view(torch.float32)
        return found, self.above, self.ties


class TopKStream(Stream):
    """Stream of `TopK` and `Trimmed`: keeps the largest members if few and unweighted, else uses a radix search.

    `most` is the largest number of members that may carry weight, or None if unknown.
    """

    constant = True

    def __init__(
        self, over: Weighing, groups: int, like: Tensor, orders: Orders, cap: Cap | None, most: int | None
    ) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._most = most
        self._kept: Largest | None = None
        self._digits: Digits | None = None

    def _start(self) -> None: ...

    def _keeps(self, *, weighted: bool) -> bool:
        """Whether the largest members are kept; decided by the first chunk."""
        if self._kept is None and self._digits is None:
            if self._most is not None and self._most * len(self.size) <= KEPT and not weighted:
                self._kept = Largest(len(self.size), self._most, self.like, self.floor)
            else:
                self._digits = Digits(len(self.size), self.like)
        return self._kept is not None

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        if self._keeps(weighted=w.dtype != torch.bool) and self._kept is not None:
            self._kept.look(hidden(l, w), tag)
        elif self._digits is not None:
            self._digits.add(l, w)

    def _look(self, l: Tensor, size: Tensor, w: Tensor | None) -> None:
        if self._keeps(weighted=w is not None) and self._kept is not None:
            self._kept.look(l)
        else:
            super()._look(l, size, w)

    def _merge(self, ranks: ProcessGroup) -> None:
        kept = self._digits if self._kept is None else self._kept
        assert kept is not None  # noqa: S101 - there was a chunk
        kept.merge(ranks)

    def _turn(self) -> bool:
        k = self.taken()
        if self._digits is not None and self._digits.turn(k):
            return True
        if self._digits is not None:
            threshold, above, ties = self._digits.threshold()
        else:
            assert self._kept is not None  # noqa: S101 - there was a chunk
            threshold, above, ties = self._kept.threshold(k)
        self.dual = threshold, over(k - above.to(k.dtype), ties.to(k.dtype)), k
        return False

    def _parts(self, kept: Largest) -> Tensor:
        """Weights [g, k] of the members kept."""
        threshold, share, k = (x[:, None] for x in self.dual)
        part = (kept.values > threshold).to(k.dtype) + share * (kept.values == threshold)
        return over(part * ((kept.values > self.floor) & torch.isfinite(kept.values)), k)

    def support(self) -> Support | None:
        """The K largest members; None unless all members tied at the threshold are kept (synchronizes)."""
        kept = self._kept
        if kept is None or len(self.size) > 1 or self.over.zero_member:
            return None
        if self.floor == -math.inf and not readable(kept.values):
            return None
        # members without weight need not be kept
        idle = bool(self.dual[0] <= self.floor) and kept.sound()
        if not self.ranks.all_agree(idle or kept.complete(self.dual[0]), kept.values):
            return None
        part = self._parts(kept)[0]
        chosen = (part > 0).nonzero()[:, 0]
        return Support(kept.place[0, chosen], part[chosen], kept.tag[0, chosen])

    def value(self) -> Tensor:
        """Mean of the K largest losses; only if they are kept."""
        assert self._kept is not None  # noqa: S101 - called only if there is a support
        part = self._parts(self._kept)
        return self.ranks.sum((torch.where(part > 0, self._kept.values, 0.0) * part).sum(dim=1))

"""Streams: the dual of a group told chunk by chunk, so that its members need never be in memory at once.

    stream = over.stream(groups, like)
    wanted = True
    while wanted:                              one sweep over all chunks, or as many as the set needs
        for l, w in chunks:
            stream.add(l, w)
        wanted = stream.turn()
    p = stream.weights(l, w)                   elementwise: any chunk, in any order

With several processes each tells its own chunks, and `turn` merges what they found (`ranks`): all then know the same.

Chunks are l [g, c] with a measure w [g, c], c of the members of each of g groups. Sums are kept in float64: a float32
running sum over 16 million pairs loses five digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.measure import hidden, over, total, weighted
from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar.sets.base import Dual, Orders, UncertaintySet

Cap = Callable[[], Tensor]
"""The most a group may take [g], asked for when a sweep is over."""


@dataclass(frozen=True, eq=False)
class Support:
    """The few members that hold all the weight of a group [1, n]: which they are (in the order they came), how much.

    Args:
        place: [k] the how-manieth member that came.
        weights: [k] p*.
        tag: [k] what was told of each when it came.
    """

    place: Tensor
    weights: Tensor
    tag: Tensor


class Stream(ABC):
    """What a set keeps of g groups while their members pass by."""

    constant = False
    """The value is Σ p*l with p* held constant, to be summed by who sweeps once more."""
    ranks: ProcessGroup = ALONE
    """Who else is told members of the same groups."""

    def __init__(self, over: UncertaintySet, groups: int, like: Tensor, orders: Orders, cap: Cap | None) -> None:
        self.over = over
        self.like = like
        self.sweep = 0
        self.size = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self._orders = orders
        self._cap = cap
        self._fresh = True

    def add(self, losses: Tensor, measure: Tensor, tag: Tensor | None = None) -> None:
        """One chunk [g, c]; `tag` [g, c] is handed back with the members that matter, where a set keeps any."""
        if self._fresh:
            self._fresh = False
            self._start()
            if self.over.zero_member and self.ranks.rank == 0:
                alone = torch.ones(len(losses), 1, dtype=measure.dtype, device=measure.device)
                self._take(losses.new_zeros(len(losses), 1), alone, None)
        self._take(*self._members(losses, measure), tag)

    def _take(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        if not self.sweep:
            self.size += total(w, self.size)
        self._add(l, w, tag)

    def turn(self) -> bool:
        """End a sweep; whether another is wanted."""
        if self.ranks.world > 1:
            if not self.sweep:
                self.size.copy_(self.ranks.sum(self.size))
            self._merge(self.ranks)
        self._fresh = True
        self.sweep += 1
        return self._turn()

    def weights(self, losses: Tensor, measure: Tensor) -> Tensor:
        """p* [g, c] of a chunk, after the last sweep."""
        l, w = self._members(losses, measure)
        return self._weights(l, w)

    def taken(self) -> Tensor:
        """How much measure [g] the weight may rest on; known after the first sweep."""
        return self.over._limit(self.size.to(self.like.dtype), self._orders, None if self._cap is None else self._cap())

    def support(self) -> Support | None:
        """The members that hold all the weight, where they are few and known."""
        return None

    def _members(self, losses: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
        if self.over.zero == "drop":
            alive = ~(losses <= 0)  # a NaN stays a member and shows
            measure = measure & alive if measure.dtype == torch.bool else measure * alive
        return hidden(losses, measure, 0.0), measure

    def _full(self, value: float, *, wide: bool = False) -> Tensor:
        dtype = torch.float64 if wide else self.like.dtype
        return torch.full((len(self.size),), value, dtype=dtype, device=self.like.device)

    def _narrow(self, x: Tensor) -> Tensor:
        """A result [g] in the type of the losses, 0 for an empty group."""
        return torch.where(self.size == 0, 0.0, x).to(self.like.dtype)

    @abstractmethod
    def _start(self) -> None:
        """Begin a sweep."""

    @abstractmethod
    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        """Members of one chunk: absent ones hold l = 0 and w = 0."""

    @abstractmethod
    def _merge(self, ranks: ProcessGroup) -> None:
        """At the end of a sweep: what was kept of it becomes that of all ranks together."""

    def _turn(self) -> bool:
        return False

    @abstractmethod
    def value(self) -> Tensor:
        """F [g], after the last sweep."""

    @abstractmethod
    def _weights(self, l: Tensor, w: Tensor) -> Tensor: ...


class MeanStream(Stream):
    """Running Σ w and Σ wl."""

    def _start(self) -> None:
        self._sum = self._full(0.0, wide=True)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self._sum += weighted(l, w).sum(dim=1, dtype=torch.float64)

    def _merge(self, ranks: ProcessGroup) -> None:
        self._sum = ranks.sum(self._sum)

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(over(self._sum, self.size))

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return over(w.to(l.dtype), self.size.to(l.dtype)[:, None])


class WorstStream(Stream):
    """Running maximum, and the measure of the members tied there."""

    def _start(self) -> None:
        self._top = self._full(-torch.inf)
        self._ties = self._full(0.0, wide=True)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        top = torch.maximum(self._top, hidden(l, w).amax(dim=1))
        here = total(w * (l == top[:, None]), self._ties)
        self._ties = torch.where(top > self._top, 0.0, self._ties) + here
        self._top = top

    def _merge(self, ranks: ProcessGroup) -> None:
        top = ranks.largest(self._top)
        self._ties = ranks.sum(torch.where(self._top == top, self._ties, 0.0))
        self._top = top

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(self._top)

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return over(w * (l == self._top[:, None]).to(l.dtype), self._ties.to(l.dtype)[:, None])


class HeldStream(Stream):
    """Another set's weights with the value Σ p*l, p* held constant; `height` is what that set sees of a loss."""

    constant = True

    def __init__(self, inner: Stream, height: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(inner.over, len(inner.size), inner.like, inner._orders, inner._cap)
        self.inner = inner
        self.size = inner.size
        self._height = height

    def _start(self) -> None:
        self.inner._start()

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self.inner._add(l if self._height is None else self._height(l), w, tag)

    def _merge(self, ranks: ProcessGroup) -> None:
        self.inner.ranks = ranks
        self.inner._merge(ranks)

    def _turn(self) -> bool:
        self.inner.sweep = self.sweep
        return self.inner._turn()

    def support(self) -> Support | None:  # noqa: D102
        return self.inner.support()

    def value(self) -> Tensor:  # noqa: D102
        return self.inner.value()

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return self.inner._weights(l if self._height is None else self._height(l), w)


class DualStream(Stream):
    """A stream that ends in the set's own dual, from which the set's own weights follow elementwise."""

    dual: Dual = ()

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(self.dual[0])

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return self.over._weights(l, w, self.dual)


def both(outer: UncertaintySet, inner: UncertaintySet) -> UncertaintySet:
    """`inner` with what `outer`, which wraps it, says of zeros and of the zero member as well."""
    zero: Literal["keep", "drop"] = "drop" if "drop" in (outer.zero, inner.zero) else "keep"
    return replace(inner, zero=zero, zero_member=outer.zero_member or inner.zero_member)

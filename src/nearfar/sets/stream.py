"""Streams: reduce groups chunk by chunk, so that their members are never in memory all at once.

    stream = over.stream(groups, like)
    wanted = True
    while wanted:                              one or more sweeps over all chunks, as the set needs
        for l, w in chunks:
            stream.add(l, w)
        wanted = stream.turn()
    p = stream.weights(l, w)                   elementwise: any chunk, in any order

With several processes (`ranks`), each adds its own chunks, and `turn` merges the results, so that all have the same.

Chunks are l [g, c] with a measure w [g, c]: c members of each of g groups. Sums are accumulated in float64: a float32
running sum over 16 million pairs loses five digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import hidden, total

__all__ = ["Cap", "Dual", "Orders", "Stream", "Support", "Weighing"]

Orders = Tensor | int
Cap = Callable[[], Tensor]
"""Returns the upper limit [g] on the measure that carries weight; called at the end of a sweep."""
Dual = tuple[Tensor, ...]
"""Dual variables, tensors [g]; the first is the one that `explain` shows."""


class Weighing(Protocol):
    """What a stream asks of its set, an `UncertaintySet`."""

    @property
    def zero(self) -> str: ...  # noqa: D102

    @property
    def zero_member(self) -> bool: ...  # noqa: D102

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor: ...

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Support:
    """The few members of a group [1, n] that carry all its weight: their indices and weights.

    Args:
        place: [k] index in order of arrival.
        weights: [k] p*.
        tag: [k] the tag passed to `Stream.add` with each member.
    """

    place: Tensor
    weights: Tensor
    tag: Tensor


class Stream(ABC):
    """Base class: reduces g groups whose members arrive chunk by chunk, in one or more sweeps over all chunks.

    A set's stream writes `_start`, `_add`, `_merge`, `_turn`, `value` and `_weights`. Engines that may overwrite their
    chunks call `look` for `add` and `weigh_` for `weights`: absent members are marked in the losses, without a mask.

    Args:
        over: the set.
        groups: g.
        like: a tensor of the losses' dtype and device.
        orders: see `UncertaintySet.value`.
        cap: see `UncertaintySet.value`; a function, because the limit may depend on another stream.
    """

    constant = False
    """Whether the value is Σ p*l with p* held constant, which the caller sums in one more sweep."""
    single = False
    """Whether `weigh_` also adds: weights are known up to one factor while members still arrive, in a single sweep."""
    absent = -math.inf
    """The loss that marks an absent member for `look` and `weigh_`."""
    even = False
    """Whether the weights are the measure times a factor, in which case `weigh_` does not write them."""
    vanishes = False
    """Whether members without loss have a negligible weight."""
    floor = -math.inf
    """Members whose loss does not exceed this one need no weight: their slope is 0. Set by the engine."""
    times = 1
    """How often each member counts: 2 if one of the two orders of each pair is swept. Set by the engine."""
    ranks: ProcessGroup = ALONE
    """The processes that hold other members of the same groups."""
    merged: Tensor | None = None
    """[g] factor of all that `weigh_` wrote before the last `turn`; None for 1."""
    dual: Dual = ()
    """The set's dual variables, if `_weights` is to be that of the set."""

    def __init__(self, over: Weighing, groups: int, like: Tensor, orders: Orders, cap: Cap | None) -> None:
        self.over = over
        self.like = like
        self.sweep = 0
        self.size = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self._orders = orders
        self._cap = cap
        self._fresh = True
        self._held = torch.zeros_like(self.size)

    def add(self, losses: Tensor, measure: Tensor, tag: Tensor | None = None) -> None:
        """Add a chunk [g, c] of members; `tag` [g, c] is returned with those in `support`."""
        self._begin(measure.dtype)
        l, w = self._members(losses, measure)
        self.size += 0 if self.sweep else total(w, self.size)
        self._add(l, w, tag)

    def look(self, l: Tensor, size: Tensor | float, w: Tensor | None = None, free: Tensor | None = None) -> None:
        """Add a chunk [g, c] in which absent members are marked.

        Args:
            l: [g, c] losses, `absent` for absent members; also written there where the set drops members.
            size: [g] measure of the members present.
            w: [g, c] weights of the members, 0 for absent ones; None if every member counts once.
            free: an unused buffer of the shape of the losses, or None.
        """
        self._begin(torch.bool if w is None else w.dtype)
        size, w = self._alive_(l, size, w, free)
        self.size += 0 if self.sweep else size
        self._look(l, size, w)

    def turn(self) -> bool:
        """End a sweep, merge over processes, and return whether another sweep is needed."""
        if self.ranks.world > 1:
            if not self.sweep:
                self.size.copy_(self.ranks.sum(self.size))
            self.merged = self._merge(self.ranks)
        self._fresh = True
        self.sweep += 1
        return self._turn()

    def weights(self, losses: Tensor, measure: Tensor) -> Tensor:
        """Weights p* [g, c] of a chunk, after the last sweep."""
        return self._weights(*self._members(losses, measure))

    def held(self, losses: Tensor, measure: Tensor) -> Tensor:
        """Weighted sum Σ p*l [g] of a chunk, after the last sweep, with p* held constant."""
        # absent members are 0; the NaN of a present one propagates even if its weight is 0
        return (self.weights(losses.detach(), measure) * hidden(losses, measure, 0.0)).sum(dim=1)

    def weigh_(
        self, l: Tensor, size: Tensor | float, w: Tensor | None = None, free: Tensor | None = None
    ) -> Tensor | None:
        """Overwrite a chunk with its weights, up to the factor of `finish`; arguments as in `look`.

        Returns:
            The factor [g] of all that was written before, or None for 1.
        """
        if self.single:
            self._begin(torch.bool if w is None else w.dtype)
        size, w = self._alive_(l, size, w, free)
        if self.single:
            self.size += size
        before = torch.nan_to_num(l, nan=math.nan, posinf=math.inf, neginf=0.0) if self.constant else None
        shrink = self._weigh_(l, size, w)
        if before is not None:
            held = self._held if shrink is None else self._held * shrink
            self._held = held + before.mul_(l).sum(dim=1)
        return shrink

    def finish(self) -> tuple[Tensor, Tensor]:
        """The value F [g], and the factor [g] that turns what `weigh_` wrote into p*; after the last chunk."""
        scale = self._scale()
        if not self.constant:
            return self.value(), scale
        held = self._held if self.merged is None else self._held * self.merged
        return (self.ranks.sum(held) * scale).to(self.like.dtype), scale

    def alone_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Value and factor, as `finish`, of groups that are one chunk, overwritten with weights; -inf is absent."""
        there = None
        if self.absent > -math.inf:
            there = l > (0.0 if self.over.zero == "drop" else -math.inf)
            l.masked_fill_(~there, self.absent)
        wanted = not self.single
        while wanted:
            self.look(l, size, w)
            wanted = self.turn()
        self.weigh_(l, size, w)
        if there is not None:
            l.copy_(there if w is None else w * there) if self.even else l.mul_(there)
        value, scale = self.finish()
        return value, scale.to(l.dtype)

    def taken(self) -> Tensor:
        """Total measure [g] that may carry weight; known after the first sweep."""
        return self.over._limit(self.size.to(self.like.dtype), self._orders, None if self._cap is None else self._cap())

    def support(self) -> Support | None:
        """The members that carry all the weight; None if they are many or unknown."""
        return None

    def _begin(self, dtype: torch.dtype) -> None:
        """Start a sweep if none is under way; the first process adds the zero member, with a measure of this dtype."""
        if not self._fresh:
            return
        self._fresh = False
        self._start()
        if self.over.zero_member and self.ranks.rank == 0:
            alone = torch.ones(len(self.size), 1, dtype=dtype, device=self.size.device)
            self.size += 0 if self.sweep else 1
            self._add(torch.zeros_like(alone, dtype=self.like.dtype), alone, None)

    def _members(self, losses: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and measure [g, c] of a chunk with `zero` applied; absent members have l = 0."""
        if self.over.zero == "drop":
            alive = ~(losses <= 0)  # NaN stays a member and propagates
            measure = measure & alive if measure.dtype == torch.bool else measure * alive
        return hidden(losses, measure, 0.0), measure

    def _alive_(
        self, l: Tensor, size: Tensor | float, w: Tensor | None, free: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mark members without loss as absent if the set drops them; gives the measure [g] and weights of the rest."""
        if self.over.zero == "drop":
            alive = torch.sign(l, out=free).clamp_min_(0.0)
            w = None if w is None else alive.mul_(w)
            size = alive.sum(dim=1)
            if self.absent < 0:
                torch.threshold_(l, 0.0, self.absent)  # keeps NaN
        return torch.as_tensor(size, dtype=torch.float64, device=l.device).expand(len(l)), w

    def _there(self, l: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and measure as `_add` takes them, of a chunk in which absent members are marked."""
        there = l != self.absent if w is None else w
        return hidden(l, there, 0.0), there

    def _full(self, value: float, *, wide: bool = False) -> Tensor:
        """A constant tensor [g], in the dtype of the losses, or in float64 if `wide`."""
        dtype = torch.float64 if wide else self.like.dtype
        return torch.full((len(self.size),), value, dtype=dtype, device=self.like.device)

    def _narrow(self, x: Tensor) -> Tensor:
        """Cast a result [g] to the dtype of the losses, with 0 for empty groups."""
        return torch.where(self.size == 0, 0.0, x).to(self.like.dtype)

    @abstractmethod
    def _start(self) -> None:
        """Reset the accumulators at the beginning of a sweep."""

    @abstractmethod
    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        """Accumulate a chunk; absent members have l = 0 and w = 0."""

    def _look(self, l: Tensor, size: Tensor, w: Tensor | None) -> None:
        """Accumulate a chunk in which absent members are marked."""
        self._add(*self._there(l, w), None)

    @abstractmethod
    def _merge(self, ranks: ProcessGroup) -> Tensor | None:
        """Merge the accumulators of all processes; gives the factor of what `weigh_` wrote here, or None for 1."""

    def _turn(self) -> bool:
        """Update the solution after a sweep; returns whether another sweep is needed."""
        return False

    def value(self) -> Tensor:
        """Worst-case value F [g], after the last sweep."""
        return self._narrow(self.dual[0])

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        """Weights p* [g, c] of a prepared chunk, elementwise."""
        return self.over._weights(l, w, self.dual)

    def _weigh_(self, l: Tensor, size: Tensor, w: Tensor | None) -> Tensor | None:
        """Overwrite a chunk in which absent members are marked with its weights; returns as `weigh_`."""
        l.copy_(self._weights(*self._there(l, w)))
        return None

    def _scale(self) -> Tensor:
        """The factor [g] that turns what `weigh_` wrote into p*."""
        return self._full(1.0, wide=True)

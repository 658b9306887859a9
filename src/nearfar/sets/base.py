"""What every uncertainty set is: a problem over weights, its dual, its weights, its value.

    F(l) = max over p in U of  Σ pᵢ lᵢ  (- penalty)          one such problem per group (row)

Losses come as l [g, n], one group a row, with a base measure w [g, n]: a boolean mask, or weights where an integer
weight means the pair is there that many times. Members with w = 0 are absent. An empty group has value 0, weights 0.

A set gives three things (`l`, `w` already hold the zero member and lack the dropped members; absent members have l =
0):

    dual(l, w)        a few numbers per group from which the weights follow, no gradient
    weights(l, w, dual)   p* elementwise, no gradient
    value(l, w)       F [g], whose gradient in l is p* (Danskin), twice differentiable where F is

and, for groups that are too large to be in memory at once, a `stream` (stream.py) that is told them chunk by chunk.

Emptiness is always told by the measure, never by comparing losses: a comparison is false for NaN and would hide it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.checks import check_choice
from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import hidden, total

__all__ = ["Cap", "Dual", "Orders", "Solved", "Stream", "Support", "UncertaintySet"]

Orders = Tensor | int
Cap = Callable[[], Tensor]
"""The most a group may take [g], asked for when a sweep is over."""
Dual = tuple[Tensor, ...]
"""Tensors [g]; the first is the leading variable, the one `explain` shows."""


@dataclass(frozen=True, eq=False)
class Solved:
    """What `solve_` leaves behind: p* is what now stands in place of the losses, times `scale`.

    Args:
        value: [g] F.
        scale: [g], 0 for an empty group.
        place: [g] where all the weight rests on one member: its column; the losses then stand as they were.
    """

    value: Tensor
    scale: Tensor
    place: Tensor | None = None


@dataclass(frozen=True, eq=False)
class UncertaintySet(Part, ABC):
    """A set U of weights over the members of a group.

    Args:
        zero: "drop" leaves members without loss (l <= 0) out of the group, as Qi et al. 2020 does; "keep" lets them
            damp the rest.
        zero_member: add one member whose loss is always 0 (multi-similarity's "1 +" inside the logarithm).
    """

    zero: Literal["keep", "drop"] = field(default="keep", kw_only=True)
    zero_member: bool = field(default=False, kw_only=True)

    shortcuts = ("stream", "solve_")
    exact_gradient = True
    """False where the value is not the antiderivative of the gradient (weights held constant, or drawn)."""
    draws = False
    """Members are drawn at random."""

    def __post_init__(self) -> None:
        check_choice(type(self).__name__, "zero", self.zero, ("keep", "drop"))
        for entry in fields(self):  # a NumPy number becomes a plain one, which torch takes everywhere
            value = getattr(self, entry.name)
            if isinstance(value, Real) and type(value).__module__ == "numpy":
                object.__setattr__(self, entry.name, float(value))

    def value(
        self, losses: Tensor, measure: Tensor | None = None, *, orders: Orders = 1, cap: Tensor | None = None
    ) -> Tensor:
        """F [g] of losses [g, n].

        `orders` says how often each unordered pair stands in a group (a TopK counts unordered pairs), and `cap` [g] the
        most it may take; other sets ignore both.
        """
        l, w = self._members(losses, measure)
        return self._value(l, w, self._mass(l, w, orders, cap))

    def dual(
        self, losses: Tensor, measure: Tensor | None = None, *, orders: Orders = 1, cap: Tensor | None = None
    ) -> Dual:
        """The dual variables, each [g]."""
        with torch.no_grad():
            l, w = self._members(losses, measure)
            return self._dual(l, w, self._mass(l, w, orders, cap))

    def weights(
        self,
        losses: Tensor,
        measure: Tensor | None = None,
        dual: Dual | None = None,
        *,
        orders: Orders = 1,
        cap: Tensor | None = None,
    ) -> Tensor:
        """Weights p* [g, n]: not negative, summing to 1 over a group and its zero member, 0 over an empty group."""
        with torch.no_grad():
            l, w = self._members(losses, measure)
            dual = self._dual(l, w, self._mass(l, w, orders, cap)) if dual is None else dual
            return self._weights(l, w, dual)[:, : losses.shape[1]]

    def taken(self, losses: Tensor, measure: Tensor, *, orders: Orders = 1, cap: Tensor | None = None) -> Tensor:
        """How much measure [g] of each group the weight may rest on."""
        with torch.no_grad():
            l, w = self._members(losses, measure)
            return self._mass(l, w, orders, cap)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream | None:
        """What finds the dual of members that come chunk by chunk; None where nobody has written it for this set."""
        return None

    def solve_(self, l: Tensor, size: Tensor) -> Solved | None:
        """Value and weights of groups [g, n] at once, the weights in place of the losses; None where it is not written.

        Absent members hold -inf, and `size` [g] counts the others. Every member counts once.
        """
        return None

    def _mass(self, l: Tensor, w: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        return self._limit(total(w, l), orders, cap)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """How much of a group's measure `size` [g] the weight may rest on."""
        return size

    def _members(self, losses: Tensor, measure: Tensor | None) -> tuple[Tensor, Tensor]:
        w = torch.ones_like(losses, dtype=torch.bool) if measure is None else measure
        if self.zero == "drop":
            # ~(l <= 0) and not l > 0: a NaN stays a member and shows
            alive = ~(losses.detach() <= 0)
            w = w & alive if w.dtype == torch.bool else w * alive
        if losses.shape[1] == 0:  # no members at all: one that is absent keeps every reduction defined
            losses, w = pad(losses, (0, 1)), pad(w, (0, 1))
        losses = hidden(losses, w, 0.0)  # whatever an absent member holds, inf and NaN too, ends here
        return (pad(losses, (0, 1)), pad(w, (0, 1), value=1)) if self.zero_member else (losses, w)

    @abstractmethod
    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual: ...

    @abstractmethod
    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor: ...

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        """Σ p*l with p* held constant: right as it stands where F is piecewise linear; smooth sets say more."""
        with torch.no_grad():
            p = self._weights(l, w, self._dual(l, w, mass))
        # a present NaN shows even where its weight is 0, because 0·NaN is NaN
        return (p * l).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Support:
    """The few members that hold all the weight of a group [1, n]: which they are (in the order they came), how much.

    Args:
        place: [k] index in order of arrival.
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

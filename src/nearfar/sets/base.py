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
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.checks import check_choice
from nearfar._utils.measure import hidden, total
from nearfar._utils.shortcuts import Part

if TYPE_CHECKING:
    from nearfar.sets.stream import Cap, Stream

Orders = Tensor | int
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

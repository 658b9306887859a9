"""The base class of uncertainty sets: the worst-case weighted mean of the losses of a group, and its weights.

    F(l) = max over p in U of  Σ pᵢ lᵢ  (- penalty)          one such problem per group (row)

Losses are l [g, n], one group per row, with a base measure w [g, n]: a boolean mask, or weights, where an integer
weight k means that the pair counts k times. Members with w = 0 are absent. An empty group has value 0 and weights 0.

A set implements three methods. Their `l` and `w` include the zero member and exclude dropped members; absent members
have l = 0.

    dual(l, w)              a few numbers per group that determine the weights, no gradient
    weights(l, w, dual)     p* elementwise, no gradient
    value(l, w)             F [g], whose gradient in l is p* (Danskin), twice differentiable where F is

Groups too large for memory are reduced by a `stream` (stream.py), which receives their members chunk by chunk.

Whether a group is empty is decided by the measure, never by comparing losses: a comparison with NaN is false and would
hide it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.checks import check_choice
from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import hidden, total
from nearfar.sets.stream import Cap, Dual, Orders, Stream

__all__ = ["Fold", "Solved", "UncertaintySet", "in_blocks", "sums"]


@dataclass(frozen=True, eq=False)
class Solved:
    """Result of `solve_`: the value of each group, and how to read the weights off the overwritten losses.

        p* = scale · (what the losses were overwritten with)

    Args:
        value: [g] F.
        scale: [g], 0 for an empty group.
        place: [g] column of the one member that has all the weight, or None. If given, the losses are unchanged.
    """

    value: Tensor
    scale: Tensor
    place: Tensor | None = None


BLOCK = 2**18
"""Entries of the groups that are solved at a time where it takes several passes: they stay in the processor's cache."""
Solver = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def in_blocks(solve: Solver, l: Tensor, zero: str, size: Tensor, w: Tensor | None) -> Solved:
    """Solve groups a few at a time; arguments as in `UncertaintySet.solve_`.

    Args:
        solve: gives value and scale of some groups, and overwrites their losses.
        l: [g, n].
        zero: "drop" leaves members without loss out first.
        size: [g].
        w: [g, n], or None.
    """
    values, scales, tall = list[Tensor](), list[Tensor](), max(1, BLOCK // max(1, l.shape[1]))
    for first in range(0, len(l), tall):
        here = slice(first, first + tall)
        some, mass, weights = l[here], size[here], None if w is None else w[here]
        if zero == "drop":
            alive = torch.sign(some).clamp_min_(0.0)
            weights = None if weights is None else alive.mul_(weights)
            mass = alive.sum(dim=1)
            torch.threshold_(some, 0.0, -math.inf)
        value, scale = solve(some, mass, weights)
        values.append(value)
        scales.append(scale)
    return Solved(torch.cat(values), torch.cat(scales))


def sums(x: Tensor, w: Tensor | None) -> Tensor:
    """Sums Σ wᵢxᵢ [g] of groups x [g, n], as float64."""
    return (x if w is None else x * w).sum(dim=1).double()


@dataclass(frozen=True, eq=False)
class Fold:
    """How the members of a group come down to a few numbers, for engines that make weights by hand.

    Args:
        kind: "exp": weights w·e^{l/γ}; "sum": w; "max": all at the largest loss; "top": the K largest.
        gamma: γ of "exp".
        normalized: whether γ·log Σw is taken off the value of "exp".
        held: the value is Σ p*l with p* held constant.
        most: K of "top", where it is a number of members.
    """

    kind: Literal["exp", "sum", "max", "top"]
    gamma: float = 1.0
    normalized: bool = True
    held: bool = False
    most: float | None = None


@dataclass(frozen=True, eq=False)
class UncertaintySet(Part, ABC):
    """Base class: a set U of weights over the members of a group, and the worst case over it.

        F(l) = max over p in U of  Σ pᵢ lᵢ  (- penalty)

    Args:
        zero: "drop" leaves members without loss (l <= 0) out of the group, as Qi et al. 2020 does; "keep" lets them
            share the weight.
        zero_member: add one member whose loss is always 0 (multi-similarity's "1 +" inside the logarithm).
    """

    zero: Literal["keep", "drop"] = field(default="keep", kw_only=True)
    zero_member: bool = field(default=False, kw_only=True)

    shortcuts = ("stream", "solve_", "fold", "per")
    exact_gradient = True
    """False if the value is not the antiderivative of the gradient (weights held constant, or drawn at random)."""
    draws = False
    """Whether members are drawn at random."""

    def __post_init__(self) -> None:
        check_choice(type(self).__name__, "zero", self.zero, ("keep", "drop"))
        for entry in fields(self):  # NumPy scalars become floats, which torch accepts everywhere
            value = getattr(self, entry.name)
            if isinstance(value, Real) and type(value).__module__ == "numpy":
                object.__setattr__(self, entry.name, float(value))

    def at(self, rows: int) -> UncertaintySet:
        """This set for a batch of so many rows: its counts that are multiples of the batch size become numbers."""
        return self

    def value(
        self, losses: Tensor, measure: Tensor | None = None, *, orders: Orders = 1, cap: Tensor | None = None
    ) -> Tensor:
        """Worst-case value F [g] of losses [g, n].

        Args:
            losses: [g, n], one group per row.
            measure: [g, n] mask or weights of the members; None for all.
            orders: how often each unordered pair occurs in a group; only TopK, which counts unordered pairs, uses it.
            cap: [g] upper limit on the measure that carries weight; only TopK uses it.
        """
        l, w = self._members(losses, measure)
        return self._value(l, w, self._mass(l, w, orders, cap))

    def dual(
        self, losses: Tensor, measure: Tensor | None = None, *, orders: Orders = 1, cap: Tensor | None = None
    ) -> Dual:
        """Dual variables of the groups, each [g]; arguments as in `value`."""
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
        """Weights p* [g, n]: nonnegative, with sum 1 over a group and its zero member, or 0 for an empty group."""
        with torch.no_grad():
            l, w = self._members(losses, measure)
            dual = self._dual(l, w, self._mass(l, w, orders, cap)) if dual is None else dual
            return self._weights(l, w, dual)[:, : losses.shape[1]]

    def taken(self, losses: Tensor, measure: Tensor, *, orders: Orders = 1, cap: Tensor | None = None) -> Tensor:
        """Total measure [g] of each group that may carry weight."""
        with torch.no_grad():
            l, w = self._members(losses, measure)
            return self._mass(l, w, orders, cap)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream | None:
        """A solver for groups whose members arrive chunk by chunk; None if this set has none."""
        return None

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved | None:
        """Value and weights of groups in one pass, overwriting the losses; None if their stream is to solve them.

        Args:
            l: [g, n] losses, -inf for absent members; overwritten with unscaled weights.
            size: [g] measure of the members present.
            w: [g, n] weights of the members, 0 for absent ones; None if every member counts once.
        """
        return None

    def solves(self) -> bool:
        """Whether whole groups can be solved in place: by `solve_`, or by a stream that gets them as one chunk."""
        one = torch.ones(1)
        return self.solve_(one[None].clone(), one) is not None or self.stream(1, one) is not None

    def solved_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved:
        """Like `solve_`, for every set that `solves`."""
        found, stream = self.solve_(l, size, w), None
        if found is None:
            stream = self.stream(len(l), l)
            assert stream is not None  # noqa: S101 - checked by `solves`
            found = Solved(*stream.alone_(l, size, w))
        return found

    def fold(self) -> Fold | None:
        """How members are reduced, apart from `zero` and `zero_member`; None if it is none of the kinds of `Fold`."""
        return None

    def per(self, unit: Tensor) -> UncertaintySet | None:
        """The set whose value of losses l/c, for a unit c > 0, is that of l, divided by c; None where it has none."""
        return None

    def _mass(self, l: Tensor, w: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """Total measure [g] that may carry weight, of members already prepared by `_members`."""
        return self._limit(total(w, l), orders, cap)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """Measure that may carry weight, out of a group's measure `size` [g]."""
        return size

    def _members(self, losses: Tensor, measure: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and measure [g, n] with `zero` and `zero_member` applied; absent members have l = 0."""
        w = torch.ones_like(losses, dtype=torch.bool) if measure is None else measure
        if self.zero == "drop":
            # ~(l <= 0) instead of l > 0: NaN stays a member and propagates
            alive = ~(losses.detach() <= 0)
            w = w & alive if w.dtype == torch.bool else w * alive
        if losses.shape[1] == 0:  # no members: add an absent one, so that every reduction is defined
            losses, w = pad(losses, (0, 1)), pad(w, (0, 1))
        losses = hidden(losses, w, 0.0)  # removes inf and NaN of absent members
        return (pad(losses, (0, 1)), pad(w, (0, 1), value=1)) if self.zero_member else (losses, w)

    @abstractmethod
    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        """Dual variables, each [g], of prepared members [g, n]; `mass` [g] is the measure that may carry weight."""

    @abstractmethod
    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        """Weights p* [g, n] of prepared members, elementwise from the dual variables."""

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        """Σ p*l with p* held constant: exact for piecewise linear F; smooth sets override it."""
        with torch.no_grad():
            p = self._weights(l, w, self._dual(l, w, mass))
        # the NaN of a present member propagates even if its weight is 0, because 0·NaN is NaN
        return (p * l).sum(dim=1)

"""The base class of uncertainty sets: the worst-case weighted mean of the losses of a group, and its weights.

    F(l) = max over p in U of  Σ pᵢ lᵢ  (- penalty)          one such problem per group (row)

Losses are l [g, n], one group per row, with a base measure w [g, n]: a boolean mask, or weights, where an integer
weight k means that the pair counts k times. Members with w = 0 are absent. An empty group has value 0 and weights 0; a
group is empty by its measure, never by a comparison of losses, which NaN makes false.

A set implements three methods. Their `l` and `w` include the zero member and exclude dropped members; absent members
have l = 0. Groups too large for memory are reduced chunk by chunk, by its `stream`.

    dual(l, w)              a few numbers per group that determine the weights, no gradient
    weights(l, w, dual)     p* elementwise, no gradient
    value(l, w)             F [g], whose gradient in l is p* (Danskin), twice differentiable where F is
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.checks import check_choice
from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import hidden, total
from nearfar.sets.stream import Cap, Collected, Dual, Orders, Stream

__all__ = ["Fold", "UncertaintySet"]


@dataclass(frozen=True, eq=False)
class Fold:
    """How the members of a group are reduced to a few numbers, for engines that never hold all members.

    The kinds:

        exp       weights w·e^{l/γ}: Σ w·e^{l/γ}
        sum       weights w: Σ wl and Σ w
        max       all weight on the largest loss: that loss
        top       weight only on the largest losses: these losses
        moments   the measure, mean, energy and least loss above a level: `ChiSquare.solve_moments`
    """

    kind: Literal["exp", "sum", "max", "top", "moments"]
    gamma: float = 1.0  # of "exp": γ
    normalized: bool = True  # of "exp": whether γ·log Σw is subtracted from the value
    held: bool = False  # the value is Σ p*l with p* held constant
    base: float = 0.0  # of "exp": weights w·(1 + l/base)^raised instead; if `base` is not 0, and only if held
    raised: float = 1.0
    # of "top": only the most·orders + fraction·(measure of the group) largest members may carry weight.
    # `UncertaintySet._value` of these, with the `_limit` of the whole group, is the group's value
    most: float = 0.0
    fraction: float = 0.0


@dataclass(frozen=True, eq=False)
class UncertaintySet(Part, ABC):
    """Base class: a set U of weights over the members of a group, and the worst case over it.

        F(l) = max over p in U of  Σ pᵢ lᵢ  (- penalty)

    The size of a set may be given as `effective`, the number 1 / Σ pᵢ²/wᵢ of entries over which the weight shall be
    spread: a number for each group, or a multiple of the batch size such as "8B", eight entries a row.

    Args:
        zero: "drop" leaves members without loss (l <= 0) out of the group, as Qi et al. 2020 does; "keep" lets them
            share the weight.
        zero_member: add one member whose loss is always 0 (multi-similarity's "1 +" inside the logarithm).
    """

    zero: Literal["keep", "drop"] = field(default="keep", kw_only=True)
    zero_member: bool = field(default=False, kw_only=True)

    shortcuts = ("stream", "fold", "per")
    exact_gradient = True
    """False if the value is not the antiderivative of the gradient (weights held constant, or drawn at random)."""
    draws = False
    """Whether members are drawn at random."""
    keeps = 0
    """How many dual variables of a group `Remembered` averages over batches: by `_keep(plain, l, w, mass, old, share)`
    [g, keeps], old ones with those of prepared members, whose value is `plain` [g], at a share [g]. `_at(plain, l, w,
    mass, kept)` is the value [g] at such numbers, held constant; with share 1 it is `plain`. 0 for a set without."""
    remembers = False
    """Whether the loss keeps a memory for this set."""

    def __post_init__(self) -> None:
        check_choice(type(self).__name__, "zero", self.zero, ("keep", "drop"))
        for entry in fields(self):  # NumPy scalars become floats, which torch accepts everywhere
            value = getattr(self, entry.name)
            if isinstance(value, Real) and type(value).__module__ == "numpy":
                object.__setattr__(self, entry.name, float(value))

    def at(self, rows: int) -> "UncertaintySet":
        """This set for a batch of `rows` rows: counts given as multiples of the batch size become numbers."""
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
            return self._carried(self._mass(l, w, orders, cap))

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:
        """A solver for groups whose members arrive chunk by chunk; by default it collects all members first."""
        return Collected(self, groups, like, orders, cap)

    def fold(self) -> Fold | None:
        """How members are reduced, apart from `zero` and `zero_member`; None if no kind of `Fold` applies."""
        return None

    def per(self, unit: Tensor) -> "UncertaintySet | None":
        """For a unit c > 0, the set whose value of the losses l/c is value(l)/c; None if there is none."""
        return None

    def _mass(self, l: Tensor, w: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """Total measure [g] that may carry weight, given members already prepared by `_members`."""
        return self._limit(total(w, l), orders, cap)

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        """Measure that may carry weight, given the groups' measure `size` [g]; in any shape that `_dual` takes."""
        return size

    def _carried(self, mass: Tensor) -> Tensor:
        """Measure [g] that may carry weight, given what `_limit` returned."""
        return mass

    def _members(self, losses: Tensor, measure: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and measure [g, n] with `zero` and `zero_member` applied; absent members have l = 0."""
        w = torch.ones_like(losses, dtype=torch.bool) if measure is None else measure
        if self.zero == "drop":
            # not(l <= 0) instead of l > 0: NaN stays a member and propagates
            free = losses.detach() <= 0
            w = w > free if w.dtype == torch.bool else w * ~free
        if losses.shape[1] == 0:  # no members: add an absent one, so that every reduction is defined
            losses, w = pad(losses, (0, 1)), pad(w, (0, 1))
        losses = hidden(losses, w, 0.0)  # removes inf and NaN of absent members
        return (pad(losses, (0, 1)), pad(w, (0, 1), value=1)) if self.zero_member else (losses, w)

    def _blend(self, kept: Tensor, weights: Tensor) -> Tensor:
        """Average dual variables [g, m, keeps] with weights [g, m]."""
        return (kept * weights[..., None]).sum(dim=1)

    @abstractmethod
    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        """Dual variables, each [g], of prepared members [g, n]; `mass` [g] is the measure that may carry weight."""

    @abstractmethod
    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        """Weights p* [g, n] of prepared members, elementwise from the dual variables."""

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        """Σ p*l with p* held constant: exact if F is piecewise linear; smooth sets override it."""
        with torch.no_grad():
            p = self._weights(l, w, self._dual(l, w, mass))
        # the NaN of a present member propagates even if its weight is 0, because 0·NaN is NaN
        return (p * l).sum(dim=1)

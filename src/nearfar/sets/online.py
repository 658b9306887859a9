"""Online solvers: value and weights of one group over the whole batch in a single sweep (`ChiSquare`: two)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import over
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.soft import LOWEST, flat_rise, log_mean

__all__ = ["Online", "OnlineKL", "OnlineMean", "Variance", "online"]


class Online(ABC):
    """Base class: solves one group in a single sweep, whose nonnegative losses arrive strip by strip.

    Weights are known during the sweep up to one common factor ("raw" weights); `finish` returns that factor.
    """

    absent: float
    """The loss that marks an absent member."""
    even: bool = False
    """Whether all raw weights are 1 (or those of the members), in which case they are not written."""
    vanishes: bool = False
    """Whether members without loss have a negligible raw weight."""

    def __init__(self, of: UncertaintySet, like: Tensor) -> None:
        self.drop = of.zero == "drop"
        self.size = torch.zeros((), dtype=torch.float64, device=like.device)

    @abstractmethod
    def absorb_(
        self, l: Tensor, members: Tensor | float, free: Tensor | None = None, w: Tensor | None = None
    ) -> Tensor | None:
        """Add a strip of losses and overwrite them with raw weights.

        Args:
            l: losses of the strip.
            members: measure of the members present.
            free: an unused buffer of the shape of the losses, or None.
            w: weights of the members, 0 for absent ones; None if each counts once.

        Returns:
            The factor by which all earlier raw weights must be multiplied, or None for 1.
        """

    @abstractmethod
    def merge(self, ranks: ProcessGroup) -> Tensor | None:
        """Merge with all other processes; returns the factor for this process's raw weights, or None for 1."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, Tensor]:
        """The value F, and the factor that turns raw weights into p*."""


class OnlineMean(Online):
    """Online `Mean`: all raw weights are 1."""

    absent = 0.0
    even = True

    def __init__(self, of: UncertaintySet, like: Tensor) -> None:
        super().__init__(of, like)
        self._sum = torch.zeros_like(self.size)

    def absorb_(  # noqa: D102
        self, l: Tensor, members: Tensor | float, free: Tensor | None = None, w: Tensor | None = None
    ) -> Tensor | None:
        if self.drop:
            alive = torch.sign(l)
            members = (alive if w is None else alive.mul_(w)).sum()
        l = l if w is None else l.mul_(w)
        self._sum += l.sum(dtype=torch.float64) if l.dtype == torch.float64 else l.sum(dim=-1).sum(dtype=torch.float64)
        self.size += members
        return None

    def merge(self, ranks: ProcessGroup) -> Tensor | None:  # noqa: D102
        self._sum, self.size = ranks.sum(torch.stack([self._sum, self.size]))
        return None

    def finish(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return over(self._sum, self.size), over(torch.ones_like(self.size), self.size)


class OnlineKL(Online):
    """Online `KL`: raw weights are e^{(l - largest so far)/γ}."""

    absent = -math.inf

    def __init__(self, of: UncertaintySet, fold: Fold, like: Tensor, orders: int) -> None:
        super().__init__(of, like)
        self._orders = orders
        self._gamma, self._normalized, self.vanishes = fold.gamma, fold.normalized, self.drop
        self._top = torch.zeros_like(self.size)  # a lower bound, since losses are nonnegative
        self._sum, self._rise = torch.zeros_like(self.size), torch.zeros_like(self.size)

    def absorb_(  # noqa: D102
        self, l: Tensor, members: Tensor | float, free: Tensor | None = None, w: Tensor | None = None
    ) -> Tensor | None:
        shrink = self._lift(torch.maximum(self._top, l.amax()))
        if self.drop:
            alive = torch.sign(l, out=free).clamp_min_(0.0)
            members = (alive if w is None else alive.mul_(w)).sum()
            torch.threshold_(l, 0.0, -math.inf)
        l.sub_(self._top).mul_(1 / self._gamma).clamp_min_(LOWEST[l.dtype])
        members = torch.as_tensor(members, dtype=self.size.dtype, device=self.size.device)
        flat = None if w is None else w.reshape(1, -1)
        rise = flat_rise(l.reshape(1, -1), members[None], flat) if self._normalized else None
        raw = (l.exp_() if w is None else l.exp_().mul_(w)).sum(dim=-1).sum(dtype=torch.float64)
        self._sum = self._sum + raw
        self._rise = self._rise + (raw - members if rise is None else rise[0])
        self.size += members
        return shrink

    def merge(self, ranks: ProcessGroup) -> Tensor | None:  # noqa: D102
        shrink = self._lift(ranks.largest(self._top))
        self._sum, self._rise, self.size = ranks.sum(torch.stack([self._sum, self._rise, self.size])).unbind()
        return shrink

    def _lift(self, top: Tensor) -> Tensor:
        """Rescale the sums to a new maximum `top`; returns the factor for earlier raw weights."""
        down = (self._top - top) / self._gamma
        self._top, shrink = top, torch.exp(down)
        self._sum, self._rise = self._sum * shrink, self._rise * shrink + self.size * torch.expm1(down)
        return shrink

    def finish(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        there = self.size > 0
        norm = torch.where(there, self._sum, 1.0)
        log = log_mean(norm.log(), self._rise, self.size) if self._normalized else (norm * self._orders).log()
        value = self._top + self._gamma * log
        return torch.where(there, value, 0.0), torch.where(there, 1 / norm, 0.0)


def online(of: UncertaintySet, like: Tensor, orders: int) -> Online | None:
    """The online solver of a set, or None if it has none.

    Args:
        of: the set.
        like: a tensor of the losses' dtype and device.
        orders: how often each member added counts in the group (2 if only one order of each pair is swept).
    """
    fold = of.fold()
    if fold is None or fold.held or of.zero_member:
        return None
    if fold.kind == "sum":
        return OnlineMean(of, like)
    return OnlineKL(of, fold, like, orders) if fold.kind == "exp" else None


class Variance:
    """Two-sweep solver of `ChiSquare` where its closed form holds: first the moments, then weights linear in l.

        F = mean + √(2ρ·Var/n)

    Args:
        of: the set.
        like: a tensor of the losses' dtype and device.
        orders: how often each member added counts in the group.
    """

    absent = 0.0
    even = False
    vanishes = False
    seen = 0

    def __init__(self, of: ChiSquare, like: Tensor, orders: int) -> None:
        self._rho, self._drop, self._orders = of.rho, of.zero == "drop", orders
        self.size, self._sum, self._squares = torch.zeros(3, dtype=torch.float64, device=like.device).unbind()
        self._slope = self._start = self._value = self.size

    def look(self, l: Tensor, members: Tensor | float, w: Tensor | None = None) -> None:
        """Add a strip of the first sweep to the moments."""
        if self._drop:
            members = (torch.sign(l) if w is None else torch.sign(l).mul_(w)).sum()
        self.size = self.size + members
        once = l if w is None else l * w
        self._sum = self._sum + once.sum(dim=-1).sum(dtype=torch.float64)
        self._squares = self._squares + (once * l).sum(dim=-1).sum(dtype=torch.float64)

    def merge(self, ranks: ProcessGroup) -> None:
        """Sum the moments of all processes."""
        self.size, self._sum, self._squares = ranks.sum(torch.stack([self.size, self._sum, self._squares]))

    def ready(self) -> bool:
        """Whether the closed form holds: no weight is negative even at a loss of 0. Synchronizes with the device."""
        n = self.size * self._orders
        mean = over(self._sum, self.size)
        energy = ((self._squares - self._sum * mean) * self._orders).clamp_min(0.0)
        room = over(torch.full_like(n, 2 * self._rho), n * n)
        self._slope = over(room.sqrt(), energy.sqrt()) * self._orders
        self._start = over(torch.full_like(n, self._orders), n) - self._slope * mean
        self._value = mean + (room * energy).sqrt()
        return bool((self._start >= 0) & (energy > 1e-6 * self._squares))

    def absorb_(
        self, l: Tensor, members: Tensor | float, free: Tensor | None = None, w: Tensor | None = None
    ) -> Tensor | None:
        """Overwrite the losses of a strip of the second sweep with weights."""
        l.mul_(self._slope.to(l.dtype)).add_(self._start.to(l.dtype))
        if w is not None:
            l.mul_(w)
        return None

    def finish(self) -> tuple[Tensor, Tensor]:
        """The value F, and the factor that turns raw weights into p* (1)."""
        return self._value, torch.ones_like(self._value)

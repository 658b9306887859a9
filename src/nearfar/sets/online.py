"""Weights known up to one factor while members still come: `Mean` and `KL` over a batch in a single sweep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.shortcuts import exactly
from nearfar._utils.tensors import over
from nearfar.sets.base import UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.entropic import KL
from nearfar.sets.linear import Mean
from nearfar.sets.soft import LOWEST, flat_rise, log_mean

__all__ = ["Online", "OnlineKL", "OnlineMean", "Variance", "online"]


class Online(ABC):
    """One group whose losses, never negative, come strip by strip."""

    absent: float
    """What an absent member holds."""
    even: bool = False
    """Raw weights are 1 and are not written."""
    vanishes: bool = False
    """Members without loss have next to no raw weight."""

    def __init__(self, of: UncertaintySet, like: Tensor) -> None:
        self.drop = of.zero == "drop"
        self.size = torch.zeros((), dtype=torch.float64, device=like.device)

    @abstractmethod
    def absorb_(self, l: Tensor, members: Tensor | float, free: Tensor | None = None) -> Tensor | None:
        """Losses become raw weights, in place; what all raw weights so far must be multiplied by, or None.

        `members` counts those present; `free` is a buffer like the losses, where there is one to spare.
        """

    @abstractmethod
    def merge(self, ranks: ProcessGroup) -> Tensor | None:
        """Take in what all ranks have absorbed; what this rank's raw weights must be multiplied by, or None."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, Tensor]:
        """The value, and the factor that makes raw weights p*."""


class OnlineMean(Online):
    """Raw weights are 1, so that the slope of a loss is its gradient already."""

    absent = 0.0
    even = True

    def __init__(self, of: UncertaintySet, like: Tensor) -> None:
        super().__init__(of, like)
        self._sum = torch.zeros_like(self.size)

    def absorb_(self, l: Tensor, members: Tensor | float, free: Tensor | None = None) -> Tensor | None:  # noqa: D102
        self._sum += l.sum(dtype=torch.float64) if l.dtype == torch.float64 else l.sum(dim=-1).sum(dtype=torch.float64)
        self.size += torch.sign(l).sum() if self.drop else members
        return None

    def merge(self, ranks: ProcessGroup) -> Tensor | None:  # noqa: D102
        self._sum, self.size = ranks.sum(torch.stack([self._sum, self.size]))
        return None

    def finish(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return over(self._sum, self.size), over(torch.ones_like(self.size), self.size)


class OnlineKL(Online):
    """Raw weights e^{(l - largest so far)/γ}."""

    absent = -math.inf

    def __init__(self, of: KL, like: Tensor, orders: int) -> None:
        super().__init__(of, like)
        self._orders = orders
        self._gamma, self._normalized, self.vanishes = of.gamma, of.normalized, self.drop
        self._top = torch.zeros_like(self.size)  # losses are not negative: 0 is as good a start as any
        self._sum, self._rise = torch.zeros_like(self.size), torch.zeros_like(self.size)

    def absorb_(self, l: Tensor, members: Tensor | float, free: Tensor | None = None) -> Tensor | None:  # noqa: D102
        shrink = self._lift(torch.maximum(self._top, l.amax()))
        if self.drop:
            members = torch.sign(l, out=free).clamp_min_(0.0).sum()
            torch.threshold_(l, 0.0, -math.inf)
        l.sub_(self._top).mul_(1 / self._gamma).clamp_min_(LOWEST[l.dtype])
        members = torch.as_tensor(members, dtype=self.size.dtype, device=self.size.device)
        rise = flat_rise(l.reshape(1, -1), members[None]) if self._normalized else None
        raw = l.exp_().sum(dim=-1).sum(dtype=torch.float64)
        self._sum = self._sum + raw
        self._rise = self._rise + (raw - members if rise is None else rise[0])
        self.size += members
        return shrink

    def merge(self, ranks: ProcessGroup) -> Tensor | None:  # noqa: D102
        shrink = self._lift(ranks.largest(self._top))
        self._sum, self._rise, self.size = ranks.sum(torch.stack([self._sum, self._rise, self.size])).unbind()
        return shrink

    def _lift(self, top: Tensor) -> Tensor:
        """Take the sums about a larger loss; what raw weights so far must be multiplied by."""
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
    """The single-sweep form of a set, where it has one; each member that comes stands `orders` times in its group."""
    if of.zero_member:
        return None
    if exactly(of, Mean):
        return OnlineMean(of, like)
    return OnlineKL(of, like, orders) if exactly(of, KL) else None


class Variance:
    """The chi-square ball where its closed form holds: two sweeps, moments and then weights that are linear in l.

    Args:
        of: the set.
        like: a tensor of the losses' type.
        orders: how often each member stands in the group.
    """

    absent = 0.0
    even = False
    vanishes = False
    seen = 0

    def __init__(self, of: ChiSquare, like: Tensor, orders: int) -> None:
        self._rho, self._drop, self._orders = of.rho, of.zero == "drop", orders
        self.size, self._sum, self._squares = torch.zeros(3, dtype=torch.float64, device=like.device).unbind()
        self._slope = self._start = self._value = self.size

    def look(self, l: Tensor, members: Tensor | float) -> None:
        """A strip of the first sweep."""
        self.size = self.size + (torch.sign(l).sum() if self._drop else members)
        self._sum = self._sum + l.sum(dim=-1).sum(dtype=torch.float64)
        self._squares = self._squares + l.square().sum(dim=-1).sum(dtype=torch.float64)

    def merge(self, ranks: ProcessGroup) -> None:
        """The moments of all ranks."""
        self.size, self._sum, self._squares = ranks.sum(torch.stack([self.size, self._sum, self._squares]))

    def ready(self) -> bool:
        """Whether the closed form holds for losses of 0 and more: no weight below 0 even there (told by a read)."""
        n = self.size * self._orders
        mean = over(self._sum, self.size)
        energy = ((self._squares - self._sum * mean) * self._orders).clamp_min(0.0)
        room = over(torch.full_like(n, 2 * self._rho), n * n)
        self._slope = over(room.sqrt(), energy.sqrt()) * self._orders
        self._start = over(torch.full_like(n, self._orders), n) - self._slope * mean
        self._value = mean + (room * energy).sqrt()
        return bool((self._start >= 0) & (energy > 1e-6 * self._squares))

    def absorb_(self, l: Tensor, members: Tensor | float, free: Tensor | None = None) -> Tensor | None:
        """A strip of the second sweep: losses become weights, in place."""
        l.mul_(self._slope.to(l.dtype)).add_(self._start.to(l.dtype))
        return None

    def finish(self) -> tuple[Tensor, Tensor]:
        """The value, and the factor that makes raw weights p*."""
        return self._value, torch.ones_like(self._value)

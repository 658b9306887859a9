"""Running moments: measure, mean, sum of squares about it, largest and smallest, merged chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, over, total, weighted

__all__ = ["Moments"]


class Moments:
    """Of the members of g groups so far: `size`, `mean`, `energy` (Σ w(l-mean)²), `top` and `least`, float64 [g] each.

    All are taken about one of the members, `start`, so that equal members have exactly no energy.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        nothing = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self.size, self.start, self.energy, self._mean = nothing, nothing, nothing, nothing
        self.top, self.least = nothing - math.inf, nothing + math.inf

    @property
    def mean(self) -> Tensor:
        """The mean [g]."""
        return self.start + self._mean

    def mean_above(self, level: Tensor) -> Tensor:
        """The mean less one of the members [g]; nothing is lost where it lies near that one."""
        return self.start - level + self._mean

    def add(self, l: Tensor, w: Tensor) -> None:
        """One chunk [g, c]; two means and sums of squares merge without cancellation."""
        size = total(w, self.size)
        top = hidden(l, w).amax(dim=1)
        self.start = torch.where((self.size == 0) & (size > 0), top, self.start)
        about = l - self.start.to(l.dtype)[:, None]
        mean = over(weighted(about, w).sum(dim=1, dtype=torch.float64), size)
        about = about - mean.to(l.dtype)[:, None]
        # about the rounded mean: what is left of the rounding is taken off again
        energy = weighted(about * about, w).sum(dim=1, dtype=torch.float64)
        energy = energy - size * (mean - mean.to(l.dtype)) ** 2
        self._join(size, mean, energy)
        self.top = torch.maximum(self.top, top)
        self.least = torch.minimum(self.least, hidden(l, w, math.inf).amin(dim=1))

    def merge(self, ranks: ProcessGroup) -> None:
        """The moments of all ranks' members, the same on every rank."""
        told = (self.size, self.start, self._mean, self.energy, self.top, self.least)
        sizes, starts, means, energies, tops, leasts = ranks.gather(torch.stack(told)).unbind(dim=1)
        nothing = torch.zeros_like(self.size)
        self.size, self.start, self.energy, self._mean = nothing, nothing, nothing, nothing
        for size, start, mean, energy in zip(sizes, starts, means, energies, strict=True):
            self.start = torch.where((self.size == 0) & (size > 0), start, self.start)
            self._join(size, torch.where(size > 0, start - self.start + mean, 0.0), energy)
        self.top, self.least = tops.amax(dim=0), leasts.amin(dim=0)

    def _join(self, size: Tensor, mean: Tensor, energy: Tensor) -> None:
        """Take in members with this measure, mean about `start`, and energy."""
        both, apart = self.size + size, mean - self._mean
        self.energy = (self.energy + energy + apart * apart * over(self.size * size, both)).clamp_min(0.0)
        self._mean = self._mean + apart * over(size, both)
        self.size = both

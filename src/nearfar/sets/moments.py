"""Running moments of groups, merged chunk by chunk: measure, mean, centered sum of squares, maximum, minimum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, over, total, weighted

__all__ = ["Moments"]


class Moments:
    """Running moments of g groups.

    All sums are relative to one of the members, `start`, so that the variance of equal members is exactly 0.

    Attributes:
        size: [g] Σ w; float64, like all moments.
        mean: [g] Σ wl / Σ w.
        energy: [g] Σ w(l - mean)².
        top: [g] largest member.
        least: [g] smallest member.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        nothing = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self.size, self.start, self.energy, self._mean = nothing, nothing, nothing, nothing
        self.top, self.least = nothing - math.inf, nothing + math.inf

    @property
    def mean(self) -> Tensor:
        """Mean [g] of the members."""
        return self.start + self._mean

    def mean_above(self, level: Tensor) -> Tensor:
        """Mean minus `level` [g], one of the members, without cancellation if they are close."""
        return self.start - level + self._mean

    def add(self, l: Tensor, w: Tensor) -> None:
        """Add a chunk [g, c]; means and sums of squares are merged without cancellation."""
        size = total(w, self.size)
        top = hidden(l, w).amax(dim=1)
        self.start = torch.where((self.size == 0) & (size > 0), top, self.start)
        about = l - self.start.to(l.dtype)[:, None]
        mean = over(weighted(about, w).sum(dim=1, dtype=torch.float64), size)
        about = about - mean.to(l.dtype)[:, None]
        # centered at the rounded mean: correct for its rounding error
        energy = weighted(about * about, w).sum(dim=1, dtype=torch.float64)
        energy = energy - size * (mean - mean.to(l.dtype)) ** 2
        self._join(size, mean, energy)
        self.top = torch.maximum(self.top, top)
        self.least = torch.minimum(self.least, hidden(l, w, math.inf).amin(dim=1))

    def merge(self, ranks: ProcessGroup) -> None:
        """Merge the moments of all processes; the result is the same on each."""
        local = (self.size, self.start, self._mean, self.energy, self.top, self.least)
        sizes, starts, means, energies, tops, leasts = ranks.gather(torch.stack(local)).unbind(dim=1)
        nothing = torch.zeros_like(self.size)
        self.size, self.start, self.energy, self._mean = nothing, nothing, nothing, nothing
        for size, start, mean, energy in zip(sizes, starts, means, energies, strict=True):
            self.start = torch.where((self.size == 0) & (size > 0), start, self.start)
            self._join(size, torch.where(size > 0, start - self.start + mean, 0.0), energy)
        self.top, self.least = tops.amax(dim=0), leasts.amin(dim=0)

    def _join(self, size: Tensor, mean: Tensor, energy: Tensor) -> None:
        """Merge members with this measure, mean relative to `start`, and energy."""
        both, apart = self.size + size, mean - self._mean
        self.energy = (self.energy + energy + apart * apart * over(self.size * size, both)).clamp_min(0.0)
        self._mean = self._mean + apart * over(size, both)
        self.size = both

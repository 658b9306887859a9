"""Streaming softmax weights: the streams of `KL` and `KLBall`, for members that arrive chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, log_of, over, readable, total, weighted
from nearfar.sets.base import Cap, Orders, Stream, UncertaintySet
from nearfar.sets.moments import Moments

__all__ = ["LOWEST", "KLBallStream", "KLStream", "flat_rise", "gentle", "log_mean"]

LOWEST = {torch.float64: -600.0, torch.float32: -60.0}
"""Smallest exponents: below, exp gives subnormal numbers, on which a processor is thirty times slower."""


def gentle(z: Tensor) -> Tensor:
    """Exponential of z ≤ 0, clamped at `LOWEST` so that no result is subnormal."""
    return torch.exp(z.clamp_min(LOWEST[z.dtype]))


def log_mean(log: Tensor, rise: Tensor, size: Tensor) -> Tensor:
    """Logarithm of a mean of exponentials, accurate also if the mean is near 1.

        log (Σ w eᶻ / Σ w)  =  log1p(rise / size)

    If γ is large compared with the losses, the mean is near 1, and log Σ w eᶻ - log Σ w would cancel all its digits.

    Args:
        log: log Σ w eᶻ.
        rise: Σ w(eᶻ - 1).
        size: Σ w.
    """
    above = over(rise, size)
    flat = above > -0.5
    return torch.where(flat, torch.log1p(torch.where(flat, above, 0.0)), log - log_of(size))


def flat_rise(z: Tensor, members: Tensor, w: Tensor | None = None) -> Tensor | None:
    """Sum of eᶻ - 1 over the members of each group, for `log_mean`; None if no group needs it.

    No group needs it if the mean of z is below -1 in all: the plain logarithm is then accurate.

    Args:
        z: [g, n] exponents <= 0, clamped at `LOWEST`, which is also the value of absent members.
        members: [g] measure of the members present.
        w: [g, n] weights of the members, 0 for absent ones; None if every member counts once.
    """
    lowest = LOWEST[z.dtype]
    if w is not None:
        return (torch.expm1(z) * w).sum(dim=1)
    if readable(z) and not bool((z.sum(dim=1) - lowest * (z.shape[1] - members) > -members).any()):
        return None
    inside = z > lowest
    return torch.expm1(z).mul_(inside).sum(dim=1) - (members - inside.sum(dim=1))


class KLStream(Stream):
    """Stream of `KL`: a running log-sum-exp, relative to the largest loss so far.

    Accumulates Σ w e^{(l - largest)/γ} and, for the normalized value, Σ w (e^{(l - largest)/γ} - 1) and Σ w.
    """

    def __init__(
        self,
        over: UncertaintySet,
        groups: int,
        like: Tensor,
        orders: Orders,
        cap: Cap | None,
        gamma: float,
        normalized: bool,
    ) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._gamma = gamma
        self._normalized = normalized

    def _start(self) -> None:
        self._top = self._full(-torch.inf)
        self._sum, self._rise, self._seen = (self._full(0.0, wide=True) for _ in range(3))

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        level = self._lift(torch.maximum(self._top, hidden(l, w).amax(dim=1)))
        z = (l - level[:, None]) / self._gamma
        self._sum += weighted(gentle(z), w).sum(dim=1, dtype=torch.float64)
        if self._normalized:
            self._rise += weighted(torch.expm1(z), w).sum(dim=1, dtype=torch.float64)
            self._seen += total(w, self._seen)

    def _merge(self, ranks: ProcessGroup) -> None:
        self._lift(ranks.largest(self._top))
        self._sum, self._rise, self._seen = ranks.sum(torch.stack([self._sum, self._rise, self._seen])).unbind()

    def _lift(self, top: Tensor) -> Tensor:
        """Rescale the sums to a new maximum `top`; returns it, with 0 for groups without members."""
        level = torch.where(top == -torch.inf, 0.0, top)  # no members yet: any finite level will do
        down = (self._top.double() - level.double()) / self._gamma
        self._sum = self._sum * torch.exp(down)
        self._rise = self._rise * torch.exp(down) + self._seen * torch.expm1(down)
        self._top = top
        return level

    def value(self) -> Tensor:  # noqa: D102
        log = log_mean(self._sum.log(), self._rise, self.size) if self._normalized else self._sum.log()
        return self._narrow(self._top.double() + self._gamma * log)

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        raw = weighted(gentle((l - self._top[:, None]) / self._gamma), w)
        return over(raw, self._sum.to(l.dtype)[:, None])


class KLBallStream(Stream):
    """Stream of `KLBall`: finds the temperature γ by Newton's method in log γ, one sweep per step.

    The first sweep collects moments for the initial guess; five to ten sweeps are usual. Whether all groups have
    converged is read from the device after each sweep.
    """

    def __init__(
        self, over: UncertaintySet, groups: int, like: Tensor, orders: Orders, cap: Cap | None, rho: float
    ) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._rho = rho
        self._moments = Moments(groups, like)
        self._ties = self._full(0.0, wide=True)
        self._gamma = self._low = self._high = self._full(1.0, wide=True)

    def _start(self) -> None:
        self._sum, self._rise, self._first, self._second = (self._full(0.0, wide=True) for _ in range(4))

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        if not self.sweep:
            before = self._moments.top
            self._moments.add(l, w)
            top = self._moments.top
            here = total(w * (l == top.to(l.dtype)[:, None]), self._ties)
            self._ties = torch.where(top > before, 0.0, self._ties) + here
            return
        z = hidden((l.double() - self._level[:, None]) / self._gamma[:, None], w, 0.0)
        e = weighted(gentle(z), w)
        self._sum += e.sum(dim=1)
        self._rise += weighted(torch.expm1(z), w).sum(dim=1)
        self._first += (e * z).sum(dim=1)
        self._second += (e * z * z).sum(dim=1)

    def _merge(self, ranks: ProcessGroup) -> None:
        if self.sweep:
            mine = torch.stack([self._sum, self._rise, self._first, self._second])
            self._sum, self._rise, self._first, self._second = ranks.sum(mine).unbind()
            return
        top = self._moments.top
        self._moments.merge(ranks)
        self._ties = ranks.sum(torch.where(top == self._moments.top, self._ties, 0.0))

    def _turn(self) -> bool:
        if self.sweep == 1:
            return self._begin()
        norm = torch.where(self.size == 0, 1.0, self._sum)
        mean = self._first / norm
        log = log_mean(norm.log(), self._rise, self.size)
        divergence = mean - log
        spread = (self._second / norm - mean * mean).clamp_min(0.0)
        at = self._gamma.log()
        outside = divergence > self._rho
        self._low, self._high = torch.where(outside, at, self._low), torch.where(outside, self._high, at)
        # Newton on log D as a function of log γ, which is a line of slope -2 for large γ
        step = over((torch.where(divergence > 0, divergence, 1.0) / max(self._rho, 1e-300)).log() * divergence, spread)
        new = at + torch.where(divergence > 0, step, math.inf)
        inside = (new > self._low) & (new < self._high)
        # tolerance: the change of γ that the rounding of the divergence causes
        near = (new - at).abs() < 1e-13 + over(torch.full_like(at, 32 * torch.finfo(torch.float64).eps), spread)
        new = torch.where(inside, new, (self._low + self._high) / 2)
        done = self._still | near | (self._high - self._low < 1e-14)
        self._gamma = torch.where(done, self._gamma, new.exp())
        self._norm, self._log = norm, log
        # the last sweep must use the final γ
        return not bool(done.all()) and self.sweep < 100

    def _begin(self) -> bool:
        """Set the bracket and the first guess of γ from the moments; returns whether any group needs a search."""
        found = self._moments
        self._level = torch.where(self.size == 0, 0.0, found.top)
        spread = self._level - torch.where(self.size == 0, 0.0, found.least)
        self._flat = (self.size == 0) | (spread == 0) | (self._rho == 0)
        self._corner = ~self._flat & (self._rho >= torch.log(over(self.size, self._ties).clamp_min(1.0)))
        self._still = self._flat | self._corner
        unit = torch.where(self._flat, 1.0, spread)
        self._low = unit.log() + math.log(1e-12)
        self._high = unit.log() + (math.log(10 * max(1.0, self._rho**-0.5)) if self._rho else 0.0)
        guess = (over(found.energy, self.size) / (2 * max(self._rho, 1e-300))).sqrt()
        guess = torch.minimum(torch.maximum(guess.log(), self._low), self._high).exp()
        self._gamma = torch.where(self._still, unit, guess)
        self._norm, self._log = torch.ones_like(unit), torch.zeros_like(unit)
        return not bool(self._still.all())

    def value(self) -> Tensor:  # noqa: D102
        inside = self._level + self._gamma * (self._rho + self._log)
        return self._narrow(torch.where(self._flat, self._moments.mean, torch.where(self._corner, self._level, inside)))

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        z = hidden((l.double() - self._level[:, None]) / self._gamma[:, None], w, 0.0)
        soft = weighted(gentle(z), w) / self._norm[:, None]
        corner = over(w * (l == self._level.to(l.dtype)[:, None]).double(), self._ties[:, None])
        flat = over(w.double(), self.size[:, None])
        edge = torch.where(self._corner[:, None], corner, flat)
        return torch.where(self._still[:, None], edge, soft).to(l.dtype)

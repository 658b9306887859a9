"""The KL ball: the worst case over all weights within a KL divergence of the base measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import centered, hidden, over, total, weighted
from nearfar.sets.base import UncertaintySet
from nearfar.sets.entropic import gentle, log_average, log_mean, log_partition
from nearfar.sets.linear import Worst
from nearfar.sets.moments import Moments
from nearfar.sets.stream import Cap, Dual, Orders, Stream

__all__ = ["KLBall"]


@dataclass(frozen=True, eq=False)
class KLBall(UncertaintySet, swift=True):
    """KL ball: the worst case over all weights within a KL divergence ρ of the base measure.

        U = {p ≥ 0, Σp = 1, KL(p ‖ w/W) ≤ ρ}
        F = min over γ > 0 of  γρ + γ·log Σ (wᵢ/W) e^{lᵢ/γ},    p* = softmax(l/γ)

    γ is the temperature at which KL(p* ‖ w/W) = ρ. It is found by bisection in log γ and then Newton's method, in a
    fixed number of steps that do not synchronize with the device. One more, differentiable Newton step supplies dγ/dl,
    so that second derivatives are exact too.

    Args:
        rho: ρ ≥ 0, the radius.

    Relations: ρ = 0 is Mean; ρ ≥ log(W / measure of the members tied at the largest loss) is Worst.
    """

    rho: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("KLBall", "rho", self.rho, zero=True)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _KLBallStream(self, groups, like, orders, cap)

    def _temperature(self, l: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Temperature γ [g], the groups whose solution is `Worst` [g], and the groups whose solution is `Mean` [g]."""
        top = hidden(l, w).amax(dim=1)
        spread = top - hidden(l, w, math.inf).amin(dim=1)
        ties = total(w * (l == top[:, None]), l)
        size = total(w, l)
        flat = (size == 0) | (spread == 0) | (self.rho == 0)
        corner = ~flat & (self.rho >= torch.log(over(size, ties).clamp_min(1.0)))
        unit = torch.where(flat, 1.0, spread)
        z = torch.where(flat[:, None], 0.0, hidden((l - top[:, None]) / unit[:, None], w, -1.0))
        low = torch.full_like(unit, math.log(1e-12))
        high = torch.full_like(unit, math.log(10 * max(1.0, self.rho**-0.5)) if self.rho else 0.0)
        for _ in range(50):
            middle = (low + high) / 2
            outside = _divergence(z, w, middle.exp()) > self.rho
            low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
        gamma = ((low + high) / 2).exp()
        for _ in range(4):
            step = (_divergence(z, w, gamma) - self.rho) / _divergence_slope(z, w, gamma)
            gamma = torch.where(torch.isfinite(step) & (step.abs() < gamma / 2), gamma - step, gamma)
        return torch.where(flat | corner, torch.ones_like(gamma), gamma * unit), corner, flat

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        gamma, corner, flat = self._temperature(l, w)
        size, (top, ties) = total(w, l), Worst()._dual(l, w, mass)
        norm = weighted(gentle((l - torch.where(size == 0, 0.0, top)[:, None]) / gamma[:, None]), w).sum(dim=1)
        return torch.where(corner, 0.0, torch.where(flat, math.inf, gamma)), top, ties, size, norm

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        gamma, top, _, size, norm = (x[:, None] for x in dual)
        corner = Worst()._weights(l, w, dual[1:3])
        flat = over(w.to(l.dtype), size)
        inside = torch.isfinite(gamma) & (gamma > 0)
        soft = over(weighted(gentle((l - top) / torch.where(inside, gamma, 1.0)), w), norm)
        return torch.where(inside, soft, torch.where(gamma == 0, corner, flat))

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        size = total(w, l)
        top, l = centered(l, w, size)
        with torch.no_grad():
            gamma, corner, flat = self._temperature(l, w)
            slope = _divergence_slope(l, w, gamma)
            # near-ties below the resolution of γ leave no root, and no slope for a Newton step
            met = (_divergence(l, w, gamma) - self.rho).abs() <= 1e-3 * gamma * slope.abs()
            usable = ~flat & ~corner & (slope < 0) & met
            slope = torch.where(usable, slope, 1.0)
        # the implicit function theorem as one Newton step: zero in value at the root, dγ/dl in derivative
        step = (_divergence(l, w, gamma) - self.rho) / slope
        gamma = gamma - torch.where(usable, step, 0.0)
        inside = gamma * (self.rho + log_average(l, w, gamma[:, None], size))
        worst = Worst()._value(l, w, size)
        mean = over(weighted(l, w).sum(dim=1), size)
        return top + torch.where(flat, mean, torch.where(corner, worst, inside))


def _soft(z: Tensor, w: Tensor, gamma: Tensor) -> Tensor:
    """Weights softmax(z/γ) [g, n] with respect to the measure w."""
    norm = log_partition(z, w, gamma[:, None], total(w, z))
    return weighted(torch.exp(hidden(z / gamma[:, None], w) - norm[:, None]), w)


def _divergence(z: Tensor, w: Tensor, gamma: Tensor) -> Tensor:
    """Divergence KL(softmax(z/γ) ‖ w/W) of each group, [g]."""
    p = _soft(z, w, gamma)
    return (p * z).sum(dim=1) / gamma - log_average(z, w, gamma[:, None], total(w, z))


def _divergence_slope(z: Tensor, w: Tensor, gamma: Tensor) -> Tensor:
    """Derivative of `_divergence` in γ: -Var_p(z) / γ³, [g]."""
    p = _soft(z, w, gamma)
    mean = (p * z).sum(dim=1, keepdim=True)
    return -(p * (z - mean) ** 2).sum(dim=1) / gamma**3


class _KLBallStream(Stream):
    """Stream of `KLBall`: finds the temperature γ by Newton's method in log γ, one sweep per step.

    The first sweep collects moments for the initial guess; five to ten sweeps are usual. Whether all groups have
    converged is read from the device after each sweep.
    """

    def __init__(self, over: KLBall, groups: int, like: Tensor, orders: Orders, cap: Cap | None) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._rho = over.rho
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
            return self._guess()
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
        self._log = log
        self._mark(norm)
        # the last sweep must use the final γ
        return not bool(done.all()) and self.sweep < 100

    def _guess(self) -> bool:
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
        self._log = torch.zeros_like(unit)
        self._mark(torch.ones_like(unit))
        return not bool(self._still.all())

    def _mark(self, norm: Tensor) -> None:
        """Set the dual variables, as `KLBall._dual` gives them."""
        gamma = torch.where(self._corner, 0.0, torch.where(self._flat, math.inf, self._gamma))
        self.dual = tuple(x.to(self.like.dtype) for x in (gamma, self._level, self._ties, self.size, norm))

    def value(self) -> Tensor:
        inside = self._level + self._gamma * (self._rho + self._log)
        return self._narrow(torch.where(self._flat, self._moments.mean, torch.where(self._corner, self._level, inside)))

"""Entropic sets: the KL divergence from the base measure as a penalty (`KL`) or as a constraint (`KLBall`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import centered, hidden, log_of, over, total, weighted
from nearfar.sets.base import Cap, Dual, Fold, Orders, Solved, Stream, UncertaintySet
from nearfar.sets.linear import Worst
from nearfar.sets.soft import LOWEST, KLBallStream, KLStream, flat_rise, log_mean

__all__ = ["KL", "KLBall", "log_average", "log_partition"]


def log_partition(l: Tensor, w: Tensor, gamma: Tensor | float, size: Tensor) -> Tensor:
    """Log partition function log Σ wᵢ e^{lᵢ/γ} of each group, [g].

    An empty group (`size` [g] = Σ wᵢ = 0) has the value 0, and a gradient of 0 instead of NaN.
    """
    z = l / gamma
    if w.dtype != torch.bool:
        z = z + torch.where(w > 0, w, 1.0).log()
    empty = size == 0
    # the row of an empty group is set to zeros, so that its log-sum-exp, which is discarded, is finite
    z = hidden(z, (w > 0 if w.dtype != torch.bool else w) | empty[:, None])
    return torch.where(empty, 0.0, torch.logsumexp(z, dim=1))


def log_average(l: Tensor, w: Tensor, gamma: Tensor | float, size: Tensor) -> Tensor:
    """Logarithm of the mean exponential, log Σ (wᵢ/W) e^{lᵢ/γ}, of each group, [g]; accurate for any γ.

    Losses must be <= 0, and W = `size` [g]. The value is that of `log_mean`; derivatives of every order are those of
    `log_partition`, which do not cancel.
    """
    plain = log_partition(l, w, gamma, size)
    with torch.no_grad():
        rise = weighted(torch.expm1(l / gamma), w).sum(dim=1)
        value = log_mean(plain, rise, size)
    return value + (plain - plain.detach())


@dataclass(frozen=True, eq=False)
class KL(UncertaintySet, swift=True):
    """KL penalty: softmax weights, and a log-sum-exp of the losses (DRO-KL of Qi et al. 2020).

        F  = max over p ≥ 0, Σp = 1 of  Σ pᵢlᵢ - γ·KL(p ‖ w/W)  =  γ·log Σ (wᵢ/W) e^{lᵢ/γ}
        p*ᵢ ∝ wᵢ e^{lᵢ/γ}, the softmax of l/γ

    Args:
        gamma: γ, the temperature: the strength of the penalty.
        normalized: False drops the constant -γ·log W, so that F = γ·log Σ wᵢ e^{lᵢ/γ} (entropy instead of KL).

    Relations: γ→0 is Worst, γ→∞ is Mean. With `zero_member` and a linear pair loss, per anchor and sign, it is
    multi-similarity; not normalized and over {violation, 0} it is the smoothed hinge of Jaffe 2020.

    >>> KL(0.5).weights(torch.tensor([[0.0, 1.0]]))
    tensor([[0.1192, 0.8808]])
    """

    gamma: float = 1.0
    normalized: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("KL", "gamma", self.gamma)

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved:  # noqa: D102
        return self.soft_(l, size, w)

    def fold(self) -> Fold:  # noqa: D102
        return Fold("exp", self.gamma, self.normalized)

    def soft_(self, l: Tensor, size: Tensor, w: Tensor | None = None, *, held: bool = False) -> Solved:
        """Softmax weights in place of the losses, as `solve_`; with `held` the value is Σ p*l instead of F."""
        count = size
        if self.zero == "drop":
            if self.normalized:
                alive = torch.sign(l).clamp_min_(0.0)
                count = (alive if w is None else alive.mul_(w)).sum(dim=1)
            torch.threshold_(l, 0.0, -math.inf)  # threshold_ keeps NaN
        top = l.amax(dim=1)
        empty = (size == 0) | (top == -math.inf)
        if self.zero_member:
            top, count, empty = top.clamp_min(0.0), count + 1, torch.zeros_like(empty)
        level = torch.where(empty, 0.0, top)
        l.sub_(level[:, None])
        if self.gamma != 1:
            l.mul_(1 / self.gamma)
        l.clamp_min_(LOWEST[l.dtype])
        below = l.clone() if held else None
        rise = flat_rise(l, count - float(self.zero_member), w) if self.normalized and not held else None
        norm = (l.exp_() if w is None else l.exp_().mul_(w)).sum(dim=1)
        alone = torch.exp(-level / self.gamma) if self.zero_member else torch.zeros_like(norm)
        norm = norm + alone
        if below is not None:
            value = level * (1 - alone / norm) + self.gamma * (below.mul_(l).sum(dim=1) / norm)
        elif rise is not None:
            rise = rise + torch.expm1(-level / self.gamma) if self.zero_member else rise
            value = level + self.gamma * log_mean(norm.log(), rise, count)
        else:
            value = level + self.gamma * (norm.log() - (log_of(count) if self.normalized else 0.0))
        return Solved(torch.where(empty, 0.0, value), torch.where(empty, 0.0, 1 / norm))

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return KLStream(self, groups, like, orders, cap, self.gamma, self.normalized)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top, z = centered(l, w, mass)
        return (top + log_partition(z, w, self.gamma, mass) * self.gamma,)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        _, z = centered(l, w, total(w, l))
        raw = weighted(torch.exp(hidden(z, w) / self.gamma), w)
        return over(raw, raw.sum(dim=1, keepdim=True))

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        top, z = centered(l, w, mass)  # mass = total measure of the group
        if self.normalized:
            return top + self.gamma * log_average(z, w, self.gamma, mass)
        return top + self.gamma * log_partition(z, w, self.gamma, mass)


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
        return KLBallStream(self, groups, like, orders, cap, self.rho)

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
        gamma = torch.where(corner, 0.0, torch.where(flat, math.inf, gamma))
        return gamma, *Worst()._dual(l, w, total(w, l)), total(w, l)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        gamma, top, ties, size = dual
        corner = Worst()._weights(l, w, (top, ties))
        flat = over(w.to(l.dtype), size[:, None])
        inside = torch.isfinite(gamma) & (gamma > 0)
        safe = torch.where(inside, gamma, 1.0)[:, None]
        soft = weighted(torch.exp(hidden(l - top[:, None], w) / safe), w)
        soft = over(soft, soft.sum(dim=1, keepdim=True))
        return torch.where(inside[:, None], soft, torch.where((gamma == 0)[:, None], corner, flat))

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

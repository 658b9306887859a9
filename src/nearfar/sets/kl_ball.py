"""The KL ball: the worst case over all weights within a KL divergence of the base measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import centered, hidden, over, readable, total, weighted
from nearfar.sets.base import Solved, UncertaintySet, in_blocks, sums
from nearfar.sets.entropic import LOWEST, gentle, log_average, log_mean, log_partition
from nearfar.sets.linear import Worst
from nearfar.sets.moments import Moments
from nearfar.sets.stream import Cap, Dual, Orders, Stream

__all__ = ["KLBall"]


@dataclass(frozen=True, eq=False)
class KLBall(UncertaintySet, swift=True):
    """KL ball: the worst case over all weights within a KL divergence ρ of the base measure.

        U = {p ≥ 0, Σp = 1, KL(p ‖ w/W) ≤ ρ}
        F = min over γ > 0 of  γρ + γ·log Σ (wᵢ/W) e^{lᵢ/γ},    p* = softmax(l/γ)

    γ is the temperature at which KL(p* ‖ w/W) = ρ. It is found by Newton's method in log γ, within a bracket that
    halves where a step would leave it; on a GPU in a fixed number of steps, which do not synchronize with it. One more,
    differentiable Newton step supplies dγ/dl, so that second derivatives are exact too.

    Args:
        rho: ρ ≥ 0, the radius.

    Relations: ρ = 0 is Mean; ρ ≥ log(W / measure of the members tied at the largest loss) is Worst.
    """

    rho: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("KLBall", "rho", self.rho, zero=True)

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved | None:  # noqa: D102
        # the divergence at a small radius is a difference of numbers near 1: left to the stream, which has float64
        fine = self.rho == 0 or self.rho > 1e4 * torch.finfo(l.dtype).eps
        return in_blocks(self._solve_, l, self.zero, size, w) if fine and readable(l) and not self.zero_member else None

    def _solve_(self, l: Tensor, size: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value and scale [g] of some groups; overwrites the losses."""
        top, n = torch.where(size > 0, l.amax(dim=1), 0.0), size.double()
        l.sub_(top[:, None])
        z = torch.threshold(l, torch.finfo(l.dtype).min, 0.0)
        mean, least = over(sums(z, w), n), z.amin(dim=1)
        flat = (least == 0) | (self.rho == 0)
        corner = ~flat & (self.rho >= over(n, sums((l == 0).to(l.dtype), w)).clamp_min(1.0).log())
        spread = torch.where(flat, 1.0, -least).double()
        guess = over(sums(z * z, w) - n * mean * mean, 2 * self.rho * n).clamp_min(0.0).sqrt()
        gamma = _search(l, w, self.rho, n, spread, torch.where(flat | corner, spread, guess), flat | corner)
        even = (flat | corner).nonzero()[:, 0]
        inside = (l[even] == 0) | (flat[even, None] & (l[even] > -math.inf))
        l.mul_((1 / gamma).to(l.dtype)[:, None]).clamp_min_(LOWEST[l.dtype]).exp_()
        l[even] = inside.to(l.dtype)
        if w is not None:
            l.mul_(w)
        norm = l.sum(dim=1)
        soft = gamma * (self.rho + over(norm.double(), n).clamp_min(1e-300).log())
        value = top + torch.where(flat, mean, torch.where(corner, 0.0, soft))
        return torch.where(n > 0, value, 0.0).to(l.dtype), over((n > 0).to(l.dtype), norm)

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
        bracket = _bracket(torch.ones_like(unit), self.rho)
        at = bracket[1]
        for _ in range(60):
            gamma = at.exp()
            p, log = _soft(z, w, gamma), log_average(z, w, gamma[:, None], size)
            mean = (p * z).sum(dim=1, keepdim=True)
            variance = (p * (z - mean) ** 2).sum(dim=1) / gamma**2
            bracket, at, near = _newton(mean[:, 0] / gamma - log, variance, self.rho, at, bracket, 1e-12)
            if readable(l) and bool((flat | corner | near).all()):
                break
        gamma = at.exp()
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


def _search(l: Tensor, w: Tensor | None, rho: float, n: Tensor, spread: Tensor, gamma: Tensor, done: Tensor) -> Tensor:
    """Temperatures γ [g] at which the divergence is ρ, by Newton's method in log γ within a bracket.

    Args:
        l: [g, n] losses relative to the largest, -inf for absent members.
        w: [g, n] weights of the members, 0 for absent ones; None if every member counts once.
        rho: ρ.
        n: [g] measure of the members.
        spread: [g] largest minus smallest loss.
        gamma: [g] the first guess.
        done: [g] groups that need no search.
    """
    bracket = _bracket(spread, rho)
    at = torch.minimum(torch.maximum(gamma.log(), bracket[0]), bracket[1])
    # the error of a step of Newton is about its square
    enough, z, e = torch.finfo(l.dtype).eps ** 0.65, torch.empty_like(l), torch.empty_like(l)
    for _ in range(100):
        if bool(done.all()):
            break
        torch.mul(l, torch.exp(-at).to(l.dtype)[:, None], out=z).clamp_min_(LOWEST[l.dtype])
        torch.exp(z, out=e)
        if w is not None:
            e.mul_(w)
        norm = e.sum(dim=1).double()
        mean, square = (over(e.mul_(z).sum(dim=1).double(), norm) for _ in range(2))
        divergence = mean - over(norm, n).log()
        bracket, new, near = _newton(divergence, (square - mean * mean).clamp_min(0.0), rho, at, bracket, enough)
        at, done = torch.where(done, at, new), done | near | (bracket[1] - bracket[0] < 1e-14)
    return at.exp()


def _bracket(spread: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Smallest and largest log γ [g] of groups whose losses lie within `spread` [g]."""
    return spread.log() + math.log(1e-12), spread.log() + (math.log(10 * max(1.0, rho**-0.5)) if rho else 0.0)


def _newton(
    divergence: Tensor, spread: Tensor, rho: float, at: Tensor, bracket: tuple[Tensor, Tensor], enough: Tensor | float
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """A new bracket, a new log γ [g], and whether the step there is smaller than `enough`.

    Args:
        divergence: [g] D at log γ = `at`.
        spread: [g] variance of l/γ there.
        rho: ρ.
        at: [g] log γ.
        bracket: [g] bounds of log γ so far.
        enough: [g] or a number.
    """
    outside = divergence > rho
    low, high = torch.where(outside, at, bracket[0]), torch.where(outside, bracket[1], at)
    # on log D as a function of log γ, which is a line of slope -2 for large γ
    step = over((torch.where(divergence > 0, divergence, 1.0) / max(rho, 1e-300)).log() * divergence, spread)
    new = at + torch.where(divergence > 0, step, math.inf)
    # a last step may fall onto the bound that it began at
    near = ((new - at).abs() < enough) & (spread > 0)
    return (low, high), torch.where(near | ((new > low) & (new < high)), new, (low + high) / 2), near


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
        self._gamma = self._full(1.0, wide=True)
        self._range = self._gamma, self._gamma

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
        # tolerance: the change of γ that the rounding of the divergence causes
        enough = 1e-13 + over(torch.full_like(at, 32 * torch.finfo(torch.float64).eps), spread)
        self._range, new, near = _newton(divergence, spread, self._rho, at, self._range, enough)
        done = self._still | near | (self._range[1] - self._range[0] < 1e-14)
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
        self._range = _bracket(unit, self._rho)
        guess = (over(found.energy, self.size) / (2 * max(self._rho, 1e-300))).sqrt()
        guess = torch.minimum(torch.maximum(guess.log(), self._range[0]), self._range[1]).exp()
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

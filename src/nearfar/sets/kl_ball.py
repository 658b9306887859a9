"""The KL ball: the worst case over all weights within a KL divergence of the base measure."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import centered, hidden, over, readable, weighted
from nearfar.sets.base import UncertaintySet
from nearfar.sets.entropic import gentle, log_average, log_mean, log_partition
from nearfar.sets.linear import Worst
from nearfar.sets.stream import Cap, Dual, Moments, Orders, Stream, Sums

__all__ = ["KLBall"]


@dataclass(frozen=True, eq=False)
class KLBall(UncertaintySet, swift=True):
    """KL ball: the worst case over all weights within a KL divergence ρ of the base measure.

        U = {p ≥ 0, Σp = 1, KL(p ‖ w/W) ≤ ρ}
        F = min over γ > 0 of  γρ + γ·log Σ (wᵢ/W) e^{lᵢ/γ},    p* = softmax(l/γ)

    γ is the temperature at which KL(p* ‖ w/W) = ρ, found by Newton's method (on a GPU in a fixed number of steps, which
    do not synchronize). One more, differentiable Newton step supplies dγ/dl, so that second derivatives are exact too.

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

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return self._search(l, w).dual(l.dtype)

    def _search(self, l: Tensor, w: Tensor) -> "_Search":
        """The temperatures of the groups, found by `_Search`."""
        search = _Search(self.rho, Moments.of(l, w))
        for _ in range(60):
            done = search.step(search.sums(l, w))
            if readable(l) and bool(done.all()):
                break
        return search

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        gamma, top, _, norm = (x[:, None] for x in dual)
        soft = over(weighted(gentle((l - top) / gamma), w), norm)
        return torch.where(gamma == 0, Worst()._weights(l, w, dual[1:3]), soft)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        top, l = centered(l, w, mass)
        with torch.no_grad():
            search = self._search(l, w)
            gamma, inside = search.gamma.to(l.dtype), ~search.still
            gap, slope = self._gap(l, w, gamma, mass)
            # near-ties below the resolution of γ leave no root, and no slope for a Newton step
            usable = inside & (slope < 0) & (gap.abs() <= 1e-3 * gamma * slope.abs())
            slope = torch.where(usable, slope, 1.0)
        # the implicit function theorem as one Newton step: zero in value at the root, dγ/dl in derivative
        gamma = gamma - torch.where(usable, self._gap(l, w, gamma, mass)[0] / slope, 0.0)
        soft = gamma * (self.rho + log_average(l, w, gamma[:, None], mass))
        flat, worst = over(weighted(l, w).sum(dim=1), mass), Worst()._value(l, w, mass)
        return top + torch.where(inside, soft, torch.where(search.flat, flat, worst))

    def _gap(self, z: Tensor, w: Tensor, gamma: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """KL(softmax(z/γ) ‖ w/W) - ρ of each group [g], and its derivative in γ, -Var_p(z) / γ³."""
        log = log_partition(z, w, gamma[:, None], size)
        p = weighted(torch.exp(hidden(z / gamma[:, None], w) - log[:, None]), w)
        mean = (p * z).sum(dim=1)
        slope = -(p * (z - mean[:, None]) ** 2).sum(dim=1) / gamma**3
        return mean / gamma - log_average(z, w, gamma[:, None], size) - self.rho, slope


class _Search:
    """Newton's method for the temperatures γ of g groups, in log γ; a step that leaves the bracket becomes a bisection.

    Attributes:
        found: moments of the groups.
        level: [g] largest loss; 0 for an empty group.
        flat: [g] whether the solution is `Mean`.
        still: [g] whether it is `Mean` or `Worst`, so that no search is needed.
        log: [g] log Σ (wᵢ/W) e^{(lᵢ - level)/γ}, at the γ of the last step.
    """

    def __init__(self, rho: float, found: Moments) -> None:
        self.rho, self.found = rho, found
        empty = found.size == 0
        self.level = torch.where(empty, 0.0, found.top)
        spread = self.level - torch.where(empty, 0.0, found.least)
        self.flat = (spread == 0) | (rho == 0)
        self.still = self.flat | (rho >= over(found.size, found.ties).clamp_min(1.0).log())
        unit = torch.where(self.flat, 1.0, spread)
        far = math.log(10 * max(1.0, rho**-0.5)) if rho else 0.0
        self._low, self._high = unit.log() + math.log(1e-12), unit.log() + far
        guess = (over(found.energy, found.size) / (2 * max(rho, 1e-300))).sqrt().log()  # KL ≈ Var/2γ² for large γ
        guess = torch.minimum(torch.maximum(guess, self._low), self._high)
        self.gamma = torch.where(self.still, unit, guess.exp())
        self.log, self._norm = torch.zeros_like(unit), torch.ones_like(unit)

    def sums(self, l: Tensor, w: Tensor) -> Tensor:
        """Sums [4, g] over members [g, n] of w·e^z, w(e^z - 1), w·z·e^z and w·z²·e^z, where z = (l - level)/γ."""
        z = hidden((l.double() - self.level[:, None]) / self.gamma[:, None], w, 0.0)
        e = weighted(gentle(z), w)
        return torch.stack([x.sum(dim=1) for x in (e, weighted(torch.expm1(z), w), e * z, e * z * z)])

    def step(self, sums: Tensor) -> Tensor:
        """Take a step, given the sums at the present γ; returns for which groups [g] γ is final and unchanged."""
        norm, rise, first, second = sums.unbind()
        self._norm = torch.where(self.found.size == 0, 1.0, norm)
        mean, self.log = first / self._norm, log_mean(self._norm.log(), rise, self.found.size)
        gap, spread, at = mean - self.log, (second / self._norm - mean * mean).clamp_min(0.0), self.gamma.log()
        self._low = torch.where(gap > self.rho, at, self._low)
        self._high = torch.where(gap > self.rho, self._high, at)
        # Newton on log D as a function of log γ, which for large γ is a line of slope -2
        change = over((torch.where(gap > 0, gap, 1.0) / max(self.rho, 1e-300)).log() * gap, spread)
        new = at + torch.where(gap > 0, change, math.inf)
        # tolerance: the change of γ that the rounding of the divergence causes
        enough = 1e-13 + over(torch.full_like(at, 32 * torch.finfo(torch.float64).eps), spread)
        # the last step may land on the bound where it started
        near = ((new - at).abs() < enough) & (spread > 0)
        new = torch.where(near | ((new > self._low) & (new < self._high)), new, (self._low + self._high) / 2)
        done = self.still | near | (self._high - self._low < 1e-14)
        self.gamma = torch.where(done, self.gamma, new.exp())
        return done

    def dual(self, dtype: torch.dtype) -> Dual:
        """Dual variables of the set: γ (0 for `Worst`, infinite for `Mean`), those of `Worst`, and Σ w e^z."""
        norm = torch.where(self.flat, self.found.size, self._norm)
        gamma = torch.where(self.still, torch.where(self.flat, math.inf, 0.0), self.gamma)
        return tuple(x.to(dtype) for x in (gamma, self.found.top, self.found.ties, norm))


class _KLBallStream(Stream):
    """Stream of `KLBall`: one sweep for the moments, then one per step of the search, usually 5 to 10.

    Whether all groups have converged is read from the device after each sweep.
    """

    over: KLBall

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        return (self._search.sums(l, w),) if self.sweep else Moments.of(l, w)

    def _join(self, a: Sums, b: Sums) -> Sums:
        return super()._join(a, b) if self.sweep else Moments(*a).join(Moments(*b))

    def _turn(self, *sums: Tensor) -> bool:
        if self.sweep == 1:
            search = self._search = _Search(self.over.rho, Moments(*sums))
            done = search.still
        else:
            search = self._search
            done = search.step(*sums)
        self.dual = search.dual(self.like.dtype)
        even = torch.where(search.flat, search.found.mean(search.level), 0.0)
        self._value = search.level + torch.where(search.still, even, search.gamma * (search.rho + search.log))
        # the last sweep must use the final γ
        return not bool(done.all()) and self.sweep < 100

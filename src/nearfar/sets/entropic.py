"""`KL` and `KLBall`, the entropic sets: the KL divergence from the base measure as a penalty, or limited."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.settings import Number
from nearfar._utils.tensors import centered, hidden, log_of, log_sum_exp, over, readable, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.counts import Count, check_count, check_one, entries, of_batch
from nearfar.sets.linear import Worst
from nearfar.sets.stream import Cap, Dual, Moments, Orders, Stream, Sums

__all__ = ["KL", "LOWEST", "KLBall", "gentle", "log_average", "log_mean", "log_partition"]

LOWEST = {torch.float64: -600.0, torch.float32: -60.0}
"""Smallest exponents: exp of lower ones is subnormal, which is thirty times slower on a processor."""


def gentle(z: Tensor) -> Tensor:
    """Exponential of z ≤ 0, clamped at `LOWEST` so that no result is subnormal."""
    return torch.exp(z.clamp_min(LOWEST.get(z.dtype, -math.inf)))


def log_mean(log: Tensor, rise: Tensor, size: Tensor) -> Tensor:
    """Logarithm of a mean of exponentials, accurate also if the mean is near 1.

        log (Σ w eᶻ / Σ w)  =  log1p(rise / size),    log = log Σ w eᶻ,  rise = Σ w(eᶻ - 1),  size = Σ w

    If γ is large compared with the losses, the mean is near 1, and log Σ w eᶻ - log Σ w would cancel all its digits.
    """
    above = over(rise, size)
    flat = above > -0.5
    return torch.where(flat, torch.log1p(torch.where(flat, above, 0.0)), log - log_of(size))


def log_partition(l: Tensor, w: Tensor, gamma: Tensor | float, size: Tensor) -> Tensor:
    """Log partition function log Σ wᵢ e^{lᵢ/γ} of each group, [g].

    An empty group (`size` [g] = Σ wᵢ = 0) has the value 0, and a gradient of 0 instead of NaN: absent members have
    the lowest number, not -inf, so that its log-sum-exp, which is discarded, is finite.
    """
    z = l / gamma
    if w.dtype != torch.bool:
        z = z + torch.where(w > 0, w, 1.0).log()
        w = w > 0
    return log_sum_exp(hidden(z, w, torch.finfo(z.dtype).min)).masked_fill(size == 0, 0)


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
class _Softmax(UncertaintySet):
    """Base class of the entropic sets: softmax weights whose temperature may be found for each group by `_Search`.

    Args:
        effective: the number E of effective entries (`UncertaintySet`) for which γ is solved in each group. The
            gradient is the weights: γ is held constant in it, so that the value is not its antiderivative.
    """

    effective: Count | None = field(default=None, kw_only=True)

    @property
    def exact_gradient(self) -> bool:  # type: ignore[override]
        """Whether γ, or the radius, does not depend on the losses."""
        return self.effective is None

    def _check(self, name: str, default: float) -> None:
        """Require `name` or `effective`; neither means the default."""
        owner = type(self).__name__
        if getattr(self, name) is self.effective is None:
            object.__setattr__(self, name, default)
        check_one(owner, self, name, "effective")
        if self.effective is not None:
            check_count(owner, "effective", self.effective)

    def at(self, rows: int) -> "UncertaintySet":
        return of_batch(self, rows, "effective") if isinstance(self.effective, str) else self

    def _target(self, found: Moments) -> "_Search":
        """A search for the temperatures of groups with these moments."""
        most = None if self.effective is None else entries(type(self).__name__, self.effective, found.size)
        return _Search(getattr(self, "rho", None), found, most)

    def _search(self, l: Tensor, w: Tensor) -> "_Search":
        """The temperatures of the groups, found by `_Search`."""
        search = self._target(Moments.of(l, w))
        for _ in range(60):
            done = search.step(search.sums(l, w))
            if readable(l) and bool(done.all()):
                break
        return search

    def _over_gamma(self, search: "_Search") -> Tensor:
        """The value [g] of each group above its largest loss, divided by γ."""
        return search.log

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return self._search(l, w).dual(l.dtype)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        gamma, top, _, norm = (x[:, None] for x in dual)
        soft = over(weighted(gentle((l - top) / gamma), w), norm)
        return torch.where(gamma == 0, Worst()._weights(l, w, dual[1:3]), soft)


@dataclass(frozen=True, eq=False)
class KL(_Softmax, swift=True):
    """KL penalty: softmax weights, and a log-sum-exp of the losses (DRO-KL of Qi et al. 2020).

        F  = max over p ≥ 0, Σp = 1 of  Σ pᵢlᵢ - γ·KL(p ‖ w/W)  =  γ·log Σ (wᵢ/W) e^{lᵢ/γ}
        p*ᵢ ∝ wᵢ e^{lᵢ/γ}, the softmax of l/γ

    Args:
        gamma: γ, the temperature: the strength of the penalty; the default is 1.
        normalized: False drops the constant -γ·log W, so that F = γ·log Σ wᵢ e^{lᵢ/γ} (entropy instead of KL).
        effective: instead of gamma, the number of effective entries (`UncertaintySet`): γ solves 1/Σ pᵢ²/wᵢ = E in each
            group. The gradient is p, with γ held constant.

    Relations: γ→0 is Worst, γ→∞ is Mean. With `zero_member` and a linear pair loss, per anchor and sign, it is
    multi-similarity; not normalized and over {violation, 0} it is the smoothed hinge of Jaffe 2020.

    >>> KL(0.5).weights(torch.tensor([[0.0, 1.0]]))
    tensor([[0.1192, 0.8808]])
    """

    gamma: Number = None  # type: ignore[assignment] # 1, unless `effective` is given
    normalized: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("gamma", 1.0)
        if self.effective is None:
            check_positive("KL", "gamma", self.gamma, learned=True)
        elif not self.normalized:
            raise ValueError("KL: effective needs normalized=True, because γ is infinite where the weights are even.")

    def fold(self) -> Fold | None:  # noqa: D102
        if isinstance(self.gamma, Tensor) or self.effective is not None:
            return None
        return Fold("exp", self.gamma, self.normalized)

    def per(self, unit: Tensor) -> "KL | None":  # noqa: D102
        return replace(self, gamma=1.0) if self.gamma is unit else None

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return (_KLStream if self.effective is None else _SearchStream)(self, groups, like, orders, cap)

    @property
    def keeps(self) -> int:  # type: ignore[override]
        """One, the value itself, if γ is given."""
        return int(self.effective is None)

    def _keep(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, old: Tensor, share: Tensor) -> Tensor:
        return self._blend(torch.stack([old, plain[:, None]], dim=1), torch.stack([1 - share, share], dim=1))

    def _blend(self, kept: Tensor, weights: Tensor) -> Tensor:
        """The mean of e^{F/γ}, as F."""
        found: Tensor = self.gamma * torch.logsumexp(kept / self.gamma + weights.log()[..., None], dim=1)
        return found

    def _at(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, kept: Tensor) -> Tensor:
        return kept[:, 0] + self.gamma * torch.expm1((plain - kept[:, 0]) / self.gamma)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        if self.effective is not None:
            return super()._dual(l, w, mass)
        top, z = centered(l, w, mass)
        norm = weighted(gentle(z / self.gamma), w).sum(dim=1)
        return top + log_of(norm) * self.gamma, top, norm

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        if self.effective is not None:
            return super()._weights(l, w, dual)
        _, top, norm = (x[:, None] for x in dual)
        return over(weighted(gentle((l - top) / self.gamma), w), norm)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        if not self.normalized:
            return self.gamma * log_partition(l, w, self.gamma, mass)
        top, z = centered(l, w, mass)  # mass = total measure of the group
        if self.effective is None:
            return top + self.gamma * log_average(z, w, self.gamma, mass)
        with torch.no_grad():
            search = self._search(z, w)
            gamma = search.gamma.to(l.dtype)
        return top + search.where(gamma * log_average(z, w, gamma[:, None], mass), z, w, mass)


class _KLStream(Stream):
    """Stream of `KL`: the largest loss `top`, Σ w e^{(l - top)/γ}, Σ w (e^{(l - top)/γ} - 1), and Σ w."""

    over: KL

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        l = hidden(l, w)
        top = l.amax(dim=1)
        z = (l - torch.where(top == -math.inf, 0.0, top)[:, None]) / self.over.gamma
        sums = (weighted(x, w).sum(dim=1).double() for x in (gentle(z), torch.expm1(z)))
        return top, *sums, total(w, self.size)

    def _join(self, a: Sums, b: Sums) -> Sums:
        top = torch.maximum(a[0], b[0])
        (norm, rise), (others, more) = (self._lift(x, top) for x in (a, b))
        return top, norm + others, rise + more, a[3] + b[3]

    def _lift(self, sums: Sums, top: Tensor) -> tuple[Tensor, Tensor]:
        """Rescale both sums [g] from their own maximum to `top`, which is at least as large."""
        old, norm, rise, size = sums
        down = (old.double() - torch.where(top == -math.inf, 0.0, top).double()) / self.over.gamma
        return norm * torch.exp(down), rise * torch.exp(down) + size * torch.expm1(down)

    def _turn(self, *sums: Tensor) -> bool:
        top, norm, rise, _ = sums
        level, dtype = torch.where(self.size == 0, 0.0, top), self.like.dtype
        self.dual = level + (self.over.gamma * log_of(norm)).to(dtype), level, norm.to(dtype)
        log = log_mean(norm.log(), rise, self.size) if self.over.normalized else norm.log()
        self._value = top.double() + self.over.gamma * log
        return False


@dataclass(frozen=True, eq=False)
class KLBall(_Softmax, swift=True):
    """KL ball: the worst case over all weights within a KL divergence ρ of the base measure.

        U = {p ≥ 0, Σp = 1, KL(p ‖ w/W) ≤ ρ}
        F = min over γ > 0 of  γρ + γ·log Σ (wᵢ/W) e^{lᵢ/γ},    p* = softmax(l/γ)

    γ is the temperature at which KL(p* ‖ w/W) = ρ, found by Newton's method (on a GPU in a fixed number of steps, which
    do not synchronize). One more, differentiable Newton step supplies dγ/dl, so that second derivatives are exact too.

    Args:
        rho: ρ ≥ 0, the radius; the default is .1.
        effective: instead of rho, the number of effective entries (`UncertaintySet`), with the weights of
            `KL(effective=...)` and the value Σ pᵢlᵢ. (A radius of log(n/E) would fix the perplexity, not 1/Σp².)

    Relations: ρ = 0 is Mean; ρ ≥ log(W / measure of the members tied at the largest loss) is Worst.
    """

    rho: float = None  # type: ignore[assignment] # .1, unless `effective` is given

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rho", 0.1)
        if self.effective is None:
            check_positive("KLBall", "rho", self.rho, zero=True)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _SearchStream(self, groups, like, orders, cap)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        if self.effective is not None:
            return super()._value(l, w, mass)
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
        return top + search.where(gamma * (self.rho + log_average(l, w, gamma[:, None], mass)), l, w, mass)

    def _over_gamma(self, search: "_Search") -> Tensor:
        return search.rho + search.log if self.effective is None else search.mean

    def _gap(self, z: Tensor, w: Tensor, gamma: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """KL(softmax(z/γ) ‖ w/W) - ρ of each group [g], and its derivative in γ, -Var_p(z) / γ³."""
        log = log_partition(z, w, gamma[:, None], size)
        p = weighted(torch.exp(hidden(z / gamma[:, None], w) - log[:, None]), w)
        mean = (p * z).sum(dim=1)
        slope = -(p * (z - mean[:, None]) ** 2).sum(dim=1) / gamma**3
        return mean / gamma - log_average(z, w, gamma[:, None], size) - self.rho, slope


class _Search:
    """Newton's method for the temperatures γ of g groups, in log γ; a step that leaves the bracket becomes a bisection.

    A divergence of the weights p from w/W, which falls as γ rises, shall be ρ [g]: the KL divergence, or with `most`
    effective entries E that of order 2, log(W Σ pᵢ²/wᵢ), with ρ = log(W/E).

    Attributes:
        found: moments of the groups.
        level: [g] largest loss; 0 for an empty group.
        flat: [g] whether the solution is `Mean`.
        still: [g] whether it is `Mean` or `Worst`, so that no search is needed.
        log: [g] log Σ (wᵢ/W) e^{(lᵢ - level)/γ}, at the γ of the last step.
        mean: [g] Σ pᵢ(lᵢ - level)/γ, likewise.
    """

    def __init__(self, rho: float | None, found: Moments, most: Tensor | None) -> None:
        self.found, self.order = found, 1 if most is None else 2
        empty = found.size == 0
        target = torch.zeros_like(found.size) + (0.0 if rho is None else rho)
        if most is not None:
            target = torch.where(empty, 0.0, over(found.size, most).log())
        self.rho, few = target, target.clamp_min(1e-300)
        self.level = torch.where(empty, 0.0, found.top)
        spread = self.level - torch.where(empty, 0.0, found.least)
        self.flat = (spread == 0) | (target == 0)
        self.still = self.flat | (target >= over(found.size, found.ties).clamp_min(1.0).log())
        unit = torch.where(self.flat, 1.0, spread)
        self._low, self._high = unit.log() + math.log(1e-12), unit.log() + (10 * few.rsqrt().clamp_min(1.0)).log()
        # both divergences are about order·Var/2γ² for large γ
        guess = (self.order * over(found.energy, found.size) / (2 * few)).sqrt().log()
        guess = torch.minimum(torch.maximum(guess, self._low), self._high)
        self.gamma = torch.where(self.still, unit, guess.exp())
        self.log, self.mean, self._norm = torch.zeros_like(unit), torch.zeros_like(unit), torch.ones_like(unit)

    def sums(self, l: Tensor, w: Tensor) -> Tensor:
        """Sums [k, g] over members [g, n] of w·e^z, w(e^z - 1) and w·z·e^z, where z = (l - level)/γ; and more.

        The divergence of order 1 also needs w·z²·e^z, that of order 2 the first three for 2z.
        """
        z = hidden((l.double() - self.level[:, None]) / self.gamma[:, None], w, 0.0)
        e = weighted(gentle(z), w)
        found = [e, weighted(torch.expm1(z), w), e * z]
        if self.order == 1:
            return torch.stack([x.sum(dim=1) for x in (*found, e * z * z)])
        square = weighted(gentle(2 * z), w)
        return torch.stack([x.sum(dim=1) for x in (*found, square, weighted(torch.expm1(2 * z), w), square * z)])

    def step(self, sums: Tensor) -> Tensor:
        """Take a step, given the sums at the present γ; returns for which groups [g] γ is final and unchanged."""
        empty, (norm, rise, first, *more) = self.found.size == 0, sums.unbind()
        self._norm = torch.where(empty, 1.0, norm)
        self.mean, self.log = first / self._norm, log_mean(self._norm.log(), rise, self.found.size)
        if self.order == 1:
            gap, spread = self.mean - self.log, (more[0] / self._norm - self.mean * self.mean).clamp_min(0.0)
        else:
            square = torch.where(empty, 1.0, more[0])
            gap = log_mean(square.log(), more[1], self.found.size) - 2 * self.log
            spread = (2 * (more[2] / square - self.mean)).clamp_min(0.0)
        at = self.gamma.log()
        self._low = torch.where(gap > self.rho, at, self._low)
        self._high = torch.where(gap > self.rho, self._high, at)
        # Newton on log D as a function of log γ, which for large γ is a line of slope -2
        change = over((torch.where(gap > 0, gap, 1.0) / self.rho.clamp_min(1e-300)).log() * gap, spread)
        new = at + torch.where(gap > 0, change, math.inf)
        # tolerance: the change of γ that the rounding of the divergence causes
        enough = 1e-13 + over(torch.full_like(at, 32 * torch.finfo(torch.float64).eps), spread)
        # the last step may land on the bound where it started
        near = ((new - at).abs() < enough) & (spread > 0)
        new = torch.where(near | ((new > self._low) & (new < self._high)), new, (self._low + self._high) / 2)
        done = self.still | near | (self._high - self._low < 1e-14)
        self.gamma = torch.where(done, self.gamma, new.exp())
        return done

    def where(self, soft: Tensor, z: Tensor, w: Tensor, size: Tensor) -> Tensor:
        """Values [g]: `soft`, but the mean or the maximum of the members z where γ is infinite or 0."""
        flat, worst = over(weighted(z, w).sum(dim=1), size), Worst()._value(z, w, size)
        return torch.where(self.still, torch.where(self.flat, flat, worst), soft)

    def dual(self, dtype: torch.dtype) -> Dual:
        """Dual variables of the set: γ (0 for `Worst`, infinite for `Mean`), those of `Worst`, and Σ w e^z."""
        norm = torch.where(self.flat, self.found.size, self._norm)
        gamma = torch.where(self.still, torch.where(self.flat, math.inf, 0.0), self.gamma)
        return tuple(x.to(dtype) for x in (gamma, self.found.top, self.found.ties, norm))


class _SearchStream(Stream):
    """Stream of a set whose γ is solved: one sweep for the moments, then one per step of the search, usually 5 to 10.

    Whether all groups have converged is read from the device after each sweep.
    """

    over: KL | KLBall

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        return (self._search.sums(l, w),) if self.sweep else Moments.of(l, w)

    def _join(self, a: Sums, b: Sums) -> Sums:
        return super()._join(a, b) if self.sweep else Moments(*a).join(Moments(*b))

    def _turn(self, *sums: Tensor) -> bool:
        if self.sweep == 1:
            self._search = self.over._target(Moments(*sums))
        search = self._search
        done = search.still if self.sweep == 1 else search.step(*sums)
        self.dual = search.dual(self.like.dtype)
        even = torch.where(search.flat, search.found.mean(search.level), 0.0)
        self._value = search.level + torch.where(search.still, even, search.gamma * self.over._over_gamma(search))
        # the last sweep must use the final γ
        return not bool(done.all()) and self.sweep < 100

"""`KL`, the entropic set: the KL divergence from the base measure as a penalty, so that weights are a softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.settings import Number
from nearfar._utils.tensors import centered, hidden, log_of, over, readable, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.stream import Cap, Dual, Orders, Stream

__all__ = ["KL", "LOWEST", "KLStream", "gentle", "log_average", "log_mean", "log_partition"]

LOWEST = {torch.float64: -600.0, torch.float32: -60.0}
"""Smallest exponents: below, exp gives subnormal numbers, on which a processor is thirty times slower."""


def gentle(z: Tensor) -> Tensor:
    """Exponential of z ≤ 0, clamped at `LOWEST` so that no result is subnormal."""
    return torch.exp(z.clamp_min(LOWEST.get(z.dtype, -math.inf)))


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


def _flat_rise(z: Tensor, members: Tensor, w: Tensor | None = None) -> Tensor | None:
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

    gamma: Number = 1.0
    normalized: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("KL", "gamma", self.gamma, learned=True)

    def fold(self) -> Fold | None:  # noqa: D102
        return None if isinstance(self.gamma, Tensor) else Fold("exp", self.gamma, self.normalized)

    def per(self, unit: Tensor) -> KL | None:  # noqa: D102
        return replace(self, gamma=1.0) if self.gamma is unit else None

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        gamma = cast("float", self.gamma)  # strips leave a learned one to autograd
        return KLStream(self, groups, like, orders, cap, gamma, normalized=self.normalized)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top, z = centered(l, w, mass)
        norm = weighted(gentle(z / self.gamma), w).sum(dim=1)
        return top + log_of(norm) * self.gamma, top, norm

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        _, top, norm = (x[:, None] for x in dual)
        return over(weighted(gentle((l - top) / self.gamma), w), norm)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        top, z = centered(l, w, mass)  # mass = total measure of the group
        if self.normalized:
            return top + self.gamma * log_average(z, w, self.gamma, mass)
        return top + self.gamma * log_partition(z, w, self.gamma, mass)


class KLStream(Stream):
    """Stream of `KL`: a running log-sum-exp, relative to the largest loss so far.

    Accumulates Σ w e^{(l - largest)/γ} and, for the normalized value, Σ w (e^{(l - largest)/γ} - 1) and Σ w.
    """

    single = True

    def __init__(
        self,
        over: UncertaintySet,
        groups: int,
        like: Tensor,
        orders: Orders,
        cap: Cap | None,
        gamma: float,
        *,
        normalized: bool = True,
    ) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._gamma, self._normalized, self.vanishes = gamma, normalized, over.zero == "drop"

    def _start(self) -> None:
        self._top = self._full(-math.inf)
        self._sum, self._rise, self._seen = (self._full(0.0, wide=True) for _ in range(3))

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self._weigh_(hidden(l, w), total(w, self._seen), None if w.dtype == torch.bool else w)

    def _weigh_(self, l: Tensor, size: Tensor, w: Tensor | None) -> Tensor:
        level, shrink = self._lift(torch.maximum(self._top, l.amax(dim=1)))
        l.sub_(level[:, None])
        if self._gamma != 1:
            l.mul_(1 / self._gamma)
        l.clamp_min_(LOWEST[l.dtype])
        rise = _flat_rise(l, size.to(l.dtype), w) if self._normalized and not self.constant else None
        raw = (l.exp_() if w is None else l.exp_().mul_(w)).sum(dim=1)
        self._sum = self._sum + raw
        self._rise = self._rise + (raw - size if rise is None else rise)
        self._seen = self._seen + size
        return shrink

    def _merge(self, ranks: ProcessGroup) -> Tensor:
        _, shrink = self._lift(ranks.largest(self._top))
        self._sum, self._rise, self._seen = ranks.sum(torch.stack([self._sum, self._rise, self._seen])).unbind()
        return shrink

    def _lift(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """Rescale the sums to a new maximum `top` [g]; gives it, 0 for groups without members, and the factor."""
        level = torch.where(top == -math.inf, 0.0, top)  # no members yet: any finite level will do
        down = (self._top.double() - level.double()) / self._gamma
        shrink, self._top = torch.exp(down), top
        self._sum = self._sum * shrink
        self._rise = self._rise * shrink + self._seen * torch.expm1(down)
        return level, shrink

    def _turn(self) -> bool:
        level = torch.where(self._top == -math.inf, 0.0, self._top)
        self.dual = level + (self._gamma * log_of(self._sum)).to(level.dtype), level, self._sum.to(level.dtype)
        return False

    def value(self) -> Tensor:
        """F [g]: γ·log of the mean, or of the sum, of e^{l/γ}."""
        log = (self._sum * self.times).log()
        log = log_mean(self._sum.log(), self._rise, self.size) if self._normalized else log
        return self._narrow(self._top.double() + self._gamma * log)

    def _scale(self) -> Tensor:
        return over((self.size > 0).double(), self._sum)

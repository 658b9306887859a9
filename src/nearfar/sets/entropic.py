"""`KL`, the entropic set: the KL divergence from the base measure as a penalty, so that weights are a softmax."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.settings import Number
from nearfar._utils.tensors import centered, hidden, log_of, over, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.stream import Cap, Dual, Orders, Stream, Sums

__all__ = ["KL", "LOWEST", "gentle", "log_average", "log_mean", "log_partition"]

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
    return torch.logsumexp(hidden(z, w, torch.finfo(z.dtype).min), dim=1).masked_fill(size == 0, 0)


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

    def per(self, unit: Tensor) -> "KL | None":  # noqa: D102
        return replace(self, gamma=1.0) if self.gamma is unit else None

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _KLStream(self, groups, like, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top, z = centered(l, w, mass)
        norm = weighted(gentle(z / self.gamma), w).sum(dim=1)
        return top + log_of(norm) * self.gamma, top, norm

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        _, top, norm = (x[:, None] for x in dual)
        return over(weighted(gentle((l - top) / self.gamma), w), norm)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        if not self.normalized:
            return self.gamma * log_partition(l, w, self.gamma, mass)
        top, z = centered(l, w, mass)  # mass = total measure of the group
        return top + self.gamma * log_average(z, w, self.gamma, mass)


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

"""Sets that wrap another set (`DetachedWeights`, `Sampled`), and weightings that are no worst case over a set."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive, check_whole
from nearfar._utils.shortcuts import check_part
from nearfar._utils.tensors import hidden, over, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.counts import changed
from nearfar.sets.entropic import KL
from nearfar.sets.stream import Dual, Orders

__all__ = ["CalibratedKL", "DetachedWeights", "PowerWeights", "Sampled", "Wrapped", "draw"]


@dataclass(frozen=True, eq=False)
class Wrapped(UncertaintySet):
    """Base class: uses the members and weights of another set, `of`, with a value of its own."""

    of: UncertaintySet

    exact_gradient = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part(type(self).__name__, "of", self.of, UncertaintySet, "nf.sets.KL(0.1)")

    def at(self, rows: int) -> UncertaintySet:  # noqa: D102
        of = self.of.at(rows)
        return self if of is self.of else changed(self, rows, of=of)

    def _members(self, losses: Tensor, measure: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.of._members(*super()._members(losses, measure))

    def _limit(self, size: Tensor, orders: Orders, cap: Tensor | None) -> Tensor:
        return self.of._limit(size, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return self.of._dual(l, w, mass)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return self.of._weights(l, w, dual)


@dataclass(frozen=True, eq=False)
class DetachedWeights(Wrapped, swift=True):
    """Detached weights: the weights of another set, held constant in the value (HAP2S reports this value).

        F = Σ pᵢlᵢ    with p = weights of `of`, without gradient

    The gradient Σ pᵢ dlᵢ is that of `of`. The value exceeds the F of `of` by its penalty, so it is not the
    antiderivative of the gradient.

    Args:
        of: the set that determines the weights.
    """

    def fold(self) -> Fold | None:  # noqa: D102
        found = None if (self.of.zero, self.of.zero_member) != (self.zero, self.zero_member) else self.of.fold()
        return None if found is None else replace(found, held=True)


@dataclass(frozen=True, eq=False)
class Sampled(Wrapped, swift=True):
    """Sampled weights: the mean loss of members drawn with replacement from the weights of another set.

        F̂ = Σ p̂ᵢlᵢ,    p̂ = counts of the draws / samples,    draws ~ p* of `of`
        E[F̂] = Σ p*ᵢlᵢ,    E[Σ p̂ᵢ dlᵢ] = Σ p*ᵢ dlᵢ

    The gradient is unbiased (without replacement it would not be). Qi et al. 2020 sample from DRO-KL in this way. Draws
    use torch's generator of the losses' device.

    Args:
        of: the set that determines the weights.
        samples: number of draws per group.
    """

    samples: int

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("Sampled", "samples", self.samples)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        with torch.no_grad():
            p = draw(self._weights(l, w, self._dual(l, w, mass)), self.samples) / self.samples
        return (p * l).sum(dim=1)


def draw(p: Tensor, samples: int, wanted: Tensor | None = None) -> Tensor:
    """Draw members with replacement and count how often each is drawn, [g, n].

    Inverts the cumulative sum of p, because `torch.multinomial` is limited to 2²⁴ members (a batch of 4,096 rows).

    Only the first `wanted` [g, 1] of the `samples` draws of a row count, if given; a row of zeros gives none.
    """
    heights = p.to(torch.float64).cumsum(dim=1)
    end = heights[:, -1:]
    spots = torch.rand(p.shape[0], samples, dtype=torch.float64, device=p.device) * end
    hit = torch.searchsorted(heights, spots, right=True).clamp(max=p.shape[1] - 1)
    place = torch.arange(samples, device=p.device)[None, :]
    counted = (end > 0) & (place < (samples if wanted is None else wanted))
    return torch.zeros_like(p).scatter_add_(1, hit, counted.to(p.dtype))


SOFTMAX = KL(1.0)  # a module constant, because `torch.compile` of torch 2.11 cannot construct a set while tracing


@dataclass(frozen=True, eq=False)
class PowerWeights(UncertaintySet, swift=True):
    """Power weights: weights that are a power of the loss, the polynomial weighting of HAP2S; no worst case.

        pᵢ ∝ wᵢ (1 + lᵢ/a)^b,    F = Σ pᵢlᵢ with p held constant

    Args:
        shift: a; 1 for distances, -1 for negated distances.
        power: b.
    """

    shift: float = 1.0
    power: float = 10.0

    exact_gradient = False

    def fold(self) -> Fold | None:  # noqa: D102
        drops = self.zero == "drop"  # the power of a member without loss may not be a number
        return None if drops else Fold("exp", held=True, base=self.shift, raised=self.power)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        return SOFTMAX._dual(self._height(l), w, mass)

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return SOFTMAX._weights(self._height(l), w, dual)

    def _height(self, l: Tensor) -> Tensor:
        """Logarithm of the power, b·log(1 + l/a), whose softmax gives the weights."""
        return self.power * torch.log1p(l / self.shift)


@dataclass(frozen=True, eq=False)
class CalibratedKL(UncertaintySet, swift=True):
    """Calibrated KL: exponential weights that are 0 for members without loss, on the largest losses only.

        pᵢ ∝ wᵢ (e^{lᵢ/γ} - 1)  on the `keep` largest losses,    F = Σ pᵢlᵢ with p held constant

    The code of Qi et al. 2020 samples from these weights, although the text says softmax. If no member has a loss, the
    weights are uniform, as in that code.

    Args:
        gamma: γ, the temperature.
        keep: number of members that keep their weight (4K in the code).
    """

    gamma: float = 0.1
    keep: int = 320

    exact_gradient = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("CalibratedKL", "gamma", self.gamma)
        check_whole("CalibratedKL", "keep", self.keep)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        masked = hidden(l, w)
        top = masked.amax(dim=1)
        floor = masked.topk(min(self.keep, l.shape[1]), dim=1).values[:, -1]
        return top, floor, self._raw(l, w, top, floor).sum(dim=1), total(w, l)

    def _raw(self, l: Tensor, w: Tensor, top: Tensor, floor: Tensor) -> Tensor:
        """Unscaled weights (e^{l/γ} - 1)·e^{-top/γ} = (1 - e^{-l/γ})·e^{(l - top)/γ}, without overflow for any γ."""
        raw = torch.expm1(-l / self.gamma) * -torch.exp((l - top[:, None]) / self.gamma)
        return weighted(raw, w * (l >= floor[:, None]) * (l > 0))

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        top, floor, norm, size = dual
        uniform = over(w.to(l.dtype), size[:, None])
        return torch.where((norm > 0)[:, None], over(self._raw(l, w, top, floor), norm[:, None]), uniform)

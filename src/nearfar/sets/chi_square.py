"""The chi-square ball: mean plus a variance penalty where the closed form holds, and the exact solution elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import centered, hidden, over, total, weighted
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.counts import Count, check_count, check_one, entries, of_batch, unread
from nearfar.sets.stream import Cap, Dual, Moments, Orders, Stream, Sums
from nearfar.similarity import root

__all__ = ["ChiSquare"]


@dataclass(frozen=True, eq=False)
class ChiSquare(UncertaintySet, swift=True):
    """Chi-square ball: weights that rise linearly with the loss; the value is the mean plus a variance penalty.

        U  = {p ≥ 0, Σp = 1, ½ Σ qᵢ(pᵢ/qᵢ - 1)² ≤ ρ/n},    q = w/W,  n = W
        pᵢ = wᵢ (1/W_A + t (lᵢ - m_A)) on A, 0 elsewhere,    t = √((s - 1/W_A) / V_A),   s = 1/n + 2ρ/n²
        F  = m_A + √((s - 1/W_A) V_A)

    The active set A contains the largest losses; W_A, m_A and V_A are its measure, mean and centered sum of squares. It
    is the longest prefix of the sorted losses without a negative weight: O(n log n), and exact. If A contains all
    members, F = mean + √(2ρ·Var/n), the closed form of Qi et al. 2020, section 3.1. That form holds if and only if
    2ρ(mean - min)² ≤ n·Var, and is too large otherwise (docs/papers/qi-2020.md).

    Args:
        rho: ρ ≥ 0, the radius: a number, or in a loss a multiple of the batch size B, such as "40B"; the default is 1.
        effective: instead, the number E of effective entries (`UncertaintySet`): ρ = n(n/E - 1)/2, so that s = 1/E.

    Relations: ρ = 0 is Mean; ρ ≥ n(n-1)/2 is Worst.

    >>> round(ChiSquare(1.0).value(torch.tensor([[0.0, 1.0]])).item(), 6)  # mean ½ + √(2·1·¼/2) = 1, where Worst begins
    1.0
    """

    rho: Count | None = None
    effective: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho is self.effective is None:
            object.__setattr__(self, "rho", 1.0)
        check_one("ChiSquare", self, "rho", "effective")
        if self.rho is not None:
            check_count("ChiSquare", "rho", self.rho, zero=True)
        else:
            check_count("ChiSquare", "effective", self.effective)

    def at(self, rows: int) -> "ChiSquare":  # noqa: D102
        return of_batch(self, rows, "rho", "effective")

    def fold(self) -> Fold:  # noqa: D102
        return Fold("moments")

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _ChiSquareStream(self, groups, like, orders, cap)

    def solve_moments(
        self, size: Tensor, whole: Tensor, mean: Tensor, energy: Tensor, least: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value F, level η below which weights would be negative, and slope t, all [g], if A is the active set.

            pᵢ = wᵢ (1/W_A + t (lᵢ - m_A)) for lᵢ ≥ η, which is wᵢ t (lᵢ - η) where t > 0

        To solve by sweeps, start with A = all members and repeat with A = {l ≥ η} until η stops rising: η never exceeds
        the optimal η if A contains the optimal active set, so no active member is left out.

        Args:
            size: [g] W_A, the measure of the members in A.
            whole: [g] n, the measure of all members.
            mean: [g] m_A, relative to any level, like `least`, F and η. The largest loss is a good level, because η may
                lie between two nearly tied losses there.
            energy: [g] V_A, the centered sum of squares; exactly 0 if the members are equal.
            least: [g] smallest loss in A: η where weights are uniform (t = 0).
        """
        room, base = self._room(size, whole).clamp_min(0.0), over(torch.ones_like(size), size)
        slope = over(root(room), root(energy))
        eta = torch.where(slope > 0, mean - over(base, slope), least)
        return mean + root(room * energy), eta, slope

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top, l = centered(l, w, mass)
        floor = self._floor(l, w)
        size, mean, energy = self._moments(l, w, floor)
        _, eta, slope = self.solve_moments(size, mass, mean, energy, floor)
        return eta + top, floor, mean, over(torch.ones_like(size), size), slope, top

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        _, floor, mean, base, slope, top = (x[:, None] for x in dual)
        l = l - top
        part = (base + slope * (l - mean)).clamp_min(0.0)
        return weighted(part, w * (l >= floor))

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        with torch.no_grad():
            # centered at the mean, not at the maximum: a value far below the largest loss would cancel
            middle = over(weighted(l, w).sum(dim=1), total(w, l))
        l = l - middle[:, None]
        with torch.no_grad():
            floor = self._floor(l, w)
        size, mean, energy = self._moments(l, w, floor)
        return middle + self.solve_moments(size, mass, mean, energy, floor)[0]

    @property
    def keeps(self) -> int:  # type: ignore[override]
        """Two, η and s², unless the set is the mean, where η is -∞."""
        return 0 if self.rho == 0 else 2

    def _keep(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, old: Tensor, share: Tensor) -> Tensor:
        eta = torch.lerp(old[:, 0], self._dual(l, w, mass)[0].to(old.dtype), share)
        # at the new η, so that s² is at least `share` times what it divides
        square = torch.lerp(old[:, 1], self._square(l, w, mass, eta[:, None].to(l.dtype)).to(old.dtype), share)
        return torch.stack([eta, square], dim=1)

    def _at(self, plain: Tensor, l: Tensor, w: Tensor, mass: Tensor, kept: Tensor) -> Tensor:
        s, factor = root(kept[:, 1]), root(1 + mass * self._room(mass, mass))
        return kept[:, 0] + factor * (over(self._square(l, w, mass, kept[:, :1]), 2 * s) + s / 2)

    def _square(self, l: Tensor, w: Tensor, mass: Tensor, eta: Tensor) -> Tensor:
        """The mean of (l - η)₊² of each group [g]."""
        return over(weighted((l - eta).clamp_min(0.0) ** 2, w).sum(dim=1), mass)

    def _room(self, size: Tensor, whole: Tensor) -> Tensor:
        """Slack s - 1/W_A of the constraint at uniform weights on A, for W_A = `size` and n = `whole`."""
        # 1/n - 1/W_A as one quotient: exactly 0 if A contains all; a difference would lose 2ρ/n² to rounding
        if self.effective is not None:
            least = entries("ChiSquare", self.effective, whole)
            return over(size - least, size * least)
        return over(2 * unread("ChiSquare", "rho", self.rho or 0.0) - over(whole * (whole - size), size), whole * whole)

    def _moments(self, l: Tensor, w: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Measure W_A, mean m_A and energy V_A of A = {l ≥ floor}, each [g]; an energy of rounding errors becomes 0."""
        # ~(l < floor): NaN stays in the set and propagates
        active = w * ~(l.detach() < floor[:, None])
        size = total(active, l)
        mean = over(weighted(l, active).sum(dim=1), size)
        energy = weighted((l - mean[:, None]) ** 2, active).sum(dim=1)
        grain = 16 * torch.finfo(l.dtype).eps * hidden(l.detach(), active, 0.0).abs().amax(dim=1)
        # an overflow of the energy is not rounding error, although the tolerance overflows too
        rounding = (energy <= size * grain**2) & torch.isfinite(energy)
        return size, mean, torch.where(rounding, torch.zeros_like(energy), energy)

    def _floor(self, l: Tensor, w: Tensor) -> Tensor:
        """Smallest loss of A [g]: the last sorted z_k with 1/W_k + t_k (z_k - m_k) ≥ 0, or the largest loss if none."""
        ranked, order = hidden(l, w).sort(dim=1, descending=True)
        mass = w.gather(1, order).to(torch.float64)
        present = mass > 0
        z = torch.where(present, ranked - ranked[:, :1], 0.0).to(torch.float64)
        size = mass.cumsum(dim=1)
        first = (mass * z).cumsum(dim=1)
        mean = over(first, size)
        energy = ((mass * z * z).cumsum(dim=1) - first * mean).clamp_min(0.0)
        room = self._room(size, size[:, -1:])
        good = present & (energy > 0) & (room >= 0) & (room * (size * (mean - z)) ** 2 <= energy)
        place = torch.arange(l.shape[1], device=l.device)
        last = torch.where(good, place, 0).amax(dim=1, keepdim=True)
        return ranked.gather(1, last)[:, 0]


class _ChiSquareStream(Stream):
    """Stream of `ChiSquare`: `solve_moments` after each sweep, on the members without a negative weight so far.

    One sweep if the closed form holds. Whether all groups have converged is read from the device after each sweep.
    """

    over: ChiSquare

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        # ~(l < eta): NaN stays in the set and propagates
        return Moments.of(l, w * ~(l - self._top[:, None] < self._eta[:, None]) if self.sweep else w)

    def _join(self, a: Sums, b: Sums) -> Sums:
        return Moments(*a).join(Moments(*b))

    def _turn(self, *sums: Tensor) -> bool:
        found = Moments(*sums)
        if self.sweep == 1:
            self._top, self._eta = found.top.to(self.like.dtype), torch.full_like(self.size, -torch.inf)
        mean, least = found.mean(self._top), found.least - self._top
        energy = found.energy.to(self.like.dtype).double()  # an energy that overflows in the losses' dtype stays inf
        value, eta, slope = self.over.solve_moments(found.size, self.size, mean, energy, least)
        self._eta, self._value = torch.maximum(eta, self._eta), self._top + value
        duals = eta + self._top, torch.maximum(eta, least), mean, over(torch.ones_like(eta), found.size), slope
        self.dual = *(x.to(self.like.dtype) for x in duals), self._top
        return bool((eta > least).any())

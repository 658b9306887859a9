"""The chi-square ball: mean plus a variance penalty where the closed form holds, and the exact solution elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import centered, hidden, over, readable, total, weighted
from nearfar.sets.base import Solved, UncertaintySet, in_blocks, sums
from nearfar.sets.counts import Count, check_count, of_batch, unread
from nearfar.sets.moments import Moments
from nearfar.sets.stream import Cap, Dual, Orders, Stream
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
        rho: ρ ≥ 0, the radius: a number, or in a loss a multiple of the batch size B, such as "40B".

    Relations: ρ = 0 is Mean; ρ ≥ n(n-1)/2 is Worst.

    >>> round(ChiSquare(1.0).value(torch.tensor([[0.0, 1.0]])).item(), 6)  # mean ½ + √(2·1·¼/2) = 1, where Worst begins
    1.0
    """

    rho: Count = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("ChiSquare", "rho", self.rho, zero=True)

    def at(self, rows: int) -> ChiSquare:  # noqa: D102
        return of_batch(self, rows, "rho")

    def solve_(self, l: Tensor, size: Tensor, w: Tensor | None = None) -> Solved | None:  # noqa: D102
        return None if self.zero_member or not readable(l) else in_blocks(self._solve_, l, self.zero, size, w)

    def _solve_(self, l: Tensor, size: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value and scale [g] of some groups; overwrites the losses."""
        top, n, absent = torch.where(size > 0, l.amax(dim=1), 0.0), size.double(), torch.finfo(l.dtype).min
        l.sub_(top[:, None])
        about = over(sums(torch.threshold(l, absent, 0.0), w), n).to(l.dtype)
        z = torch.threshold_(l - about[:, None], absent, 0.0)
        shift, least = over(sums(z, w), n), z.amin(dim=1) + about
        energy = sums(z * z, w) - n * shift * shift
        energy = torch.where(energy <= n * (16 * torch.finfo(l.dtype).eps * least.double()) ** 2, 0.0, energy)
        mean, floor = about + shift, torch.full_like(n, -math.inf)
        base, slope, penalty = self._line(n, n, energy)
        left = ((slope > 0) & (mean - over(base, slope) > least)).nonzero()[:, 0]
        if len(left):  # some weights would be negative
            found = self._shrink(l[left].double(), None if w is None else w[left].double(), n[left])
            for old, new in zip((mean, base, slope, penalty, floor), found, strict=True):
                old[left] = new
        a, b = slope.to(l.dtype)[:, None], (base - slope * mean).to(l.dtype)[:, None]
        even = ((slope == 0) & (floor > -math.inf)).nonzero()[:, 0]
        inside = l[even] > floor[even, None]
        # a slope of 0 would make NaN of absent members
        l.mul_(a.clamp_min(1e-30)).add_(b).clamp_min_(0.0)
        l[even] = torch.where(inside, b[even], 0.0)
        if w is not None:
            l.mul_(w)
        value = torch.where(n > 0, top + mean + penalty, 0.0)
        return value.to(l.dtype), (n > 0).to(l.dtype)

    def _shrink(self, l: Tensor, w: Tensor | None, n: Tensor) -> tuple[Tensor, ...]:
        """Mean, base, slope, penalty and floor [g] of A, found by leaving out what has a negative weight.

        Args:
            l: [g, n] losses relative to the largest, -inf for absent members.
            w: [g, n] weights of the members; None if every member counts once.
            n: [g] measure of the members.
        """
        n, floor = n if w is None else w.sum(dim=1), torch.full_like(n, torch.finfo(l.dtype).min)
        before = torch.zeros_like(n)
        while True:
            inside = torch.sign(l - floor[:, None]).clamp_min_(0.0)
            inside = inside if w is None else inside.mul_(w)
            size, z = inside.sum(dim=1), torch.threshold(l, torch.finfo(l.dtype).min, 0.0)
            mean = over((inside * z).sum(dim=1), size)
            energy = (inside * (z - mean[:, None]).square_()).sum(dim=1)
            grain = 16 * torch.finfo(l.dtype).eps * torch.where(inside > 0, z, 0.0).amin(dim=1)
            base, slope, penalty = self._line(size, n, torch.where(energy <= size * grain**2, 0.0, energy))
            if bool((size == before).all()):
                return mean, base, slope, penalty, floor
            # the largest loss, which is 0 here, stays above the floor
            raised = torch.maximum(mean - over(base, slope), floor).clamp_max(-torch.finfo(l.dtype).tiny)
            before, floor = size, torch.where(slope > 0, raised, floor)

    def _line(self, size: Tensor, whole: Tensor, energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1/W_A, t and √((s - 1/W_A) V_A) from W_A, n and V_A, each [g]."""
        room = self._room(size, whole).clamp_min(0.0)
        return over(torch.ones_like(size), size), over(root(room), root(energy)), root(room * energy)

    def stream(self, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> Stream:  # noqa: D102
        return _ChiSquareStream(self, groups, like, orders, cap)

    def _dual(self, l: Tensor, w: Tensor, mass: Tensor) -> Dual:
        top, l = centered(l, w, total(w, l))
        floor = self._floor(l, w)
        mean, base, energy, room = self._moments(l, w, floor)
        slope = over(root(room), root(energy))
        # pᵢ = wᵢ·slope·(lᵢ - η)₊; if the weights are uniform (slope 0), η is the floor
        eta = torch.where(slope > 0, mean - over(base, slope), floor)
        return eta + top, floor, mean, base, slope, top

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
        mean, _, energy, room = self._moments(l, w, floor)
        return middle + mean + root(room * energy)

    def _room(self, size: Tensor, whole: Tensor, times: int = 1) -> Tensor:
        """Slack s - 1/W_A of the constraint at uniform weights on A, for W_A = `size` and n = `whole`.

        If each member counts `times`, sums over members are those of a radius of ρ/times.
        """
        # 1/n - 1/W_A as one quotient: exactly 0 if A contains all; a difference would lose 2ρ/n² to rounding
        rho = unread("ChiSquare", "rho", self.rho)
        return over(2 * rho / times - over(whole * (whole - size), size), whole * whole)

    def _moments(self, l: Tensor, w: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean m_A, 1/W_A, V_A (0 if it is rounding error) and s - 1/W_A on A = {l ≥ floor}, each [g]."""
        # ~(l < floor): NaN stays in the set and propagates
        active = w * ~(l.detach() < floor[:, None])
        size = total(active, l)
        mean = over(weighted(l, active).sum(dim=1), size)
        energy = weighted((l - mean[:, None]) ** 2, active).sum(dim=1)
        grain = 16 * torch.finfo(l.dtype).eps * hidden(l.detach(), active, 0.0).abs().amax(dim=1)
        # an overflow of the energy is not rounding error, although the tolerance overflows too
        rounding = (energy <= size * grain**2) & torch.isfinite(energy)
        energy = torch.where(rounding, torch.zeros_like(energy), energy)
        return mean, over(torch.ones_like(size), size), energy, self._room(size, total(w, l)).clamp_min(0.0)

    def _floor(self, l: Tensor, w: Tensor) -> Tensor:
        """Smallest loss of A [g]: the last sorted z_k with 1/W_k + t_k (z_k - m_k) ≥ 0, or the largest loss if none."""
        ranked, order = hidden(l, w).sort(dim=1, descending=True)
        mass = w.gather(1, order).to(torch.float64)
        top = ranked[:, :1]
        present = mass > 0
        z = torch.where(present, ranked - top, 0.0).to(torch.float64)
        size = mass.cumsum(dim=1)
        first = (mass * z).cumsum(dim=1)
        mean = over(first, size)
        energy = ((mass * z * z).cumsum(dim=1) - first * mean).clamp_min(0.0)
        room = self._room(size, size[:, -1:])
        tilt = over(root(room), root(energy))
        least = over(torch.ones_like(size), size) + tilt * (z - mean)
        good = present & (room >= 0) & (energy > 0) & (least >= 0)
        place = torch.arange(l.shape[1], device=l.device)
        last = torch.where(good, place, 0).amax(dim=1, keepdim=True)
        return ranked.gather(1, last)[:, 0]


class _ChiSquareStream(Stream):
    """Stream of `ChiSquare`: finds the active set A by elimination, starting from all members.

    Each sweep solves on A and drops the members with a negative weight, until none is dropped; one sweep if the closed
    form holds. For any A that contains the optimal one, η is at most the optimal η, so no active member is dropped.
    Whether all groups have converged is read from the device after each sweep. η is stored relative to the largest
    loss, because it may lie between two losses that are nearly tied there.

    If losses are nonnegative (`floor` is 0), a first `look` sums only l and l². This is enough if no weight is negative
    even at a loss of 0, and a loss of 0 may then mark absent members.
    """

    over: ChiSquare
    _top: Tensor | None = None
    _short = True
    """Whether sums of l and l² are, or may be, enough."""

    @property
    def _sums_only(self) -> bool:
        return self._short and self.floor == 0 and not self.over.zero_member

    @property
    def absent(self) -> float:  # type: ignore[override]
        """The loss that marks an absent member."""
        return 0.0 if self._sums_only else -math.inf

    def _start(self) -> None:
        if self._top is None:
            self._eta = self._full(-torch.inf, wide=True)
        self._moments = Moments(len(self.size), self.like)
        self._sums = torch.zeros(2, len(self.size), dtype=torch.float64, device=self.size.device)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        # ~(l < eta): NaN stays in the set and propagates
        active = w if self._top is None else w * ~(l - self._top[:, None] < self._eta[:, None])
        self._moments.add(l, active)

    def _look(self, l: Tensor, size: Tensor, w: Tensor | None) -> None:
        if not self._sums_only:
            super()._look(l, size, w)
            return
        once = l if w is None else l * w
        self._sums += torch.stack([once.sum(dim=1), (once * l).sum(dim=1)])

    def _merge(self, ranks: ProcessGroup) -> None:
        if self._sums_only:
            self._sums = ranks.sum(self._sums)
        else:
            self._moments.merge(ranks)

    def _turn(self) -> bool:
        return self._closed_form() if self._sums_only else self._eliminate()

    def _closed_form(self) -> bool:
        """Solve by sums of l and l², with all members in A; returns whether another sweep is needed."""
        nothing, mean = torch.zeros_like(self.size), over(self._sums[0], self.size)
        energy = (self._sums[1] - self._sums[0] * mean).clamp_min(0.0)
        grain = max(1e-6, torch.finfo(self.like.dtype).eps ** 0.5)
        eta = self._solve(self.size, energy, mean, nothing, nothing)
        self._value = mean + self._penalty
        self._short = bool(((eta <= 0) & (energy > grain * self._sums[1])).all())
        return not self._short

    def _eliminate(self) -> bool:
        """Solve on the members that are left; returns whether some of them have a negative weight."""
        found = self._moments
        if self._top is None:
            self._top = found.top.to(self.like.dtype)
        spread = torch.maximum(found.top - found.start, found.start - found.least)
        grain = 16 * torch.finfo(self.like.dtype).eps * spread
        energy = torch.where(found.energy <= found.size * grain**2, 0.0, found.energy)
        least = found.least - found.top
        eta = self._solve(found.size, energy, found.mean_above(found.top), found.top, least)
        self._eta, self._value = torch.maximum(eta, self._eta), found.mean + self._penalty
        return bool((eta > least).any())

    def _solve(self, size: Tensor, energy: Tensor, mean: Tensor, top: Tensor, least: Tensor) -> Tensor:
        """Dual variables from W_A, V_A, and m_A and the smallest loss relative to `top`; returns η relative to it."""
        room = self.over._room(size, self.size, self.times).clamp_min(0.0)
        base, slope = over(torch.ones_like(room), size), over(root(room), root(energy))
        eta = torch.where(slope > 0, mean - over(base, slope), least)
        duals = (eta + top, torch.maximum(eta, least), mean, base, slope, top)
        self.dual, self._penalty = tuple(x.to(self.like.dtype) for x in duals), root(room * energy)
        return eta

    def value(self) -> Tensor:
        return self._narrow(self._value)

    def _weigh_(self, l: Tensor, size: Tensor, w: Tensor | None) -> Tensor | None:
        if not self._sums_only:
            return super()._weigh_(l, size, w)
        _, _, mean, base, slope, _ = (x[:, None] for x in self.dual)
        l.mul_(slope).add_(base - slope * mean)
        if w is not None:
            l.mul_(w)
        return None

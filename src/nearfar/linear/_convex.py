"""The convex form of the problem: over M = A'A ⪰ 0 it has one minimum, which is global for d ≥ m.

f(A) = F(A'A) with F(M) = tr(Q M) + Σ wᵢ μ·softplus((<M, Bᵢ> + α)/μ), a convex function of M.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar.linear._objective import Objective, gate
from nearfar.pairs import smooth_hinge

SHARPENINGS = 7  # temperatures by which the hinge is approached, each a tenth of the one before
EVERY = 10  # steps between two computations of the lower bound


@dataclass(frozen=True)
class Reference:
    """The convex solution: M [m, m], F(M), a lower bound on min F (0 if none is known), and the number of steps."""

    matrix: Tensor = field(repr=False)
    value: float
    lower: float
    steps: int

    def factor(self, components: int | None = None) -> Tensor:
        """A factor A [components, m] with A'A = M, or its best approximation of that rank, largest directions first."""
        values, vectors = torch.linalg.eigh(self.matrix)
        rows: Tensor = (vectors * values.clamp_min(0.0).sqrt()).T.flip(0)
        return rows if components is None else rows[:components]


def psd_reference(
    objective: Objective,
    start: Tensor | None = None,
    *,
    steps: int = 2000,
    tolerance: float = 1e-8,
    radius: float | None = None,
) -> Reference:
    """Compute the minimum of F(M) = tr(Q M) + Σ wᵢ μ·softplus((<M, Bᵢ> + α)/μ) over psd M, global for d ≥ m.

    FISTA with backtracking and restarts; the projection sets negative eigenvalues to 0 and, with a radius, keeps
    tr M = |A|² ≤ R². Without a radius, rows are whitened first. The dual Σ wᵢ(αqᵢ + μH₂(qᵢ)), over q with T(q) = Q + Σ
    wᵢqᵢBᵢ ⪰ 0, bounds min F from below. q is made feasible by scaling, which needs Q ≻ 0 (a ridge, or positive pairs
    that span the space); with a radius, the bound is lowered by R²·|λmin(T)| instead.

    Args:
        objective: f.
        start: M [m, m], psd; 0 by default.
        steps: the largest number of steps.
        tolerance: stop when F(M) minus the lower bound is at most this times F(M), or when F no longer changes.
        radius: R, for the minimum over |A|_F ≤ R.
    """
    if radius is not None:
        check_positive("psd_reference", "radius", radius)
    if objective.mu:
        return _fista(objective, start, steps, tolerance, radius)
    scale = max(float(objective.value(objective.v.new_zeros(1, objective.width))), 1e-12)
    soft = objective.at(mu=scale / 10)
    reference = _fista(soft, start, steps, tolerance, radius)
    for _ in range(SHARPENINGS - 1):
        soft = objective.at(mu=soft.mu / 10)
        reference = _fista(soft, reference.matrix, steps, tolerance, radius)
    # softplus exceeds the hinge by at most μ·log 2
    lower = max(0.0, reference.lower - soft.mu * math.log(2) * float(objective.weights.sum()))
    return Reference(reference.matrix, float(objective.value(reference.factor())), lower, reference.steps)


class _Cone:
    """F and its gradient in coordinates N, where M = W N W' and the rows u, v, r become u W, v W, r W."""

    def __init__(self, objective: Objective, radius: float | None) -> None:
        eye = torch.eye(objective.width).to(objective.v)
        pull = torch.cat([objective.pull, math.sqrt(objective.ridge / 2) * eye]) if objective.ridge else objective.pull
        rows = objective.weights[:, None].sqrt() * torch.stack([objective.u, objective.v])
        self.W = eye
        if radius is None:
            together = torch.cat([rows[0], rows[1], pull])
            values, vectors = torch.linalg.eigh(together.T @ together)
            live = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp_min(1e-300)
            self.W = vectors[:, live] / values[live].sqrt()
        self.trace = None if radius is None else radius**2
        self.u, self.v, self.pull = objective.u @ self.W, objective.v @ self.W, pull @ self.W
        self.Q = self.pull.T @ self.pull
        self.weights, self.margin, self.mu = objective.weights, objective.margin, objective.mu

    def value_and_gradient(self, N: Tensor) -> tuple[float, Tensor, Tensor]:
        """F, T = Q + Σ wᵢqᵢBᵢ and q."""
        s = ((self.u @ N) * self.u).sum(dim=1) - ((self.v @ N) * self.v).sum(dim=1) + self.margin
        q = gate(s, self.mu)
        value = (self.Q * N).sum() + (self.weights * smooth_hinge(s, self.mu)).sum()
        wq = (self.weights * q)[:, None]
        return float(value), self.Q + self.u.T @ (wq * self.u) - self.v.T @ (wq * self.v), q

    def project(self, N: Tensor) -> Tensor:
        """Project to the nearest psd matrix, with a trace of at most R² if a radius is given."""
        values, vectors = torch.linalg.eigh((N + N.T) / 2)
        values = values.clamp_min(0.0)
        if self.trace is not None and float(values.sum()) > self.trace:
            ranked = values.flip(0)
            excess = (ranked.cumsum(0) - self.trace) / torch.arange(1, len(ranked) + 1).to(ranked)
            values = (values - excess[ranked > excess][-1]).clamp_min(0.0)
        projected: Tensor = (vectors * values) @ vectors.T
        return projected

    def lower(self, N: Tensor, value: float, T: Tensor, q: Tensor) -> float:
        """A lower bound on min F from the dual point q, made feasible."""
        least = float(torch.linalg.eigvalsh(T)[0])
        if self.trace is not None:
            return max(0.0, value - float((T * N).sum()) + self.trace * min(least, 0.0))
        scale = 1.0
        if least < 0:
            values, directions = torch.linalg.eigh(self.Q)
            if float(values[0]) <= 1e-12 * max(float(values[-1]), 1e-300):
                return 0.0
            half = directions / values.sqrt()
            scale = min(1.0, -1 / float(torch.linalg.eigvalsh(half.T @ (T - self.Q) @ half)[0]))
        q = scale * q
        inner = self.margin * q + self.mu * (torch.special.entr(q) + torch.special.entr(1 - q))
        return max(0.0, float((self.weights * inner).sum()))


def _fista(objective: Objective, start: Tensor | None, steps: int, tolerance: float, radius: float | None) -> Reference:
    """Accelerated projected gradient descent (FISTA); the momentum restarts whenever F would increase."""
    cone = _Cone(objective, radius)
    N = torch.zeros_like(cone.Q)
    if start is not None:
        inverse = torch.linalg.pinv(cone.W)
        N = cone.project(inverse @ start @ inverse.T)
    value, T, q = cone.value_and_gradient(N)
    lower, ahead, pace = cone.lower(N, value, T, q), N, 1.0
    lipschitz = max(float(torch.linalg.matrix_norm(T)), 1e-300)
    step = 0
    for step in range(1, steps + 1):
        at, slope, _ = cone.value_and_gradient(ahead)
        lipschitz *= 0.7
        for _ in range(100):
            tried = cone.project(ahead - slope / lipschitz)
            moved = tried - ahead
            found, T, q = cone.value_and_gradient(tried)
            if found <= at + float((slope * moved).sum()) + lipschitz / 2 * float((moved * moved).sum()) + 1e-15 * at:
                break
            lipschitz *= 2
        if found > value:  # the momentum overshot, or only rounding is left
            if pace == 1.0:
                break
            ahead, pace = N, 1.0
            continue
        still = value - found <= 1e-15 * value and pace > 1.0
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead, N, pace, value = tried + (pace - 1) / faster * (tried - N), tried, faster, found
        if step % EVERY == 0 or still:
            lower = max(lower, cone.lower(N, value, T, q))
            if value - lower <= tolerance * value or still:
                break
    return Reference(cone.W @ N @ cone.W.T, value, lower, step)

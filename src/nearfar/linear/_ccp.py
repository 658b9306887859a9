"""The convex-concave procedure (DCA) for f = g - h, with a duality gap for each subproblem.

With C = Σ wᵢ vᵢvᵢ', one CCP step linearizes h at A_k and solves the convex rest. Completed by a constant it is

    A₊ = argmin m(A),   m(A) = g(A) - h(A_k) - <∇h(A_k), A - A_k> = f(A) + Σ wᵢ|(A - A_k)vᵢ|²

so m ≥ f with equality at A_k, and any A₊ with m(A₊) ≤ m(A_k) has f(A₊) ≤ f(A_k) - Σ wᵢ|(A₊ - A_k)vᵢ|².
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar.linear._convex import SHARPENINGS
from nearfar.linear._descent import Callback, Iterate, Path, size
from nearfar.linear._objective import Objective, gate
from nearfar.pairs import smooth_hinge

CHECKS = (2, 4, 6, 8)  # L-BFGS iterations at which the gap, which costs a factorization, is checked; then every tenth


def majorizer(objective: Objective, A: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """The majorizer m(A) = f(A) + Σ wᵢ|(A - A_k)vᵢ|² and its gradient, for A_k = `anchor`, without cancellation."""
    value, gradient = objective.value_and_gradient(A)
    moved = objective.v @ (A - anchor).T
    weighted = objective.weights[:, None] * moved
    return value + (weighted * moved).sum(), gradient + 2 * weighted.T @ objective.v


def curvature(objective: Objective, A: Tensor) -> Tensor:
    """Half the curvature of m with q held fixed, P = Q + Σ wᵢ(qᵢ uᵢuᵢ' + (1-qᵢ) vᵢvᵢ'), [m, m]."""
    q = gate(objective.products(A)[2], objective.mu)[:, None]
    w = objective.weights[:, None]
    P = objective.u.T @ (w * q * objective.u) + objective.v.T @ (w * (1 - q) * objective.v)
    return P + objective.pull.T @ objective.pull + objective.ridge / 2 * torch.eye(len(P)).to(P)


def duality_gap(objective: Objective, A: Tensor, anchor: Tensor, *, mu: float | None = None) -> float:
    """The duality gap of a subproblem: m(A) minus the dual value at q = sigmoid(s(A)/μ), an upper bound of m - min m.

    The dual is concave in q ∈ (0, 1)ⁿ, with H₂(q) = -q·log q - (1-q)·log(1-q):

        max Σ wᵢ(αqᵢ + μH₂(qᵢ)) - tr(A_k C P(q)⁻¹ C A_k') + h(A_k)

    At that q the Lagrangian is a quadratic in A with curvature 2P that has the value m(A) and its gradient G, so the
    gap is ¼<G, G P⁻¹>: a sum of squares, which avoids the cancellation of subtracting two large values. It is infinite
    if G is outside the range of P, because q has underflowed. For the hinge, `mu` is the temperature whose q is tried
    as the dual point, and Σ wᵢ([sᵢ]₊ - qᵢsᵢ) is added. `anchor` is A_k.
    """
    soft = objective if mu is None else objective.at(mu=mu)
    _, G = majorizer(soft, A, anchor)
    values, vectors = torch.linalg.eigh(curvature(soft, A))
    along = (G @ vectors).square().sum(dim=0)
    eps = torch.finfo(G.dtype).eps
    live = values > len(values) * eps * values[-1]
    # outside the range of P only rounding errors are allowed
    if bool((along[~live].sqrt() > 1e3 * eps * (size(G) + size(anchor) * float(values[-1]))).any()):
        return math.inf
    gap = float((along[live] / values[live]).sum()) / 4
    if mu is not None:
        s = objective.products(A)[2]
        gap += float((objective.weights * (smooth_hinge(s, objective.mu) - gate(s, mu) * s)).sum())
    return gap


@dataclass(frozen=True)
class Subproblem:
    """The result of one CCP step: A₊, m(A₊), the gap relative to m(A₊), and the number of L-BFGS iterations."""

    A: Tensor
    value: float
    gap: float
    inner: int


def _minimize(objective: Objective, anchor: Tensor, start: Tensor, gap: float, inner: int) -> tuple[Tensor, int]:
    """Minimize m by L-BFGS from `start`, in coordinates that whiten P(start), until the relative gap is small."""
    from scipy.optimize import minimize

    values, vectors = torch.linalg.eigh(curvature(objective, start))
    live = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    # A = start + Z basis': directions outside the range of P stay fixed
    basis: Tensor = vectors[:, live] / values[live].sqrt()
    count = 0

    def place(x: object) -> Tensor:
        return start + torch.as_tensor(x, dtype=start.dtype).reshape(len(start), -1) @ basis.T

    def fun(x: object) -> tuple[float, object]:
        value, gradient = majorizer(objective, place(x), anchor)
        return float(value), (gradient @ basis).to(torch.float64).ravel().numpy()

    def check(intermediate_result: object) -> None:
        nonlocal count
        count += 1
        if count in CHECKS or count % 10 == 0:
            A = place(intermediate_result.x)  # type: ignore[attr-defined]
            if duality_gap(objective, A, anchor) <= gap * intermediate_result.fun:  # type: ignore[attr-defined]
                raise StopIteration

    options = {"maxiter": inner, "maxfun": 3 * inner, "maxcor": 20, "ftol": 2e-16, "gtol": 0.0}
    zero = torch.zeros(start.shape[0] * basis.shape[1], dtype=torch.float64).numpy()
    found = minimize(fun, zero, jac=True, method="L-BFGS-B", callback=check, options=options)
    return place(found.x), int(found.nit)


def ccp_step(objective: Objective, anchor: Tensor, *, gap: float = 1e-6, inner: int = 500) -> Subproblem:
    """Take a CCP step A₊ ≈ argmin f(A) + Σ wᵢ|(A - A_k)vᵢ|², by L-BFGS from A_k until m(A₊) - dual ≤ gap·m(A₊).

    The fixed-point iteration A = A_k C P(A)⁻¹ of the optimality condition diverges without damping. The hinge is
    approached by lowering μ from a tenth of f(A_k), each temperature solved as accurately as it approximates the hinge.
    """
    if objective.mu:
        A, spent = _minimize(objective, anchor, anchor, gap, inner)
        return _evaluate(objective, A, anchor, None, spent)
    scale = float(objective.value(anchor))
    best = Subproblem(anchor, scale, math.inf, 0)
    A, spent = anchor, 0
    for k in range(1, SHARPENINGS + 1):
        mu = max(scale * 10.0**-k, 1e-300)
        A, count = _minimize(objective.at(mu=mu), anchor, A, max(gap / 4, 10.0**-k / 10), inner)
        spent += count
        found = _evaluate(objective, A, anchor, mu, spent)
        best = found if found.value <= best.value else best
        if found.gap <= gap:
            break
    return best


def _evaluate(objective: Objective, A: Tensor, anchor: Tensor, mu: float | None, spent: int) -> Subproblem:
    """Evaluate A: its value and its relative gap."""
    value = float(majorizer(objective, A, anchor)[0])
    return Subproblem(A, value, duality_gap(objective, A, anchor, mu=mu) / max(value, 1e-300), spent)


def ccp(
    objective: Objective,
    A: Tensor,
    *,
    steps: int = 50,
    tolerance: float = 1e-8,
    gap: float = 1e-6,
    inner: int = 500,
    callback: Callback | None = None,
) -> Path:
    """Minimize f by CCP, A_{k+1} = argmin_A g(A) - <∇h(A_k), A>. f never increases, even with inexact steps.

    Args:
        objective: f.
        A: the start, [d, m]. 0 stays 0.
        steps: the largest number of subproblems.
        tolerance: stop when |∇f(A)|_F is at most this.
        gap: the relative duality gap to which each subproblem is solved.
        inner: the largest number of L-BFGS iterations per subproblem; the gap that was reached is recorded.
        callback: called as callback(t, A, iterate); a true return value ends the run.

    Returns:
        The path. An iterate's `certified` is Σ wᵢ|(A₊ - A_k)vᵢ|², the guaranteed decrease of f; `gap` and `inner`
        belong to its subproblem.

    >>> from nearfar.linear import TripletObjective
    >>> f = TripletObjective(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), margin=0.0, ridge=0.1)
    >>> path = ccp(f, torch.tensor([[1.0, 0.1]]), steps=3)
    >>> path.values == sorted(path.values, reverse=True)
    True
    """
    check_positive("ccp", "gap", gap)
    A = A.detach()
    iterates: list[Iterate] = []
    reason, step, certified, found = "steps", 0.0, 0.0, Subproblem(A, 0.0, math.nan, 0)
    for t in range(steps + 1):
        value, gradient = objective.value_and_gradient(A)
        iterates.append(Iterate(float(value), size(A), size(gradient), step, certified, found.gap, found.inner))
        if callback is not None and callback(t, A, iterates[-1]):
            reason = "callback"
            break
        if iterates[-1].gradient <= tolerance:
            reason = "tolerance"
            break
        if t == steps:
            break
        found = ccp_step(objective, A, gap=gap, inner=inner)
        # m(A₊) ≤ m(A_k) = f(A_k) implies descent; rounding can break it near the end
        if not (found.value <= float(value) and float(objective.value(found.A)) <= float(value)):
            reason = "rounding"
            break
        certified = float(objective.concave_part(found.A - A))
        A, step = found.A, math.nan
    return Path(A, tuple(iterates), reason)

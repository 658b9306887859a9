"""Gradient descent A ← A - η∇f(A) with certified steps, whose least decrease is known before they are taken.

The gradient is L(R)-Lipschitz on the ball |A|_F ≤ R (`Objective.smoothness`), so with the η that solves
η·L(|A| + η|∇f|) = 1 f decreases by at least (η/2)|∇f|². Longer steps are tried from there. With one triplet the longest
safe step is known exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_positive
from nearfar.linear._objective import Objective, TripletObjective, gate
from nearfar.pairs import smooth_hinge

RULES = ("armijo", "safe", "local", "exact", "single")
ENOUGH = 0.1  # c of the Armijo rule: a step η must lower f by c·η|∇f|²; any c ≤ ½ accepts the safe step
REACH = 10.0  # a trial moves A by at most this many times max(|A|, 1), because some rays descend forever


@dataclass(frozen=True)
class Iterate:
    """One iterate, and the step that led to it."""

    value: float  # f(A); in a stochastic run f of the batch
    norm: float  # |A|_F, which grows without bound if inf f is not attained
    gradient: float  # |∇f(A)|_F; with a ball, |A₊ - A|/η of the projected step
    step: float = 0.0  # η of the step that led here; 0 at the start, NaN for CCP
    certified: float = 0.0  # the guaranteed decrease of this step; NaN in a stochastic run, where nothing is guaranteed
    gap: float = math.nan  # the duality gap of the CCP subproblem that led here, relative to its value; NaN elsewhere
    inner: int = 0  # the number of L-BFGS iterations of that subproblem


@dataclass(frozen=True)
class Path:
    """The iterates of a run, its last A, and why it stopped: "tolerance", "steps", "rounding" or "callback".

    "rounding" means that no step lowers f in floating point any more. |∇f| below about √(eps·f·L) may be unreachable
    (2e-8 if f and L are about 1), because the decrease is then below the last digit of f. With a tolerance near that,
    like the default, "tolerance" and "rounding" both mean convergence, and the processor decides which one occurs.
    """

    A: Tensor = field(repr=False)
    iterates: tuple[Iterate, ...] = field(repr=False)
    reason: str

    def __len__(self) -> int:
        """The number of steps taken."""
        return len(self.iterates) - 1

    @property
    def values(self) -> list[float]:
        """The values f of all iterates, from the start to the end."""
        return [each.value for each in self.iterates]

    @property
    def certified(self) -> list[float]:
        """The certified decreases, one per step."""
        return [each.certified for each in self.iterates[1:]]


Callback = Callable[[int, Tensor, Iterate], object]
"""Called as callback(t, A, iterate) at every iterate; a true return value ends the run."""


class Move(NamedTuple):
    """A step: the new A, η, and the certified decrease."""

    A: Tensor
    step: float
    certified: float


def size(A: Tensor) -> float:
    """The Frobenius norm |A|_F."""
    return float(torch.linalg.vector_norm(A))


def safe_step(objective: Objective, A: Tensor, gradient: Tensor, *, local: bool = False) -> float:
    """The safe step: the root η of η·L(|A| + η|∇f|) = 1, for which f(A - η∇f) ≤ f(A) - (η/2)|∇f|².

    The left side increases with η, and the segment from A stays in the ball of radius |A| + η|∇f|. (The paper's 1/M(w)
    is a bound at w alone, not along the step; see docs/papers/jaffe-2020.md.)

    Args:
        objective: with μ > 0; the hinge has no Lipschitz gradient.
        A: [d, m].
        gradient: ∇f(A), [d, m].
        local: bound the curvature around A, by Σ wᵢ(2bᵢ + (|A Bᵢ|_F + η|∇f|bᵢ)²/μ), instead of on the whole ball. The
            step is never shorter and costs two more products; it pays if many columns of A hardly matter.

    >>> f = TripletObjective(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), margin=0.0)
    >>> A = torch.tensor([[1.0, 0.0]])
    >>> round(safe_step(f, A, f.gradient(A)), 4)  # a little less than 1/L(1) = 1/24
    0.0387
    """
    if not objective.mu:
        raise ValueError("safe_step: mu must be above zero, but came as 0; the hinge has no Lipschitz gradient.")
    least, constant, linear, square = objective.local_bounds(A) if local else _ball_bounds(objective, size(A))
    g = size(gradient)
    low, high = 0.0, _inverse(max(least, constant))
    for _ in range(60):
        middle = (low + high) / 2
        reach = middle * g
        if middle * max(least, constant + linear * reach + square * reach**2) <= 1:
            low = middle
        else:
            high = middle
    return low


def _ball_bounds(objective: Objective, a: float) -> tuple[float, float, float, float]:
    """The bound L(|A| + ρ) = max(c₀, c₁ + c₂(|A| + ρ)²), as a polynomial in ρ."""
    least, first, second = objective.bounds()
    return least, first + second * a * a, 2 * second * a, second


def _inverse(smoothness: float) -> float:
    """The step 1/L; 1 if f is constant (L = 0), where any step is safe."""
    return 1 / smoothness if smoothness else 1.0


def single_triplet_step(objective: TripletObjective, A: Tensor, *, factor: float = 1.0) -> tuple[Tensor, float]:
    """Take the step A ← A - factor·A B/l₊ for one triplet; return its exact decrease -μ·log(q·e^{b/μ} + 1-q) too.

    This is the gradient step with η = factor/(2q·l₊), written without q, because the paper's η̂ = 1/(2qλmax) overflows
    as q vanishes. Every factor in (0, 2] descends; the paper's is 1. If l₊ ≤ 0 every step does, and |l₋| is used
    instead. The objective has no ridge.
    """
    if len(objective.v) != 1 or objective.ridge:
        raise ValueError(
            f"single_triplet_step: objective must hold one triplet and no ridge, but holds {len(objective.v)} "
            f"and ridge={objective.ridge:g}; take safe_step."
        )
    low, high = (float(x) for x in objective.extreme_eigenvalues())
    scale = high if high > 0 else -low
    if not scale:  # B = 0: f is constant
        return A, 0.0
    _, _, s = objective.products(A)
    AB = _times_b(objective, A)
    b = factor * (-2 * float((AB * AB).sum()) + factor * float((AB * _times_b(objective, AB)).sum()) / scale) / scale
    return A - factor * AB / scale, _decrease(float(s), b, objective.mu)


def _times_b(objective: TripletObjective, A: Tensor) -> Tensor:
    """The product A B for the one triplet."""
    return (objective.u @ A.T).T @ objective.u - (objective.v @ A.T).T @ objective.v


def _decrease(s: float, b: float, mu: float) -> float:
    """The decrease of one term, f(s) - f(s + b) = -μ·log(q·e^{b/μ} + 1-q); for μ = 0 that of the hinge."""
    if mu and abs(b) < mu:  # accurate for small changes of f; the difference below is for large ones
        q = float(gate(torch.tensor(s, dtype=torch.float64), mu))
        return -mu * math.log1p(q * math.expm1(b / mu))
    before, after = smooth_hinge(torch.tensor([s, s + b], dtype=torch.float64), mu).tolist()
    return float(before - after)


def exact_step(objective: Objective, A: Tensor, gradient: Tensor, *, start: float) -> float:
    """The first local minimizer η ≥ start of f(A - η∇f), by doubling and bisection on the slope along the ray.

    For one triplet it is s₂/(2q·s₃), s₂ = |A B|², s₃ = <A B, A B B>, if s₃ > 0, which is at least 1/(2qλmax) (the paper
    prints "at most"). If the ray descends forever (s₃ ≤ 0), A moves by 10·max(|A|, 1). `start` must lower f, as
    the safe step does.
    """
    ray = objective.ray(A, -gradient)
    limit = max(start, REACH * max(size(A), 1.0) / max(size(gradient), 1e-300))
    low = high = start
    while high < limit and ray.slope(high) < 0:
        low, high = high, min(2 * high, limit)
    if ray.slope(high) < 0:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ray.slope(middle) < 0 else (low, middle)
    # doubling may have jumped over a maximum: never end above the start
    return low if ray.value(low) <= ray.value(start) else start


def descend(
    objective: Objective,
    A: Tensor,
    *,
    steps: int = 100,
    tolerance: float = 1e-8,
    rule: str = "armijo",
    radius: float | None = None,
    batch: int | None = None,
    generator: torch.Generator | None = None,
    decay: float = 0.5,
    callback: Callback | None = None,
) -> Path:
    """Minimize f by gradient descent A ← A - η∇f(A). f never increases, and certified decreases are recorded.

    rule      η                                                      certified decrease
    "safe"    root of η·L(|A| + η|∇f|) = 1                           (η/2)|∇f|², known beforehand
    "local"   the same with the curvature around A                   (η/2)|∇f|², known beforehand
    "armijo"  twice the last one, halved down to the safe one        η/10·|∇f|² (checked), (η/2)|∇f|² at the safe one
    "exact"   first minimizer along the ray, from the safe one       as "armijo"
    "single"  1/(2q·l₊) of the only triplet, in its stable form      exact
    radius    on the ball |A|_F ≤ R, steps from 1/L(R), projected    |A₊ - A|²/(2η), or c|A₊ - A|²/η where η is longer
    batch     (safe step of a drawn batch)/(1+t)^decay               none: it certifies a decrease for the batch only

    The hinge (μ = 0) has no safe step: "armijo" and "exact" start from 1/(2 Σ wb), and stop if no step descends.

    Args:
        objective: f.
        A: the start, [d, m]; not 0, which is always stationary.
        steps: the largest number of steps.
        tolerance: stop when |∇f|_F (or its projected form) is at most this.
        rule: one of the above.
        radius: R of the projected variant, which projects the start too.
        batch: triplets per step of the stochastic variant.
        generator: random generator of the draws.
        decay: exponent of the stochastic step; the noise vanishes with ½.
        callback: see `Callback`.

    Returns:
        The path; `path.A` is the last iterate.

    >>> f = TripletObjective(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), margin=0.0)
    >>> path = descend(f, torch.tensor([[1.0, 0.1]]), steps=5, rule="single")
    >>> [f"{value:.4f}" for value in path.values]
    ['1.2842', '0.3133', '0.0000']
    """
    check_choice("descend", "rule", rule, RULES)
    if radius is not None:
        check_positive("descend", "radius", radius)
        if rule in ("local", "exact", "single"):
            raise ValueError(f"descend: rule must be 'armijo' or 'safe' with a radius, but came as {rule!r}.")
    if rule in ("safe", "local") and not objective.mu:
        raise ValueError(f"descend: rule must be 'armijo' or 'exact' for the hinge (mu=0), but came as {rule!r}.")
    A = _project(A.detach(), radius)
    iterates: list[Iterate] = []
    step = certified = 0.0
    reason = "steps"
    for t in range(steps + 1):
        term = objective if batch is None else objective.sample(batch, generator)
        value, gradient = term.value_and_gradient(A)
        base = _base(term, A, gradient, radius, local=rule == "local" and batch is None)
        projected = radius is not None and batch is None
        slope = size(_project(A - base * gradient, radius) - A) / base if projected else size(gradient)
        iterates.append(Iterate(float(value), size(A), slope, step, certified))
        if callback is not None and callback(t, A, iterates[-1]):
            reason = "callback"
        elif slope <= tolerance and batch is None:
            reason = "tolerance"
        elif t < steps:
            if batch is None:
                move = _move(objective, A, float(value), gradient, rule, radius, base, step)
            else:
                step = base / (1 + t) ** decay
                move = Move(_project(A - step * gradient, radius), step, math.nan)
            if move is not None:
                A, step, certified = move
                continue
            reason = "rounding"
        break
    return Path(A, tuple(iterates), reason)


def _project(A: Tensor, radius: float | None) -> Tensor:
    """The nearest point of the ball |A|_F ≤ radius."""
    norm = size(A)
    # slightly inside, so that rounding does not leave the ball
    return A if radius is None or norm <= radius else A * (radius / norm * (1 - 1e-15))


def _base(objective: Objective, A: Tensor, gradient: Tensor, radius: float | None, *, local: bool = False) -> float:
    """The step with a guaranteed decrease: the safe step; 1/L(R) on a ball; 1/(2 Σ wb) for the hinge between kinks."""
    if not objective.mu:
        return _inverse(max(objective.bounds()[:2]))
    if radius is not None:
        return _inverse(objective.smoothness(radius))
    return safe_step(objective, A, gradient, local=local)


def _move(
    objective: Objective,
    A: Tensor,
    value: float,
    gradient: Tensor,
    rule: str,
    radius: float | None,
    base: float,
    last: float,
) -> Move | None:
    """Take the step of a rule; None if no step of it lowers f in floating point."""
    if rule == "single":
        if not isinstance(objective, TripletObjective):
            raise TypeError(f"descend: rule='single' needs a TripletObjective, but got {type(objective).__name__}.")
        moved, drop = single_triplet_step(objective, A)
        # η in units of the gradient; it may overflow as q vanishes, the step itself does not
        length = size(moved - A) / max(size(gradient), 1e-300)
        return Move(moved, length, drop) if float(objective.value(moved)) <= value else None
    eta = base
    if rule == "exact":
        eta = exact_step(objective, A, gradient, start=base)
    elif rule == "armijo":
        eta = max(base, min(2 * last, REACH * max(size(A), 1.0) / max(size(gradient), 1e-300)))
    floor = base if objective.mu else base * 2.0**-40
    while True:
        moved = _project(A - eta * gradient, radius)
        fall = size(moved - A) ** 2 / eta if eta else 0.0
        reached = float(objective.value(moved))
        if eta <= base and objective.mu:
            return Move(moved, eta, fall / 2) if reached <= value else None
        if reached <= value - ENOUGH * fall:
            return Move(moved, eta, ENOUGH * fall)
        if eta <= floor:
            return None
        eta = max(eta / 2, floor)

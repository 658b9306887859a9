"""The smoothed triplet and contrastive losses of a linear map, as functions of the matrix A [d, m].

    f(A) = tr(A Q A') + Σ wᵢ μ·softplus(sᵢ/μ),   sᵢ = |A uᵢ|² - |A vᵢ|² + α

The triplet loss has Q = 0; the contrastive loss has Q = Σ aᵢ uᵢuᵢ' and u = 0 in s. In docstrings Bᵢ = uᵢuᵢ' - vᵢvᵢ' and
qᵢ = sigmoid(sᵢ/μ); Bᵢ is never formed, since A uᵢ and A vᵢ suffice. A bias would cancel in all differences.
"""

import copy
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import check_embeddings
from nearfar.pairs import smooth_hinge


@dataclass(frozen=True)
class Infimum:
    """Bounds lower ≤ inf f ≤ upper known in closed form, and whether inf f is attained (None if unknown)."""

    lower: float
    upper: float
    attained: bool | None
    why: str


@dataclass(frozen=True)
class Ray:
    """f on the line A + tD, c₀ + c₁t + c₂t² + Σ wᵢ μ·softplus((aᵢ + bᵢt + cᵢt²)/μ), evaluated in O(n)."""

    rows: tuple[Tensor, Tensor, Tensor]
    pull: tuple[float, float, float]
    weights: Tensor
    mu: float

    def value(self, t: float) -> float:
        a, b, c = self.rows
        inner = float((self.weights * smooth_hinge(a + b * t + c * t * t, self.mu)).sum())
        return self.pull[0] + self.pull[1] * t + self.pull[2] * t * t + inner

    def slope(self, t: float) -> float:
        a, b, c = self.rows
        q = gate(a + b * t + c * t * t, self.mu)
        return self.pull[1] + 2 * self.pull[2] * t + float((self.weights * q * (b + 2 * c * t)).sum())


def gate(s: Tensor, mu: float) -> Tensor:
    """The derivative q = sigmoid(s/μ) of μ·softplus(s/μ); 1[s > 0] for the hinge μ = 0."""
    return torch.sigmoid(s / mu) if mu else (s > 0).to(s.dtype)


class Objective:
    """The base of both losses, f(A) = ½ridge|A|² + Σ|A rₖ|² + Σ wᵢ μ·softplus((|A uᵢ|² - |A vᵢ|² + α)/μ).

    gradient   2 A (Q + Σ wᵢqᵢBᵢ),  Q = Σ rₖrₖ' + ½ridge·I
    Hessian    H[D] = 2 D (Q + Σ wᵢqᵢBᵢ) + (4/μ) Σ wᵢqᵢ(1-qᵢ) <A Bᵢ, D> A Bᵢ,   <A Bᵢ, D> = <A uᵢ, D uᵢ> - <A vᵢ, D vᵢ>
    parts      f = g - h,  g = tr(A Q A') + Σ wᵢ μ·log(e^{(|A uᵢ|²+α)/μ} + e^{|A vᵢ|²/μ}),  h = Σ wᵢ|A vᵢ|²

    Both parts are convex, and f is convex in M = A'A. Its gradient is Lipschitz on balls only (`smoothness`), because
    |Hess| grows like |A|² where s = 0.
    """

    def __init__(
        self, u: Tensor, v: Tensor, *, margin: float, mu: float, weights: Tensor, ridge: float, pull: Tensor
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, "margin", margin, zero=True)
        check_positive(owner, "mu", mu, zero=True)
        check_positive(owner, "ridge", ridge, zero=True)
        self.u = u
        self.v = v
        self.margin = float(margin)
        self.mu = float(mu)
        self.ridge = float(ridge)
        self.weights = weights
        self.pull = pull
        self._norms: Tensor | None = None

    @property
    def width(self) -> int:
        """The number of columns m of A."""
        return self.v.shape[1]

    def at(self, *, mu: float | None = None, ridge: float | None = None) -> Self:
        """The same data with another μ or ridge, without copying tensors."""
        other = copy.copy(self)
        if mu is not None:
            check_positive(type(self).__name__, "mu", mu, zero=True)
            other.mu = float(mu)
        if ridge is not None:
            check_positive(type(self).__name__, "ridge", ridge, zero=True)
            other.ridge = float(ridge)
        return other

    def sample(self, batch: int, generator: torch.Generator | None = None) -> Self:
        """Draw `batch` terms with replacement in proportion to their weights, so that E f_batch = f."""
        index = torch.multinomial(self.weights, batch, replacement=True, generator=generator)
        other = copy.copy(self)
        other.u, other.v = self.u[index], self.v[index]
        other.weights = self.weights.new_full((batch,), 1 / batch)
        other._norms = None if self._norms is None else self._norms[index]
        return other

    def products(self, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products A uᵢ [n, d], A vᵢ [n, d] and the scores sᵢ [n]."""
        if A.ndim != 2 or A.shape[1] != self.width:
            raise ValueError(
                f"{type(self).__name__}: A must have shape [d, {self.width}], but came with shape {list(A.shape)}."
            )
        au, av = self.u @ A.T, self.v @ A.T
        return au, av, (au * au).sum(dim=1) - (av * av).sum(dim=1) + self.margin

    def _quadratic(self, A: Tensor) -> Tensor:
        """The quadratic term tr(A Q A')."""
        total = (A * A).sum() * (self.ridge / 2)
        return total + ((self.pull @ A.T) ** 2).sum() if len(self.pull) else total

    def _quadratic_slope(self, A: Tensor) -> Tensor:
        """The gradient 2 A Q of the quadratic term."""
        slope = self.ridge * A
        return slope + 2 * (self.pull @ A.T).T @ self.pull if len(self.pull) else slope

    def value(self, A: Tensor) -> Tensor:
        """The value f(A), a 0-dim tensor; μ = 0 is the hinge."""
        s = self.products(A)[2]
        return self._quadratic(A) + (self.weights * smooth_hinge(s, self.mu)).sum()

    def gradient(self, A: Tensor) -> Tensor:
        """The gradient 2 A (Q + Σ wᵢqᵢBᵢ), [d, m]; for μ = 0 the Clarke subgradient without terms at s = 0."""
        return self.value_and_gradient(A)[1]

    def value_and_gradient(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient, from one pair of products."""
        au, av, s = self.products(A)
        wq = (2 * self.weights * gate(s, self.mu))[:, None]
        value = self._quadratic(A) + (self.weights * smooth_hinge(s, self.mu)).sum()
        return value, self._quadratic_slope(A) + (wq * au).T @ self.u - (wq * av).T @ self.v

    def hessian_vector(self, A: Tensor, D: Tensor) -> Tensor:
        """The Hessian-vector product H[D], [d, m]; for μ = 0 the second derivative where it exists.

        The paper's Hessian of g lacks the term 2P and doubles its cross term; eq. (28) for f is right.
        """
        au, av, s = self.products(A)
        du, dv = self.u @ D.T, self.v @ D.T
        q = gate(s, self.mu)
        first = (2 * self.weights * q)[:, None]
        left, right = first * du, first * dv
        if self.mu:
            along = (au * du).sum(dim=1) - (av * dv).sum(dim=1)
            second = (4 / self.mu * self.weights * q * (1 - q) * along)[:, None]
            left, right = left + second * au, right + second * av
        return self._quadratic_slope(D) + left.T @ self.u - right.T @ self.v

    def convex_part(self, A: Tensor) -> Tensor:
        """The convex part g(A) = tr(A Q A') + Σ wᵢ μ·logaddexp((|A uᵢ|²+α)/μ, |A vᵢ|²/μ); the maximum for μ = 0."""
        return self.value(A) + self.concave_part(A)

    def concave_part(self, A: Tensor) -> Tensor:
        """The convex function h(A) = Σ wᵢ|A vᵢ|² that is subtracted; its gradient is 2 A C, C = Σ wᵢ vᵢvᵢ'."""
        return (self.weights * (self.v @ A.T).square().sum(dim=1)).sum()

    def ray(self, A: Tensor, D: Tensor) -> Ray:
        """The restriction of f to the line A + tD."""
        au, av, s = self.products(A)
        du, dv = self.u @ D.T, self.v @ D.T
        along = 2 * ((au * du).sum(dim=1) - (av * dv).sum(dim=1))
        square = (du * du).sum(dim=1) - (dv * dv).sum(dim=1)
        pull = (float(self._quadratic(A)), float((self._quadratic_slope(A) * D).sum()), float(self._quadratic(D)))
        return Ray((s, along, square), pull, self.weights, self.mu)

    def extreme_eigenvalues(self) -> tuple[Tensor, Tensor]:
        """The two possibly nonzero eigenvalues l₋ ≤ l₊ of Bᵢ, ½(<u-v, u+v> ∓ |u-v||u+v|), [n] each."""
        less, more = self.u - self.v, self.u + self.v
        inner = (less * more).sum(dim=1)
        size = torch.linalg.vector_norm(less, dim=1) * torch.linalg.vector_norm(more, dim=1)
        return (inner - size) / 2, (inner + size) / 2

    def spectral_norms(self) -> Tensor:
        """The norms bᵢ = |Bᵢ|₂ = max(l₊, -l₋) = ½(|<u-v, u+v>| + |u-v||u+v|), [n], without cancellation."""
        if self._norms is None:
            low, high = self.extreme_eigenvalues()
            self._norms = torch.maximum(high.abs(), low.abs())
        return self._norms

    def bounds(self) -> tuple[float, float, float]:
        """The coefficients (c₀, c₁, c₂) of L(R) = max(c₀, c₁ + c₂R²); c₂ is infinite for the hinge."""
        b = self.spectral_norms()
        second = float((self.weights * b * b).sum())
        return 0.0, self._pull_norm() + 2 * float((self.weights * b).sum()), _divide(second, self.mu)

    def smoothness(self, radius: float) -> float:
        """A bound L(R) ≥ |Hess f(A)| for all |A|_F ≤ R: 2|Q|₂ + Σ wᵢ(2bᵢ + R²bᵢ²/μ), or a sharper one of a subclass.

        The paper's M_f = |w|²λmax(B)² + 2λmax(B) is no bound, since B is indefinite (docs/papers/jaffe-2020.md).
        """
        least, first, second = self.bounds()
        return max(least, first + (second * radius**2 if radius else 0.0))

    def local_bounds(self, A: Tensor) -> tuple[float, float, float, float]:
        """Coefficients of a curvature bound near A: max(c₀, c₁ + c₂ρ + c₃ρ²) ≥ |Hess f| within distance ρ of A."""
        au, av, _ = self.products(A)
        turn = (self.u * self.v).sum(dim=1) * (au * av).sum(dim=1)
        first, second = (x.square().sum(dim=1) * y.square().sum(dim=1) for x, y in ((au, self.u), (av, self.v)))
        square = (first + second - 2 * turn).clamp_min(0.0)  # |A B|²
        b = self.spectral_norms()
        reach = _divide(float((self.weights * square).sum()), self.mu)
        least, start, top = self.bounds()
        return least, start + reach, _divide(2 * float((self.weights * square.sqrt() * b).sum()), self.mu), top

    def _pull_norm(self) -> float:
        """The norm 2|Q|₂ of the quadratic term's Hessian."""
        return self.ridge + (2 * float(torch.linalg.matrix_norm(self.pull, ord=2)) ** 2 if len(self.pull) else 0.0)

    def _value_at_zero(self) -> float:
        return float(self.value(self.v.new_zeros(1, self.width)))


class TripletObjective(Objective):
    """f(A) = Σ wᵢ μ·softplus((|A uᵢ|² - |A vᵢ|² + α)/μ), the smoothed triplet margin loss of a linear map (Jaffe 2020).

    Args:
        u: x_anchor - x_positive, [n, m], floating point (use float64 for meaningful certificates).
        v: x_anchor - x_negative, [n, m].
        margin: α ≥ 0.
        mu: μ ≥ 0, the temperature; 0 is the hinge. f exceeds the hinge by at most μ·log 2.
        weights: w ≥ 0, [n], divided by their sum; 1/n each by default.
        ridge: adds ½·ridge·|A|², which makes every infimum attained.

    >>> u, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    >>> f = TripletObjective(u, v, margin=0.0)
    >>> f.value(torch.zeros(1, 2))  # log 2 wherever the two distances are equal
    tensor(0.6931)
    >>> f.spectral_norms(), f.smoothness(1.0)  # B = diag(1, -4): 2·4 + 4²
    (tensor([4.]), 24.0)
    """

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        *,
        margin: float = 1.0,
        mu: float = 1.0,
        weights: Tensor | None = None,
        ridge: float = 0.0,
    ) -> None:
        check_rows("TripletObjective", u, v)
        if len(u) != len(v):
            raise ValueError(f"TripletObjective: u and v must have one row a triplet, but {len(u)} and {len(v)} came.")
        weights = shares("TripletObjective", weights, len(v), v)
        super().__init__(u, v, margin=margin, mu=mu, weights=weights, ridge=ridge, pull=v[:0])

    def reweighted(self, weights: Tensor | None) -> Self:
        """The same triplets with other weights [n] (1/n each if None), without copying tensors."""
        other = copy.copy(self)
        other.weights = shares("TripletObjective", weights, len(self.v), self.v)
        return other

    def infimum(self, components: int | None = None) -> Infimum:
        """Bounds of inf f over A [components, m], from cases with a closed form.

        With ridge > 0 it is attained. Else, over the triplets of positive weight:

        * all Bᵢ ⪰ 0 (v = c·u with |c| ≤ 1): min f = μ·log(1+e^{α/μ}) (α for the hinge), attained at 0;
        * some psd M of rank ≤ d has <M, Bᵢ> < 0 for all i: inf f = 0. For μ > 0 it is not attained and |A| grows
          without end; the hinge attains it. Tried here: M = I and the lowest direction of Σ wᵢBᵢ;
        * otherwise between 0 and f(0): `psd_reference` finds it for d ≥ m.

        The paper's log 2 or 0 is right for α = 0, μ = 1, n = 1.
        """
        top = self._value_at_zero()
        if self.ridge:
            return Infimum(0.0, top, True, "ridge > 0 makes f coercive")
        live = self.weights > 0
        low, _ = self.extreme_eigenvalues()
        if bool((low[live] >= -1e-12 * self.spectral_norms()[live]).all()):
            return Infimum(top, top, True, "every B is positive semidefinite: A = 0 is a minimum")
        shorter = self.u.square().sum(dim=1) < self.v.square().sum(dim=1)
        if (components is None or components >= self.width) and bool(shorter[live].all()):
            return Infimum(0.0, 0.0, not self.mu, "A = t·I separates every triplet as t grows")
        S = self.u.T @ (self.weights[:, None] * self.u) - self.v.T @ (self.weights[:, None] * self.v)
        direction = torch.linalg.eigh(S)[1][:, 0]
        if bool(((self.u @ direction).abs() < (self.v @ direction).abs())[live].all()):
            return Infimum(0.0, 0.0, not self.mu, "one direction separates every triplet as it grows")
        return Infimum(0.0, top, None, "not known in closed form; psd_reference finds it for d ≥ m")


class ContrastiveObjective(Objective):
    """f(A) = Σ aᵢ|A uᵢ|² + Σ cⱼ μ·softplus((m - |A vⱼ|²)/μ): positives pulled, negatives pushed beyond m.

    f = g - h with g = Σ aᵢ|A uᵢ|² + Σ cⱼ μ·logaddexp(m/μ, |A vⱼ|²/μ) and h = Σ cⱼ|A vⱼ|². The Hessian is the difference
    of two psd parts, so its norm is at most the larger of the two. The paper leaves this loss to future work.

    Args:
        u: differences of positive pairs, [n, m].
        v: differences of negative pairs, [k, m].
        margin: m ≥ 0, the squared distance beyond which a negative pair has no loss.
        mu: μ ≥ 0, the temperature; 0 is the hinge.
        weights: (a, c), [n] and [k], divided by their common sum; 1/(n+k) each by default.
        ridge: adds ½·ridge·|A|².

    >>> f = ContrastiveObjective(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), margin=1.0, mu=0.0)
    >>> f.value(torch.eye(2)), f.value(torch.zeros(1, 2))  # ½(1 + 0) and ½(0 + 1)
    (tensor(0.5000), tensor(0.5000))
    """

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        *,
        margin: float = 1.0,
        mu: float = 1.0,
        weights: tuple[Tensor, Tensor] | None = None,
        ridge: float = 0.0,
    ) -> None:
        check_rows("ContrastiveObjective", u, v)
        both = shares("ContrastiveObjective", None if weights is None else torch.cat(weights), len(u) + len(v), v)
        self.positive = u
        pull = both[: len(u), None].sqrt() * u
        super().__init__(torch.zeros_like(v), v, margin=margin, mu=mu, weights=both[len(u) :], ridge=ridge, pull=pull)

    def sample(self, batch: int, generator: torch.Generator | None = None) -> Self:
        """Draw `batch` negative pairs in proportion to their weights, and as many positive ones: E f_batch = f."""
        other = super().sample(batch, generator)
        other.weights = other.weights * self.weights.sum()
        if len(self.pull):
            index = torch.randint(len(self.pull), (batch,), generator=generator, device=self.v.device)
            other.pull = self.pull[index] * math.sqrt(len(self.pull) / batch)
        return other

    def bounds(self) -> tuple[float, float, float]:
        """Coefficients of L(R) = max(2 Σ cⱼ|vⱼ|², 2|Q|₂ + R² Σ cⱼ|vⱼ|⁴/μ), the larger of the two parts."""
        _, both, second = super().bounds()
        push = 2 * float((self.weights * self.spectral_norms()).sum())
        return push, both - push, second

    def infimum(self, components: int | None = None) -> Infimum:
        """Between 0 and f(0); attained if ridge > 0 or negative differences lie in the span of the positive ones."""
        top = self._value_at_zero()
        rank, whole = (int(torch.linalg.matrix_rank(rows)) for rows in (self.pull, torch.cat([self.pull, self.v])))
        known = True if self.ridge or rank == whole else None
        return Infimum(
            0.0, top, known, "the pull is coercive" if known else "negative pairs may move apart without bound"
        )


def check_rows(owner: str, u: Tensor, v: Tensor) -> None:
    """Require two matrices of differences of equal width, dtype and device, with at least one negative difference."""
    check_embeddings(owner, "u", u)
    check_embeddings(owner, "v", v)
    if u.shape[1] != v.shape[1] or u.dtype != v.dtype or u.device != v.device:
        raise ValueError(
            f"{owner}: u and v must agree in width, dtype and device, but came as {list(u.shape)} {u.dtype} on "
            f"{u.device} and {list(v.shape)} {v.dtype} on {v.device}."
        )
    if not len(v):
        raise ValueError(f"{owner}: v must have at least one row, but came with shape {list(v.shape)}.")


def shares(owner: str, weights: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Normalize weights to sum 1; uniform if none are given."""
    if weights is None:
        return like.new_full((rows,), 1 / rows)
    if weights.shape != (rows,):
        raise ValueError(f"{owner}: weights must have shape [{rows}], but came with shape {list(weights.shape)}.")
    weights = weights.to(like)
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise ValueError(f"{owner}: weights must be finite, not negative and not all zero, but their sum is {total:g}.")
    return weights / total


def _divide(numerator: float, mu: float) -> float:
    """The quotient x/μ with 0/0 = 0 and x/0 = ∞: second derivatives of a hinge."""
    if not numerator:
        return 0.0
    return numerator / mu if mu else math.inf

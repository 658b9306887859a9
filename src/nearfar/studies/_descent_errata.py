"""Errata of Jaffe 2020: what is printed and what is true, each with a computed counterexample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Triplet:
    """One triplet (u, v) and one w, α = 0 and μ = 1, as in section 2 of the paper."""

    u: Array
    v: Array
    w: Array

    @property
    def b(self) -> Array:
        """The matrix B = uu' - vv'."""
        return np.outer(self.u, self.u) - np.outer(self.v, self.v)

    @property
    def q(self) -> float:
        """The sigmoid of w'Bw."""
        return float(np.exp(-np.logaddexp(0.0, -self.w @ self.b @ self.w)))

    @property
    def gradient(self) -> Array:
        """The gradient 2qBw."""
        return 2 * self.q * self.b @ self.w

    def at(self, w: Array) -> Triplet:
        """The same triplet with another w."""
        return Triplet(self.u, self.v, w)

    def value(self) -> float:
        """The loss log(1 + e^{w'Bw})."""
        return float(np.logaddexp(0.0, self.w @ self.b @ self.w))

    def hessian(self) -> Array:
        """The Hessian 4q(1-q)Bww'B + 2qB, eq. (28)."""
        turned = self.b @ self.w
        return 4 * self.q * (1 - self.q) * np.outer(turned, turned) + 2 * self.q * self.b

    def hessian_g(self) -> Array:
        """The Hessian of g, 2P + 4p(1-p)Bww'B with P = p·uu' + (1-p)·vv'; the paper leaves out 2P."""
        P = self.q * np.outer(self.u, self.u) + (1 - self.q) * np.outer(self.v, self.v)
        turned = self.b @ self.w
        return 2 * P + 4 * self.q * (1 - self.q) * np.outer(turned, turned)

    def printed_hessian_g(self) -> Array:
        """The Hessian of g as printed: 4p(1-p)[(w'u)²uu' + (w'v)²vv' - 2(w'u)(w'v)(uv' + vu')]."""
        a, b = self.w @ self.u, self.w @ self.v
        cross = np.outer(self.u, self.v) + np.outer(self.v, self.u)
        square = a * a * np.outer(self.u, self.u) + b * b * np.outer(self.v, self.v)
        return 4 * self.q * (1 - self.q) * (square - 2 * a * b * cross)

    def printed_m_g(self) -> float:
        """The printed bound |w|²(|u|⁴ + |v|⁴ + 4|u|²|v|²), eq. (23)."""
        a, b = self.u @ self.u, self.v @ self.v
        return float(self.w @ self.w * (a * a + b * b + 4 * a * b))

    def true_m_g(self) -> float:
        """The true bound 2·max(|u|², |v|²) + |w|²|B|²."""
        return float(2 * max(self.u @ self.u, self.v @ self.v) + self.w @ self.w * self.norm() ** 2)

    def top(self) -> float:
        """The largest eigenvalue λmax(B)."""
        return float(np.linalg.eigvalsh(self.b)[-1])

    def norm(self) -> float:
        """The norm |B|₂."""
        return float(np.abs(np.linalg.eigvalsh(self.b)).max())

    def printed_m_f(self) -> float:
        """The printed bound |w|²λmax(B)² + 2λmax(B), eq. (29)."""
        return float(self.w @ self.w * self.top() ** 2 + 2 * self.top())

    def true_m_f(self) -> float:
        """The true bound |w|²|B|² + 2|B|."""
        return float(self.w @ self.w * self.norm() ** 2 + 2 * self.norm())

    def change(self, eta: float) -> float:
        """The change b_η = w'(4η²q²B³ - 4ηqB²)w, eq. (33)."""
        turned = self.b @ self.w
        return float(4 * eta * self.q * (eta * self.q * turned @ self.b @ turned - turned @ turned))


def draws(count: int, seed: int = 0) -> list[Triplet]:
    """Random triplets of 2 to 6 features; lengths of w from .01 to 3, of v from .1 to 10 times those of u."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        m = int(rng.integers(2, 7))
        u, v, w = rng.standard_normal((3, m))
        w *= 10 ** rng.uniform(-2, 0.5) / np.linalg.norm(w)
        found.append(Triplet(u, v * 10 ** rng.uniform(-1, 1), w))
    return found


def _entry(where: str, printed: str, true: str, counterexample: str, **measured: float) -> dict[str, object]:
    return {"where": where, "printed": printed, "true": true, "counterexample": counterexample, "measured": measured}


def errata(count: int = 2000) -> list[dict[str, object]]:
    """The table of errata: where, printed, true, a counterexample, and measurements on it and on random draws."""
    cases = draws(count)
    return [*_of_g(cases), *_of_f(cases), *_of_steps(cases), *_of_convergence(cases)]


def _share(flags: list[bool]) -> float:
    return float(np.mean(flags))


def _spread(matrix: Array) -> float:
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())


def _of_g(cases: list[Triplet]) -> list[dict[str, object]]:
    near = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.01, 0.01]))
    printed_error = _spread(near.printed_hessian_g() - near.hessian_g()) / _spread(near.hessian_g())
    return [
        _entry("(15)", "Hess w'Bw = B", "2B", "any B ≠ 0", ratio=2.0),
        _entry(
            "(18)",
            "Hess LSE ⪯ I/μ",
            "⪯ I/(2μ): right, but loose",
            "two equal entries",
            ratio=_lse_ratio(),
        ),
        _entry(
            "Hess g",
            "4p(1-p)[...] - 8p(1-p)(...)",
            "2P + 4p(1-p)Bww'B",
            "u = e₁, v = e₂/2, w = (.01, .01)",
            relative_error=printed_error,
        ),
        _entry(
            "(23)",
            "M_g = |w|²(|u|⁴ + |v|⁴ + 4|u|²|v|²)",
            "2·max(|u|², |v|²) + |w|²|B|²",
            "u = e₁, v = e₂/2, w = (.01, .01)",
            hessian_over_printed=_spread(near.hessian_g()) / near.printed_m_g(),
            hessian_over_true=_spread(near.hessian_g()) / near.true_m_g(),
            violated=_share([_spread(c.hessian_g()) > c.printed_m_g() for c in cases]),
            true_violated=_share([_spread(c.hessian_g()) > c.true_m_g() * (1 + 1e-12) for c in cases]),
        ),
    ]


def _of_f(cases: list[Triplet]) -> list[dict[str, object]]:
    far = Triplet(np.array([1.0, 0.0]), np.array([0.0, 99.5]), np.array([-0.085, 0.014]))
    saddle = [Triplet(np.eye(2)[0], np.eye(2)[1], np.full(2, t)) for t in (10.0, 100.0)]
    return [
        _entry("before (29)", "q² ≤ 1/4", "q(1-q) ≤ 1/4", "q = .95", square=0.95**2),
        _entry(
            "(29)",
            "M_f = |w|²λmax(B)² + 2λmax(B)",
            "|w|²|B|² + 2|B|",
            "u = e₁, v = 99.5e₂, w = (-.085, .014)",
            hessian_over_printed=_spread(far.hessian()) / far.printed_m_f(),
            hessian_over_true=_spread(far.hessian()) / far.true_m_f(),
            violated=_share([_spread(c.hessian()) > c.printed_m_f() for c in cases]),
            true_violated=_share([_spread(c.hessian()) > c.true_m_f() * (1 + 1e-12) for c in cases]),
        ),
        _entry(
            "2.5",
            "1/M_f is usually better than 1/M_g",
            "never worse: |B| ≤ max(|u|², |v|²), so the true M_f ≤ the true M_g",
            "none: it holds",
            above=_share([c.true_m_f() > c.true_m_g() * (1 + 1e-12) for c in cases]),
        ),
        _entry(
            "after (29)",
            "f is M_f-smooth, so Lee et al. apply",
            "smooth on balls only: |Hess| grows like |w|²",
            "u = e₁, v = e₂, w = (t, t)",
            growth_from_t_10_to_100=_spread(saddle[1].hessian()) / _spread(saddle[0].hessian()),
        ),
    ]


def _lse_ratio() -> float:
    s = np.array([0.5, 0.5, 0.0])
    return float(np.linalg.eigvalsh(np.diag(s) - np.outer(s, s))[-1])


def _of_steps(cases: list[Triplet]) -> list[dict[str, object]]:
    small = [c.at(c.w * 0.01 / np.linalg.norm(c.w)) for c in cases]
    near = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.1, 0.1]))
    reverse = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.1, 1.0]))
    curve = reverse.b @ reverse.w
    cubic = float(curve @ reverse.b @ curve)
    line = Triplet(np.array([1.0, 0.0]), np.array([2.0, 0.0]), np.array([0.3, 0.2]))
    single = [c for c in cases if c.top() > 1e-9 and c.q > 1e-12]
    return [
        _entry(
            "step 1/M_g",
            "f falls",
            "f can rise: the printed M_g vanishes with w",
            "u = e₁, v = e₂/2, w = (.1, .1)",
            rise=near.at(near.w - near.gradient / near.printed_m_g()).value() - near.value(),
            raised_for_small_w=_share(
                [c.at(c.w - c.gradient / c.printed_m_g()).value() > c.value() + 1e-12 for c in small]
            ),
            true_raised_for_small_w=_share(
                [c.at(c.w - c.gradient / c.true_m_g()).value() > c.value() + 1e-12 for c in small]
            ),
        ),
        _entry("2.6", "w - η∇f = w - 2qBw", "w - 2ηqBw", "η ≠ 1"),
        _entry(
            "2.7",
            "critical η ≤ 1/(2qλmax)",
            "≥ if w'B³w > 0, and none (unbounded descent) otherwise",
            "u = e₁, v = e₂/2, w = (.1, 1): w'B³w < 0",
            cubic=cubic,
        ),
        _entry(
            "η̂",
            "1/(2qλmax) always",
            "undefined where λmax ≤ 0: there every η > 0 descends",
            "u = e₁, v = 2e₁",
            largest_eigenvalue=line.top(),
        ),
        _entry(
            "b_η̂ ≤ 0",
            "at η̂",
            "true, and for every 0 < η ≤ 1/(qλmax)",
            "none: it holds",
            raised=_share([c.change(1 / (c.q * c.top())) > 1e-9 for c in single]),
        ),
    ]


def _of_convergence(cases: list[Triplet]) -> list[dict[str, object]]:
    live = [c for c in cases if c.top() > 1e-9 and 1e-9 < c.q < 1 - 1e-9]
    printed, true = [], []
    for case in live:
        fall = case.value() - case.at(case.w - case.gradient / case.top()).value()
        X = (1 - case.q) * float(case.gradient @ case.gradient) / (case.q * case.top())
        printed.append(float(np.logaddexp(np.log(case.q) + X, np.log1p(-case.q))) > fall + 1e-9)
        true.append(-float(np.log1p(case.q * np.expm1(-X))) > fall + 1e-9)
    return [
        _entry(
            "2.8",
            "|w| ≤ |(I - B/λmax)ᵗ|_F |w¹|",
            "true, but loose: the spectral norm max(1, 1 + |λmin|/λmax)ᵗ does",
            "none: it holds",
        ),
        _entry(
            "2.9",
            "log(q·e^{+X} + 1-q) ≤ fₜ - fₜ₊₁",
            "-log(q·e^{-X} + 1-q) ≤ fₜ - fₜ₊₁, X = (1-q)|∇f|²/(qλmax)",
            "random draws, η = 1/λmax",
            violated=_share(printed),
            true_violated=_share(true),
        ),
        _entry(
            "2.10",
            "≤, sum to t+1, f(w*)",
            "=, sum to t; w* does not exist where inf f is not attained",
            "every B with a negative eigenvalue",
        ),
        _entry(
            "Figure 2",
            "with η̂ the descent appears to be quadratic in log space",
            "exponential: -log f grows by (1 + |λmin|/λmax)² a step",
            "the triplet of the figure",
        ),
        _entry("bias", "to be studied", "cancels in every difference: nothing to study", "any"),
    ]

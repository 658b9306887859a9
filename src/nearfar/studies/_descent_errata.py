"""Errata of Jaffe 2020: the bounds as printed and as they are, measured on counterexamples and random draws."""

from collections.abc import Callable
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

    def at(self, w: Array) -> "Triplet":
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


def errata(count: int = 2000) -> dict[str, dict[str, float]]:
    """Place in the paper -> measurements on a counterexample and on random draws (docs/papers/jaffe-2020.md)."""
    cases = draws(count)
    return {**_of_g(cases), **_of_f(cases), **_of_steps(cases), **_of_convergence(cases)}


def _share(flags: list[bool]) -> float:
    return float(np.mean(flags))


def _spread(matrix: Array) -> float:
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())


def _exceed(cases: list[Triplet], hessian: Callable[[Triplet], Array], bound: Callable[[Triplet], float]) -> float:
    """The share of draws whose Hessian exceeds a bound."""
    return _share([_spread(hessian(c)) > bound(c) * (1 + 1e-12) for c in cases])


def _of_g(cases: list[Triplet]) -> dict[str, dict[str, float]]:
    near = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.01, 0.01]))
    s = np.array([0.5, 0.5, 0.0])
    return {
        "(18)": {"ratio": float(np.linalg.eigvalsh(np.diag(s) - np.outer(s, s))[-1])},
        "Hess g": {"relative_error": _spread(near.printed_hessian_g() - near.hessian_g()) / _spread(near.hessian_g())},
        "(23)": {
            "hessian_over_printed": _spread(near.hessian_g()) / near.printed_m_g(),
            "hessian_over_true": _spread(near.hessian_g()) / near.true_m_g(),
            "violated": _exceed(cases, Triplet.hessian_g, Triplet.printed_m_g),
            "true_violated": _exceed(cases, Triplet.hessian_g, Triplet.true_m_g),
        },
    }


def _of_f(cases: list[Triplet]) -> dict[str, dict[str, float]]:
    far = Triplet(np.array([1.0, 0.0]), np.array([0.0, 99.5]), np.array([-0.085, 0.014]))
    saddle = [Triplet(np.eye(2)[0], np.eye(2)[1], np.full(2, t)) for t in (10.0, 100.0)]
    return {
        "(29)": {
            "hessian_over_printed": _spread(far.hessian()) / far.printed_m_f(),
            "hessian_over_true": _spread(far.hessian()) / far.true_m_f(),
            "violated": _exceed(cases, Triplet.hessian, Triplet.printed_m_f),
            "true_violated": _exceed(cases, Triplet.hessian, Triplet.true_m_f),
        },
        "2.5": {"above": _share([c.true_m_f() > c.true_m_g() * (1 + 1e-12) for c in cases])},
        "after (29)": {"growth_from_t_10_to_100": _spread(saddle[1].hessian()) / _spread(saddle[0].hessian())},
    }


def _of_steps(cases: list[Triplet]) -> dict[str, dict[str, float]]:
    near = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.1, 0.1]))
    reverse = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.1, 1.0]))
    curve = reverse.b @ reverse.w
    line = Triplet(np.array([1.0, 0.0]), np.array([2.0, 0.0]), np.array([0.3, 0.2]))
    small = [c.at(c.w * 0.01 / np.linalg.norm(c.w)) for c in cases]
    single = [c for c in cases if c.top() > 1e-9 and c.q > 1e-12]

    def raised(bound: Callable[[Triplet], float]) -> float:
        return _share([c.at(c.w - c.gradient / bound(c)).value() > c.value() + 1e-12 for c in small])

    return {
        "step 1/M_g": {
            "rise": near.at(near.w - near.gradient / near.printed_m_g()).value() - near.value(),
            "raised_for_small_w": raised(Triplet.printed_m_g),
            "true_raised_for_small_w": raised(Triplet.true_m_g),
        },
        "2.7": {"cubic": float(curve @ reverse.b @ curve)},
        "η̂": {"largest_eigenvalue": line.top()},
        "b_η̂ ≤ 0": {"raised": _share([c.change(1 / (c.q * c.top())) > 1e-9 for c in single])},
    }


def _of_convergence(cases: list[Triplet]) -> dict[str, dict[str, float]]:
    live = [c for c in cases if c.top() > 1e-9 and 1e-9 < c.q < 1 - 1e-9]
    printed, true = [], []
    for case in live:
        fall = case.value() - case.at(case.w - case.gradient / case.top()).value()
        X = (1 - case.q) * float(case.gradient @ case.gradient) / (case.q * case.top())
        printed.append(float(np.logaddexp(np.log(case.q) + X, np.log1p(-case.q))) > fall + 1e-9)
        true.append(-float(np.log1p(case.q * np.expm1(-X))) > fall + 1e-9)
    return {"2.9": {"violated": _share(printed), "true_violated": _share(true)}}

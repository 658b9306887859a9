"""The nonlinear program of d_iso and d_haus for SLSQP; one radius per anchor gives O(N²) constraints, not O(N³).

    variables    g [N, n],  a radius r for each anchor and each two neighboring steps of its ladder,  t
    separated    |g_i - g_j| ≤ r  (at or above the step),     r + α ≤ |g_i - g_k|  (below it)
    objective t  haus:  |g_i - f_i|² ≤ t²             iso:  | |g_i - g_j| - |f_i - f_j| | ≤ t

Classes are a ladder of two steps. All constraints except those of haus are linear in the distances D, so one Jacobian
of D serves them all. On the sphere rows are g/|g| and distances are angles; haus uses the chord, which increases with
the angle.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nearfar.geometry.ladder import steps
from nearfar.geometry.spaces import Flat, Space

__all__ = ["Choice", "Kind", "Program", "descend", "settle", "splits"]

Kind = Literal["iso", "haus"]
Choice = Callable[[Any], tuple[Any, Any]]


def splits(y: Any) -> dict[str, Any]:
    """Arrays of the pairs (i, j), i < j, and of the constraints between a pair and a radius.

    Constraint c bounds the distance of `pairs[c]` by `radius[c]`, from above if `sign[c]` is -1, else from below. A row
    on step k of an anchor's ladder lies inside the radius below that step, and outside the radius above it.
    """
    i, j = np.triu_indices(len(y), 1)
    number = np.zeros((len(y), len(y)), dtype=int)
    number[i, j] = number[j, i] = np.arange(len(i))
    pairs, radius, sign, count = [], [], [], 0
    for anchor, row in enumerate(steps(y)):
        last = row.max()
        for other in np.flatnonzero(row >= 0):
            for step, side in ((row[other], -1.0), (row[other] - 1, 1.0)):
                if 0 <= step < last:
                    pairs.append(number[anchor, other])
                    radius.append(count + step)
                    sign.append(side)
        count += max(0, last)
    found = {"pairs": np.array(pairs, int), "radius": np.array(radius, int), "sign": np.array(sign)}
    return {"i": i, "j": j, "radii": int(count), **found}


@dataclass(frozen=True, eq=False)
class Program:
    """Constraints c(z) ≥ 0 and their Jacobian, z = (g, r, t)."""

    kind: Kind  # "iso" or "haus"
    f: Any  # [N, n], the rows to approximate, of diameter about 1 (unit rows on the sphere)
    y: Any  # [N] their classes, or [N, N] their relevance
    margin: float = 0.0  # α, in the same units
    space: Space = field(default_factory=Flat)  # defines the distances
    parts: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.parts.update(splits(self.y))
        self.parts["apart"] = self._distances(self.f)[0]

    @property
    def size(self) -> int:
        """The number of variables."""
        return int(self.f.size + self.parts["radii"] + 1)

    def start(self, g: Any) -> Any:
        """The variables z of a separated g: a radius is that of the farthest row it must contain, t is the cost."""
        parts = self.parts
        distance, *_ = self._distances(g)
        radii = np.zeros(parts["radii"])
        inside = parts["sign"] < 0
        np.maximum.at(radii, parts["radius"][inside], distance[parts["pairs"][inside]])
        return np.concatenate([g.ravel(), radii, [self.cost(g)]])

    def cost(self, g: Any) -> float:
        """The objective t of g: the longest chord |g_i - f_i|, or the largest difference of distances."""
        if self.kind == "haus":
            return float(np.linalg.norm(self._on(g) - self.f, axis=1).max())
        return float(np.abs(self._distances(g)[0] - self.parts["apart"]).max())

    def differences(self, g: Any) -> tuple[Any, Any]:
        """The distances of all pairs in g less those in f, [pairs], and their Jacobian [pairs, N n]."""
        return self._distances(g)[0] - self.parts["apart"], self._slopes(g)

    def rows(self, z: Any) -> Any:
        """The rows g [N, n] in z."""
        return z[: self.f.size].reshape(self.f.shape)

    def constraints(self, z: Any) -> Any:
        """The constraints c(z), which must be nonnegative."""
        parts, g, t = self.parts, self.rows(z), z[-1]
        distance, *_ = self._distances(g)
        radii = z[self.f.size : -1]
        separated = parts["sign"] * (distance[parts["pairs"]] - radii[parts["radius"]])
        separated -= self.margin * (parts["sign"] > 0)
        if self.kind == "haus":
            return np.concatenate([separated, t * t - ((self._on(g) - self.f) ** 2).sum(axis=1)])
        off = distance - parts["apart"]
        return np.concatenate([separated, t - off, t + off])

    def jacobian(self, z: Any) -> Any:
        """The dense Jacobian of c(z)."""
        parts, g, t = self.parts, self.rows(z), z[-1]
        slopes = self._slopes(g)
        many, width = len(parts["pairs"]), self.f.size
        top = np.zeros((many, len(z)))
        top[:, :width] = parts["sign"][:, None] * slopes[parts["pairs"]]
        top[np.arange(many), width + parts["radius"]] = -parts["sign"]
        if self.kind == "haus":
            low = np.zeros((len(g), len(z)))
            slope = self._haus_slopes(g)
            for k in range(g.shape[1]):
                low[np.arange(len(g)), np.arange(len(g)) * g.shape[1] + k] = slope[:, k]
            low[:, -1] = 2 * t
            return np.vstack([top, low])
        low = np.zeros((2 * len(slopes), len(z)))
        low[: len(slopes), :width], low[len(slopes) :, :width] = -slopes, slopes
        low[:, -1] = 1.0
        return np.vstack([top, low])

    @property
    def _flat(self) -> bool:
        return isinstance(self.space, Flat)

    def _on(self, g: Any) -> Any:
        return g if self._flat else g / np.linalg.norm(g, axis=1, keepdims=True)

    def _haus_slopes(self, g: Any) -> Any:
        """The gradient [N, n] of -|g_i - f_i|² with respect to g_i."""
        if self._flat:
            return -2 * (g - self.f)
        u = self._on(g)
        along = (u * self.f).sum(axis=1, keepdims=True)
        return 2 * (self.f - along * u) / np.linalg.norm(g, axis=1, keepdims=True)

    def _distances(self, g: Any) -> tuple[Any, Any, Any]:
        return self.space.with_gradients(g, self.parts["i"], self.parts["j"])

    def _slopes(self, g: Any) -> Any:
        """The Jacobian dD/dg, [pairs, N n]."""
        distance, at_i, at_j = self._distances(g)
        n, places = g.shape[1], np.arange(len(distance))
        found = np.zeros((len(distance), g.size))
        for k in range(n):
            found[places, self.parts["i"] * n + k] = at_i[:, k]
            found[places, self.parts["j"] * n + k] = at_j[:, k]
        return found


def descend(program: Program, g: Any, keep: Choice | None = None, *, iterations: int = 300) -> Any:
    """Run SLSQP from a separated g (from f itself it diverges); the result is nearly feasible and needs a repair.

    `keep` returns a number that must not be negative and its gradient [N, n].
    """
    slope = np.zeros(program.size)
    slope[-1] = 1.0
    more = [] if keep is None else [_bound(_of_rows(program, keep))]
    return _minimize(program, g, lambda z: (z[-1], slope), iterations, more)


def settle(program: Program, g: Any, value: float, choose: Choice | None = None, *, iterations: int = 300) -> Any:
    """Among rows that cost at most `value`, find those that minimize `choose`, starting from g.

    `choose` returns a number and its gradient [N, n]; by default it is the squared distance to f.
    """
    choose = choose or (lambda rows: (((rows - program.f) ** 2).sum(), 2 * (rows - program.f)))
    limit = np.zeros(program.size)
    limit[-1] = -1.0
    bound = _bound(lambda z: (value - z[-1], limit))
    return _minimize(program, g, _of_rows(program, choose), iterations, [bound])


def _of_rows(program: Program, choose: Choice) -> Choice:
    """A function of the rows as a function of the variables z."""

    def found(z: Any) -> tuple[float, Any]:
        value, gradient = choose(program.rows(z))
        slope = np.zeros(len(z))
        slope[: gradient.size] = gradient.ravel()
        return float(value), slope

    return found


def _bound(function: Choice) -> dict[str, Any]:
    """A constraint for SLSQP: the function must not be negative."""
    return {"type": "ineq", "fun": lambda z: function(z)[0], "jac": lambda z: function(z)[1]}


def _minimize(
    program: Program,
    g: Any,
    objective: Callable[[Any], tuple[float, Any]],
    iterations: int,
    bounds: Sequence[dict[str, Any]] = (),
) -> Any:
    """Minimize an objective with its gradient under the program's constraints, from g; g itself if that diverges."""
    from scipy.optimize import minimize

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SLSQP warns whenever it clips a step to its bounds
        found = minimize(
            objective,
            program.start(g),
            jac=True,
            method="SLSQP",
            constraints=[{"type": "ineq", "fun": program.constraints, "jac": program.jacobian}, *bounds],
            options={"ftol": 1e-10, "maxiter": iterations},
        )
    rows = program.rows(found.x)
    return rows if np.isfinite(rows).all() else g

"""The programme behind d_iso and d_haus, for SLSQP: one radius an anchor makes O(N²) constraints of O(N³) triplets.

    variables    g [N, n],  r_i for each anchor with positives and negatives,  t
    separated    |g_i - g_j| ≤ r_i  (same class),     r_i + α ≤ |g_i - g_k|  (another class)
    objective t  haus:  |g_i - f_i|² ≤ t²             iso:  | |g_i - g_j| - |f_i - f_j| | ≤ t

Every constraint but haus's own is linear in the distances D, so that one Jacobian of D serves them all.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Kind = Literal["iso", "haus"]
ROUND = 1e-18
"""Under the root of a distance, so that coincident rows have a slope."""


@dataclass(frozen=True, eq=False)
class Programme:
    """Constraints c(z) ≥ 0 and their Jacobian, z = (g, r, t).

    Args:
        kind: "iso" or "haus".
        f: [N, n], the rows to approximate, of diameter about 1.
        y: [N], their classes.
        margin: α, in the same units.
    """

    kind: Kind
    f: Any
    y: Any
    margin: float = 0.0
    parts: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.f)
        i, j = np.triu_indices(rows, 1)
        same = self.y[i] == self.y[j]
        counts = np.array([(self.y == label).sum() for label in self.y])
        anchors = np.flatnonzero((counts > 1) & (counts < rows))
        radius = np.full(rows, -1)
        radius[anchors] = np.arange(len(anchors))
        pairs, ends = np.concatenate([np.arange(len(i))] * 2), np.concatenate([i, j])
        sign = np.where(np.concatenate([same, same]), -1.0, 1.0)  # r - D ≥ 0, or D - r - α ≥ 0
        kept = radius[ends] >= 0
        parts = {
            "i": i,
            "j": j,
            "pairs": pairs[kept],
            "radius": radius[ends[kept]],
            "sign": sign[kept],
            "anchors": anchors,
            "same": same,
            "apart": np.linalg.norm(self.f[i] - self.f[j], axis=1),
        }
        self.parts.update(parts)

    @property
    def size(self) -> int:
        """How many variables there are."""
        return int(self.f.size + len(self.parts["anchors"]) + 1)

    def start(self, g: Any) -> Any:
        """The variables for a separated g: radii at the farthest positives, t at its value."""
        distance, _ = self._distances(g)
        radii = np.zeros(len(self.f))
        for p in np.flatnonzero(self.parts["same"]):
            for end in (self.parts["i"][p], self.parts["j"][p]):
                radii[end] = max(radii[end], distance[p])
        return np.concatenate([g.ravel(), radii[self.parts["anchors"]], [self.value(g)]])

    def value(self, g: Any) -> float:
        """What g costs: max |g_i - f_i|, or the largest difference of distances."""
        if self.kind == "haus":
            return float(np.linalg.norm(g - self.f, axis=1).max())
        i, j = self.parts["i"], self.parts["j"]
        return float(np.abs(np.linalg.norm(g[i] - g[j], axis=1) - self.parts["apart"]).max())

    def rows(self, z: Any) -> Any:
        """The rows g [N, n] out of z."""
        return z[: self.f.size].reshape(self.f.shape)

    def constraints(self, z: Any) -> Any:
        """c(z), all of which must not be negative."""
        parts, g, t = self.parts, self.rows(z), z[-1]
        distance, _ = self._distances(g)
        radii = z[self.f.size : -1]
        separated = parts["sign"] * (distance[parts["pairs"]] - radii[parts["radius"]])
        separated -= self.margin * (parts["sign"] > 0)
        if self.kind == "haus":
            return np.concatenate([separated, t * t - ((g - self.f) ** 2).sum(axis=1)])
        off = distance - parts["apart"]
        return np.concatenate([separated, t - off, t + off])

    def jacobian(self, z: Any) -> Any:
        """The slopes of c in z, dense."""
        parts, g, t = self.parts, self.rows(z), z[-1]
        slopes = self._slopes(g)
        many, width = len(parts["pairs"]), self.f.size
        top = np.zeros((many, len(z)))
        top[:, :width] = parts["sign"][:, None] * slopes[parts["pairs"]]
        top[np.arange(many), width + parts["radius"]] = -parts["sign"]
        if self.kind == "haus":
            low = np.zeros((len(g), len(z)))
            for k in range(g.shape[1]):
                low[np.arange(len(g)), np.arange(len(g)) * g.shape[1] + k] = -2 * (g - self.f)[:, k]
            low[:, -1] = 2 * t
            return np.vstack([top, low])
        low = np.zeros((2 * len(slopes), len(z)))
        low[: len(slopes), :width], low[len(slopes) :, :width] = -slopes, slopes
        low[:, -1] = 1.0
        return np.vstack([top, low])

    def _distances(self, g: Any) -> tuple[Any, Any]:
        between = g[self.parts["i"]] - g[self.parts["j"]]
        return np.sqrt((between**2).sum(axis=1) + ROUND), between

    def _slopes(self, g: Any) -> Any:
        """dD/dg, [pairs, N n]."""
        distance, between = self._distances(g)
        unit = between / distance[:, None]
        n, places = g.shape[1], np.arange(len(distance))
        found = np.zeros((len(distance), g.size))
        for k in range(n):
            found[places, self.parts["i"] * n + k] = unit[:, k]
            found[places, self.parts["j"] * n + k] = -unit[:, k]
        return found


def descend(programme: Programme, g: Any, *, iterations: int = 300) -> Any:
    """The rows where SLSQP ends from a separated g (from f itself it diverges); near feasible, to be repaired."""
    from scipy.optimize import minimize

    slope = np.zeros(programme.size)
    slope[-1] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step outside its bounds is clipped, and says so
        found = minimize(
            lambda z: z[-1],
            programme.start(g),
            jac=lambda z: slope,
            method="SLSQP",
            constraints={"type": "ineq", "fun": programme.constraints, "jac": programme.jacobian},
            options={"ftol": 1e-10, "maxiter": iterations},
        )
    ended = programme.rows(found.x)
    return ended if np.isfinite(ended).all() else g


def settle(programme: Programme, g: Any, value: float, *, iterations: int = 300) -> Any:
    """Of the rows that cost at most `value`, those that lie nearest to f in least squares, sought from g."""
    from scipy.optimize import minimize

    def objective(z: Any) -> tuple[float, Any]:
        off = programme.rows(z) - programme.f
        slope = np.zeros(len(z))
        slope[: off.size] = 2 * off.ravel()
        return float((off**2).sum()), slope

    start = programme.start(g)
    limit = np.zeros((1, len(start)))
    limit[0, -1] = -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = minimize(
            objective,
            start,
            jac=True,
            method="SLSQP",
            constraints=[
                {"type": "ineq", "fun": programme.constraints, "jac": programme.jacobian},
                {"type": "ineq", "fun": lambda z: value - z[-1:], "jac": lambda z: limit},
            ],
            options={"ftol": 1e-10, "maxiter": iterations},
        )
    ended = programme.rows(found.x)
    return ended if np.isfinite(ended).all() else g

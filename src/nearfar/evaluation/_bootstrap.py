"""Bootstrap confidence intervals over classes or over queries; neighbors are searched once and not resampled.

Zero-shot retrieval asks how a space serves *other classes*, and queries of one class fail together. Classes are
therefore resampled; intervals over queries would be too narrow. Per-query results are computed once, and a resample
only weights them differently.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nearfar._utils.checks import check_choice

Unit = Literal["class", "query"]
DRAWS = 2**20  # units drawn at once, which bounds the memory by about 25 MB


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: the estimate.
        low: lower end.
        high: upper end.
        error: standard error.
    """

    value: float
    low: float
    high: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def resampled_means(
    values: np.ndarray,
    groups: np.ndarray,
    *,
    unit: Unit = "class",
    resamples: int = 2000,
    seed: int = 0,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Means of columns of per-query results [n, c] over resampled classes `groups` [n], or queries: [resamples, c].

    `counts` [n] are the weights of the rows in the means; 1 by default.
    """
    check_choice("bootstrap", "unit", unit, ("class", "query"))
    _, place = np.unique(groups, return_inverse=True)
    if unit == "query":
        place = np.arange(len(values))
    units = int(place.max()) + 1
    weights = np.ones(len(values)) if counts is None else counts
    totals = np.bincount(place, weights, minlength=units)
    sums = np.stack([np.bincount(place, column * weights, minlength=units) for column in values.T], axis=1)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    step = max(1, DRAWS // units)
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        drawn = rng.integers(units, size=(draws, units)) + units * np.arange(draws)[:, None]
        times = np.bincount(drawn.ravel(), minlength=draws * units).reshape(draws, units).astype(float)
        means[start : start + draws] = (times @ sums) / (times @ totals)[:, None]
    return means


def intervals(
    values: np.ndarray,
    groups: np.ndarray,
    *,
    unit: Unit = "class",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    counts: np.ndarray | None = None,
) -> list[Interval]:
    """One confidence interval per column of values [n, c]: percentiles of the resampled means.

    Drawing n of n units shrinks the variance by (n-1)/n, and a normal tail is too thin for few units; so expanded
    percentiles are used, which correspond to a t interval (Hesterberg 2015). For a single unit, whose variance is
    unknown, the interval and the error are NaN. With `counts`, the weights of the rows, units are counted by Kish's
    effective number, (Σ w)² / Σ w².
    """
    if not 0 < level < 1:
        raise ValueError(f"bootstrap: level must lie between 0 and 1, but came as {level!r}.")
    check_choice("bootstrap", "unit", unit, ("class", "query"))
    units: float = len(values) if unit == "query" else len(np.unique(groups))
    estimates = np.average(values, axis=0, weights=counts)
    if units < 2:
        return [Interval(float(v), np.nan, np.nan, np.nan) for v in estimates]
    means = resampled_means(values, groups, unit=unit, resamples=resamples, seed=seed, counts=counts)
    from scipy.special import ndtr, stdtrit

    if counts is not None:
        held = np.bincount(np.unique(groups, return_inverse=True)[1], counts) if unit == "class" else counts
        units = max(1.1, float(held.sum() ** 2 / (held**2).sum()))
    # the percentile to read lies farther out for few units, whose bootstrap is too narrow
    tail = float(ndtr(np.sqrt(units / (units - 1)) * stdtrit(units - 1, (1 - level) / 2)))
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    error = means.std(axis=0, ddof=1) * np.sqrt(units / (units - 1))
    return [
        Interval(float(v), float(a), float(b), float(e)) for v, a, b, e in zip(estimates, low, high, error, strict=True)
    ]

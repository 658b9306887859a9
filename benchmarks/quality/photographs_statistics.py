"""Statistics of the study on photographs: differences, ranks over data sets, and how often the doctor was right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.studies.grid import Line, Trial

RESAMPLES = 4000
NEAR, FAR = 2.0, 20.0  # points below the best: a finding there is a false alarm; no finding there is a miss
COLLAPSES = ("total collapse", "class collapse")


def difference(
    known: Mapping[str, Line], before: Sequence[Trial], after: Sequence[Trial], score: str
) -> dict[str, Any] | None:
    """`after` - `before` in points, paired by seed and class, with a 95% interval over both (two-level bootstrap).

    Seeds and classes are drawn with replacement, independently of each other; queries of a class stay together. None
    where no seed has both runs. One seed says nothing about others, so its verdict is "cannot tell".
    """
    pairs = [(known[a.key]["classes"], known[b.key]["classes"]) for a, b in zip(before, after, strict=False)
             if all(known.get(t.key, {}).get("classes") for t in (a, b))]  # fmt: skip
    if not pairs:
        return None
    steps = np.array([np.subtract(b[score], a[score]) for a, b in pairs])
    low, high = bootstrap(steps, np.array(pairs[0][0]["queries"], dtype=float))
    queries = np.array(pairs[0][0]["queries"], dtype=float)
    mean = float((steps * queries).sum() / (len(steps) * queries.sum()))
    found = {"mean": 100 * mean, "low": 100 * low, "high": 100 * high, "seeds": len(pairs), "classes": len(queries)}
    clear = len(pairs) > 1
    return found | {"verdict": "better" if clear and low > 0 else "worse" if clear and high < 0 else "cannot tell"}


def bootstrap(steps: NDArray[Any], queries: NDArray[Any], *, seed: int = 0) -> tuple[float, float]:
    """The ends of the 95% interval of the mean of `steps` [seeds, classes], the classes weighted by their queries."""
    random = np.random.default_rng(seed)
    seeds, classes = steps.shape
    by_seed = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES).astype(float)
    by_class = random.multinomial(classes, np.full(classes, 1 / classes), size=RESAMPLES) * queries
    means = np.einsum("rs,sc,rc->r", by_seed, steps, by_class, optimize=True) / (seeds * by_class.sum(1))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def ranks(tables: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Data set -> method -> mean score, to method -> its rank on each data set, and their mean; 1 is the best.

    Only methods that every data set has are ranked; equal scores share the mean of their ranks.

    >>> ranks({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0, "y": 3.0}})
    {'y': {'a': 1.0, 'b': 1.5, 'mean': 1.25}, 'x': {'a': 2.0, 'b': 1.5, 'mean': 1.75}}
    """
    common = [name for name in next(iter(tables.values()), {}) if all(name in table for table in tables.values())]
    found: dict[str, dict[str, float]] = {}
    for name in common:
        row = {}
        for data, table in tables.items():
            above = sum(table[other] > table[name] for other in common)
            equal = sum(table[other] == table[name] for other in common)
            row[data] = above + (equal + 1) / 2
        found[name] = row | {"mean": float(np.mean(list(row.values())))}
    return dict(sorted(found.items(), key=lambda item: item[1]["mean"]))


def record(lines: Iterable[tuple[str, Line]], score: str) -> dict[str, dict[str, Any]]:
    """The doctor's findings in the runs of each method; `lines` are pairs of method and line.

    Returns:
        Method -> `runs`; `named`: with a warning or an alarm while training; `collapsed`: named as a collapse, with the
        median `step` of the first such finding; `false`: named though the score is within two points of the best run of
        the same kind (tuning or test); `missed`: twenty points or more below that and not named; `names`: finding ->
        number of runs.
    """
    runs = [(name, line) for name, line in lines if line["error"] is None]
    best: dict[bool, float] = {}
    for _, line in runs:
        kind = line["held_out"] > 0
        best[kind] = max(best.get(kind, 0.0), line["scores"][score])
    found: dict[str, dict[str, Any]] = {}
    for name, line in runs:
        row = found.setdefault(
            name, {"runs": 0, "named": 0, "collapsed": 0, "false": 0, "missed": 0, "names": {}, "at": []}
        )
        above = {each: about for each, about in line["journal"]["findings"].items() if about["severity"] != "note"}
        below = 100 * (best[line["held_out"] > 0] - line["scores"][score])
        steps = [about["first"] for each, about in above.items() if each in COLLAPSES]
        row["runs"] += 1
        row["named"] += bool(above)
        row["collapsed"] += bool(steps)
        row["at"] += [min(steps)] if steps else []
        row["false"] += bool(above) and below <= NEAR
        row["missed"] += not above and below >= FAR
        for each in above:
            row["names"][each] = row["names"].get(each, 0) + 1
    for row in found.values():
        at = row.pop("at")
        row["step"] = median(at) if at else None
    return found

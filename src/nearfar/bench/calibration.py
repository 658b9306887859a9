"""`nearfar bench --calibrate`: from measured times to the table of thresholds that `engine="auto"` reads.

For each scope the threshold of an engine is the measured size from which on it is taken, chosen so that `auto` is as
near as possible to the best engine at its worst over all losses and sizes that were measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from nearfar.bench.study import Plan, Row, about, offered
from nearfar.bench.subjects import EACH, SUBJECTS
from nearfar.engines import thresholds
from nearfar.engines.thresholds import ENGINES, GENERAL, SCOPES, Thresholds, scope_of
from nearfar.engines.tiled import lean_way
from nearfar.groups.groupings import Product
from nearfar.relations.relation import Relation

__all__ = ["BAR", "LOSSES", "Fit", "calibrated", "contestants", "cut", "representatives", "scopes_of", "served",
           "table_text"]  # fmt: skip

LOSSES = (
    "MultiSimilarity", "SupCon", "Triplet hard", "Contrastive", "DroKL", "DroTopK", "LiftedStructure", "Triplet all",
    "Angular",
)  # fmt: skip
"""Losses that stand for their scopes: row, batch, lifted, triplets."""
OTHERS = 2
"""How many losses stand for those without a fast path; which ones, the engine is asked."""
FUSED = "nearfar.engines.fused"
DENSE = {"recorded": "dense"}
"""On a GPU small batches of the dense engine are recorded, and so they are timed."""
BAR = 1.15
"""How much slower than the best engine `auto` may be at a measured size."""
CLEAR = 0.97
"""An engine must take less than this share of the time of the one before it: a tie goes to the simpler engine."""


@dataclass(frozen=True)
class Fit:
    """What the measurements of one device say.

    Attributes:
        thresholds: by scope and engine.
        worst: scope -> (ratio, loss, rows): where `auto` with these thresholds is farthest from the best engine.
    """

    thresholds: Thresholds
    worst: Mapping[str, tuple[float, str, int]] = field(default_factory=dict)


def contestants(device: str) -> tuple[str, ...]:
    """The engines among which `auto` chooses on a device."""
    every = (each for each in offered(device) if each != "auto")
    return tuple("recorded" if each == "dense" and device == "cuda" else each for each in every)


def representatives() -> tuple[str, ...]:
    """The losses to measure: `LOSSES`, and the first few without a fast path."""
    return LOSSES + tuple(name for name in SUBJECTS if scopes_of(name)[0] == GENERAL)[:OTHERS]


def scopes_of(name: str) -> tuple[str, str]:
    """The scope by which the tiled engine's threshold of a loss is found, and that of the fused engine."""
    product, relation = _parts(name)
    scope = scope_of(product)
    return (GENERAL if lean_way(product, relation) is None else scope), scope


def served(name: str, engine: str) -> bool:
    """Whether an engine computes a loss itself; the fused engine hands those on for which it has no kernel."""
    if engine != "fused":
        return True
    if find_spec(FUSED) is None:
        return False
    return bool(import_module(FUSED).fused_way(*_parts(name)))


def _parts(name: str) -> tuple[Product, Relation]:
    loss: Any = SUBJECTS[name].make(2 * EACH, 4, "auto")
    return getattr(loss, "robust", loss).product, Relation.from_labels(torch.arange(2 * EACH) // EACH)


def calibrated(rows: Sequence[Row], plan: Plan, table: Mapping[str, Thresholds] = thresholds.TABLE) -> Fit:
    """The thresholds that fit rows measured with the engines dense, tiled and, where it is offered, fused.

    Where the tiled engine is best at no measured size it is taken from the next one on, or from where the `table` has
    it: larger batches must go to the engine that needs less memory.
    """
    rows = [
        replace(row, cells={DENSE.get(who, who): row.cells[who] for who in row.cells if served(row.loss, who)})
        for row in rows
    ]
    scopes = {row.loss: scopes_of(row.loss) for row in rows}
    found: dict[str, dict[str, int]] = {scope: {} for scope in SCOPES}
    for place, engine in enumerate(ENGINES):
        for scope in SCOPES:
            mine = [row for row in rows if scopes[row.loss][place] == scope and engine in row.cells]
            if not mine:
                continue
            first = cut(mine, engine, [_before(row, scopes, found, engine) for row in mine])
            if first is not None:
                found[scope][engine] = first**2
            elif engine == "tiled":
                known = table[plan.device].pairs(scope, engine) if plan.device in table else 0
                found[scope][engine] = max(known, (2 * max(row.rows for row in mine)) ** 2)
    worst: dict[str, tuple[float, str, int]] = {}
    for row in rows:
        ratio = _ratio(row, _before(row, scopes, found, ""))
        scope = scopes[row.loss][0]
        if ratio is not None and ratio > worst.get(scope, (0.0,))[0]:
            worst[scope] = ratio, row.loss, row.rows
    where = about(plan)
    words = f"{where['device']}, d = {plan.width}, torch {where['versions']['torch']}"
    return Fit(Thresholds(found, words), worst)


def _before(row: Row, scopes: Mapping[str, tuple[str, str]], found: Mapping[str, Mapping[str, int]], end: str) -> str:
    """The engine that `auto` takes for a row by the thresholds of the engines before `end`."""
    taken = "dense"
    for place, engine in enumerate(ENGINES):
        if engine == end:
            break
        least = found[scopes[row.loss][place]].get(engine, math.inf)
        if engine in row.cells and row.rows**2 >= least:
            taken = engine
    return taken


def cut(rows: Sequence[Row], engine: str, before: Sequence[str]) -> int | None:
    """The measured size from which `engine` is best taken: that with the least worst ratio; None if at no size.

    Args:
        rows: what was measured.
        engine: which engine.
        before: the engine that would be taken in its place, for each row.
    """
    beyond = math.inf

    def judged(first: float) -> tuple[float, float]:
        taken = (engine if row.rows >= first else other for row, other in zip(rows, before, strict=True))
        ratios = [_ratio(row, who, engine) for row, who in zip(rows, taken, strict=True)]
        known = [ratio for ratio in ratios if ratio is not None]
        return max(known, default=1.0), sum(math.log(min(ratio, 1e6)) for ratio in known)

    sizes = sorted({row.rows for row in rows})
    best = min((beyond, *reversed(sizes)), key=judged)  # of equals the first: as late as possible
    return None if math.isinf(best) else int(best)


def _ratio(row: Row, taken: str, favored: str = "") -> float | None:
    """Time of an engine over that of the best one; None if none ran. A failed engine took for ever."""
    times = {who: math.inf if cell.seconds is None else cell.seconds for who, cell in row.cells.items()}
    if favored in times:  # a tie is no reason to take it
        times[favored] /= CLEAR
    best = min(times.values())
    return None if math.isinf(best) or taken not in times else times[taken] / best


def table_text(fit: Fit, device: str, before: Mapping[str, Thresholds]) -> str:
    """The JSON of a table with a new entry for one type of device; what was not measured keeps its old number."""
    known = before.get(device)
    table = dict(before)
    scopes = {
        scope: {**(known.scopes.get(scope, {}) if known else {}), **fit.thresholds.scopes[scope]} for scope in SCOPES
    }
    table[device] = Thresholds(scopes, fit.thresholds.measured)
    lines = []
    for name, each in table.items():
        inner = ",\n".join(f"    {json.dumps(scope)}: {json.dumps(dict(each.scopes[scope]))}" for scope in SCOPES)
        lines.append(
            f'  {json.dumps(name)}: {{\n   "measured": {json.dumps(each.measured)},\n'
            f'   "scopes": {{\n{inner}\n   }}\n  }}'
        )
    return '{\n "devices": {\n' + ",\n".join(lines) + "\n }\n}\n"

"""Training curves from the journal of a run (JSON lines), grouped into panels.

A panel shows curves that belong together: losses, scores, weights, learning rates. Steps are reduced to a few hundred
buckets; a bucket keeps its mean, lowest and highest value, so that a single peak is still visible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar._utils.journal import read_lines

__all__ = ["Journal", "Panel", "Series", "read_journal"]

BUCKETS = 240
PANELS = (
    ("Loss", re.compile(r"loss|objective")),
    ("Retrieval", re.compile(r"recall|precision|map_at|^map|mrr|nmi|ami|f1|r@|accuracy")),
    ("Space", re.compile(r"^spread$|effective_rank|skill")),
    ("Weights", re.compile(r"weight|active|dual|entropy|hardest|effective|support")),
    ("Learning rate", re.compile(r"rate|^lr")),
    ("Constraints violated", re.compile(r"violation")),
)
LARGEST = 1e300
"""Larger numbers count as infinite: no axis can show them."""
SKIPPED = re.compile(r"^(step|epoch|time|seconds|elapsed|wall.*|training classes)$")


@dataclass(frozen=True)
class Series:
    """One curve: its name, and [step, mean, lowest, highest] of each bucket."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn in one figure."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Journal:
    """The panels of a run, notes about problems of the file, and R@1 before training by name."""

    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    baselines: Mapping[str, float] = field(default_factory=dict)


def read_journal(path: Path) -> Journal:
    """Read `journal.jsonl`; a missing file gives no panels, truncated and damaged lines are skipped and counted."""
    found = read_lines(path)
    panels, odd = _panels([_flat({**entry, "baselines": None}) for entry in found.entries])
    baselines = [entry["baselines"] for entry in found.entries if isinstance(entry.get("baselines"), dict)]
    before = _flat(baselines[0]) if baselines else {}
    broken = len(found.damaged) + found.torn
    torn = (f"{broken} unreadable line{'s' * (broken > 1)} of the journal passed over.",) if broken else ()
    return Journal(panels, torn + odd, before)


def _flat(entry: dict[str, Any]) -> dict[str, float]:
    """Numbers by name; one level of nesting ("metrics": {...}) is flattened."""
    flat: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            flat |= {str(inner): _float(v) for inner, v in value.items() if _is_number(v)}
        elif _is_number(value):
            flat[str(key)] = _float(value)
    return flat


def _float(value: int | float) -> float:
    """Convert a number to float, also an integer of any length; too large ones become infinite."""
    if value > LARGEST or value < -LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _panels(lines: list[dict[str, float]]) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
    names = [name for name in dict.fromkeys(key for line in lines for key in line) if not SKIPPED.match(name)]
    grouped: dict[str, list[Series]] = {title: [] for title in (*(title for title, _ in PANELS), "Other")}
    notes = []
    for name in names:
        pairs = [(line["step"], line[name]) for line in lines if name in line]
        good = [(step, value) for step, value in pairs if math.isfinite(value) and math.isfinite(step)]
        if len(good) < len(pairs):
            first = next(step for step, value in pairs if not (math.isfinite(value) and math.isfinite(step)))
            count = len(pairs) - len(good)
            notes.append(f"{name} is not finite at {count} step{'s' * (count > 1)}, first at step {first:g}.")
        if good:
            title = next((title for title, rule in PANELS if rule.search(name.lower())), "Other")
            grouped[title].append(Series(name, _thin(good)))
    return tuple(Panel(title, tuple(series)) for title, series in grouped.items() if series), tuple(notes)


def _thin(pairs: list[tuple[float, float]]) -> tuple[tuple[float, float, float, float], ...]:
    size = math.ceil(len(pairs) / BUCKETS)
    points = []
    for start in range(0, len(pairs), size):
        steps, values = zip(*pairs[start : start + size], strict=True)
        points.append((steps[-1] if start else steps[0], sum(values) / len(values), min(values), max(values)))
    return tuple(points)

"""Training curves from the journal of a run (JSON lines), one panel per quantity; recall at several k shares a panel.

Steps are reduced to a few hundred buckets, each with its mean, lowest and highest value, so that peaks stay visible.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar._utils.journal import read_lines

BUCKETS = 240
MOST = 40  # the most panels of a run; quantities of the user's own callbacks come last
SIDES = {"validation": "held-out classes", "test": "test classes"}
QUANTITIES = (
    (r"loss", "Loss", ""),
    (r"((?P<side>validation|test) )?recall@(?P<k>\d+)", "Recall at k", "% of the queries"),
    (r"((?P<side>validation|test) )?map_at_r", "MAP@R", "% right among the R nearest, early ranks count more"),
    (r"violation", "Constraints violated", "% of the pairs of a batch"),
    (r"probe recall@1", "Recall at 1, training samples", "% of the samples looked at"),
    (r"probe skill", "Above chance, training samples", "%: 0 is chance, 100 all right"),
    (r"spread", "Spread of the space", "rms distance of unit vectors to their mean"),
    (r"pair spread (?P<curve>V|bound)", "Spread of pairs", "mean of 1 - cos² of a batch, and its bound"),
    (r"effective_rank", "Effective rank", "dimensions in use"),
    (r"effective pairs per row", "Effective pairs for each sample", "pairs that share the weight of the loss"),
    (r"effective_pairs", "Effective pairs", "pairs of a batch that share the weight"),
    (r"active_positives", "Positive pairs with weight", "pairs of a batch"),
    (r"active_negatives", "Negative pairs with weight", "pairs of a batch"),
    (r"gradient", "Gradient norm", "before clipping"),
    (r"lr", "Learning rate", "of the trunk"),
)
"""Pattern of a name in the journal, title and unit of its panel. Shares are shown in percent."""
LARGEST = 1e300  # larger numbers count as infinite, because no axis can show them
SKIPPED = re.compile(r"^(step|epoch|time|seconds|elapsed|wall.*|training classes)$")


@dataclass(frozen=True)
class Series:
    """One curve: its name, and [step, mean, lowest, highest] of each bucket."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One quantity: its name, its unit, and its curves."""

    title: str
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Journal:
    """The panels of a run, notes about problems of the file, and R@1 before training by baseline."""

    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    baselines: Mapping[str, float] = field(default_factory=dict)


def read_journal(path: Path) -> Journal:
    """Read `journal.jsonl`; a missing file gives no panels, truncated and damaged lines are skipped and counted."""
    found = read_lines(path)
    hidden = {"baselines": None, "restart": None, "length": None}
    panels, odd = _panels([_flat({**entry, **hidden}) for entry in found.entries])
    panels = (*(panel for entry in found.entries for panel in _length_panel(entry.get("length"))), *panels)
    baselines = [entry["baselines"] for entry in found.entries if isinstance(entry.get("baselines"), dict)]
    before = _flat(baselines[0]) if baselines else {}
    broken = len(found.damaged) + found.torn
    torn = (f"{broken} unreadable line{'s' * (broken > 1)} of the journal passed over.",) if broken else ()
    return Journal(panels, torn + odd, before)


def _length_panel(found: Any) -> Iterator[Panel]:
    """The search for the length: MAP@R of the held-out classes at its looks."""
    curve = found.get("curve") if isinstance(found, dict) else None
    rows = [row[:2] for row in curve if isinstance(row, list)] if isinstance(curve, list) else []
    good = [row for row in rows if len(row) == 2 and all(_is_number(v) and math.isfinite(_float(v)) for v in row)]
    if good:
        unit = f"% MAP@R of held-out classes; chosen: {found.get('best')} steps, {found.get('steps')} in training"
        yield Panel("Search for the length", unit, (Series("MAP@R", _thin([(s, 100 * v) for s, v in good])),))


def _flat(entry: dict[str, Any]) -> dict[str, float]:
    """Numbers by name, with one level of nesting ("metrics": {...}) flattened."""
    flat: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            flat |= {str(inner): _float(v) for inner, v in value.items() if _is_number(v)}
        elif _is_number(value):
            flat[str(key)] = _float(value)
    return flat


def _float(value: int | float) -> float:
    """Convert a number to float; integers of any length too, and numbers beyond `LARGEST` become infinite."""
    if value > LARGEST or value < -LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _panels(lines: list[dict[str, float]]) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
    names = [name for name in dict.fromkeys(key for line in lines for key in line) if not SKIPPED.match(name)]
    grouped: dict[tuple[int, str, str], list[Series]] = {}
    notes = []
    for name in names:
        place, title, unit, label = _quantity(name)
        pairs = [(line["step"], line[name]) for line in lines if name in line]
        good = [(step, value) for step, value in pairs if math.isfinite(value) and math.isfinite(step)]
        if len(good) < len(pairs):
            first = next(step for step, value in pairs if not (math.isfinite(value) and math.isfinite(step)))
            count = len(pairs) - len(good)
            notes.append(f"{name} is not finite at {count} step{'s' * (count > 1)}, first at step {first:g}.")
        if good:
            scale = 100 if unit.startswith("%") else 1
            series = Series(label, _thin([(step, scale * value) for step, value in good]))
            grouped.setdefault((place, title, unit), []).append(series)
    if len(grouped) > MOST:
        notes.append(f"{len(grouped) - MOST} further quantities of the journal are not drawn.")
    chosen = sorted(grouped, key=lambda key: key[0])[:MOST]
    return tuple(Panel(title, unit, tuple(grouped[place, title, unit])) for place, title, unit in chosen), tuple(notes)


def _quantity(name: str) -> tuple[int, str, str, str]:
    """The position of a journal name among the panels, its title and unit, and the name of its curve."""
    for place, (pattern, title, unit) in enumerate(QUANTITIES):
        found = re.fullmatch(pattern, name)
        if found is not None:
            parts = found.groupdict()
            title += f", {SIDES[parts['side']]}" if parts.get("side") else ""
            return place, title, unit, f"R@{parts['k']}" if "k" in parts else parts.get("curve", title)
    title = name.replace("_", " ")
    return len(QUANTITIES), title, "", title


def _thin(pairs: list[tuple[float, float]]) -> tuple[tuple[float, float, float, float], ...]:
    size = math.ceil(len(pairs) / BUCKETS)
    points = []
    for start in range(0, len(pairs), size):
        steps, values = zip(*pairs[start : start + size], strict=True)
        points.append((steps[-1] if start else steps[0], sum(values) / len(values), min(values), max(values)))
    return tuple(points)

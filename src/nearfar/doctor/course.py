"""The course of a training run: a series of short looks at a few samples, and the findings that follow from it.

The callback and the journal apply the same rules to the same looks, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nearfar.doctor.findings import Finding
from nearfar.doctor.remedies import Patient, finding, level, margin_of, widened
from nearfar.doctor.thresholds import Thresholds
from nearfar.geometry.collapse import effective_rank
from nearfar.runs.config import Config
from nearfar.similarity import unit

__all__ = ["CLASSES", "Case", "Sight", "judged", "look", "seen"]

NAMES = {
    "spread": "spread",
    "rank": "effective_rank",
    "recall": "probe recall@1",
    "skill": "probe skill",
    "pairs": "effective pairs per row",
}
"""Attribute -> its name in the journal."""
LEAST = 3
"""The least number of looks after the first for a finding about what was learned since then."""
CLASSES = "training classes"
"""The name of the number of training classes in the journal, written with the first look."""


@dataclass(frozen=True)
class Sight:
    """One look at a few samples.

    Attributes:
        step: the step of the look.
        spread: rms distance of unit rows to their mean.
        rank: effective rank, the number of dimensions in use.
        recall: share of rows whose nearest other row is of their class.
        skill: recall above chance, 1 if every row is right; None if no row has another of its class.
        loss: loss of the step before the look; None before the first step.
        pairs: number of pairs over which that loss spreads its weight (`Explanation.effective_pairs`), divided by the
            rows of its batch; None if it was not computed.
    """

    step: int
    spread: float
    rank: float
    recall: float | None = None
    skill: float | None = None
    loss: float | None = None
    pairs: float | None = None

    def line(self) -> dict[str, float]:
        """The look as an entry of the journal, without the loss, which has an entry of its own."""
        values = {name: getattr(self, attribute) for attribute, name in NAMES.items()}
        return {name: round(value, 6) for name, value in values.items() if value is not None}


def seen(entries: Iterable[Mapping[str, Any]]) -> list[Sight]:
    """Read the looks of a journal, each with the last loss before it."""
    found, loss = [], None
    for entry in entries:
        loss = entry.get("loss", loss)
        if "spread" in entry and "effective_rank" in entry:
            values: dict[str, Any] = {attribute: entry.get(name) for attribute, name in NAMES.items()}
            found.append(Sight(int(entry["step"]), **values, loss=loss))
    return found


@torch.no_grad()
def look(step: int, x: Tensor, y: Tensor, loss: float | None = None, pairs: float | None = None) -> Sight:
    """Take a look at rows [n, d] with labels [n]; on the CPU, where such small problems are fastest."""
    x, y = unit(x.detach().float().cpu()), y.cpu()
    same = y[:, None] == y[None, :]
    # in float32, as vectors are searched: a cone too narrow for its cosines has lost its classes in effect
    near = (x @ x.T).fill_diagonal_(-torch.inf).argmax(dim=1)
    x = x.double()
    others = same.sum(dim=1) - 1
    asked = others > 0
    recall = skill = None
    if bool(asked.any()) and not bool(same.all()):
        recall = float((y[near] == y)[asked].double().mean())
        chance = float(others[asked].double().mean() / (len(x) - 1))
        skill = (recall - chance) / (1 - chance)
    x = x - x.mean(dim=0)
    return Sight(step, float((x * x).sum(dim=1).mean().sqrt()), effective_rank(x), recall, skill, loss, pairs)


@dataclass(frozen=True)
class Case:
    """What is known about a run beside its looks: the margin of its triplets, and its configuration for remedies."""

    margin: float | None = None
    run: Patient = field(default_factory=Patient)

    @staticmethod
    def of(config: Config | None, classes: int | None = None) -> Case:
        """Build from a configuration and the number of training classes."""
        return Case(margin_of(config), Patient(config, classes))


def judged(sights: Sequence[Sight], limits: Thresholds, case: Case) -> Iterator[Finding]:
    """The findings that hold at the last `limits.looks` looks in a row, compared with the first look of the run.

    A run is unhealthy if classes have been lost since its first look, if few dimensions are left, or if the loss stays
    at its margin and classes are not separated. The spread decides which finding it is: a small space whose classes are
    separated has not collapsed.
    """
    if len(sights) <= limits.looks:
        return
    recent = sights[-limits.looks :]
    yield from _classes(sights[0], recent, limits, case)
    yield from _few_pairs(sights, limits, case)
    rank, spread = max(s.rank for s in recent), max(s.spread for s in recent)
    if rank < limits.rank_alarm <= sights[0].rank:
        evidence = f"The effective rank is {rank:.2f} and was {sights[0].rank:.2f} at the first look."
        yield finding("dimensional collapse", "alarm", evidence, "dimensions", case.run)
    if _pinned(recent, limits, case.margin):
        evidence = (
            f"The loss rests on its margin of {case.margin:g}, the spread is {spread:.3g}, "
            f"and the nearest sample is of the same class for only {_recall(recent):.1%}."
        )
        yield finding("loss pinned at its margin", "alarm", evidence, "collapse", case.run)


def _classes(first: Sight, recent: Sequence[Sight], limits: Thresholds, case: Case) -> Iterator[Finding]:
    """Classes that were separated and no longer are, with a lower threshold in a narrow space; or a narrow cone."""
    spread, share = max(s.spread for s in recent), _kept(first, recent, limits)
    narrow = spread < limits.spread_alarm
    if share < (limits.lost_warning if narrow else limits.lost_alarm):
        evidence = (
            f"Of the skill at the first look {max(share, 0):.0%} is left (the nearest sample is of the same class for "
            f"{_recall(recent):.1%}, at first {_recall([first]):.1%}); the spread is {spread:.3g}."
        )
        name, kind = ("total collapse", "collapse") if narrow else ("class collapse", "classes")
        yield finding(name, level(share < limits.lost_alarm), evidence, kind, case.run)
    elif narrow:
        evidence = f"The spread is {spread:.3g}; the nearest sample is of the same class for {_recall(recent):.1%}."
        yield finding("narrow cone", "note", evidence, "cone", case.run)


def _few_pairs(sights: Sequence[Sight], limits: Thresholds, case: Case) -> Iterator[Finding]:
    """Nearly all weight on a few pairs, by a set that could be larger, in a run that has learned little.

    Few pairs alone are no illness: a run that has learned its classes has few left, and some losses (N-pair, proxies)
    are made of few.
    """
    first, since = sights[0], [s for s in sights[1:] if s.pairs is not None and s.skill is not None]
    config = case.run.config
    if first.skill is None or len(since) < LEAST or config is None or widened(case.run) is None:
        return
    if sights[-1].step < config.training.steps / 2 or _moved(first, sights[-1]) < limits.moved:
        return  # healthy runs, too, may begin slowly; and a space that has not moved needs another rate, not more pairs
    pairs = median(s.pairs or 0.0 for s in since)
    gained, room = max(s.skill or 0.0 for s in since[-LEAST:]) - first.skill, 1 - first.skill
    if 0 < pairs < limits.few_pairs and room > limits.lost_least and gained < limits.gained * room:
        evidence = (
            f"The loss has {pairs:.2f} effective pairs per row of a batch, and the nearest sample is of the same class "
            f"for {_recall(since[-LEAST:]):.1%} after {sights[-1].step} steps, at first for {_recall([first]):.1%}."
        )
        yield finding("weight on too few pairs", "warning", evidence, "too few", case.run)


def _moved(first: Sight, last: Sight) -> float:
    """How much the space has changed: the relative change of its spread or of its effective rank, the larger one."""
    changes = (abs(now - then) / then for then, now in ((first.spread, last.spread), (first.rank, last.rank)) if then)
    return max(changes, default=0.0)


def _pinned(recent: Sequence[Sight], limits: Thresholds, margin: float | None) -> bool:
    """Whether distances are negligible beside the margin, and classes are not separated."""
    if not margin:
        return False
    return all(
        s.loss is not None
        and s.skill is not None
        and abs(s.loss - margin) <= limits.pinned * margin
        and s.spread < margin / 4
        and s.skill < limits.skill_pinned
        for s in recent
    )


def _kept(first: Sight, recent: Sequence[Sight], limits: Thresholds) -> float:
    """The share of the first look's skill that is left; 1 if the loss of skill is within chance."""
    now = max((s.skill for s in recent if s.skill is not None), default=None)
    if first.skill is None or now is None or first.skill - now < limits.lost_least:
        return 1.0
    return now / first.skill


def _recall(sights: Sequence[Sight]) -> float:
    return max([s.recall for s in sights if s.recall is not None] or [0.0])

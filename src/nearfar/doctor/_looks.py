"""Looks at a few samples during training, and the findings that follow from a series of them.

The callback and the journal's diagnosis apply the same rules to the same looks, so they cannot disagree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nearfar.doctor._findings import Finding
from nearfar.doctor._remedies import Patient, enlarge_set, finding, level
from nearfar.doctor._thresholds import Thresholds
from nearfar.geometry.collapse import effective_rank
from nearfar.similarity import unit

NAMES = {
    "spread": "spread",
    "rank": "effective_rank",
    "recall": "probe recall@1",
    "skill": "probe skill",
    "pairs": "effective pairs per row",
}
"""Attribute of a look -> its key in the journal."""
MIN_LOOKS = 3  # looks after the first that a finding about learning progress needs
CLASSES = "training classes"  # journal key of the number of training classes, written with the first look


@dataclass(frozen=True)
class Look:
    """One look at a few samples."""

    step: int  # the training step
    spread: float  # rms distance of unit rows to their mean
    rank: float  # effective rank, the number of dimensions in use
    recall: float | None = None  # share of rows whose nearest other row is of their class
    skill: float | None = None  # (recall - chance) / (1 - chance); None if no row has another of its class
    loss: float | None = None  # the latest loss before the look; None before the first step
    pairs: float | None = None  # `Explanation.effective_pairs` of that loss per row of its batch; None if not computed

    def to_entry(self) -> dict[str, float]:
        """The look as a journal entry, without the loss, which the training loop logs."""
        values = {name: getattr(self, attribute) for attribute, name in NAMES.items()}
        return {name: round(value, 6) for name, value in values.items() if value is not None}


def read_looks(entries: Iterable[Mapping[str, Any]]) -> list[Look]:
    """Read the looks of a journal, each with the last loss before it."""
    found, loss = [], None
    for entry in entries:
        loss = entry.get("loss", loss)
        if "spread" in entry and "effective_rank" in entry:
            values: dict[str, Any] = {attribute: entry.get(name) for attribute, name in NAMES.items()}
            found.append(Look(int(entry["step"]), **values, loss=loss))
    return found


@torch.no_grad()
def take_look(step: int, x: Tensor, y: Tensor, loss: float | None = None, pairs: float | None = None) -> Look:
    """Examine rows [n, d] with labels [n], on the CPU, which is fastest for so few rows."""
    x, y = unit(x.detach().float().cpu()), y.cpu()
    same = y[:, None] == y[None, :]
    # float32 like retrieval: a cone too narrow for float32 cosines has lost its classes in practice
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
    return Look(step, float((x * x).sum(dim=1).mean().sqrt()), effective_rank(x), recall, skill, loss, pairs)


def judge(looks: Sequence[Look], limits: Thresholds, run: Patient) -> Iterator[Finding]:
    """Yield the findings that hold at each of the last `limits.looks` looks, compared with the first look of the run.

    A run is unhealthy if it has lost classes since its first look, if few dimensions are left, or if its loss stays at
    the margin while classes overlap. A small spread alone is a note: the classes may still be separated.
    """
    if len(looks) <= limits.looks:
        return
    recent = looks[-limits.looks :]
    yield from _classes(looks[0], recent, limits, run)
    yield from _few_pairs(looks, limits, run)
    rank, spread = max(s.rank for s in recent), max(s.spread for s in recent)
    if rank < limits.rank_alarm <= looks[0].rank:
        evidence = f"The effective rank is {rank:.2f} and was {looks[0].rank:.2f} at the first look."
        yield finding("dimensional collapse", "alarm", evidence, "dimensions", run)
    if _pinned(recent, limits, run.margin):
        evidence = (
            f"The loss rests on its margin of {run.margin:g}, the spread is {spread:.3g}, "
            f"and the nearest sample is of the same class for only {_recall(recent):.1%}."
        )
        yield finding("loss pinned at its margin", "alarm", evidence, "collapse", run)


def _classes(first: Look, recent: Sequence[Look], limits: Thresholds, run: Patient) -> Iterator[Finding]:
    """Yield an alarm or a warning if classes were lost (stricter in a narrow space), or a note on a narrow cone."""
    spread, share = max(s.spread for s in recent), _skill_left(first, recent, limits)
    narrow = spread < limits.spread_alarm
    if share < (limits.lost_warning if narrow else limits.lost_alarm):
        evidence = (
            f"Of the skill at the first look {max(share, 0):.0%} is left (the nearest sample is of the same class for "
            f"{_recall(recent):.1%}, at first {_recall([first]):.1%}); the spread is {spread:.3g}."
        )
        name, kind = ("total collapse", "collapse") if narrow else ("class collapse", "classes")
        yield finding(name, level(share < limits.lost_alarm), evidence, kind, run)
    elif narrow:
        evidence = f"The spread is {spread:.3g}; the nearest sample is of the same class for {_recall(recent):.1%}."
        yield finding("narrow cone", "note", evidence, "cone", run)


def _few_pairs(looks: Sequence[Look], limits: Thresholds, run: Patient) -> Iterator[Finding]:
    """Yield a warning if the loss weights few pairs, its set could be larger, and the run has learned little.

    Few pairs alone are healthy: a run that has learned its classes has few active pairs, and some losses (N-pair,
    proxies) use few by design.
    """
    first, since = looks[0], [s for s in looks[1:] if s.pairs is not None and s.skill is not None]
    config = run.config
    if first.skill is None or len(since) < MIN_LOOKS or config is None or enlarge_set(run) is None:
        return
    if looks[-1].step < config.training.length / 2 or _moved(first, looks[-1]) < limits.moved:
        return  # healthy runs may start slowly, and a space that has not moved needs another rate, not more pairs
    pairs = median(s.pairs or 0.0 for s in since)
    gained, room = max(s.skill or 0.0 for s in since[-MIN_LOOKS:]) - first.skill, 1 - first.skill
    if 0 < pairs < limits.few_pairs and room > limits.lost_least and gained < limits.gained * room:
        evidence = (
            f"The loss has {pairs:.2f} effective pairs per row of a batch, and the nearest sample is of the same class "
            f"for {_recall(since[-MIN_LOOKS:]):.1%} after {looks[-1].step} steps, at first for {_recall([first]):.1%}."
        )
        yield finding("weight on too few pairs", "warning", evidence, "too few", run)


def _moved(first: Look, last: Look) -> float:
    """The relative change of the spread or of the effective rank, whichever is larger."""
    changes = (abs(now - then) / then for then, now in ((first.spread, last.spread), (first.rank, last.rank)) if then)
    return max(changes, default=0.0)


def _pinned(recent: Sequence[Look], limits: Thresholds, margin: float | None) -> bool:
    """Whether the loss equals the margin, distances are small against it, and classes overlap."""
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


def _skill_left(first: Look, recent: Sequence[Look], limits: Thresholds) -> float:
    """The share of the first look's skill that is left; 1 if the drop may be chance."""
    now = max((s.skill for s in recent if s.skill is not None), default=None)
    if first.skill is None or now is None or first.skill - now < limits.lost_least:
        return 1.0
    return now / first.skill


def _recall(looks: Sequence[Look]) -> float:
    return max([s.recall for s in looks if s.recall is not None] or [0.0])

"""The doctor's look at a run: what its journal tells, with the configuration where it is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from nearfar.doctor import remedies
from nearfar.doctor.findings import Diagnosis, Finding, Severity, concluded
from nearfar.doctor.thresholds import Thresholds

if TYPE_CHECKING:  # the loop brings accelerate with it
    from nearfar.train import Config

Series = tuple[tuple[int, float], ...]
RECALL = ("validation recall@1", "test recall@1")
LEAST = 20
"""Losses that a run must have before the doctor speaks of its course."""


@dataclass(frozen=True, eq=False)
class History:
    """What a journal holds, by name; and the configuration, or None."""

    entries: tuple[Mapping[str, Any], ...]
    config: Config | None
    limits: Thresholds

    def series(self, *names: str) -> Series:
        """(step, value) of the first of these names that the journal knows."""
        for name in names:
            found = [(int(e["step"]), float(e[name])) for e in self.entries if isinstance(e.get(name), int | float)]
            if found:
                return tuple(found)
        return ()

    def finite(self, *names: str) -> Series:
        """The same, without values that are not finite."""
        return tuple((step, value) for step, value in self.series(*names) if math.isfinite(value))

    @property
    def margin(self) -> float | None:
        """α of a triplet loss, where the configuration names one."""
        if self.config is None or self.config.loss.name != "Triplet":
            return None
        return float(self.config.loss.options.get("margin", 0.05))

    @property
    def batch(self) -> int | None:
        """Rows of a batch, where the configuration says."""
        if self.config is None:
            return None
        options = self.config.batches.options
        if "batch_size" in options:
            return int(options["batch_size"])
        return int(options["classes"]) * int(options["samples"]) if {"classes", "samples"} <= options.keys() else None


def diagnose_journal(
    entries: Sequence[Mapping[str, Any]], *, config: Config | None = None, thresholds: Thresholds | None = None
) -> Diagnosis:
    """Say from a run's journal whether it collapsed, stalled, forgot, is only slow, or is well.

    Args:
        entries: the lines of journal.jsonl, as dictionaries (`nearfar.train.journal.read`).
        config: the run's configuration: without it nothing is known of margin, mining and batch.
        thresholds: where the lines are; provisional, see docs/doctor.md.

    >>> diagnose_journal([{"step": i, "loss": 0.5 + 1 / i} for i in range(1, 101)])
    Healthy.
    """
    history = History(tuple(entries), config, thresholds or Thresholds())
    found = [finding for rule in RULES for finding in rule(history)]
    losses = history.finite("loss")
    last = {name: series[-1][1] for name in (*RECALL, "spread", "effective_rank") if (series := history.finite(name))}
    return concluded(found, {"steps": losses[-1][0], "loss": losses[-1][1]} | last if losses else last)


def not_finite(history: History) -> Iterator[Finding]:
    """A loss that was NaN or infinite."""
    bad = [step for step, value in history.series("loss") if not math.isfinite(value)]
    if bad:
        evidence = f"The loss is not finite at {len(bad)} steps, first at step {bad[0]}."
        yield Finding("non-finite values", "alarm", evidence, remedies.NOT_FINITE, flags=_slower(history))


def pinned_loss(history: History) -> Iterator[Finding]:
    """A triplet loss that stays at its margin: all distances are alike."""
    losses, margin = history.finite("loss"), history.margin
    if not margin or len(losses) < LEAST:
        return
    room = history.limits.pinned * margin
    since = None
    for step, value in _smooth(losses):
        since = (step if since is None else since) if abs(value - margin) <= room else None
    tail = [value for _, value in losses[-max(LEAST // 2, len(losses) // 10) :]]
    if since is None or max(tail) - min(tail) > 4 * room:
        return
    evidence = f"Since about step {since} the loss lies at {median(tail):.4g}, which is its margin of {margin:g}."
    yield _shrunk(history, "loss pinned at its margin", evidence, "alarm")


def collapse(history: History) -> Iterator[Finding]:
    """What the callback `Doctor` measured on the way."""
    limits = history.limits
    spread, rank = history.finite("spread"), history.finite("effective_rank")
    if spread and spread[-1][1] < limits.spread_warning:
        step, value = spread[-1]
        evidence = (
            f"The spread of a batch's unit rows is {value:.3g} at step {step} and was {spread[0][1]:.3g} at first."
        )
        yield _shrunk(history, "total collapse", evidence, remedies.level(value < limits.spread_alarm))
    width = history.config.model.width if history.config else 4
    if rank and width >= 4 and rank[-1][1] < limits.rank_alarm:
        step, value = rank[-1]
        evidence = f"The effective rank of a batch is {value:.2f} at step {step} and was {rank[0][1]:.2f} at first."
        yield Finding("dimensional collapse", "alarm", evidence, remedies.DIMENSIONS, flags=remedies.SEMIHARD)


def forgotten(history: History) -> Iterator[Finding]:
    """Recall below half of what it was at first, and not back since; or merely past its best."""
    recall = history.finite(*RECALL)
    if len(recall) < 2:
        return
    (_, first), (_, last) = recall[0], recall[-1]
    best_step, best = max(recall, key=lambda point: point[1])
    later = [value for _, value in recall[-max(1, len(recall) // 3) :]]
    if max(later) < history.limits.lost * first:
        evidence = f"Recall@1 on held-out classes fell from {first:.1%} to {last:.1%}."
        flags = remedies.SEMIHARD + _slower(history)
        yield Finding("recall lost", "alarm", evidence, remedies.COLLAPSE, flags=flags)
    elif last < 0.9 * best:
        evidence = f"Recall@1 on held-out classes was {best:.1%} at step {best_step} and is {last:.1%}: over-fitting."
        yield Finding("past its best", "note", evidence, f"Stop there (--training.steps {best_step}); best.pt is kept.")


def no_active_pairs(history: History) -> Iterator[Finding]:
    """Three looks in a row at a loss that moves nothing."""
    looks = [
        (e["step"], e["active_positives"] + e["active_negatives"]) for e in history.entries if "active_positives" in e
    ]
    if len(looks) >= 3 and not any(active for _, active in looks[-3:]):
        evidence = f"At steps {', '.join(str(step) for step, _ in looks[-3:])} the loss moved no pair of the batch."
        yield Finding("no active pairs", "warning", evidence, remedies.EASY)


def few_pull(history: History) -> Iterator[Finding]:
    """Weight on a pair or two, look after look."""
    looks = [value for _, value in history.finite("effective_pairs") if value > 0]
    if len(looks) >= 3 and median(looks[-max(3, len(looks) // 3) :]) <= 4:
        evidence = f"The weight is spread over {median(looks[-3:]):.1f} pairs of a batch."
        yield Finding("gradient on few pairs", "warning", evidence, remedies.FEW, flags=remedies.TOP_K)


def progress(history: History) -> Iterator[Finding]:
    """Stalled, or only slow."""
    losses, recall = history.finite("loss"), history.finite(*RECALL)
    if len(losses) < 2 * LEAST or any(True for _ in pinned_loss(history)):
        return
    values = [value for _, value in losses]
    quarter = len(values) // 4
    first, before, last = median(values[:LEAST]), median(values[-2 * quarter : -quarter]), median(values[-quarter:])
    learnt = len(recall) >= 2 and recall[-1][1] > 1.02 * recall[0][1]
    if last > 0.98 * first and first > 0 and not learnt:
        evidence = f"The loss was {first:.4g} in the first {LEAST} steps and is {last:.4g} in the last quarter."
        remedy = "Try --optimiser.rate three times higher and three times lower, and another loss (--loss.name)."
        yield Finding("stalled", "warning", evidence, remedy)
    elif before > 0 and last < 0.9 * before:
        evidence = f"The loss still fell by {1 - last / before:.0%} from the third to the last quarter of the run."
        remedy = f"Not ill, only slow: train longer (--training.steps {2 * losses[-1][0]})."
        yield Finding("only slow", "note", evidence, remedy, flags=(("training.steps", str(2 * losses[-1][0])),))


def risk(history: History) -> Iterator[Finding]:
    """Hard mining without a margin, or with many more rows than dimensions: a trend (000), no threshold."""
    config, batch = history.config, history.batch
    if config is None or history.margin is None or config.loss.options.get("mining") not in ("hard", "hardest"):
        return
    if history.margin == 0:
        evidence = "With hard mining and a margin of 0 all rows on one point are a global minimum of the loss."
        yield Finding("margin of zero", "warning", evidence, "Set --loss.margin 0.2.", flags=(("loss.margin", "0.2"),))
    if batch is not None and batch > config.model.width:
        evidence = (
            f"Hard mining with {batch} rows a batch in {config.model.width} dimensions: the more rows meet in few "
            "dimensions, the nearer a collapsed space is to the one you have (a trend, not a threshold)."
        )
        remedy = "If it collapses: --loss.mining semihard, a larger --model.width, or fewer --batches.classes."
        yield Finding("many rows, few dimensions", "note", evidence, remedy)


def _shrunk(history: History, name: str, evidence: str, severity: Severity) -> Finding:
    """A space without scale: a note where recall has been kept."""
    held, batch = history.finite(*RECALL), history.finite("batch recall@1")
    kept = (len(held) > 1 and held[-1][1] >= 0.9 * held[0][1]) or (
        bool(batch) and batch[-1][1] >= history.limits.skill_kept
    )
    if not kept:
        return Finding(name, severity, evidence, remedies.COLLAPSE, flags=remedies.SEMIHARD + _slower(history))
    evidence += f" Recall@1 is {(held or batch)[-1][1]:.1%} all the same."
    return Finding("narrow cone" if name == "total collapse" else name, "note", evidence, remedies.CONE)


def _slower(history: History) -> remedies.Flags:
    """A tenth of the rate, where it is known."""
    return (("optimiser.rate", f"{history.config.optimiser.rate / 10:g}"),) if history.config else ()


def _smooth(series: Series) -> Iterator[tuple[int, float]]:
    """Medians of about twenty stretches: (first step, median)."""
    size = max(5, len(series) // 20)
    for i in range(0, len(series), size):
        part = series[i : i + size]
        yield part[0][0], median(value for _, value in part)


RULES: tuple[Callable[[History], Iterator[Finding]], ...] = (
    not_finite,
    pinned_loss,
    collapse,
    forgotten,
    no_active_pairs,
    few_pull,
    progress,
    risk,
)

"""`diagnose_journal` and `diagnose_run`: diagnose a training run from its journal and configuration."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from nearfar.doctor import _remedies as remedies
from nearfar.doctor._findings import ORDER, Diagnosis, Finding, conclude
from nearfar.doctor._looks import CLASSES, Look, judge, read_looks
from nearfar.doctor._remedies import Patient, finding, mild
from nearfar.doctor._thresholds import Thresholds
from nearfar.runs import _journal as journal
from nearfar.runs._config import load
from nearfar.runs._sections import Config

Series = tuple[tuple[int, float], ...]
RECALL = ("validation recall@1", "test recall@1")
MAP = ("validation map_at_r", "test map_at_r")  # recall at 1 may be full while these scores still tell lengths apart
MIN_SCORES = 4  # evaluations that a finding about the length needs
MIN_LOSSES = 20  # losses that a finding about the course of a run needs
NEGLIGIBLE = 5e-5  # a loss below this needs no further training
BASELINES = {"input": "for the input vectors themselves", "untrained": "for the network before its first step"}


@dataclass(frozen=True)
class Outcome:
    """R@1 of the best weights on the test classes, with its interval, and R@1 by chance (0 if unknown)."""

    recall: float
    low: float
    high: float
    chance: float = 0.0

    @staticmethod
    def of(scores: Mapping[str, Any]) -> Outcome | None:
        """Build from the content of `scores.json`; None if it has no R@1."""
        value = scores.get("scores", {}).get("recall@1")
        if value is None:
            return None
        ends = scores.get("intervals", {}).get("recall@1") or {"low": value, "high": value}
        return Outcome(float(value), float(ends["low"]), float(ends["high"]), float(scores.get("chance", 0.0)))

    @property
    def interval(self) -> str:
        return f" [{100 * self.low:.1f}, {100 * self.high:.1f}]" if self.low < self.high else ""


@dataclass(frozen=True, eq=False)
class History:
    """A journal as series by name, with the configuration and the test result if known."""

    entries: tuple[Mapping[str, Any], ...]
    config: Config | None
    limits: Thresholds
    tested: Outcome | None = None

    def series(self, *names: str) -> Series:
        """The series (step, value) of the first of these names that the journal contains."""
        for name in names:
            found = [(int(e["step"]), float(e[name])) for e in self.entries if isinstance(e.get(name), int | float)]
            if found:
                return tuple(found)
        return ()

    def finite(self, *names: str) -> Series:
        """The series without values that are not finite."""
        return tuple((step, value) for step, value in self.series(*names) if math.isfinite(value))

    @functools.cached_property
    def looks(self) -> tuple[Look, ...]:
        """The looks that the callback `Doctor` took during the run."""
        return tuple(read_looks(self.entries))

    @functools.cached_property
    def recall(self) -> Series:
        """Held-out recall if it was evaluated twice; else the skill at the first look and its running median."""
        held = self.finite(*RECALL)
        if len(held) > 1:
            return held
        skills = [(look.step, look.skill) for look in self.looks if look.skill is not None]
        size = self.limits.looks
        windows = (skills[i + 1 - size : i + 1] for i in range(size, len(skills)))
        return (*skills[:1], *((window[-1][0], median(value for _, value in window)) for window in windows))

    @functools.cached_property
    def run(self) -> Patient:
        """The facts about the run that decide which remedies fit."""
        losses, held = self.series("loss"), self.finite(*RECALL)
        best = max(held, key=lambda point: point[1])[0] if held else 1
        classes = next((int(entry[CLASSES]) for entry in self.entries if CLASSES in entry), None)
        steps = losses[-1][0] if losses else 1
        return Patient(self.config, classes, best_step=best, steps=steps, rising=self.rising)

    @functools.cached_property
    def baselines(self) -> dict[str, float]:
        """R@1 on the test classes before the first step, by name."""
        return {name: float(value) for e in self.entries for name, value in e.get("baselines", {}).items()}

    @property
    def has_learned(self) -> bool:
        """Whether the training samples are memorized, according to the last look."""
        skill = self.looks[-1].skill if self.looks else None
        return skill is not None and skill >= self.limits.learned

    @property
    def rising(self) -> bool:
        """Whether more training could help: the last held-out recall is the best, or samples are left to learn."""
        *before, last = self.finite(*RECALL) or [(0, 0.0)]
        return last[1] > max(value for _, value in before) if before else not self.has_learned

    @property
    def keeps_recall(self) -> bool:
        """Whether recall is known to be at least about as high as at the start."""
        recall = self.recall
        return len(recall) > 1 and recall[-1][1] > 0 and recall[-1][1] >= 0.9 * recall[0][1]


def diagnose_journal(
    entries: Sequence[Mapping[str, Any]],
    *,
    config: Config | None = None,
    thresholds: Thresholds | None = None,
    tested: Outcome | None = None,
) -> Diagnosis:
    """Diagnose a run from its journal: collapsed, stalled, over-fitted, only slow, or healthy.

    Args:
        entries: the lines of journal.jsonl, as dictionaries.
        config: the run's configuration; without it the margin, mining and batch size are unknown.
        thresholds: the thresholds of the findings, see benchmarks/RESULTS-doctor.md.
        tested: the test result of the run, to compare with the journal's baselines.

    >>> diagnose_journal([{"step": i, "loss": 0.5 + 1 / i} for i in range(1, 101)])
    Healthy.
    """
    history = History(tuple(entries), config, thresholds or Thresholds(), tested)
    found = _keep_worst(each for rule in RULES for each in rule(history))
    losses = history.finite("loss")
    last = {name: series[-1][1] for name in (*RECALL, "spread", "effective_rank") if (series := history.finite(name))}
    return conclude(found, {"steps": losses[-1][0], "loss": losses[-1][1]} | last if losses else last)


def diagnose_run(folder: Path) -> Diagnosis:
    """Diagnose a run folder from its journal, and its configuration if there is one.

    Raises:
        FileNotFoundError: the folder holds no journal.
    """
    path, config, scores = (folder / name for name in ("journal.jsonl", "config.yaml", "scores.json"))
    if not path.is_file():
        raise FileNotFoundError(f"doctor: {folder} holds no journal.jsonl; name the folder that `nearfar train` wrote.")
    return diagnose_journal(
        journal.read(path),
        config=load(config) if config.is_file() else None,
        tested=Outcome.of(json.loads(scores.read_text(encoding="utf-8"))) if scores.is_file() else None,
    )


def not_finite(history: History) -> Iterator[Finding]:
    """The loss was NaN or infinite."""
    bad = [step for step, value in history.series("loss") if not math.isfinite(value)]
    if bad:
        evidence = f"The loss is not finite at {len(bad)} steps, first at step {bad[0]}."
        yield finding("non-finite values", "alarm", evidence, "not finite", history.run)


def pinned_loss(history: History) -> Iterator[Finding]:
    """A triplet loss stays at its margin: all distances are equal."""
    losses, margin = history.finite("loss"), history.run.margin
    if not margin or len(losses) < MIN_LOSSES:
        return
    room = history.limits.pinned * margin
    since = None
    for step, value in _smooth(losses):
        since = (step if since is None else since) if abs(value - margin) <= room else None
    tail = [value for _, value in losses[-max(MIN_LOSSES // 2, len(losses) // 10) :]]
    if since is None or max(tail) - min(tail) > 4 * room:
        return
    evidence = f"Since about step {since} the loss lies at {median(tail):.4g}, which is its margin of {margin:g}."
    name = "loss pinned at its margin"
    if history.keeps_recall:
        evidence += f" Recall@1 is {history.recall[-1][1]:.1%} all the same."
        yield finding(name, "note", evidence, "cone", history.run)
    else:
        yield finding(name, "alarm", evidence, "collapse", history.run)


def collapse(history: History) -> Iterator[Finding]:
    """Findings of the callback `Doctor` that still hold at the last look."""
    yield from judge(history.looks, history.limits, history.run)


def lost_recall(history: History) -> Iterator[Finding]:
    """Recall fell below half of its first value and did not recover; over-fitting; or the best came early."""
    recall = history.finite(*RECALL)
    if len(recall) < 2:
        return
    (_, first), (_, last) = recall[0], recall[-1]
    best_step, best = max(recall, key=lambda point: point[1])
    later = max(value for _, value in recall[-max(1, len(recall) // 3) :])
    if later < history.limits.lost * first:
        evidence = f"Recall@1 on held-out classes fell from {first:.1%} to {last:.1%}."
        yield finding("recall lost", "alarm", evidence, "collapse", history.run)
        return
    end = recall[-1][0]
    evidence = f"Recall@1 on held-out classes was {best:.1%} at step {best_step} and is {last:.1%} at step {end}"
    if history.has_learned and later < best:
        evidence += f", while {history.looks[-1].recall:.1%} of the training samples looked at find their own class."
        near = later >= best - history.limits.fallen
        yield finding("over-fitting", mild(near), evidence, "over-fitting", history.run)
    elif last < 0.9 * best or (last < best and best_step <= history.limits.early * end):
        yield finding("past its best", "note", f"{evidence}.", "over-fitting", history.run)


def wrong_length(history: History) -> Iterator[Finding]:
    """Held-out MAP@R still rises at the end of the run, or has fallen since its best."""
    scores, limits = history.finite(*MAP), history.limits
    if len(scores) < MIN_SCORES:
        return
    end, last = scores[-1]
    best_step, best = max(scores, key=lambda point: point[1])
    half = max((value for step, value in scores if 2 * step <= end), default=last)
    if best_step == end and last - half >= limits.rising:
        evidence = f"MAP@R on held-out classes rose to the end, from {half:.1%} in the first half to {last:.1%}."
        yield finding(
            "under-trained", mild(last - half < limits.fallen), evidence, "too short", replace(history.run, rising=True)
        )
    elif best - last >= limits.declined:
        evidence = f"MAP@R on held-out classes was {best:.1%} at step {best_step} and is {last:.1%} at step {end}."
        run = replace(history.run, best_step=best_step)
        yield finding("over-trained", mild(best - last < limits.fallen), evidence, "too long", run)


def at_chance(history: History) -> Iterator[Finding]:
    """Recall@1 on the test classes is at chance, or held-out recall@1 is 0 at every evaluation."""
    tested, held = history.tested, history.finite(*RECALL)
    if tested is not None:
        near = tested.recall - tested.chance < history.limits.skill_alarm * (1 - tested.chance)
        if tested.recall and not (tested.chance and near and tested.low <= tested.chance):
            return
        luck = f", by luck it would be {100 * tested.chance:.1f}" if tested.chance else ""
        evidence = f"R@1 on the test classes is {100 * tested.recall:.1f}{tested.interval}{luck}."
        yield finding("no better than chance", "alarm", evidence, "chance", history.run)
    elif held and not any(value for _, value in held):
        evidence = f"Recall@1 on held-out classes is 0.0% at every evaluation up to step {held[-1][0]}."
        yield finding("no better than chance", "alarm", evidence, "chance", history.run)


def below_baseline(history: History) -> Iterator[Finding]:
    """The trained network scores below a baseline: the input vectors, or itself before the first step."""
    tested = history.tested
    above = {} if tested is None else {name: v for name, v in history.baselines.items() if v > tested.recall}
    if tested is None or not above:
        return
    better = " and ".join(f"{100 * value:.1f} {BASELINES[name]}" for name, value in above.items())
    evidence = f"R@1 on the test classes is {100 * tested.recall:.1f}{tested.interval}, but {better}."
    kind = "below input" if "input" in above else "below untrained"
    yield finding("below its baseline", mild(max(above.values()) <= tested.high), evidence, kind, history.run)


def no_active_pairs(history: History) -> Iterator[Finding]:
    """The loss had no active pairs at the last three logged steps."""
    looks = [
        (e["step"], e["active_positives"] + e["active_negatives"]) for e in history.entries if "active_positives" in e
    ]
    if len(looks) >= 3 and not any(active for _, active in looks[-3:]):
        evidence = f"At steps {', '.join(str(step) for step, _ in looks[-3:])} the loss moved no pair of the batch."
        yield finding("no active pairs", mild(history.keeps_recall), evidence, "easy", history.run)


def concentrated_gradient(history: History) -> Iterator[Finding]:
    """The gradient is concentrated on a few pairs at the last logged steps."""
    looks = [value for _, value in history.finite("effective_pairs") if value > 0]
    if len(looks) >= 3 and median(looks[-max(3, len(looks) // 3) :]) <= 4:
        evidence = f"The weight is spread over {median(looks[-3:]):.1f} pairs of a batch."
        yield finding("gradient on few pairs", mild(history.keeps_recall), evidence, "few", history.run)


def progress(history: History) -> Iterator[Finding]:
    """The run has stalled, or is only slow."""
    losses, recall = history.finite("loss"), history.recall
    if len(losses) < 2 * MIN_LOSSES or any(True for _ in pinned_loss(history)):
        return
    values = [value for _, value in losses]
    quarter = len(values) // 4
    first, before, last = (
        median(values[:MIN_LOSSES]),
        median(values[-2 * quarter : -quarter]),
        median(values[-quarter:]),
    )
    lost = any(True for _ in at_chance(history))
    learned = len(recall) >= 2 and recall[-1][1] > 1.02 * recall[0][1]
    if last > 0.98 * first and first > 0 and not learned:
        evidence = f"The loss was {first:.4g} in the first {MIN_LOSSES} steps and is {last:.4g} in the last quarter."
        yield finding("stalled", "warning", evidence, "stalled", history.run)
    elif before > 0 and last < 0.9 * before and last > NEGLIGIBLE * max(1.0, first) and history.rising and not lost:
        evidence = f"The loss still fell by {1 - last / before:.0%} from the third to the last quarter of the run."
        yield finding("only slow", "note", evidence, "slow", history.run)


def risk(history: History) -> Iterator[Finding]:
    """Hard mining without a margin, or with many more rows than dimensions: a risk of collapse (Xu et al. 2022)."""
    config = history.config
    if config is None or history.run.margin is None or config.loss.options.get("mining") not in remedies.HARD:
        return
    batch = remedies.batch_of(config, history.run.classes)
    if history.run.margin == 0:
        evidence = "With hard mining and a margin of 0 all rows on one point are a global minimum of the loss."
        yield finding("margin of zero", "note", evidence, "no margin", history.run)
    dim = config.model.embedding_dim
    if dim is not None and batch > dim:
        evidence = (
            f"Hard mining with {batch} rows a batch in {dim} dimensions: the more rows meet in "
            "few dimensions, the nearer a collapsed space is to the one you have (a trend, not a threshold)."
        )
        yield finding("many rows, few dimensions", "note", evidence, "many rows", history.run)


def _keep_worst(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the worst of the findings with the same name: looks and journal may both report it."""
    worst: dict[str, Finding] = {}
    for each in findings:
        before = worst.get(each.name)
        if before is None or ORDER.index(each.severity) < ORDER.index(before.severity):
            worst[each.name] = each
    return list(worst.values())


def _smooth(series: Series) -> Iterator[tuple[int, float]]:
    """Medians over about twenty intervals: (first step, median)."""
    size = max(5, len(series) // 20)
    for i in range(0, len(series), size):
        part = series[i : i + size]
        yield part[0][0], median(value for _, value in part)


RULES: tuple[Callable[[History], Iterator[Finding]], ...] = (
    not_finite,
    pinned_loss,
    collapse,
    lost_recall,
    wrong_length,
    at_chance,
    below_baseline,
    no_active_pairs,
    concentrated_gradient,
    progress,
    risk,
)

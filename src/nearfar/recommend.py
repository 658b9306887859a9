"""`recommend`: which loss, sampler and batch to begin with, from a data set's labels and what was measured before."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from nearfar._checks import check_positive, check_whole

NEAR = math.log(4)
"""A measured data set is near when its number of classes and its samples a class are within a factor of four."""
MATRICES = 10
"""B x B matrices of float32 that a pairwise loss holds at once on the dense engine, forward and backward."""


@dataclass(frozen=True)
class Facts:
    """What the labels say: samples, classes, and the sizes of the classes."""

    samples: int
    classes: int
    smallest: int
    median: int
    largest: int
    lone: int

    @staticmethod
    def of(labels: Any) -> Facts:
        """Count them."""
        sizes = np.unique(np.asarray(labels), return_counts=True)[1]
        if len(sizes) < 2:
            raise ValueError(f"recommend: labels must hold two classes or more, but {len(sizes)} came.")
        middle = int(np.median(sizes))
        return Facts(int(sizes.sum()), len(sizes), int(sizes.min()), middle, int(sizes.max()), int((sizes == 1).sum()))


@dataclass(frozen=True)
class Row:
    """One measured result: a loss and a sampler on a data set, R@1 over seeds (a share) with its interval."""

    data: str
    classes: int
    per_class: int
    batch: int
    loss: dict[str, Any]
    batches: dict[str, Any]
    recall: float
    low: float
    high: float
    seeds: int
    source: str
    optimiser: dict[str, Any] = field(default_factory=dict)

    def distance(self, facts: Facts) -> float:
        """The larger of two ratios, as a logarithm: classes, and samples a class."""
        return max(abs(math.log(self.classes / facts.classes)), abs(math.log(self.per_class / max(1, facts.median))))

    def cited(self) -> str:
        """The row in words."""
        return (
            f"{self.loss['name']} with {self.batches['name']} on {self.data} ({self.classes} classes, "
            f"{self.per_class} a class): R@1 {100 * self.recall:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}] "
            f"over {self.seeds} seeds, {self.source}"
        )


@dataclass(frozen=True)
class Recommendation:
    """A configuration to begin with (a tree for `nearfar.train.parse`) and the reason of each part."""

    config: dict[str, Any]
    reasons: tuple[str, ...]


def measured() -> tuple[Row, ...]:
    """The rows that come with the package, made by the scripts in benchmarks/quality."""
    text = (files("nearfar") / "measured.json").read_text(encoding="utf-8")
    return tuple(Row(**row) for row in json.loads(text))


def recommend(
    labels: Any, *, batch_size: int = 128, memory: float = 8.0, rows: Sequence[Row] | None = None
) -> Recommendation:
    """Loss, sampler and batch for these labels.

    Args:
        labels: integers [n], of the training samples.
        batch_size: as many samples as the network can take at once.
        memory: gigabytes that the loss may use.
        rows: measured results to choose from; by default those of the package.

    >>> recommend([0, 0, 0, 1, 1, 1, 2, 2, 2], batch_size=6).config["batches"]
    {'name': 'PerClass', 'classes': 2, 'samples': 3}
    """
    check_whole("recommend", "batch_size", batch_size)
    check_positive("recommend", "memory", memory)
    facts = Facts.of(labels)
    row, about_row = _choose(facts, measured() if rows is None else rows)
    reasons = [_about(facts), about_row]
    batch, about_batch = _batch(facts, row, batch_size, memory)
    loss, about_loss = _loss(row, batch["classes"] * batch["samples"] if "classes" in batch else batch["batch_size"])
    config = {"loss": loss, "batches": batch}
    if row is not None and row.optimiser.get("proximal"):
        config["optimiser"] = {"proximal": row.optimiser["proximal"]}
    return Recommendation(config, (*reasons, *about_batch, about_loss))


def _about(facts: Facts) -> str:
    lone = f"; {facts.lone} classes have one sample and never form a pair" if facts.lone else ""
    return (
        f"{facts.samples:,} samples of {facts.classes:,} classes, {facts.smallest} to {facts.largest} a class, "
        f"{facts.median} in the middle{lone}."
    )


def _choose(facts: Facts, rows: Sequence[Row]) -> tuple[Row | None, str]:
    """The best row of the nearest data set, if one is near."""
    if not rows:
        return None, "Nothing was measured; this is the default."
    nearest = min(rows, key=lambda row: row.distance(facts))
    best = max((row for row in rows if row.data == nearest.data), key=lambda row: row.recall)
    if nearest.distance(facts) <= NEAR:
        return best, f"Measured on data of this shape: {best.cited()}."
    return None, (
        f"No measured row is near: the nearest data set is {nearest.data} with {nearest.classes} classes and "
        f"{nearest.per_class} a class. This is the default; try two losses on held-out classes."
    )


def _batch(facts: Facts, row: Row | None, wanted: int, memory: float) -> tuple[dict[str, Any], list[str]]:
    """Classes and samples of a batch that fits the data, the wish and the memory."""
    reasons = []
    fits = int(math.sqrt(memory * 2**30 / (4 * MATRICES)))
    size = min(wanted, fits)
    if size < wanted:
        reasons.append(f"A batch of {wanted} would need more than {memory:g} GB of B x B matrices; {size} fits.")
    if row is not None and row.batches["name"] == "Representatives":
        samples = min(int(row.batches.get("samples", 2)), max(2, facts.median))
        reasons.append("Representatives: the measured row above used alternating projections.")
        return {**row.batches, "batch_size": max(2, size // samples) * samples, "samples": samples}, reasons
    samples = max(2, min(facts.median, 5, size // 2))
    classes = max(2, min(facts.classes, size // samples))
    reasons.append(
        f"{classes} classes x {samples} samples a batch: every sample meets {samples - 1} alike and "
        f"{(classes - 1) * samples} unlike ones."
    )
    if classes == facts.classes and classes * samples < size:
        reasons.append(f"All {classes} classes give {classes * samples} samples, fewer than the {size} asked for.")
    return {"name": "PerClass", "classes": classes, "samples": samples}, reasons


def _loss(row: Row | None, batch: int) -> tuple[dict[str, Any], str]:
    """The row's loss, its k scaled to the batch; without a row the top-K loss with K twice the batch, as in 002."""
    if row is None:
        return (
            {"name": "DroTopK", "k": 2 * batch, "pair": {"name": "Logistic"}},
            "DroTopK with K = 2B, the paper's choice: the hardest pairs share the weight, so that the many easy unlike "
            "pairs do not drown the few alike ones; the binomial loss needs no margin, its threshold is .5.",
        )
    loss = dict(row.loss)
    if "k" in loss:
        loss["k"] = max(1, round(loss["k"] * batch / row.batch))
        return loss, f"k = {loss['k']}: the measured {row.loss['k']} at B = {row.batch}, scaled to B = {batch}."
    margins = {key: value for key, value in loss.items() if key in ("margin", "threshold", "neg_margin", "temperature")}
    told = ", ".join(f"{key} {value}" for key, value in margins.items()) or "its default margin"
    return loss, f"{loss['name']} with {told}, as measured."

"""`recommend`: a loss, sampler and batch size for a data set, from its labels and measured results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from nearfar._utils.checks import check_positive, check_whole
from nearfar.data._splits import Shares

NEAR = math.log(4)
"""A measured data set is near if its number of classes and its samples per class are within a factor of four."""
PLAIN = "MPerClass"  # the sampler without projections
OPEN = (
    "The learning rate is left open: it depends on the network more than on the labels. training.steps auto finds the "
    "length on held-out classes."
)
RECIPE = (
    "Size, network and rate are those of the recipe for photographs (configs/photographs.yaml), chosen on classes of "
    "CUB that were held out; training.steps auto finds the length on held-out classes of these photographs."
)
MATRICES = 10
"""B x B matrices of float32 that a pairwise loss holds at once on the dense engine, forward and backward."""


@dataclass(frozen=True)
class Facts:
    """Facts about the labels: samples, classes, and the sizes of the classes."""

    samples: int
    classes: int
    smallest: int
    median: int
    largest: int
    lone: int

    @staticmethod
    def of(labels: Any) -> Facts:
        """Count samples and classes."""
        sizes = np.unique(np.asarray(labels), return_counts=True)[1]
        if len(sizes) < 2:
            raise ValueError(f"recommend: labels must hold two classes or more, but {len(sizes)} came.")
        middle = int(np.median(sizes))
        return Facts(int(sizes.sum()), len(sizes), int(sizes.min()), middle, int(sizes.max()), int((sizes == 1).sum()))


@dataclass(frozen=True)
class Row:
    """One measured result: R@1 over seeds, with its interval, of a loss and a sampler on a data set."""

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
    optimizer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None

    def distance(self, facts: Facts) -> float:
        """The distance of the data sets: the larger log ratio of classes and of samples per class."""
        return max(abs(math.log(self.classes / facts.classes)), abs(math.log(self.per_class / max(1, facts.median))))

    def cite(self) -> str:
        """Cite the result in one line."""
        steps = "" if self.steps is None else f" after {self.steps:,} steps"
        return (
            f"{self.method()} on {self.data} ({self.classes:,} classes, {self.per_class} a class): "
            f"{self.interval()} over {self.seeds} seeds{steps}, {self.source}"
        )

    def method(self) -> str:
        """The loss and the sampler in words."""
        hard = " and hard classes" if self.batches.get("hard_classes") else ""
        return f"{_describe(self.loss)} with {self.batches['name']}{hard}"

    def interval(self) -> str:
        """R@1 in percent, with its interval."""
        return f"R@1 {100 * self.recall:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Recommendation:
    """A configuration to start from (nested values for `nearfar.runs.parse`), and the reason for each part."""

    config: dict[str, Any]
    reasons: tuple[str, ...]


def load_rows() -> tuple[Row, ...]:
    """The measured results in the package, made by the scripts in benchmarks/quality."""
    text = (files("nearfar.cli") / "recommend.json").read_text(encoding="utf-8")
    return tuple(Row(**row) for row in json.loads(text))


def recommend(
    labels: Any,
    *,
    batch_size: int = 128,
    memory: float = 8.0,
    validation: float = 0.1,
    test: int = 0,
    photographs: bool = False,
    rows: Sequence[Row] | None = None,
) -> Recommendation:
    """Recommend loss, sampler and batch for these labels [n], which include those that will be held out.

    A batch may have `batch_size` samples, and the loss may use `memory` gigabytes. Training holds out the share
    `validation` of the classes. The number of `test` classes, and whether the samples are `photographs`, for which a
    recipe sets the other options, only change the text. `rows` are the measured results to choose from.

    >>> recommend([0, 0, 0, 1, 1, 1, 2, 2, 2], batch_size=6).config["batches"]
    {'name': 'MPerClass', 'classes': 2, 'samples': 3}
    """
    check_whole("recommend", "batch_size", batch_size)
    check_positive("recommend", "memory", memory)
    facts = Facts.of(labels)
    shares = Shares.of(facts.classes, validation, test=test)
    row, about_row = _choose(facts, load_rows() if rows is None else rows)
    reasons = [_about(facts), f"{shares}.", about_row]
    batch, about_batch = _batch(facts, shares.learn, row, batch_size, memory)
    size = batch["classes"] * batch["samples"] if "classes" in batch else batch["batch_size"]
    loss, about_loss = _loss(row, photographs, size)
    config = {"loss": loss, "batches": batch}
    if row is not None:
        more = {"model": row.model, "optimizer": row.optimizer if batch["name"] == "Representatives" else {}}
        config |= {name: dict(part) for name, part in more.items() if part}
    return Recommendation(config, (*reasons, *about_batch, about_loss, RECIPE if photographs else OPEN))


def _about(facts: Facts) -> str:
    lone = f"; {facts.lone} classes have one sample and never form a pair" if facts.lone else ""
    sizes = f"{facts.smallest} to {facts.largest} a class, {facts.median} in the middle"
    if facts.smallest == facts.largest:
        sizes = f"{facts.median} a class"
    return f"{facts.samples:,} samples of {facts.classes:,} classes, {sizes}{lone}."


def _choose(facts: Facts, rows: Sequence[Row]) -> tuple[Row | None, str]:
    """The best result on the nearest data set, if one is near enough."""
    if not rows:
        return None, "Nothing was measured; this is the default."
    nearest = min(rows, key=lambda row: row.distance(facts))
    if nearest.distance(facts) > NEAR:
        return None, (
            f"No measured row is near: the nearest data set is {nearest.data} with {nearest.classes} classes and "
            f"{nearest.per_class} a class. This is the default; try two losses on held-out classes."
        )
    best = max((row for row in rows if row.data == nearest.data), key=lambda row: row.recall)
    # results of one source are comparable: same steps, network and learning rate
    there = [row for row in rows if (row.data, row.source) == (best.data, best.source)]
    if len(there) == 1:
        return best, f"The best result on data of this shape: {best.cite()}."
    plain = max((row for row in there if row.batches["name"] == PLAIN), key=lambda row: row.recall, default=best)
    if plain is best or plain.high < best.low:
        return best, f"The best of {len(there)} rows measured on data of this shape: {best.cite()}."
    return plain, (
        f"The best plain one of {len(there)} rows measured on data of this shape: {plain.cite()}. {best.method()} had "
        f"{best.interval()}; the intervals meet, so the simpler one is proposed."
    )


def _batch(facts: Facts, there: int, row: Row | None, wanted: int, memory: float) -> tuple[dict[str, Any], list[str]]:
    """Classes and samples of a batch that fits the training classes, the wanted batch size and the memory."""
    reasons = []
    fits = int(math.sqrt(memory * 2**30 / (4 * MATRICES)))
    size = min(wanted, fits)
    if size < wanted:
        reasons.append(f"A batch of {wanted} would need more than {memory:g} GB of B x B matrices; {size} fits.")
    measured_samples = 5 if row is None else int(row.batches.get("samples", 5))
    samples = max(2, min(facts.median, measured_samples, size // 2))
    classes = max(2, min(there, size // samples))
    if row is not None and row.batches["name"] != PLAIN:
        reasons.append(f"{row.batches['name']}: the measured row above used alternating projections.")
        return {**row.batches, "batch_size": classes * samples, "samples": samples}, reasons
    reasons.append(
        f"{classes} classes x {samples} samples a batch: every sample meets {samples - 1} positive and "
        f"{(classes - 1) * samples} negative ones."
    )
    if classes == there and classes * samples < size:
        reasons.append(f"All {classes} classes give {classes * samples} samples, fewer than the {size} asked for.")
    return {"name": PLAIN, "classes": classes, "samples": samples}, reasons


def _loss(row: Row | None, photographs: bool, batch: int) -> tuple[dict[str, Any], str]:
    """The loss of the result, with k scaled to the batch; without one that of the recipe, or NT-Xent."""
    if row is None and photographs:
        return {"name": "ProxyAnchor", "scale": 8.0}, "ProxyAnchor with scale 8, as in the recipe for photographs."
    if row is None:
        return (
            {"name": "NTXent", "temperature": 0.07},
            "NTXent, because no measured row is near: of 24 losses with equal tuning it has the best mean rank on two "
            "sets of photographs (benchmarks/results/photographs_study.md), and on characters it is among the best two "
            "of five (benchmarks/results/demo.md).",
        )
    loss = dict(row.loss)
    if isinstance(loss.get("k"), int | float):  # "8B" means the same at every batch size
        loss["k"] = max(1, round(loss["k"] * batch / row.batch))
        return loss, f"k = {loss['k']}: the measured {row.loss['k']} at B = {row.batch}, scaled to B = {batch}."
    return loss, f"{_describe(loss)}, as measured."


def _describe(part: Any) -> str:
    """Describe a part of a configuration.

    >>> _describe({"name": "Triplet", "margin": 0.2, "pair": {"name": "Hinge"}})
    'Triplet (margin 0.2, pair Hinge)'
    """
    if not isinstance(part, dict):
        return str(part)
    options = ", ".join(f"{name} {_describe(value)}" for name, value in part.items() if name != "name")
    return f"{part['name']} ({options})" if options else str(part["name"])

"""`diagnose`: the diagnosis of an embedding space from embeddings and labels, and the loss if it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_seed
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.doctor.findings import Diagnosis, Finding, Severity, concluded, listed
from nearfar.doctor.remedies import finding, level
from nearfar.doctor.thresholds import Thresholds
from nearfar.evaluation import neighbors
from nearfar.evaluation.inputs import demand_classes, read_inputs
from nearfar.geometry import Collapse, Pull, collapse, pull
from nearfar.geometry.collapse import sample
from nearfar.losses import Triplet

__all__ = ["Look", "diagnose", "examine", "margin_of"]

EXPLAINED = 256
"""Rows on which the loss is explained; the triplets of more would not fit into memory."""
NEAREST = 5
"""Number of neighbors that vote on a label."""


@dataclass(frozen=True, eq=False)
class Look:
    """The input of the rules: a sample of finite rows, and its measures.

    Attributes:
        x: [n, d] rows.
        y: [n] labels.
        places: [n] their row numbers in the input.
        measures: measures of the space.
        recall: share of rows whose nearest other row is of their class, without rows of lone classes.
        chance: the expected `recall` by chance.
        near: [n, k] labels of the nearest rows.
        force: how the gradient is distributed, if a loss was given.
        value: the value of that loss.
        margin: α, if there is one.
        metric: "cosine" or "euclidean".
        limits: the thresholds.
    """

    x: Tensor
    y: Tensor
    places: Tensor
    measures: Collapse
    recall: float
    chance: float
    near: Tensor
    force: Pull | None
    value: float | None
    margin: float | None
    metric: str
    limits: Thresholds

    @property
    def skill(self) -> float:
        """Recall above chance, from 0 to 1."""
        return (self.recall - self.chance) / (1 - self.chance) if self.chance < 1 else 1.0

    @property
    def apart(self) -> bool:
        """Whether classes are still separated, however small the space has become."""
        return self.chance > 0 and self.skill >= self.limits.skill_kept

    def rows(self, mine: Tensor) -> tuple[int, ...]:
        """The row numbers of these rows in the input."""
        return tuple(self.places[mine.cpu()].tolist())


def diagnose(
    embeddings: Any,
    labels: Any = None,
    *,
    loss: Any = None,
    margin: float | None = None,
    metric: str = "cosine",
    rows: int = 2000,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Diagnosis:
    """Diagnose an embedding space: is it healthy, and if not, what to change?

    A sample of rows is examined (random classes, at most 32 rows of each), so that the cost does not grow with n: about
    a second for 2,000 rows of dimension 128. With a loss, its value and the distribution of its gradient are examined
    too.

    Args:
        embeddings: [n, d], a tensor, an array, lists or `Vectors`; rows that are not finite are a finding, not an
            error.
        labels: [n] integers; by default the y of `Vectors`.
        loss: any loss of `nf.losses`; its `explain` is called on 256 rows.
        margin: α of the triplets; by default that of a `Triplet` loss.
        metric: "cosine", or "euclidean" if rows are compared without normalization.
        rows: the largest number of rows to sample.
        seed: seed of the sample.
        thresholds: the thresholds of the findings, see benchmarks/RESULTS-doctor.md.

    >>> x = torch.nn.functional.normalize(torch.ones(80, 8) + 0.01 * torch.randn(80, 8), dim=1)
    >>> diagnose(x, torch.arange(80) // 4).findings[0].name
    'total collapse'
    """
    check_choice("diagnose", "metric", metric, ("cosine", "euclidean"))
    check_seed("diagnose", seed)
    given = read_inputs("diagnose", embeddings, labels)
    embeddings, labels = given.x, demand_classes("diagnose", given.y)
    check_embeddings("diagnose", "embeddings", embeddings, finite=False)
    check_labels("diagnose", "labels", labels, len(embeddings), embeddings.device)
    limits = thresholds or Thresholds()
    finite = torch.isfinite(embeddings.detach()).all(dim=1)
    found = list(_not_finite(finite))
    kept = finite.nonzero().flatten().cpu()
    if len(kept) < 2:
        return concluded([*found, *_nothing(len(kept))], {"rows": len(kept)})
    places = kept[sample(labels.cpu()[kept], rows, seed)]
    chosen = places.to(embeddings.device)
    look = examine(embeddings.detach()[chosen], labels[chosen], places, loss, margin, metric, limits)
    found += [each for rule in RULES for each in rule(look)]
    return concluded(found, measured(look))


def examine(
    x: Tensor,
    y: Tensor,
    places: Tensor,
    loss: Any,
    margin: float | None,
    metric: str,
    limits: Thresholds,
    *,
    shrink: bool = True,
) -> Look:
    """Compute the measures that the rules need."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    margin = margin_of(loss) if margin is None else margin
    measures = collapse(x, y, margin=margin or 0.0, metric=metric, shrink=shrink, rows=len(x))
    recall, chance, near = _neighborhood(x, y, metric)
    few = sample(y, EXPLAINED).to(x.device)
    force = value = None
    if loss is not None:
        raw = pull(x[few], y[few], loss)
        force = Pull(raw.hardest, tuple(few[list(raw.rows)].tolist()), *_rest(raw))
        value = float(loss(x[few], y[few]).detach().mean())
    return Look(x, y, places, measures, recall, chance, near, force, value, margin, metric, limits)


def measured(look: Look) -> dict[str, Any]:
    """The numbers of a look, by name."""
    return look.measures.to_dict() | {"recall@1": look.recall, "chance": look.chance}


def margin_of(loss: Any) -> float | None:
    """The margin α of a `Triplet`; None for any other loss."""
    return float(loss.margin) if isinstance(loss, Triplet) else None


def _rest(raw: Pull) -> tuple[tuple[float, ...], float, int, float]:
    return raw.shares, raw.positive, raw.active, raw.effective


def _neighborhood(x: Tensor, y: Tensor, metric: str) -> tuple[float, float, Tensor]:
    """Recall@1, its value by chance, and the labels of each row's nearest rows."""
    k = min(NEAREST, len(x) - 1)
    near = y[neighbors(x, k=k, similarity=metric).places]  # type: ignore[arg-type]
    others = (y[:, None] == y[None, :]).sum(dim=1) - 1
    asked = others > 0
    if not bool(asked.any()):
        return 0.0, 0.0, near
    right = (near[:, 0] == y)[asked].double().mean()
    return float(right), float(others[asked].double().mean() / (len(x) - 1)), near


def _nothing(rows: int) -> Iterator[Finding]:
    if rows == 0:
        yield Finding(
            "nothing to see", "warning", "There are no finite rows.", "Hand in embeddings of two rows or more."
        )
    else:
        yield Finding("nothing to see", "note", "There is one finite row.", "Hand in embeddings of two rows or more.")


def _not_finite(finite: Tensor) -> Iterator[Finding]:
    bad = tuple((~finite).nonzero().flatten().tolist())
    if bad:
        evidence = f"{len(bad)} of {len(finite)} rows hold NaN or infinity (rows {listed(bad)})."
        yield finding("non-finite values", "alarm", evidence, "not finite", rows=bad)


def total_collapse(look: Look) -> Iterator[Finding]:
    """All rows are one point: unit rows in one direction, or raw rows at distances far below the margin."""
    m, limits = look.measures, look.limits
    spread, unit_of = m.total, "1 where rows point everywhere"
    if look.metric == "euclidean":
        scale = look.margin or m.norm
        spread, unit_of = (m.total / scale if scale > 0 else 0.0), "in " + ("margins" if look.margin else "lengths")
    if spread >= limits.spread_warning:
        return
    evidence = f"The rms distance of rows to their mean is {spread:.3g} ({unit_of})"
    if look.metric == "cosine":
        evidence += f", the mean cosine of two rows {1 - spread**2:.3f}"
    if look.apart:
        evidence += f", yet the nearest row is of the same class for {look.recall:.1%} of rows."
        yield finding("narrow cone", "note", evidence, "cone")
    else:
        severity = level(spread < limits.spread_alarm)
        yield finding("total collapse", severity, evidence + ".", "collapse")


def class_collapse(look: Look) -> Iterator[Finding]:
    """Classes overlap: the nearest row is of the own class hardly more often than by chance."""
    if look.measures.classes < 2 or look.chance == 0 or look.skill >= look.limits.skill_warning:
        return
    if len(look.x) < 64 and look.recall > 0:
        return  # few rows: luck may have taken some
    evidence = (
        f"The nearest row is of the same class for {look.recall:.1%} of rows, by luck it would be {look.chance:.1%}; "
        f"{look.measures.between:.1%} of the variance lies between {look.measures.classes} classes."
    )
    severity = level(look.skill < look.limits.skill_alarm)
    yield finding("class collapse", severity, evidence, "classes")


def class_points(look: Look) -> Iterator[Finding]:
    """Every class is one point: classes are separated, with no variation left inside."""
    m = look.measures
    if m.total > 0 and m.classes < m.rows and m.within < look.limits.point:
        evidence = f"The spread within classes is {m.within:.2%} of the whole (NC1 {m.nc1:.2g})."
        yield finding("classes are points", "note", evidence, "points")


def dimensional_collapse(look: Look) -> Iterator[Finding]:
    """Few dimensions are in use, although the embedding and the classes would allow many."""
    m, limits = look.measures, look.limits
    room = min(look.x.shape[1], m.classes, m.rows - 1)
    lost = m.effective_rank < limits.rank_alarm and room >= 4
    if m.total == 0 or not (lost or (m.effective_rank < limits.rank_warning and room >= 16)):
        return
    evidence = f"The effective rank is {m.effective_rank:.2f} in {look.x.shape[1]} dimensions with {m.classes} classes."
    yield finding("dimensional collapse", level(lost), evidence, "dimensions")


def pinned_loss(look: Look) -> Iterator[Finding]:
    """A triplet loss equals its margin because distances have vanished."""
    if look.value is None or not look.margin:
        return
    near = abs(look.value - look.margin) <= look.limits.pinned * look.margin
    if near and look.measures.total < 2 * look.margin:
        evidence = f"The loss is {look.value:.4g} at a margin of {look.margin:g}: distances hardly count."
        if look.apart:
            yield finding("loss pinned at its margin", "note", evidence, "cone")
        else:
            yield finding("loss pinned at its margin", "alarm", evidence, "collapse")


def no_active_pairs(look: Look) -> Iterator[Finding]:
    """The loss has no active pairs left."""
    if look.measures.total == 0 or not math.isfinite(look.measures.total):
        return
    if look.force is not None and look.force.active == 0:
        yield finding("no active pairs", "warning", "The loss moves no pair of these rows.", "easy")
    elif look.force is None and look.margin is not None and look.measures.active == 0:
        evidence = f"Every triplet is separated by the margin of {look.margin:g}."
        yield finding("no active pairs", "warning", evidence, "easy")


def few_pull(look: Look) -> Iterator[Finding]:
    """A few rows carry the gradient: outliers, or wrong labels."""
    force = look.force
    if force is None or len(look.x) < 32 or sum(force.shares) <= look.limits.pull:
        return
    rows = look.rows(torch.tensor(force.rows))
    evidence = (
        f"{sum(force.shares):.0%} of the gradient is on rows {listed(rows)}, {force.hardest:.0%} on one pair; "
        f"the weight is spread over {force.effective:.1f} pairs."
    )
    yield finding("gradient on few pairs", "warning", evidence, "few", rows=rows)


def imbalance(look: Look) -> Iterator[Finding]:
    """Only positive or only negative pairs have a gradient; classes of very different size; lone rows."""
    sizes = torch.unique(look.y, return_counts=True)[1]
    largest, middle = int(sizes.max()), float(sizes.double().median())
    if largest > look.limits.sizes * middle:
        evidence = f"The largest class has {largest} rows, the median one {middle:g}."
        yield finding("imbalance", "note", evidence, "sizes")
    lone = int((sizes == 1).sum())
    if lone > 0.2 * len(look.x):
        evidence = f"{lone} of {len(look.x)} rows are alone in their class, and have no positive."
        yield finding("imbalance", "note", evidence, "lone")
    force = look.force
    if force is not None and force.active and not 0.01 <= force.positive <= 0.99:
        evidence = f"{force.positive:.1%} of the gradient is on positive pairs."
        yield finding("imbalance", "note", evidence, "signs")


def suspects(look: Look) -> Iterator[Finding]:
    """Rows whose nearest rows agree on another label, in classes that are compact otherwise."""
    if look.near.shape[1] < NEAREST or len(look.x) < 64:
        return
    own = (look.near == look.y[:, None]).double().mean(dim=1)
    other = torch.mode(look.near, dim=1).values
    agree = (look.near == other[:, None]).sum(dim=1) >= NEAREST - 1
    _, classes, sizes = torch.unique(look.y, return_inverse=True, return_counts=True)
    held = torch.zeros(len(sizes), dtype=torch.float64, device=own.device).scatter_reduce_(
        0, classes, own, "mean", include_self=False
    )
    bad = (own == 0) & agree & (other != look.y) & (held[classes] >= 0.5) & (sizes[classes] > NEAREST)
    rows = look.rows(bad.nonzero().flatten())
    if rows:
        evidence = (
            f"{len(rows)} of {len(look.x)} rows lie among rows that agree on another label (rows {listed(rows)})."
        )
        many = len(rows) > look.limits.suspects * len(look.x)
        severity: Severity = "warning" if many else "note"
        yield finding("mislabeled suspects", severity, evidence, "suspects", rows=rows)


def norms(look: Look) -> Iterator[Finding]:
    """Norms that grow too large, of single rows or of all."""
    lengths = look.x.double().norm(dim=1)
    middle, longest = float(lengths.median()), float(lengths.max())
    if look.measures.norm > look.limits.norm or not math.isfinite(longest):
        evidence = f"The rms length of rows is {look.measures.norm:.3g}."
        yield finding("norm explosion", "alarm", evidence, "norms")
    elif middle > 0 and longest > look.limits.norm_ratio * middle:
        rows = look.rows((lengths > look.limits.norm_ratio * middle).nonzero().flatten())
        evidence = f"The longest row is {longest / middle:.0f} times the median one (rows {listed(rows)})."
        yield finding("norm explosion", "warning", evidence, "norms", rows=rows)


RULES: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    total_collapse,
    class_collapse,
    dimensional_collapse,
    pinned_loss,
    no_active_pairs,
    few_pull,
    norms,
    suspects,
    class_points,
    imbalance,
)

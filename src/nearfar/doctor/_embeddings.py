"""`diagnose`: diagnose an embedding space from embeddings and labels, and optionally the loss."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_seed
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.doctor._findings import Diagnosis, Finding, Severity, conclude, list_rows
from nearfar.doctor._remedies import finding, level, mild
from nearfar.doctor._thresholds import Thresholds
from nearfar.evaluation import neighbors
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.geometry import Collapse, Pull, collapse, pull
from nearfar.geometry.collapse import sample
from nearfar.losses import Triplet

EXPLAINED = 256  # rows on which the loss is explained, so that all triplets fit into memory
NEAREST = 5  # number of neighbors that vote on a label


@dataclass(frozen=True, eq=False)
class Measurements:
    """A sample of finite rows and its measures, the input of the rules."""

    x: Tensor  # [n, d] rows
    y: Tensor  # [n] labels
    places: Tensor  # [n] their row numbers in the input
    space: Collapse  # measures of the space
    recall: float  # share of rows whose nearest other row is of their class; rows alone in their class are left out
    chance: float  # the `recall` expected by chance
    near: Tensor  # [n, k] labels of the nearest rows
    pull: Pull | None  # distribution of the gradient over pairs and rows, if a loss was given
    value: float | None  # the value of that loss
    margin: float | None  # α, if known
    metric: str  # "cosine" or "euclidean"
    limits: Thresholds

    @property
    def skill(self) -> float:
        """Recall above chance: (recall - chance) / (1 - chance)."""
        return (self.recall - self.chance) / (1 - self.chance) if self.chance < 1 else 1.0

    @property
    def apart(self) -> bool:
        """Whether classes are separated, at any scale of the space."""
        return self.chance > 0 and self.skill >= self.limits.skill_kept

    def rows(self, mine: Tensor) -> tuple[int, ...]:
        """Row numbers in the input of these rows of the sample."""
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
    """Diagnose an embedding space: whether it is healthy, and what to change if not.

    The cost does not grow with n, because only a sample of rows is examined (random classes, at most 32 rows of each):
    about a second for 2,000 rows of dimension 128. With a loss, its value and gradient are examined too.

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
    embeddings, labels = given.x.detach(), demand_classes("diagnose", given.y)
    check_embeddings("diagnose", "embeddings", embeddings, finite=False)
    check_labels("diagnose", "labels", labels, len(embeddings), embeddings.device)
    margin = margin_of(loss) if margin is None else margin
    finite = torch.isfinite(embeddings).all(dim=1)
    found = list(_not_finite(finite))
    usable = finite.nonzero().flatten().cpu()
    if len(usable) < 2:
        evidence = "There is one finite row." if len(usable) else "There are no finite rows."
        severity: Severity = "note" if len(usable) else "warning"
        found.append(Finding("nothing to see", severity, evidence, "Pass embeddings of two or more rows."))
        return conclude(found, {"rows": len(usable)})
    places = usable[sample(labels.cpu()[usable], rows, seed)]
    x, y = embeddings[places.to(embeddings.device)], labels[places.to(embeddings.device)]
    measured = _measure(x, y, places, loss, margin, metric, thresholds or Thresholds())
    found += [each for rule in RULES for each in rule(measured)]
    return conclude(found, measured.space.to_dict() | {"recall@1": measured.recall, "chance": measured.chance})


def _measure(
    x: Tensor, y: Tensor, places: Tensor, loss: Any, margin: float | None, metric: str, limits: Thresholds
) -> Measurements:
    """Compute the input of the rules for rows [n, d] with labels [n]."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    space = collapse(x, y, margin=margin or 0.0, metric=metric, rows=len(x))
    recall, chance, near = _neighborhood(x, y, metric)
    force = value = None
    if loss is not None:
        few = sample(y, EXPLAINED).to(x.device)
        force = pull(x[few], y[few], loss)
        force = replace(force, rows=tuple(few[list(force.rows)].tolist()))
        value = float(loss(x[few], y[few]).detach().mean())
    return Measurements(x, y, places, space, recall, chance, near, force, value, margin, metric, limits)


def margin_of(loss: Any) -> float | None:
    """The margin α of a `Triplet`; None for any other loss."""
    return float(loss.margin) if isinstance(loss, Triplet) else None


def _neighborhood(x: Tensor, y: Tensor, metric: str) -> tuple[float, float, Tensor]:
    """Recall@1, recall@1 by chance, and the labels of each row's nearest rows."""
    k = min(NEAREST, len(x) - 1)
    near = y[neighbors(x, k=k, similarity=metric).places]  # type: ignore[arg-type]
    others = (y[:, None] == y[None, :]).sum(dim=1) - 1
    asked = others > 0
    if not bool(asked.any()):
        return 0.0, 0.0, near
    right = (near[:, 0] == y)[asked].double().mean()
    return float(right), float(others[asked].double().mean() / (len(x) - 1)), near


def _not_finite(finite: Tensor) -> Iterator[Finding]:
    bad = tuple((~finite).nonzero().flatten().tolist())
    if bad:
        evidence = f"{len(bad)} of {len(finite)} rows hold NaN or infinity (rows {list_rows(bad)})."
        yield finding("non-finite values", "alarm", evidence, "not finite", rows=bad)


def total_collapse(m: Measurements) -> Iterator[Finding]:
    """All rows are one point: unit rows in one direction, or raw rows at distances far below the margin."""
    space, limits = m.space, m.limits
    spread, unit_of = space.total, "1 where rows point everywhere"
    if m.metric == "euclidean":
        scale = m.margin or space.norm
        spread, unit_of = (space.total / scale if scale > 0 else 0.0), "in " + ("margins" if m.margin else "lengths")
    if spread >= limits.spread_warning:
        return
    evidence = f"The rms distance of rows to their mean is {spread:.3g} ({unit_of})"
    if m.metric == "cosine":
        evidence += f", the mean cosine of two rows {1 - spread**2:.3f}"
    if m.apart:
        evidence += f", yet the nearest row is of the same class for {m.recall:.1%} of rows."
        yield finding("narrow cone", "note", evidence, "cone")
    else:
        severity = level(spread < limits.spread_alarm)
        yield finding("total collapse", severity, evidence + ".", "collapse")


def class_collapse(m: Measurements) -> Iterator[Finding]:
    """Classes overlap: the nearest row is of the same class hardly more often than by chance."""
    if m.space.classes < 2 or m.chance == 0 or m.skill >= m.limits.skill_warning:
        return
    if len(m.x) < 64 and m.recall > 0:
        return  # with so few rows a low recall may be chance
    evidence = (
        f"The nearest row is of the same class for {m.recall:.1%} of rows, by luck it would be {m.chance:.1%}; "
        f"{m.space.between:.1%} of the variance lies between {m.space.classes} classes."
    )
    severity = level(m.skill < m.limits.skill_alarm)
    yield finding("class collapse", severity, evidence, "classes")


def class_points(m: Measurements) -> Iterator[Finding]:
    """Every class is one point: classes are separated, and no variation is left within them."""
    space = m.space
    if space.total > 0 and space.classes < space.rows and space.within < m.limits.point:
        evidence = f"The spread within classes is {space.within:.2%} of the whole (NC1 {space.nc1:.2g})."
        yield finding("classes are points", "note", evidence, "points")


def dimensional_collapse(m: Measurements) -> Iterator[Finding]:
    """The embedding uses few dimensions, although its width and the number of classes would allow many."""
    space, limits = m.space, m.limits
    room = min(m.x.shape[1], space.classes, space.rows - 1)
    lost = space.effective_rank < limits.rank_alarm and room >= 4
    if space.total == 0 or not (lost or (space.effective_rank < limits.rank_warning and room >= 16)):
        return
    evidence = (
        f"The effective rank is {space.effective_rank:.2f} in {m.x.shape[1]} dimensions with {space.classes} classes."
    )
    yield finding("dimensional collapse", level(lost), evidence, "dimensions")


def pinned_loss(m: Measurements) -> Iterator[Finding]:
    """A triplet loss equals its margin because distances have vanished."""
    if m.value is None or not m.margin:
        return
    near = abs(m.value - m.margin) <= m.limits.pinned * m.margin
    if near and m.space.total < 2 * m.margin:
        evidence = f"The loss is {m.value:.4g} at a margin of {m.margin:g}: distances hardly count."
        severity: Severity = "note" if m.apart else "alarm"
        yield finding("loss pinned at its margin", severity, evidence, "cone" if m.apart else "collapse")


def no_active_pairs(m: Measurements) -> Iterator[Finding]:
    """The loss has no active pairs left."""
    if m.space.total == 0 or not math.isfinite(m.space.total):
        return
    if m.pull is not None and m.pull.active == 0:
        yield finding("no active pairs", "warning", "The loss moves no pair of these rows.", "easy")
    elif m.pull is None and m.margin is not None and m.space.active == 0:
        evidence = f"Every triplet is separated by the margin of {m.margin:g}."
        yield finding("no active pairs", "warning", evidence, "easy")


def concentrated_gradient(m: Measurements) -> Iterator[Finding]:
    """A few rows carry the gradient: outliers, or wrong labels."""
    force = m.pull
    if force is None or len(m.x) < 32 or sum(force.shares) <= m.limits.pull:
        return
    rows = m.rows(torch.tensor(force.rows))
    evidence = (
        f"{sum(force.shares):.0%} of the gradient is on rows {list_rows(rows)}, {force.hardest:.0%} on one pair; "
        f"the weight is spread over {force.effective:.1f} pairs."
    )
    yield finding("gradient on few pairs", "warning", evidence, "few", rows=rows)


def imbalance(m: Measurements) -> Iterator[Finding]:
    """Only positive or only negative pairs have a gradient; classes of very different size; lone rows."""
    sizes = torch.unique(m.y, return_counts=True)[1]
    largest, middle = int(sizes.max()), float(sizes.double().median())
    if largest > m.limits.sizes * middle:
        evidence = f"The largest class has {largest} rows, the median one {middle:g}."
        yield finding("imbalance", "note", evidence, "sizes")
    lone = int((sizes == 1).sum())
    if lone > 0.2 * len(m.x):
        evidence = f"{lone} of {len(m.x)} rows are alone in their class, and have no positive."
        yield finding("imbalance", "note", evidence, "lone")
    force = m.pull
    if force is not None and force.active and not 0.01 <= force.positive <= 0.99:
        evidence = f"{force.positive:.1%} of the gradient is on positive pairs."
        yield finding("imbalance", "note", evidence, "signs")


def suspects(m: Measurements) -> Iterator[Finding]:
    """Rows whose nearest rows agree on another label, in classes that are compact otherwise."""
    if m.near.shape[1] < NEAREST or len(m.x) < 64:
        return
    own = (m.near == m.y[:, None]).double().mean(dim=1)
    other = torch.mode(m.near, dim=1).values
    agree = (m.near == other[:, None]).sum(dim=1) >= NEAREST - 1
    _, classes, sizes = torch.unique(m.y, return_inverse=True, return_counts=True)
    held = torch.zeros(len(sizes), dtype=torch.float64, device=own.device).scatter_reduce_(
        0, classes, own, "mean", include_self=False
    )
    bad = (own == 0) & agree & (other != m.y) & (held[classes] >= 0.5) & (sizes[classes] > NEAREST)
    rows = m.rows(bad.nonzero().flatten())
    if rows:
        evidence = f"{len(rows)} of {len(m.x)} rows lie among rows of another label (rows {list_rows(rows)})."
        few = len(rows) <= m.limits.suspects * len(m.x)
        yield finding("mislabeled suspects", mild(few), evidence, "suspects", rows=rows)


def norms(m: Measurements) -> Iterator[Finding]:
    """Norms that grow too large, of single rows or of all."""
    lengths = m.x.double().norm(dim=1)
    middle, longest = float(lengths.median()), float(lengths.max())
    if m.space.norm > m.limits.norm or not math.isfinite(longest):
        evidence = f"The rms length of rows is {m.space.norm:.3g}."
        yield finding("norm explosion", "alarm", evidence, "norms")
    elif middle > 0 and longest > m.limits.norm_ratio * middle:
        rows = m.rows((lengths > m.limits.norm_ratio * middle).nonzero().flatten())
        evidence = f"The longest row is {longest / middle:.0f} times the median one (rows {list_rows(rows)})."
        yield finding("norm explosion", "warning", evidence, "norms", rows=rows)


RULES: tuple[Callable[[Measurements], Iterator[Finding]], ...] = (
    total_collapse,
    class_collapse,
    dimensional_collapse,
    pinned_loss,
    no_active_pairs,
    concentrated_gradient,
    norms,
    suspects,
    class_points,
    imbalance,
)

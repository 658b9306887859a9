"""`evaluate`: retrieval and clustering scores with confidence intervals; `compare`: is one space better?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._utils import html
from nearfar._utils.checks import check_choice, check_seed
from nearfar._utils.progress import Watch
from nearfar.data._samples import USUAL_KS
from nearfar.evaluation._bootstrap import Interval, Unit, intervals
from nearfar.evaluation._clustering import clustering_scores, demand_scores
from nearfar.evaluation._inputs import Inputs, demand_classes, read_inputs
from nearfar.evaluation._rank_counting import Ties
from nearfar.evaluation._ranking_keys import Metric
from nearfar.evaluation._retrieval import PerQuery, retrieve
from nearfar.evaluation._scored import Scored, check_ks
from nearfar.evaluation._vectors import Vectors
from nearfar.relations.relation import Relation


@dataclass(frozen=True)
class ClassRow:
    """The scores of one class: its label, the number of its queries, and the means over them."""

    label: int
    queries: int
    recall_at_1: float
    r_precision: float
    map_at_r: float


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Scored):
    """The scores of an embedding space, in 0..1, with confidence intervals.

    Attributes:
        recall: K -> share of queries with a right answer among their K nearest.
        precision_at_1: share of queries whose nearest neighbor is right (the same as recall[1]).
        r_precision: mean share of right answers among the R nearest, R the number of right answers.
        map_at_r: mean average precision at R.
        mrr: mean of 1 / rank of the first right answer.
        nmi: normalized mutual information of k-means clusters and classes; None without `clustering`.
        ami: adjusted mutual information; None without `clustering`.
        f1: pairwise F1; None without `clustering`.
        intervals: score name ("recall@1", "map_at_r", ...) -> `Interval` over `unit`s. For clustering scores, the
            lowest and highest over k-means restarts as "nmi over starts" and so on, which is not a sampling error.
        per_class: one row per class, worst first; none if a relation was used instead of labels.
        queries: number of scored queries.
        lone: number of queries without a right answer, which were left out.
        classes: number of classes of the scored queries; 0 with a relation.
        unit: what the bootstrap resamples: "class" or "query".
        per_query: the result of each query.
        curve: width -> the evaluation of the first dimensions alone, for the `dims` of the call.
    """

    recall: dict[int, float]
    precision_at_1: float
    r_precision: float
    map_at_r: float
    mrr: float
    nmi: float | None
    ami: float | None
    f1: float | None
    intervals: dict[str, Interval]
    per_class: tuple[ClassRow, ...]
    queries: int
    lone: int
    classes: int
    unit: Unit
    per_query: PerQuery = field(repr=False)
    curve: dict[int, Evaluation] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[ClassRow, ...]:
        """The ten classes with the lowest scores."""
        return self.per_class[:10]

    def scores(self) -> dict[str, float]:
        """Every score by name, without those that were not computed."""
        named = {f"recall@{k}": value for k, value in self.recall.items()}
        named |= {"precision_at_1": self.precision_at_1, "r_precision": self.r_precision}
        named |= {"map_at_r": self.map_at_r, "mrr": self.mrr}
        return named | {k: v for k, v in (("nmi", self.nmi), ("ami", self.ami), ("f1", self.f1)) if v is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-query results, in types that JSON can hold."""
        return {
            "scores": self.scores(),
            "intervals": {name: asdict(interval) for name, interval in self.intervals.items()},
            "per_class": [asdict(row) for row in self.per_class],
            "queries": self.queries,
            "lone": self.lone,
            "classes": self.classes,
            "unit": self.unit,
        } | ({"curve": {str(width): each.to_dict() for width, each in self.curve.items()}} if self.curve else {})

    def _folded(self) -> str:
        """HTML that opens on a click: the ten worst classes."""
        if not self.per_class:
            return ""
        worst = [
            (row.label, row.queries, f"{100 * row.recall_at_1:.1f}", f"{100 * row.map_at_r:.1f}") for row in self.worst
        ]
        head = ("class", "queries", "recall@1, %", "MAP@R, %")
        return html.details("the classes that fare worst", html.table(head, worst))

    usual = "recall@1"

    def _column(self, score: str) -> np.ndarray | None:
        k = int(score[7:]) if score.startswith("recall@") and score[7:].isdecimal() else 1
        names, values = _columns(self.per_query, (k,), slice(None))
        values[self.per_query.lone.cpu().numpy()] = np.nan
        return values[:, names.index(score)] if score in names and k > 0 else None

    def _units(self) -> np.ndarray:
        return self.per_query.labels.cpu().numpy()

    def _matches(self, other: Scored) -> bool:
        if not isinstance(other, Evaluation) or not torch.equal(self.per_query.labels, other.per_query.labels):
            return False
        # without labels, relations are distinguished by their numbers of right answers
        return bool(self.classes) or torch.equal(self.per_query.relevant, other.per_query.relevant)

    def about(self) -> str:
        """One line about the queries."""
        classes = f" of {self.classes} classes" if self.classes else ""
        lone = f"; {self.lone} lone queries left out" if self.lone else ""
        over = f"95% intervals over {'classes' if self.unit == 'class' else 'queries'}"
        return f"{self.queries} queries{classes}{lone}; {over if self.intervals else 'no intervals'}"


def evaluate(
    embeddings: Any,
    labels: Any = None,
    *,
    ks: Sequence[int] = USUAL_KS,
    ref_emb: Any = None,
    ref_labels: Any = None,
    similarity: Metric = "cosine",
    clustering: bool = False,
    ties: Ties = "place",
    unit: Unit | None = None,
    resamples: int = 2000,
    seed: int = 0,
    dims: Sequence[int] = (),
    watch: Watch | None = None,
) -> Evaluation:
    """Compute retrieval scores of an embedding, and clustering scores on request, with confidence intervals.

    Args:
        embeddings: [n, d] queries: a tensor, an array, lists or `Vectors`; NaN rows are an error that names them.
        labels: [n] integers; by default the y of `Vectors`. Or an `nf.Relation` that says which references are right
            for each query (several labels per sample, a matrix, ignored pairs, which are left out of the ranking).
        ks: which recall@K; `nearfar.evaluation.KS` holds those customary for known data sets.
        ref_emb: [m, d] gallery (In-Shop's protocol); None searches among the queries, where no row finds itself.
        ref_labels: [m] integers; None if `labels` is a relation of queries and gallery.
        similarity: "cosine", "dot" or "euclidean".
        clustering: add NMI, AMI and F1: k-means with k = number of classes, k-means++, 3 restarts, `seed`; refused for
            a relation, which has no classes to compare clusters with.
        ties: "place": of equal scores the earlier reference is first; "favorable": a right one is (the rule of Qi et
            al. 2020).
        unit: what the bootstrap resamples. "class" is right for questions about unseen classes, since queries of one
            class fail together; "query" gives narrower intervals that hold for these classes only. The default is
            "class", and "query" with a relation, which has no classes.
        resamples: number of bootstrap resamples; 0 for no intervals. A single unit gives no intervals either.
        seed: seed of the bootstrap and of k-means.
        dims: widths such as (64, 128), at which the first dimensions alone are scored too; see `Evaluation.curve`.
        watch: called as watch(what, done, total) during the work.

    Lone queries (no other sample of their class) have no right answer; they are left out and counted in `lone`.

    >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.7, 0.8]])
    >>> evaluate(x, torch.tensor([0, 0, 1, 1, 0]), ks=(1, 2)).recall
    {1: 0.8, 2: 0.8}
    """
    check_seed("evaluate", seed)
    ks = check_ks("evaluate", ks)
    given = read_inputs("evaluate", embeddings, labels, ref_emb, ref_labels)
    unit = _choose_unit("evaluate", unit, isinstance(given.y, Relation))
    options = {"ks": ks, "similarity": similarity, "ties": ties, "unit": unit, "resamples": resamples, "seed": seed}
    curve = _curve(given, dims, {**options, "watch": watch})
    if clustering:
        demand_classes("evaluate: clustering (nmi, ami, f1)", given.y)
        demand_scores()
    found = retrieve(
        given.x, given.y, given.ref, given.ref_y, depth=max(ks), similarity=similarity, ties=ties, watch=watch
    )
    keep = ~found.lone
    if not bool(keep.any()):
        raise ValueError("evaluate: no query has a right answer (no other sample is a positive), so nothing is scored.")
    names, values = _columns(found, ks, keep)
    groups = found.labels[keep].cpu().numpy()
    means = dict(zip(names, values.mean(axis=0).tolist(), strict=True))
    bars = intervals(values, groups, unit=unit, resamples=resamples, seed=seed) if resamples else []
    bounds = {name: bar for name, bar in zip(names, bars, strict=False) if not math.isnan(bar.error)}
    rows = () if isinstance(given.y, Relation) else _per_class(found)
    clusters = None
    if clustering:
        x, y = (given.x, given.y) if given.ref is None or given.ref_y is None else (given.ref, given.ref_y)
        y = demand_classes("evaluate", y)
        clusters = clustering_scores(x, y, normalize=similarity == "cosine", seed=seed, watch=watch)
        bounds |= {f"{name} over starts": spread for name, spread in clusters.spread.items()}
    return Evaluation(
        recall={k: means[f"recall@{k}"] for k in ks},
        **{name: means[name] for name in ("precision_at_1", "r_precision", "map_at_r", "mrr")},
        nmi=clusters.nmi if clusters else None,
        ami=clusters.ami if clusters else None,
        f1=clusters.f1 if clusters else None,
        intervals=bounds,
        per_class=rows,
        queries=len(values),
        lone=int(found.lone.sum()),
        classes=len(rows),
        unit=unit,
        per_query=found,
        curve=curve,
    )


def _curve(given: Inputs, dims: Sequence[int], options: dict[str, Any]) -> dict[int, Evaluation]:
    """Evaluate the first dimensions alone, at each of the widths."""
    most = given.x.shape[1] if given.x.ndim == 2 else 0
    for width in dims:
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= most:
            raise ValueError(f"evaluate: dims must be widths from 1 to {most}, that of the rows, but came as {dims!r}.")
    ref = given.ref
    return {
        width: evaluate(
            given.x[:, :width],
            given.y,
            ref_emb=None if ref is None else ref[:, :width],
            ref_labels=given.ref_y,
            **options,
        )
        for width in sorted(set(dims))
    }


def _choose_unit(owner: str, unit: Unit | None, relation: bool) -> Unit:
    """Which unit to resample: `unit` if given, else classes if there are any."""
    if unit is None:
        return "query" if relation else "class"
    check_choice(owner, "unit", unit, ("class", "query"))
    if relation and unit == "class":
        raise ValueError(f'{owner}: unit="class" needs labels, but a relation came; pass unit="query".')
    return unit


def _columns(found: PerQuery, ks: Sequence[int], keep: Tensor | slice) -> tuple[list[str], np.ndarray]:
    """The names of the scores, and the per-query results [queries, scores] of the queries in `keep`."""
    rank = found.rank[keep].double()
    columns = {f"recall@{k}": (rank <= k).double() for k in ks}
    columns["precision_at_1"] = (rank <= 1).double()
    columns["r_precision"] = found.r_precision[keep].double()
    columns["map_at_r"] = found.ap_at_r[keep].double()
    columns["mrr"] = 1 / rank
    return list(columns), torch.stack(list(columns.values()), dim=1).cpu().numpy()


def _per_class(found: PerQuery) -> tuple[ClassRow, ...]:
    keep = ~found.lone
    names, place, counts = torch.unique(found.labels[keep], return_inverse=True, return_counts=True)
    columns = ((found.rank[keep] <= 1).double(), found.r_precision[keep].double(), found.ap_at_r[keep].double())
    means = [
        torch.zeros(len(names), dtype=torch.float64, device=names.device).index_add_(0, place, c) / counts
        for c in columns
    ]
    rows = zip(names.tolist(), counts.tolist(), *(mean.tolist() for mean in means), strict=True)
    return tuple(sorted((ClassRow(*row) for row in rows), key=lambda row: (row.recall_at_1, row.map_at_r, row.label)))


@dataclass(frozen=True)
class Comparison:
    """The comparison of two spaces, a and b, on the same queries.

    Attributes:
        score: which score was compared.
        a: its value in the first space.
        b: its value in the second.
        difference: b - a with its interval.
        verdict: "better", "worse" or "cannot tell", of b.
        unit: what was resampled.
    """

    score: str
    a: float
    b: float
    difference: Interval
    verdict: Literal["better", "worse", "cannot tell"]
    unit: Unit

    def __str__(self) -> str:
        d = self.difference
        return (
            f"{self.score}: {100 * self.a:.1f} -> {100 * self.b:.1f}, difference {100 * d.value:+.1f} "
            f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]: {self.verdict}"
        )


def _evaluate_both(a: Scored | Vectors, b: Scored | Vectors) -> tuple[Scored, Scored]:
    for one in (a, b):
        if not isinstance(one, Scored | Vectors):
            raise TypeError(f"compare: a and b must be evaluations or Vectors, but {type(one).__name__} came.")
    if isinstance(a, Vectors) and isinstance(b, Vectors) and None not in (a.name, b.name) and a.name != b.name:
        raise ValueError("compare: a and b must have the same samples in the same order, but their names differ.")
    left, right = (evaluate(one, ks=(1,), resamples=0) if isinstance(one, Vectors) else one for one in (a, b))
    return left, right


def compare(
    a: Scored | Vectors,
    b: Scored | Vectors,
    *,
    score: str | None = None,
    unit: Unit | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two evaluations of the same queries by a paired bootstrap: is b better than a?

    Both spaces are scored on the same resampled classes (queries, with a relation or with judgements), so that shared
    variation cancels. The verdict is "cannot tell" if the interval of the difference contains 0.

    Args:
        a: the first, from `evaluate` or `evaluate_retrieval`; `Vectors` are evaluated first.
        b: the second, of the same kind.
        score: which score; by default "recall@1", and "ndcg@10" with judgements.
        unit: what is resampled, as in `evaluate`.
        level: the confidence of the interval.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
    """
    check_seed("compare", seed)
    a, b = _evaluate_both(a, b)
    unit = _choose_unit("compare", unit, not a.classes)
    if not a._matches(b):
        raise ValueError("compare: a and b are not of the same queries in the same order; evaluate both on one set.")
    score = a.usual if score is None else score
    before, after = a._column(score), b._column(score)
    if before is None or after is None:
        raise ValueError(f"compare: score must be one of recall@K, {', '.join(a.scores())}, but came as {score!r}.")
    keep = ~np.isnan(before + after)
    before, after = before[keep], after[keep]
    change = (after - before)[:, None]
    (interval,) = intervals(change, a._units()[keep], unit=unit, level=level, resamples=resamples, seed=seed)
    verdict: Literal["better", "worse", "cannot tell"] = "cannot tell"
    if interval.low > 0:
        verdict = "better"
    elif interval.high < 0:
        verdict = "worse"
    return Comparison(score, float(before.mean()), float(after.mean()), interval, verdict, unit)

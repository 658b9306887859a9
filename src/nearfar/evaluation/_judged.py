"""`evaluate_retrieval`: nDCG, MAP, MRR, recall and precision of ranked documents under graded judgements.

With g_i the grade of the document at rank i (0 if it is not judged or its grade is negative), R the number of documents
with a grade above 0, and g*_i the grades of all judged documents, largest first:

    nDCG@k         Σ_{i ≤ k} g_i / log2(i + 1)  /  Σ_{i ≤ k} g*_i / log2(i + 1)
    MAP@k          (1/R) Σ_{i ≤ k} precision@i · [g_i > 0]
    MRR@k          1 / rank of the first relevant document, 0 if it is not among the first k
    recall@k       share of the R relevant documents among the first k
    precision@k    share of relevant documents among the first k; a shorter ranking is filled with wrong ones

The numbers are those of trec_eval, and every judged query counts: one without results, or without a relevant document,
scores 0. (`trec_eval` leaves queries without results out, unless it is called with -c.)
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from nearfar._utils.checks import check_seed
from nearfar._utils.progress import Watch
from nearfar.evaluation._bootstrap import Interval, intervals
from nearfar.evaluation._fingerprint import check_same_network
from nearfar.evaluation._judgements import Ranked, Ranks, read_qrels, read_ranked
from nearfar.evaluation._neighbors import neighbors
from nearfar.evaluation._ranking_keys import Metric
from nearfar.evaluation._scored import Scored, check_ks
from nearfar.evaluation._vectors import Vectors

RETRIEVAL_KS = (1, 10, 100)
MEASURES = ("ndcg", "map", "mrr", "recall", "precision")
BLOCK = 1 << 20  # entries of the tables of grades that are scored at a time


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalEvaluation(Scored):
    """Scores of ranked documents, in 0..1, with 95% confidence intervals over queries.

    Attributes:
        means: score ("ndcg@10", "map@10", "mrr@10", "recall@10", "precision@10", ...) -> its mean over the queries.
        intervals: score -> `Interval`; none for a single query.
        per_query: score -> its value for each query, [queries].
        queries: number of judged queries.
        ids: their names, in the order of the judgements.
        relevant: int64 [queries], the number of relevant documents.
        missing: how many judged queries the run has no results for; they score 0.
        unjudged: how many queries of the run have no judgements; they are left out.
    """

    means: dict[str, float]
    intervals: dict[str, Interval]
    per_query: dict[str, np.ndarray] = field(repr=False)
    queries: int
    ids: tuple[str, ...]
    relevant: np.ndarray
    missing: int
    unjudged: int

    classes = 0
    unit = "query"

    @property
    def usual(self) -> str:
        """The score that is compared by default: nDCG@10, or nDCG at the first k."""
        return "ndcg@10" if "ndcg@10" in self.means else next(iter(self.means))

    def scores(self) -> dict[str, float]:
        """Every score by name."""
        return dict(self.means)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the results of each query, in types that JSON can hold."""
        bars = {name: asdict(interval) for name, interval in self.intervals.items()}
        counts = {"queries": self.queries, "missing": self.missing, "unjudged": self.unjudged, "unit": self.unit}
        return {"scores": self.scores(), "intervals": bars, **counts}

    def about(self) -> str:
        """One line about the queries."""
        notes = [f"{self.queries:,} judged queries"]
        notes += [f"{self.missing:,} without results, which score 0"] if self.missing else []
        empty = int((self.relevant == 0).sum())
        notes += [f"{empty:,} without a relevant document, which score 0"] if empty else []
        notes += [f"{self.unjudged:,} queries without judgements left out"] if self.unjudged else []
        return "; ".join([*notes, "95% intervals over queries" if self.intervals else "no intervals"])

    def _units(self) -> np.ndarray:
        return np.arange(self.queries)

    def _column(self, score: str) -> np.ndarray | None:
        return self.per_query.get(score)

    def _matches(self, other: Scored) -> bool:
        return (
            isinstance(other, RetrievalEvaluation)
            and self.ids == other.ids
            and np.array_equal(self.relevant, other.relevant)
        )


def evaluate_retrieval(
    run: Ranks | str | os.PathLike[str] | tuple[Vectors, Vectors],
    qrels: Ranks | str | os.PathLike[str],
    *,
    ks: Sequence[int] = RETRIEVAL_KS,
    similarity: Metric = "cosine",
    resamples: int = 2000,
    seed: int = 0,
    watch: Watch | None = None,
) -> RetrievalEvaluation:
    """Score ranked documents by graded judgements: nDCG@k, MAP@k, MRR@k, recall@k and precision@k, with intervals.

    Args:
        run: query -> document -> score, larger is better; or the path of a run file of TREC; or `Vectors` of queries
            and of documents, whose names are their ids, which are then searched exactly.
        qrels: query -> document -> grade, a whole number, relevant if above 0; or the path of a qrels file of TREC or
            BEIR, or of a folder in the layout of BEIR.
        ks: which k.
        similarity: "cosine", "dot" or "euclidean"; for vectors only.
        resamples: number of bootstrap resamples; 0 for no intervals.
        seed: seed of the bootstrap.
        watch: called as watch(what, done, total) during the search.

    Of equal scores, the document with the larger id (as text) is ranked first, as in trec_eval; with vectors the
    earlier row is. Documents without judgements are not relevant.

    Raises:
        ValueError: judgements or results are malformed; the message names the line.

    >>> run = {"q1": {"a": 0.9, "b": 0.8}, "q2": {"b": 0.7}}
    >>> evaluate_retrieval(run, {"q1": {"b": 1}, "q2": {"a": 2, "b": 1}}, ks=(1, 2), resamples=0).means["recall@2"]
    0.75
    """
    owner = "evaluate_retrieval"
    check_seed(owner, seed)
    ks = check_ks(owner, ks)
    judged = read_qrels(owner, qrels)
    place = {name: number for number, name in enumerate(judged)}
    if isinstance(run, tuple):
        ranked = _search(owner, run, place, max(ks), similarity, watch)
    else:
        ranked = read_ranked(owner, run, place)
    found, ideal, relevant = _tables(ranked, judged, max(ks))
    step = max(1, BLOCK // max(ks))
    blocks = [slice(start, start + step) for start in range(0, len(judged), step)]
    values = np.concatenate([_measure(found[rows], ideal[rows], relevant[rows], ks) for rows in blocks])
    names = [f"{measure}@{k}" for measure in MEASURES for k in ks]
    bars = intervals(values, np.arange(len(judged)), unit="query", resamples=resamples, seed=seed) if resamples else []
    return RetrievalEvaluation(
        means=dict(zip(names, values.mean(axis=0).tolist(), strict=True)),
        intervals={name: bar for name, bar in zip(names, bars, strict=False) if not np.isnan(bar.error)},
        per_query=dict(zip(names, np.ascontiguousarray(values.T), strict=True)),
        queries=len(judged),
        ids=tuple(judged),
        relevant=relevant,
        missing=len(judged) - len(np.unique(ranked.query)),
        unjudged=ranked.unjudged,
    )


def _search(
    owner: str, run: tuple[Any, ...], place: dict[str, int], k: int, similarity: Metric, watch: Watch | None
) -> Ranked:
    """The k nearest documents of each judged query."""
    if len(run) != 2 or not all(isinstance(side, Vectors) and side.name is not None for side in run):
        raise TypeError(f"{owner}: vectors must come as (queries, documents), two Vectors whose names are their ids.")
    queries, documents = run
    check_same_network(owner, ("the queries", queries.fingerprint), ("the documents", documents.fingerprint))
    for what, side in (("queries", queries), ("documents", documents)):
        if len(set(side.name)) < len(side):
            raise ValueError(f"{owner}: the names of the {what} must differ, but some occur twice; give each an id.")
    rows = [row for row, name in enumerate(queries.name) if name in place]
    numbers = {name: number for number, name in enumerate(documents.name)}
    chosen = queries.x[torch.tensor(rows, dtype=torch.long)]
    k = min(k, len(documents))
    best = neighbors(chosen, documents.x, k=k, similarity=similarity) if rows and k else None
    query = np.repeat([place[queries.name[row]] for row in rows], k).astype(np.int64)
    scores, places = (np.zeros(0), np.zeros(0, int)) if best is None else (best.scores, best.places)
    document, score = (np.asarray(side).reshape(-1) for side in (places, scores))
    return Ranked(numbers, query, document, score.astype(np.float64), len(queries) - len(rows), by_place=True)


def _tables(ranked: Ranked, judged: dict[str, dict[str, int]], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grades at ranks 1..k as found and as they would be at best, [queries, k], and the relevant documents of each."""
    counts = [len(grades) for grades in judged.values()]
    query = np.repeat(np.arange(len(judged)), counts)
    grade = np.array([grade for grades in judged.values() for grade in grades.values()], dtype=np.int64)
    document = np.array([ranked.documents.get(name, -1) for grades in judged.values() for name in grades], np.int64)
    good = grade > 0
    query, grade, document = query[good], grade[good], document[good]
    relevant = np.bincount(query, minlength=len(judged))
    ideal = _fill(query, grade, np.lexsort((-grade, query)), len(judged), k)
    width = max(1, len(ranked.documents))
    there = np.flatnonzero(document >= 0)
    key = query[there] * width + document[there]
    sort = np.argsort(key)
    key, sorted_grade = np.append(key[sort], -1), np.append(grade[there][sort], 0)
    wanted = ranked.query * width + ranked.document
    spot = np.searchsorted(key[:-1], wanted)
    gained = np.where(key[spot] == wanted, sorted_grade[spot], 0)
    return _fill(ranked.query, gained, ranked.order(), len(judged), k), ideal, relevant


def _fill(query: np.ndarray, grade: np.ndarray, order: np.ndarray, queries: int, k: int) -> np.ndarray:
    """A table [queries, k] of the grades of each query in an order, 0 beyond its last."""
    query, grade = query[order], grade[order]
    start = np.searchsorted(query, np.arange(queries))
    rank = np.arange(len(query)) - start[query]
    table = np.zeros((queries, k), dtype=np.int64)
    table[query[rank < k], rank[rank < k]] = grade[rank < k]
    return table


def _measure(found: np.ndarray, ideal: np.ndarray, relevant: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Every measure at every k, [queries, measures · ks], in the order of `MEASURES`."""
    rank = np.arange(1, found.shape[1] + 1)
    hit = found > 0
    hits = hit.cumsum(axis=1)
    whole = np.maximum(relevant, 1)[:, None]
    gain, best = ((table / np.log2(rank + 1)).cumsum(axis=1) for table in (found, ideal))
    at = [k - 1 for k in ks]
    first = np.where(hits[:, -1] > 0, hit.argmax(axis=1) + 1, np.inf)[:, None]
    return np.concatenate(
        [
            gain[:, at] / np.where(best[:, at] > 0, best[:, at], 1),
            (hits / rank * hit).cumsum(axis=1)[:, at] / whole,
            np.where(first <= np.array(ks), 1 / first, 0),
            hits[:, at] / whole,
            hits[:, at] / np.array(ks),
        ],
        axis=1,
    )

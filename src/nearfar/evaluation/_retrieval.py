"""Retrieval scores per query: the rank of the first right answer, R-precision and average precision at R.

For a query with R relevant references (of its class, without itself), ranked by similarity:

    rank           place of the first relevant reference, from 1       recall@K = share of queries with rank ≤ K
    R-precision    share of relevant ones among the first R
    AP@R           (1/R) Σ_{i ≤ R} precision@i · [the i-th is relevant]       MAP@R = its mean

A lone query (R = 0) has no right answer: it is counted and reported, and left out of every mean. A relation (several
labels per sample, a matrix, ignored pairs) may take the place of labels; references that it leaves out are not ranked.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.progress import Watch
from nearfar._utils.tensors import check_labels
from nearfar.evaluation._exact_search import TILE, strips
from nearfar.evaluation._rank_counting import Ties, count_ranks
from nearfar.evaluation._ranking_keys import METRICS, Metric, keys, spaces
from nearfar.evaluation.parallel import check_rows, current_group, merge_rows, pace, share
from nearfar.relations.relation import Relation

TIES: tuple[Ties, ...] = ("place", "favorable")
DEEPEST = 64
"""Most neighbors listed for recall@K alone: ranks beyond are counted, which is cheaper than a longer list."""
NO_CLASS = -1  # the label of a query under a relation


@dataclass(frozen=True, eq=False)
class PerQuery:
    """The results of each query, tensors [n]; entries of lone queries are meaningless.

    Attributes:
        rank: place of the first relevant reference, from 1.
        r_precision: share of relevant ones among the first R.
        ap_at_r: average precision at R.
        relevant: R, the number of right answers.
        labels: the class of each query; `NO_CLASS` if a relation was used instead of labels.
    """

    rank: Tensor
    r_precision: Tensor
    ap_at_r: Tensor
    relevant: Tensor
    labels: Tensor

    @property
    def lone(self) -> Tensor:
        """Queries without a right answer."""
        return self.relevant == 0


def retrieve(
    embeddings: Tensor,
    labels: Tensor | Relation,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    *,
    depth: int = 1,
    similarity: Metric = "cosine",
    ties: Ties = "place",
    watch: Watch | None = None,
) -> PerQuery:
    """Rank the references of every query, and keep what the metrics need; arguments as in `evaluate`.

    About `depth` neighbors are listed. Ranks beyond the list are counted, so that only the speed depends on it. Ties
    "favorable", the rule in the code of Qi et al. 2020, change `rank` only.
    """
    check_choice("evaluate", "ties", ties, TIES)
    check_choice("evaluate", "similarity", similarity, METRICS)
    check_sides("evaluate", embeddings, None if isinstance(labels, Relation) else labels, ref_emb, ref_labels)
    if isinstance(labels, Relation):
        return _retrieve_by_relation(embeddings, labels, ref_emb, similarity, ties, watch)
    names = labels if ref_labels is None else ref_labels
    relevant = _relevant(labels, names, itself=ref_emb is None)
    most = len(names) - (ref_emb is None)
    if most < 1 or not len(labels):
        nothing = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
        return PerQuery(nothing.long(), nothing, nothing, relevant, labels)
    k = min(most, max(int(relevant.max()), min(max(depth, 8), DEEPEST)))
    parts: list[tuple[slice | Tensor, Tensor]] = []
    for rows, found in strips(embeddings, ref_emb, k=k, similarity=similarity, watch=watch):
        right = names[found.places] == labels[rows, None]
        rank, *shares = _score_lists(right, found.scores, relevant[rows], ties)
        parts.append((rows, torch.stack([rank.double(), *shares], dim=1)))
    like = torch.empty(len(labels), 3, dtype=torch.float64, device=labels.device)
    place, r_precision, ap = merge_rows(current_group(), like, parts).unbind(dim=1)
    rank = place.long()
    unseen = ((rank == 0) & (relevant > 0)).nonzero().flatten()
    if len(unseen):
        deep = count_ranks(embeddings, ref_emb, labels, names, unseen, similarity=similarity, ties=ties, watch=watch)
        rank[unseen] = deep if ties == "favorable" else deep.clamp(min=k + 1)
    return PerQuery(rank, r_precision, ap, relevant, labels)


def _retrieve_by_relation(
    embeddings: Tensor, relation: Relation, ref_emb: Tensor | None, similarity: Metric, ties: Ties, watch: Watch | None
) -> PerQuery:
    """Rank every reference that counts for every query, a strip of queries at a time."""
    x, y = spaces(embeddings, ref_emb, similarity)
    group, labels = current_group(), torch.full((len(x),), NO_CLASS, dtype=torch.int64, device=embeddings.device)
    tall = max(1, TILE // max(len(y), 1))
    count = -(-len(x) // tall) if len(y) else 0
    parts: list[tuple[slice | Tensor, Tensor]] = []
    mine, work = share(count, group.rank, group.world), tall * len(y) * embeddings.shape[1]
    for number in pace(mine, -(-count // group.world), work, partial(group.beat, labels.device)):
        rows = slice(number * tall, min((number + 1) * tall, len(x)))
        tile = relation.tile(rows, slice(None))
        key = torch.where(tile.valid, keys(x[rows], y[:]), -torch.inf)
        ranked = key.sort(dim=1, descending=True, stable=True)
        right = tile.positive.gather(1, ranked.indices)
        relevant = right.sum(dim=1)
        found = (*_score_lists(right, ranked.values, relevant, ties), relevant)
        parts.append((rows, torch.stack([column.double() for column in found], dim=1)))
        if watch is not None:
            first, last = mine.start * tall, min(mine.stop * tall, len(x))
            watch("ranking references of queries", rows.stop - first, last - first)
    like = torch.empty(len(x), 4, dtype=torch.float64, device=labels.device)
    rank, r_precision, ap, relevant = merge_rows(group, like, parts).unbind(dim=1)
    return PerQuery(rank.long(), r_precision, ap, relevant.long(), labels)


def check_sides(
    owner: str, embeddings: Tensor, labels: Tensor | None, ref_emb: Tensor | None, ref_labels: Tensor | None
) -> None:
    """Require rows and labels of equal length; labels are None if a relation is used instead."""
    check_rows(owner, "embeddings", embeddings)
    if labels is not None:
        check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
        if (ref_emb is None) != (ref_labels is None):
            raise ValueError(f"{owner}: ref_emb and ref_labels belong together, but only one of them came.")
    if ref_emb is not None:
        check_rows(owner, "ref_emb", ref_emb)
        if ref_labels is not None:
            check_labels(owner, "ref_labels", ref_labels, len(ref_emb), embeddings.device)
        if ref_emb.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"{owner}: ref_emb must be {embeddings.shape[1]} wide like embeddings, but is {ref_emb.shape[1]} wide."
            )


def _relevant(labels: Tensor, names: Tensor, *, itself: bool) -> Tensor:
    """R of each query: the number of references with its label, without itself."""
    known, counts = torch.unique(names, return_counts=True)
    place = torch.searchsorted(known, labels).clamp(max=max(len(known) - 1, 0))
    if not len(known):
        return torch.zeros_like(labels)
    found = torch.where(known[place] == labels, counts[place], 0)
    return found - 1 if itself else found


def _score_lists(right: Tensor, scores: Tensor, relevant: Tensor, ties: Ties) -> tuple[Tensor, Tensor, Tensor]:
    """Rank (0: not on the list), R-precision and AP@R of a strip, given which entries are right, [t, k]."""
    place = torch.arange(1, right.shape[1] + 1, device=right.device)
    first = torch.where(right, place, right.shape[1] + 1).amin(dim=1)
    listed = first <= right.shape[1]
    if ties == "favorable":
        best = scores.gather(1, (first - 1).clamp(max=right.shape[1] - 1)[:, None])
        first = (scores > best).sum(dim=1) + 1
    hits = (right & (place <= relevant[:, None])).double()
    divisor = relevant.clamp(min=1)
    precision = hits.cumsum(dim=1) / place
    return torch.where(listed, first, 0), hits.sum(dim=1) / divisor, (precision * hits).sum(dim=1) / divisor

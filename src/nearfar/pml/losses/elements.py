"""The arguments of a call, and the losses of single rows, pairs or triplets as PML's reducers take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import check_labels
from nearfar.engines.listed_scores import ListedScores, cheapest
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call as Checked
from nearfar.losses.robust import Labels, RobustLoss
from nearfar.pml._tuples import Indices
from nearfar.pml.reducers import LossDict, LossInfo
from nearfar.relations.index_tuples import as_pairs
from nearfar.relations.relation import Relation, Tile
from nearfar.similarity import Called, Similarity, called

__all__ = ["Call", "LossDict", "LossInfo", "log_sum", "log_sum_of", "nothing", "number", "part"]


BOTH = "the index tuple lists a pair both as positive and as negative; it can be only one."


def part(losses: Tensor, indices: Tensor | Indices, kind: str, divisor: Any = None) -> LossInfo:
    """One part of a loss; a zero where there are no losses.

    Args:
        losses: [k].
        indices: rows [k] for the kind "element", (anchors, others) for "pos_pair" and "neg_pair", (anchors, positives,
            negatives) for "triplet".
        kind: "element", "pos_pair", "neg_pair" or "triplet".
        divisor: what `DivisorReducer` divides by.
    """
    if not len(losses):
        return nothing()
    info: LossInfo = {"losses": losses, "indices": indices, "reduction_type": kind}
    return info if divisor is None else {**info, "divisor": divisor}


def number(value: Tensor) -> LossInfo:
    """A part of a loss that is a number already."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def nothing() -> LossInfo:
    """A part of a loss that is zero."""
    return {"losses": 0, "indices": None, "reduction_type": "already_reduced"}


def log_sum(values: Tensor, mask: Tensor, *, with_one: bool = False) -> Tensor:
    """Log Σ e^v over the masked entries of each row [n]: 0 where there are none; with one e^0 more if `with_one`."""
    present = mask.any(dim=1)
    # a row without entries is replaced by zeros, so that no NaN enters its gradient
    hidden = torch.where(mask, values, -torch.inf).masked_fill(~present[:, None], 0.0)
    if with_one:
        hidden = torch.cat([hidden, torch.zeros_like(hidden[:, :1])], dim=1)
    return torch.where(present, torch.logsumexp(hidden, dim=1), 0.0)


def log_sum_of(values: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log Σ e^v [count] over the values [k] of each group, given by its number [k]; and which groups have any.

    Groups without values hold -1e30, which adds nothing to a further logarithm and no NaN to its gradient.
    """
    top = values.detach().new_full((count,), -torch.inf).scatter_reduce(0, groups, values.detach(), "amax")
    present = torch.zeros(count, dtype=torch.bool, device=values.device).index_fill(0, groups, True)
    top = torch.where(torch.isfinite(top), top, 0.0)
    total = torch.zeros_like(top).index_add(0, groups, torch.exp(values - top[groups]))
    return torch.where(present, torch.log(torch.where(present, total, 1.0)) + top, -1e30), present


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, checked and on one device.

    Args:
        owner: whom messages name.
        embeddings: [n, d].
        labels: [n] integers, a `Relation`, or None.
        indices: a miner's tuple, or None.
        ref_emb: [m, d] reference rows, or None.
        ref_labels: [m] likewise.
        ids: [n] the sample of each row, or None.
        ref_ids: [m] likewise.
        ranks: the processes that share the work, each holding all of it, or None.
        weights: [n] weights of the rows by the index tuple (losses with class vectors), or None where all are 1.
    """

    owner: str
    embeddings: Tensor
    labels: Labels
    indices: Indices | None
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    weights: Tensor | None = None
    ranks: ProcessGroup | None = None

    @property
    def columns(self) -> int:
        """The number of reference rows (of the batch itself, if there is no reference)."""
        return len(self.reference)

    @property
    def reference(self) -> Tensor:
        """The reference rows [m, d], or the batch itself."""
        return self.embeddings if self.ref_emb is None else self.ref_emb

    @property
    def rows(self) -> Tensor:
        """The numbers 0..n-1, on the device of the embeddings."""
        return torch.arange(len(self.embeddings), device=self.embeddings.device)

    def own_labels(self) -> Tensor:
        """The labels [n], for losses that require them."""
        if not isinstance(self.labels, Tensor):
            raise ValueError(f"{self.owner}: labels must come as a 1-D integer tensor, with an index tuple too.")
        check_labels(self.owner, "labels", self.labels, len(self.embeddings), self.embeddings.device)
        return self.labels

    def relation(self) -> Relation:
        """The relation by the labels: which rows form positive pairs."""
        if self.labels is None:
            raise ValueError(f"{self.owner}: labels are missing; pass a 1-D integer tensor.")
        names = (self.ref_labels, self.ids, self.ref_ids)
        return Checked(self.owner, self.embeddings, self.labels, None, self.ref_emb, *names).relation()

    def scores(self, similarity: Similarity) -> Tensor:
        """All scores [n, m], larger = more similar."""
        similarity = called(similarity)
        return similarity.scores(*similarity.prepared(self.embeddings, self.ref_emb))

    def entries(self, similarity: Similarity) -> ListedScores:
        """Scores that are read as `entries[rows, cols]`: of a short index tuple no matrix [n, m] is made."""
        similarity = called(similarity)
        listed = 0 if self.indices is None else len(self.indices[1]) + len(self.indices[-1])
        whole = self.indices is None or isinstance(similarity, Called)
        how = "matrix" if whole else cheapest(listed, len(self.embeddings) * self.columns)
        return ListedScores.of(similarity, self.embeddings, self.ref_emb, how)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(anchors, positives, anchors, negatives): as listed, or all of them by the labels."""
        if self.indices is not None:
            return as_pairs(self.indices)
        tile = self._tile()
        (a, p), (b, n) = ((side > 0).nonzero(as_tuple=True) for side in (tile.positive, tile.negative))
        return a, p, b, n

    def masks(self) -> tuple[Tensor, Tensor]:
        """Masks [n, m] of the positive and of the negative pairs: each pair counts once."""
        if self.indices is None:
            tile = self._tile()
            return tile.positive > 0, tile.negative > 0
        a, p, b, n = as_pairs(self.indices)
        found = torch.zeros(2, len(self.embeddings), self.columns, dtype=torch.bool, device=self.embeddings.device)
        found[0][a, p] = True
        found[1][b, n] = True
        if bool((found[0] & found[1]).any()):
            raise ValueError(f"{self.owner}: {BOTH}")
        return found[0], found[1]

    def once(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`pairs`, each of them once; refuses a pair that is listed both as positive and as negative."""
        if self.indices is None:
            return self.pairs()
        width = self.columns
        a, p, b, n = as_pairs(self.indices)
        near, far = (torch.unique(rows * width + cols) for rows, cols in ((a, p), (b, n)))
        if len(torch.unique(torch.cat([near, far]))) < len(near) + len(far):
            raise ValueError(f"{self.owner}: {BOTH}")
        return near // width, near % width, far // width, far % width

    def triplets(self) -> tuple[Tensor, Tensor, Tensor]:
        """(anchors, positives, negatives): as listed, each positive with each negative of its anchor, or all."""
        if self.indices is not None and len(self.indices) == 3:
            a, p, n = (part.long() for part in self.indices)
            return a, p, n
        if self.indices is not None:
            a, p, b, n = as_pairs(self.indices)
            left, right = torch.nonzero(a[:, None] == b[None, :], as_tuple=True)
            return a[left], p[left], n[right]
        tile = self._tile()
        positive, negative = tile.positive > 0, tile.negative > 0
        a, p = positive.nonzero(as_tuple=True)
        which, n = negative[a].nonzero(as_tuple=True)
        return a[which], p[which], n

    def _tile(self) -> Tile:
        """The masks [n, m] of a relation without weights and representatives, which lists could not tell."""
        relation = self.relation()
        if relation.weighted or relation.anchors is not None:
            raise ValueError(
                f"{self.owner}: a Relation with weights or representatives needs a recipe; use MeanReducer, SumReducer "
                "or AvgNonZeroReducer, and leave collect_stats out."
            )
        return relation.dense()

    def into(self, robust: RobustLoss) -> Tensor:
        """Evaluate a recipe on these arguments."""
        if self.ranks is not None:
            return robust._value(Checked(robust.owner, *self._arguments(), self.ids, self.ref_ids, self.ranks))
        value: Tensor = robust(*self._arguments(), ids=self.ids, ref_ids=self.ref_ids)
        return value

    def explained(self, robust: RobustLoss) -> Explanation:
        """Explain a recipe on these arguments."""
        return robust.explain(*self._arguments(), ids=self.ids, ref_ids=self.ref_ids)

    def _arguments(self) -> tuple[Tensor, Labels, Indices | None, Tensor | None, Tensor | None]:
        # pairs that are listed need no labels, so an index tuple with a reference may come without ref_labels
        spare = self.indices is not None and (self.ref_emb is None) != (self.ref_labels is None)
        labels, ref_labels = (None, None) if spare else (self.labels, self.ref_labels)
        return self.embeddings, labels, self.indices, self.ref_emb, ref_labels

"""`BaseMiner`: the call of PML's miners, and the scores of pairs that ours choose from."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nearfar._utils.shortcuts import exactly, touched
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.engines.listed import valid_rows
from nearfar.miners import ScoredPairs
from nearfar.pml._names import check_names
from nearfar.pml._records import Records
from nearfar.pml._settings import MinerSettings, chosen_distance
from nearfar.pml._tuples import Indices
from nearfar.pml.distances import BaseDistance, LpDistance, similarity_of
from nearfar.relations.relation import Relation
from nearfar.similarity import SAMPLE, NegEuclidean, NegSquaredEuclidean, Similarity, called, origin

__all__ = ["BaseMiner", "listed"]

FEW = 2**16
"""Number of pairs up to which distances are computed in float64; the search for an origin would take longer."""


class BaseMiner(Records):
    """Base class of miners: index tuples from embeddings and labels, without gradient.

    A miner of your own overrides `mine`, as in PML.

    Args:
        settings: see `MinerSettings`; the distance is `get_default_distance()` where none is given.

    Attributes:
        distance: PML's distance.
        num_triplets: how many triplets the last call returned (miners of triplets).
        num_pos_pairs: how many positive pairs the last call returned (miners of pairs).
        num_neg_pairs: how many negative pairs.
    """

    parts = 4
    """How many tensors the tuple has: 4 for pairs, 3 for triplets."""
    fixed = False
    """Whether the distance must be the default one."""

    def __init__(self, **settings: Unpack[MinerSettings]) -> None:
        super().__init__(settings.get("collect_stats"))
        check_names(self, {name: value for name, value in settings.items() if name != "collect_stats"}, MinerSettings)
        owner = type(self).__name__
        self.distance = chosen_distance(owner, settings, self.get_default_distance(), fixed=self.fixed)
        self.num_triplets = self.num_pos_pairs = self.num_neg_pairs = 0
        self.add_to_recordable_attributes(
            list_of_names=["num_pos_pairs", "num_neg_pairs", "num_triplets"], is_stat=True
        )

    def get_default_distance(self) -> BaseDistance:
        """The distance where none is given."""
        return LpDistance()

    def mine(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Indices:
        """Compute the index tuple; see `forward`, which calls this and counts what it found.

        As in PML, a reference that is the very batch (the same tensors) is none: no row is paired with itself.
        """
        if ref_emb is embeddings and ref_labels is labels:
            ref_emb = ref_labels = None
        pairs = self._pairs(embeddings, labels, ref_emb, ref_labels, ids, ref_ids)
        if pairs is None:
            return tuple(torch.zeros(self.parts, 0, dtype=torch.int64, device=embeddings.device))
        return self._choose_from(pairs, embeddings, ref_emb)

    def _choose_from(self, pairs: ScoredPairs, rows: Tensor, cols: Tensor | None) -> Indices:
        """Choose the index tuple from scored pairs and their rows (cols None: the rows), which most do not need."""
        return self._choose(pairs)

    def _choose(self, pairs: ScoredPairs) -> Indices:
        """Choose the index tuple from scored pairs."""
        raise TypeError(f"{type(self).__name__}: a miner of your own must have a method mine(...).")

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Indices:
        """Compute the index tuple.

        Args:
            embeddings: [n, d].
            labels: [n] integers.
            ref_emb: [m, d] reference rows; by default the batch is its own reference and no row is paired with itself.
            ref_labels: [m] integers.
            ids: [n] the sample of each row; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise.
        """
        self.reset_stats()
        labels = self._check(embeddings, labels, ref_emb, ref_labels)
        # `mine` tells by identity whether there is a reference, as PML's does: one that came must not be the batch
        reference = (embeddings, labels) if ref_emb is None or ref_labels is None else (ref_emb[:], ref_labels[:])
        names = {} if ids is None and ref_ids is None else {"ids": ids, "ref_ids": ref_ids}
        with torch.no_grad():
            found = self.mine(embeddings, labels, *reference, **names)
        self.output_assertion(found)
        return found

    def output_assertion(self, output: Indices) -> None:
        """Require (anchor, positive, negative) or (anchor, positive, anchor, negative), and count what there is."""
        owner, sizes = type(self).__name__, [len(part) for part in output]
        if len(output) == 3 and sizes[0] == sizes[1] == sizes[2]:
            self.num_triplets = sizes[0]
        elif len(output) == 4 and sizes[0] == sizes[1] and sizes[2] == sizes[3]:
            self.num_pos_pairs, self.num_neg_pairs = sizes[0], sizes[2]
        else:
            raise ValueError(
                f"{owner}: mine must return (anchor, positive, negative) or (anchor, positive, anchor, negative) of "
                f"equal lengths, but returned tensors of lengths {sizes}."
            )

    def _check(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None) -> Tensor:
        """Require rows and labels that fit; the labels on the device of the rows."""
        owner = type(self).__name__
        check_embeddings(owner, "embeddings", embeddings)
        labels = labels.to(embeddings.device) if isinstance(labels, Tensor) else labels
        check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
        if (ref_emb is None) != (ref_labels is None):
            raise ValueError(f"{owner}: ref_emb and ref_labels belong together, but only one of them came.")
        if ref_emb is not None:
            check_embeddings(owner, "ref_emb", ref_emb)
        return labels

    def _pairs(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        ids: Tensor | None,
        ref_ids: Tensor | None,
    ) -> ScoredPairs | None:
        """Score the pairs; None if there are no rows."""
        if ref_emb is not None and ref_labels is not None:
            ref_labels = ref_labels.to(embeddings.device)
            check_labels(type(self).__name__, "ref_labels", ref_labels, len(ref_emb), embeddings.device)
        relation = Relation.from_labels(labels, ref_labels, ids=ids, ref_ids=ref_ids)
        if 0 in relation.shape:
            return None
        similarity = called(similarity_of(self.distance))
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        x, y = embeddings.to(dtype), None if ref_emb is None else ref_emb.to(dtype)
        rows, cols, scores = _scored(similarity, x, y)
        return ScoredPairs(scores, *_masks(relation), *valid_rows(relation), relation, similarity, rows, cols)


def _scored(similarity: Similarity, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Prepared rows and references, and their scores [n, m], without gradient."""
    plain = exactly(similarity, NegEuclidean, NegSquaredEuclidean) and touched((similarity,)) is None
    if not plain or x.dtype == torch.float64 or x.device.type == "mps":
        rows, cols = similarity.prepared(x, y)
        return rows, cols, similarity.scores(rows, cols)
    # float64: distances of near rows drown in the rounding of their norms; many rows are moved among each other instead
    rows = _wide(similarity, x)
    cols = rows if y is None else _wide(similarity, y)
    if len(rows) * len(cols) > FEW:
        start = origin(torch.cat([z[:: max(1, len(z) // SAMPLE)] for z in ((rows,) if y is None else (rows, cols))]))
        rows = (rows - start).to(x.dtype)
        cols = rows if y is None else (cols - start).to(x.dtype)
    # the product, and all that follows, in one matrix
    here = (rows * rows).sum(dim=1)
    there = here if y is None else (cols * cols).sum(dim=1)
    scores = torch.addmm(there, rows, cols.T, alpha=-2).add_(here[:, None]).clamp_min_(0.0).to(x.dtype)
    scores = scores.sqrt_() if exactly(similarity, NegEuclidean) else scores
    rows = rows.to(x.dtype)
    return rows, rows if y is None else cols.to(x.dtype), scores.neg_()


def _wide(similarity: Similarity, x: Tensor) -> Tensor:
    """Rows in float64, divided by their norms if the similarity does so; squares of float32 numbers do not overflow."""
    return normalize(x.double(), dim=1, eps=1e-300) if similarity.normalize else x.double()


def _masks(relation: Relation) -> tuple[Tensor, Tensor]:
    """Masks [n, m] of the positive and of the negative pairs."""
    plain = relation.plain_labels()
    if plain is None or not relation.square:
        tile = relation.dense()
        return tile.positive, tile.negative
    same = plain[0][:, None] == plain[1]
    return same.clone().fill_diagonal_(False), ~same


def listed(pairs: ScoredPairs) -> Indices:
    """The pairs that count as a tuple (anchor, positive, anchor, negative)."""
    return (*torch.nonzero(pairs.positive, as_tuple=True), *torch.nonzero(pairs.negative, as_tuple=True))

"""Losses of the softmax family: NT-Xent, SupCon, circle, N-pairs."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from nearfar.links import Link, PerPositive, Sides, Terms
from nearfar.losses import Circle, NTXent
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Identity, Linear
from nearfar.pml._settings import Settings
from nearfar.pml.distances import CosineSimilarity, DotProductSimilarity
from nearfar.pml.losses.base import Call, Loss
from nearfar.pml.reducers import AvgNonZeroReducer, MeanReducer
from nearfar.relations.index_tuples import as_pairs
from nearfar.relations.relation import Relation
from nearfar.sets import KL, Mean

__all__ = ["CircleLoss", "NPairsLoss", "NTXentLoss", "SupConLink", "SupConLoss"]


class NTXentLoss(Loss):
    """mean over positive pairs of  -log( e^{s_ij/τ} / (e^{s_ij/τ} + Σ_{N_i} e^{s_ik/τ}) ).

    Args:
        temperature: τ.
        settings: see `Settings`; defaults `CosineSimilarity()`, `MeanReducer()`.
    """

    def __init__(self, temperature: float = 0.07, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, CosineSimilarity(), MeanReducer())
        self.temperature = temperature
        self.robust = self._take(
            NTXent(temperature=temperature, reduction=self.reducer.how, similarity=self.distance.similarity)
        )


class SupConLink(Link):
    """Add the values over positives and over all; 0 for anchors without positives, and for all without negatives."""

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        values = sides.positive + sides.negative
        counts = sides.has_positive & sides.has_negative.any()
        return (Terms(torch.where(counts, values, torch.zeros_like(values)), sides.anchors),)


class SupConLoss(Loss):
    """mean over anchors with positives of  log Σ_{all k} e^{s_ik/τ} - mean_{P_i} s_ij/τ.

    Args:
        temperature: τ.
        settings: see `Settings`; defaults `CosineSimilarity()`, `AvgNonZeroReducer()`.
    """

    once = True

    def __init__(self, temperature: float = 0.1, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, CosineSimilarity(), AvgNonZeroReducer())
        self.temperature = temperature
        self.robust = self._take(
            RobustLoss(
                pair=(Linear(scale=1 / temperature), Identity(1 / temperature)),
                over=(Mean(), KL(1.0, normalized=False)),
                groups="anchor_sign",
                link=SupConLink(),
                members="all",
                reduction=self.reducer.how,
                similarity=self.distance.similarity,
            )
        )


class CircleLoss(Loss):
    """mean over anchors above zero of  log(1 + Σ_{P_i} e^{l_ij} · Σ_{N_i} e^{l_ik})  with self-paced scores l.

    Args:
        m: the relaxation.
        gamma: the scale.
        settings: see `Settings`; the distance must be `CosineSimilarity()`; default `AvgNonZeroReducer()`.
    """

    once = True

    def __init__(self, m: float = 0.4, gamma: float = 80, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, CosineSimilarity(), AvgNonZeroReducer(), fixed=True)
        self.m = m
        self.gamma = gamma
        self.robust = self._take(Circle(margin=m, scale=gamma, reduction=self.reducer.how))


class NPairsLoss(Loss):
    """mean over classes of  log(1 + Σ_{c'≠c} e^{s(a_c, p_c') - s(a_c, p_c)}).

    The pair (a_c, p_c) of a class is its first two rows, or the first pair of it that an index tuple lists.

    Args:
        settings: see `Settings`; defaults `DotProductSimilarity()` (of unit rows, as in PML), `MeanReducer()`.
    """

    reads_tuple = True

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, DotProductSimilarity(), MeanReducer())
        self.robust = self._take(
            RobustLoss(
                pair=Linear(),
                over=(Mean(), KL(1.0, normalized=False)),
                groups="anchor_sign",
                link=PerPositive(),
                reduction=self.reducer.how,
                similarity=self.distance.similarity,
            )
        )

    def _value(self, call: Call) -> Tensor:
        if call.ref_emb is not None or call.ref_labels is not None:
            raise ValueError("NPairsLoss: it takes no reference; leave ref_emb and ref_labels out.")
        labels = self._labels(call)
        if call.indices is None:
            a, p = torch.nonzero(call.relation().dense().positive, as_tuple=True)
        else:
            a, p, _, _ = as_pairs(call.indices)
        first = _first_of_each(labels[a])
        if not len(first):
            # a zero; without an index tuple also the warning that says why
            return call.into(self.robust)
        same = torch.eye(len(first), dtype=torch.bool, device=labels.device)
        relation = Relation.from_matrix(same, square=False)
        value: Tensor = self.robust(call.embeddings[a[first]], relation, ref_emb=call.embeddings[p[first]])
        return value


def _first_of_each(names: Tensor) -> Tensor:
    """The first position of each value [k]."""
    distinct, which = torch.unique(names, return_inverse=True)
    place = torch.arange(len(names), device=names.device)
    return torch.full_like(distinct, len(names), dtype=torch.int64).scatter_reduce(0, which, place, "amin")

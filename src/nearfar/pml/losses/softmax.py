"""Losses of the softmax family: NT-Xent, SupCon, circle, N-pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from nearfar.links import Link, PerPositive, Sides, Terms
from nearfar.losses import Circle, NTXent, SupCon
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Identity, Linear
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from nearfar.pml.losses.base import Call, Loss, LossDict, nothing, part
from nearfar.pml.losses.elements import log_sum, log_sum_of
from nearfar.pml.reducers import AvgNonZeroReducer, BaseReducer
from nearfar.relations.index_tuples import as_pairs
from nearfar.sets import KL, Mean

__all__ = ["CircleLoss", "NPairsLoss", "NTXentLoss", "SupConLink", "SupConLoss"]


class NTXentLoss(Loss):
    """mean over positive pairs of  -log( e^{s_ij/τ} / (e^{s_ij/τ} + Σ_{N_i} e^{s_ik/τ}) ).

    Args:
        temperature: τ.
        settings: see `Settings`; defaults `CosineSimilarity()`, `MeanReducer()`.
    """

    def __init__(self, temperature: float = 0.07, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.temperature = temperature
        self._make(record=["temperature"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return NTXent(temperature=self.temperature, reduction=reducer.how, similarity=self.similarity)

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.pairs()
        if not len(b):
            return {"loss": nothing()}
        s = call.entries(self.similarity)
        far, present = log_sum_of(s[b, n] / self.temperature, b, len(call.embeddings))
        losses = functional.softplus(far[a] - s[a, p] / self.temperature, threshold=40.0)
        return {"loss": part(torch.where(present[a], losses, 0.0), (a, p), "pos_pair")}


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

    lists = True
    once = True

    def __init__(self, temperature: float = 0.1, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self.temperature = temperature
        self._make(record=["temperature"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return AvgNonZeroReducer()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        self.alone = self._take(SupCon(temperature=self.temperature, reduction=reducer.how, similarity=self.similarity))
        return RobustLoss(
            pair=(Linear(scale=1 / self.temperature), Identity(1 / self.temperature)),
            over=(Mean(), KL(1.0, normalized=False)),
            groups="anchor_sign",
            link=SupConLink(),
            members="all",
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _value(self, call: Call) -> Tensor:
        # an anchor that has positives has negatives too, or nobody has: the native link, which every engine knows
        alone = call.ref_emb is None and isinstance(call.labels, Tensor)
        return call.into(self.alone if alone else self.robust)

    def _elements(self, call: Call) -> LossDict:
        a, p, b, n = call.once()
        if not len(a) or not len(b):
            return {"loss": nothing()}
        s, count = call.entries(self.similarity), len(call.embeddings)
        near, far = s[a, p] / self.temperature, s[b, n] / self.temperature
        every, _ = log_sum_of(torch.cat([near, far]), torch.cat([a, b]), count)
        many = torch.bincount(a, minlength=count)
        mean = torch.zeros_like(every).index_add(0, a, near) / many.clamp_min(1)
        return {"loss": part(torch.where(many > 0, every - mean, 0.0), call.rows, "element")}


class CircleLoss(Loss):
    """mean over anchors above zero of  log(1 + Σ_{P_i} e^{l_ij} · Σ_{N_i} e^{l_ik})  with self-paced scores l.

    Args:
        m: the relaxation.
        gamma: the scale.
        settings: see `Settings`; the distance must be `CosineSimilarity()`; default `AvgNonZeroReducer()`.
    """

    once = True

    def __init__(self, m: float = 0.4, gamma: float = 80, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, fixed=True)
        self.m = m
        self.gamma = gamma
        self._make(record=["m", "gamma"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return AvgNonZeroReducer()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return Circle(margin=self.m, scale=self.gamma, reduction=reducer.how)

    def _elements(self, call: Call) -> LossDict:
        positive, negative = call.masks()
        s = call.scores(self.similarity)
        pace = s.detach()
        near = -self.gamma * torch.relu(1 + self.m - pace) * (s - 1 + self.m)
        far = self.gamma * torch.relu(pace + self.m) * (s - self.m)
        losses = functional.softplus(log_sum(near, positive) + log_sum(far, negative))
        both = positive.any(dim=1) & negative.any(dim=1)
        return {"loss": part(torch.where(both, losses, 0.0), call.rows, "element")}


class NPairsLoss(Loss):
    """mean over classes of  log(1 + Σ_{c'≠c} e^{s(a_c, p_c') - s(a_c, p_c)}).

    The pair (a_c, p_c) of a class is its first two rows, or the first pair of it that an index tuple lists.

    Args:
        settings: see `Settings`; defaults `DotProductSimilarity()` (of unit rows, as in PML), `MeanReducer()`.
    """

    reads_rows = reads_tuple = True
    stats = ("num_pairs",)
    num_pairs: int

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        self._make()

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return DotProductSimilarity()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return RobustLoss(
            pair=Linear(),
            over=(Mean(), KL(1.0, normalized=False)),
            groups="anchor_sign",
            link=PerPositive(),
            reduction=reducer.how,
            similarity=self.similarity,
        )

    def _value(self, call: Call) -> Tensor:
        a, p = self._chosen(call)
        if not len(a):
            # a zero; without an index tuple also the warning that says why
            return call.into(self.robust)
        names = torch.arange(len(a), device=a.device)
        value: Tensor = self.robust(call.embeddings[a], names, ref_emb=call.embeddings[p], ref_labels=names)
        return value

    def _elements(self, call: Call) -> LossDict:
        a, p = self._chosen(call)
        if self.collect_stats:
            self.num_pairs = len(a)
        if not len(a):
            return {"loss": nothing()}
        s = replace(call, embeddings=call.embeddings[a], ref_emb=call.embeddings[p]).scores(self.similarity)
        return {"loss": part(torch.logsumexp(s, dim=1) - s.diagonal(), a, "element")}

    def _chosen(self, call: Call) -> tuple[Tensor, Tensor]:
        """One positive pair of each class: anchors and positives."""
        if call.ref_emb is not None or call.ref_labels is not None:
            raise ValueError("NPairsLoss: it takes no reference; leave ref_emb and ref_labels out.")
        labels = call.own_labels()
        if call.indices is None:
            ordered, order = torch.sort(labels, stable=True)
            first = _starts(ordered)[:-1] & (ordered[1:] == ordered[:-1])  # the first of a class, and one more
            return order[:-1][first], order[1:][first]
        a, p, _, _ = as_pairs(call.indices)
        ordered, order = torch.sort(labels[a], stable=True)
        chosen = order[_starts(ordered)]
        return a[chosen], p[chosen]


def _starts(ordered: Tensor) -> Tensor:
    """Which of the sorted values [k] are not the value before them."""
    return torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])

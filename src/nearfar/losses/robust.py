"""`RobustLoss`: the product of pair loss x uncertainty set x groups x link, as a PyTorch module.

    F = max over p in U of  Σ p_ij l_ij  (- penalty),   per group, joined by a link and reduced

Named losses (nearfar.losses) are one-line recipes of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nearfar._utils.checks import Deferred, DegenerateBatchWarning, constant_when_compiled
from nearfar._utils.settings import MISSING
from nearfar._utils.shortcuts import Part
from nearfar.engines import Plan, by_list, by_other_engine, check_strips, dense_pairs, dense_value, make_plan
from nearfar.groups.groupings import AnchorSign, Grouping, Product, Reduction
from nearfar.links import Link
from nearfar.losses.degenerate import Had
from nearfar.losses.explanation import Explanation, explain, unexplained
from nearfar.losses.factors import CachedProduct, Engine, Factors, Members, Pairs, Sets
from nearfar.losses.loss import Call, Loss, raw_rows, work_type
from nearfar.miners import Miner
from nearfar.pairs import PairLoss
from nearfar.relations.index_tuples import check_apart
from nearfar.relations.relation import Relation
from nearfar.relations.representatives import Anchors
from nearfar.sets.base import UncertaintySet
from nearfar.similarity import Cosine, Similarity, called

__all__ = ["RobustLoss"]

PLANNED = 64
"""Rows of the batch for which a plan is printed: counts such as "8B" follow the batch."""


class RobustLoss(Loss):
    """A loss that is a worst case over pair weights.

    Its arguments are settings: read and set them at any time, and the next call follows, on every engine.

    Args:
        pair: the pair loss l(s, sign), or two of them (positive, negative).
        over: the uncertainty set, or two of them (positive, negative).
        groups: which pairs share one p: "batch", "sign", "balanced", "anchor", "anchor_sign", "positive", "triplets",
            or a `Grouping`.
        link: how the two values of an anchor join, for "anchor_sign"; they are added where none is given.
        miner: a miner (nearfar.miners), or None for all pairs.
        reduction: over anchors: "mean", "sum", "nonzero" (mean over those above zero) or "none" (one value an anchor).
        similarity: scores between rows; `Cosine` where none is given.
        members: the wide side of an anchor: its "negative" pairs, or "all" of them (softmax denominators).
        engine: "dense": all scores at once; "tiled": the same numbers in strips of rows, for large batches; "auto": the
            faster of the two (docs/guides/big-batches.md); "fused": kernels on a GPU with Triton, and "tiled" where
            they cannot run (docs/guides/engines.md).

    Example:
        >>> import nearfar as nf
        >>> loss = nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.TopK(2), groups="batch")
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
        >>> loss(embeddings, torch.tensor([0, 0, 1, 1]))
        tensor(0.6000)
    """

    pair: Pairs = MISSING
    over: Sets = MISSING
    groups: str | Grouping = "batch"
    link: Link | None = None
    miner: Miner | None = None
    reduction: Reduction = "mean"
    similarity: Similarity | None = None
    members: Members = "negative"
    engine: Engine = "auto"

    usual: ClassVar[dict[str, Callable[[], Part]]] = {"similarity": Cosine}
    """What makes the parts that are not given."""
    anchors: ClassVar[Anchors] = "representatives"
    """Which rows act as anchors when class representatives are marked."""
    among_representatives: ClassVar[bool] = False
    """Negative pairs of two representatives count, even where the relation leaves them out."""
    listed_once = False
    """A pair that an index tuple lists several times, as triplets do, counts once."""
    listed_apart = False
    """A pair that an index tuple lists both as positive and as negative is an error."""
    composed: ClassVar[bool] = False
    """Rows, columns or relation of the product are made from the batch first."""
    tile = cast("int | None", None)
    """Rows in a strip of the tiled engine; None for a height that suits the processor's cache."""

    def factors(self) -> Factors:
        """The factors as the settings are now; miner, similarity and reduction are the settings where left out."""
        return Factors(pair=self.pair, over=self.over, groups=self.groups, link=self.link, members=self.members)

    def _prepare(self) -> None:
        super()._prepare()
        self._warned = False
        self._deferred = Deferred()
        self._cached: CachedProduct | None = None

    def _store(self, name: str, value: Any) -> None:
        super()._store(name, self.usual[name]() if value is None and name in self.usual else value)
        if name in self._modules:  # a part is registered by its place in the product
            self.__dict__[name] = self._modules.pop(name)

    def _remake(self) -> None:
        found = CachedProduct.of(self, self._cached)
        if self.engine == "tiled":
            check_strips(self.owner, found.product)
        self._cached = found

    @property
    def plan(self) -> Plan:
        """How the loss is computed, in symbols; `loss.plan.refused` says what keeps it from the operators."""
        return make_plan(self.product.at(PLANNED))

    @property
    def product(self) -> Product:
        """The factors, as an engine takes them: kept until a setting changes, and made anew while one is learned."""
        kept = self._cached
        if kept is None:  # of a copy
            kept = self._cached = CachedProduct.of(self, None)
        found = self._now(kept.make_again(self) if kept.learned else kept.product)
        similarity = called(found.similarity)
        return found if similarity is found.similarity else replace(found, similarity=similarity)

    def _now(self, product: Product) -> Product:
        return product  # a loss may change it from step to step

    @property
    def pair_positive(self) -> PairLoss:
        """The pair loss of positive pairs."""
        return self.product.positive

    @property
    def pair_negative(self) -> PairLoss:
        """The pair loss of negative pairs."""
        return self.product.negative

    @property
    def over_positive(self) -> UncertaintySet:
        """The set of positive pairs, or of all pairs of a group."""
        return self.product.over_positive

    @property
    def over_negative(self) -> UncertaintySet:
        """The set of negative pairs."""
        return self.product.over_negative

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value: not where weights are held constant on purpose, or drawn."""
        product = self.product
        factors = product.positive, product.negative, product.over_positive, product.over_negative
        return all(x.exact_gradient for x in factors)

    def _core(self) -> RobustLoss:
        return self

    def _value(self, call: Call) -> Tensor:
        relation, product = self._relation(call), self.product
        if 0 in call.shape:
            self._warn(call, relation, product, None)
            return _zero(call).expand(len(call.embeddings)) if product.reduction == "none" else _zero(call)
        product, plan = self._planned(product, len(call.embeddings))
        x, y = raw_rows(call)
        if (value := None if self.engine == "dense" else by_list(self, call, relation, product, (x, y))) is not None:
            return value
        rows = product.similarity.prepared(x, y)
        found = None
        if self.engine != "dense":
            found = by_other_engine(self, call, relation, product, plan, (x, y), rows)
        if found is not None:
            self._warn(call, relation, product, Had(*found[1:]))
            return found[0].to(x.dtype)
        # what is not dealt out to ranks is done whole on each: the same numbers, so the same draws too
        ranks = None if call.ranks is None or not product.draws else call.ranks
        with nullcontext() if ranks is None else ranks.same_draws(x.device):
            more: Any = {"once": self.listed_once, "raw": (x, y), "ranks": call.ranks}
            pairs = dense_pairs(product, *rows, relation, call.indices, **more)
            if self.listed_apart and call.indices is not None:
                check_apart(self.owner, pairs.positive, pairs.negative)
            self._warn(call, relation, product, Had(pairs.had_positive, pairs.had_negative))
            return dense_value(product, pairs).to(x.dtype)

    def _explanation(self, call: Call) -> Explanation:
        relation, product = self._relation(call), self.product
        if 0 in call.shape:
            self._warn(call, relation, product, None)
            return unexplained(_zero(call))
        product, raw = product.at(len(call.embeddings)), raw_rows(call)
        rows = product.similarity.prepared(*raw)
        pairs = dense_pairs(product, *rows, relation, call.indices, once=self.listed_once, raw=raw)
        self._warn(call, relation, product, Had(pairs.had_positive, pairs.had_negative))
        return explain(product, pairs)

    def _relation(self, call: Call) -> Relation:
        return call.relation().projected(self.anchors, among=self.among_representatives)

    @constant_when_compiled
    def _plan_once(self, rows: int) -> Plan:
        """The plan for a batch of so many rows; a compiled call keeps that of its first one."""
        return make_plan(self.product.at(rows))

    def _planned(self, product: Product, rows: int) -> tuple[Product, Plan]:
        """The product for a batch of so many rows and its plan, kept until a setting of the loss or a part changes."""
        if torch.compiler.is_compiling():
            return product.at(rows), self._plan_once(rows)
        kept = self._cached
        if kept is None or kept.learned or product is not kept.product:
            product = product.at(rows)
            return product, make_plan(product)
        return kept.plan(rows)

    def _warn(self, call: Call, relation: Relation, product: Product, had: Had | None) -> None:
        """Say once why a batch holds nothing to learn from; on a GPU, a call later and without a stall."""
        if self._warned or call.indices is not None or torch.compiler.is_compiling():
            return
        if had is None:
            self._say("it is empty")
            return
        teaches = _teaching(product, had).any()
        if relation.device.type == "cuda":
            self.heed()
            self._deferred.note(1 - teaches.to(torch.int64))
        elif relation.device.type == "cpu" and not bool(teaches):
            self._say(had.reason())

    def heed(self) -> None:
        """Say what an earlier batch on a GPU has told by now."""
        if not self._warned and self._deferred.take():
            self._say("an earlier batch had no pair to learn from")

    def _say(self, reason: str) -> None:
        self._warned = True
        warnings.warn(
            f"{self.owner}: this batch has nothing to learn from, because {reason}; its pairs cost 0. "
            "Draw several samples of several classes into each batch.",
            DegenerateBatchWarning,
            stacklevel=4,
        )


def _teaching(product: Product, had: Had) -> Tensor:
    """Anchors [n] with the pairs that a loss needs, whatever its miner later keeps."""
    groups, link, miner = product.groups, product.link, product.miner
    linked = isinstance(groups, AnchorSign) and link is not None and link.both
    if linked or groups.needs == "both" or (miner is not None and miner.both):
        return had.had_positive & had.had_negative
    return had.had_positive if groups.needs == "positive" else had.anchors


def _zero(call: Call) -> Tensor:
    """A zero that keeps the graph of a batch without rows."""
    return (call.embeddings.sum() * 0 + call.reference.sum() * 0).to(work_type(call))

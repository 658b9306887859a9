"""`RobustLoss`: the product of pair loss x uncertainty set x groups x link, as a PyTorch module.

    F = max over p in U of  Σ p_ij l_ij  (- penalty),   per group, combined by a link and reduced

Most named losses (nearfar.losses) are recipes of it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, dataclass_transform

import torch
from torch import Tensor

from nearfar._utils import tensors as tensors
from nearfar._utils.checks import Deferred, DegenerateBatchWarning, constant_when_compiled
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.settings import MISSING, Settings
from nearfar._utils.shortcuts import Part
from nearfar.engines import Plan, auto, by_list, by_other_engine, check_strips, dense_pairs, dense_value, make_plan
from nearfar.engines.recordings import DEVICES, Replays, replayed
from nearfar.groups._groupings import Grouping, Product, Reduction
from nearfar.links import Link
from nearfar.losses import memories
from nearfar.losses.arguments import Had, check_relation
from nearfar.losses.explanation import Explanation, explain, unexplained
from nearfar.losses.factors import CachedProduct, Engine, Factors, Members, Pairs, Sets, make_product
from nearfar.miners import Miner
from nearfar.relations.index_tuples import check_apart, check_indices
from nearfar.relations.relation import Relation
from nearfar.relations.representatives import Anchors
from nearfar.similarity import Cosine, Similarity, called

__all__ = ["Call", "Labels", "Loss", "RobustLoss"]


Labels = Tensor | Relation | None


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, see `Loss.forward`, and the processes that share its work, each with all rows.

    Recordings also set the dtype of the products and the largest number of positives per row.
    """

    owner: str
    embeddings: Tensor
    labels: Labels
    indices: tuple[Tensor, ...] | None = None
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    ranks: ProcessGroup | None = None
    low: torch.dtype | None = None
    width: int | None = None

    @property
    def reference(self) -> Tensor:
        """The reference rows: the batch itself if no others were given."""
        return self.embeddings if self.ref_emb is None else self.ref_emb

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m), the size of the matrix of pairs."""
        return len(self.embeddings), len(self.reference)

    def relation(self) -> Relation:
        """The validated relation: as given, made from labels, or without pairs if an index tuple lists them."""
        if self.ref_emb is not None:
            tensors.check_reference_rows(self.owner, self.embeddings, self.ref_emb)
        if self.indices is not None:
            check_indices(self.owner, self.indices, self.shape)
        if isinstance(self.labels, Relation):
            more = self.ref_labels, self.ids, self.ref_ids
            check_relation(self.owner, self.labels, self.embeddings, self.ref_emb, more)
            return self.labels
        ids: Any = {"ids": self.ids, "ref_ids": self.ref_ids}
        if self.labels is None:
            if self.indices is None:
                raise ValueError(f"{self.owner}: labels are missing; pass integers [n], a Relation or an index tuple.")
            # no two rows are positives of each other, which needs no matrix
            n, m = self.shape
            each = torch.arange(n + m, device=self.embeddings.device)
            return Relation.from_labels(each[:n], None if self.ref_emb is None else each[n:], **ids)
        device = self.embeddings.device
        tensors.check_labels(self.owner, "labels", self.labels, len(self.embeddings), device)
        tensors.check_reference(self.owner, self.embeddings, self.ref_emb, self.ref_labels)
        if self.ref_labels is not None:
            tensors.check_labels(self.owner, "ref_labels", self.ref_labels, len(self.reference), device)
        return Relation.from_labels(self.labels, self.ref_labels, **ids, width=self.width)


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Loss(Settings, ABC):
    """Base class of metric-learning losses: called with embeddings and labels, explained by `explain`."""

    keyword_only = True
    owner = ""  # the name used in messages: the class name, unless an outer loss sets its own

    def _prepare(self) -> None:
        self.owner = type(self).__name__
        self._replays = Replays()

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value; of a wrapper, that of the loss inside."""
        return bool(getattr(getattr(self, "loss", None), "exact_gradient", True))

    @property
    def spread_floor(self) -> tuple[float, float] | None:
        """Floor and weight of the barrier against a collapse in the value (`SpreadFloor`); None without one."""
        found: tuple[float, float] | None = getattr(getattr(self, "loss", None), "spread_floor", None)
        return found

    @abstractmethod
    def _value(self, call: Call) -> Tensor: ...

    @abstractmethod
    def _explanation(self, call: Call) -> Explanation: ...

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss, a differentiable scalar (or [n] with reduction="none").

        Args:
            embeddings: [n, d] floating. Half precision is computed in float32.
            labels: [n] integers, or a `Relation`; may be left out where `indices` say everything.
            indices: a miner's index tuple, (anchor, positive, negative) or (anchor, positive, anchor, negative).
            ref_emb: [m, d] reference rows; without them the batch is its own reference and no row meets itself.
            ref_labels: [m] integers of the reference rows.
            ids: [n] which sample each row is; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise for the reference rows.

        A batch with nothing to learn from gives a zero that keeps the graph, and one warning that says why.
        """
        return self._judged(Call(self.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids))

    def _judged(self, call: Call) -> Tensor:
        """Validate the embeddings, then compute the value without autocast."""
        tensors.check_embeddings(self.owner, "embeddings", call.embeddings)
        device = call.embeddings.device.type
        cast = torch.compiler.is_compiling() or torch.is_autocast_enabled(device)
        with torch.autocast(device_type=device, enabled=False) if cast else nullcontext():
            core = self._core() if device in DEVICES and not torch.compiler.is_compiling() else None
            recorded = core is not None and core.engine != "dense"
            if recorded and (value := replayed(self, core, call)) is not None:
                return value
            tensors.check_placed(self.owner, self, call.embeddings.device)
            return self._value(call)

    def _core(self) -> Any:
        """The inner `RobustLoss`, if a call depends only on its arguments, parameters and settings; else None."""
        return None

    def explain(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Explanation:
        """The value, and the losses, weights p* and dual variables that produced it. Same arguments as the call."""
        return self._examined(Call(self.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids))

    def _examined(self, call: Call) -> Explanation:
        """Validate the embeddings, then compute the explanation without autocast."""
        tensors.check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            tensors.check_placed(self.owner, self, call.embeddings.device)
            return self._explanation(call)


class RobustLoss(Loss):
    """A loss that is a worst case over the weights of its pairs.

    Its arguments are settings: they can be read and set at any time; a change takes effect at the next call.

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
    """Factories of the parts that are not given."""
    anchors: ClassVar[Anchors] = "representatives"
    """Which rows act as anchors when class representatives are marked."""
    among_representatives: ClassVar[bool] = False
    """Whether negative pairs of two representatives count even if the relation leaves them out."""
    listed_once = False  # whether a pair that an index tuple lists several times, as triplets do, counts once
    listed_apart = False  # whether a pair listed both as positive and as negative is an error
    composed: ClassVar[bool] = False
    """Whether rows, columns or relation of the product are first computed from the batch."""
    tile = cast("int | None", None)
    """Rows per strip of the tiled engine; None for a height that suits the processor's cache."""

    def factors(self) -> Factors:
        """The factors for the present settings; miner, similarity and reduction come from the settings if left out."""
        return Factors(pair=self.pair, over=self.over, groups=self.groups, link=self.link, members=self.members)

    def _prepare(self) -> None:
        super()._prepare()
        self._warned = False
        self._deferred = Deferred()
        self._cached: CachedProduct | None = None

    def _store(self, name: str, value: Any) -> None:
        super()._store(name, self.usual[name]() if value is None and name in self.usual else value)
        if name in self._modules:  # a part is registered under the name of its place in the product
            self.__dict__[name] = self._modules.pop(name)

    def _remake(self) -> None:
        found = CachedProduct.of(self, self._cached)
        if self.engine == "tiled":
            check_strips(self.owner, found.product)
        self._cached = memories.hold(self, found)

    @property
    def plan(self) -> Plan:
        """How the loss is computed, in symbols; `loss.plan.refused` says why the operators cannot compute it, if so."""
        return make_plan(self.product.at(64))  # counts such as "8B" follow the batch

    @property
    def product(self) -> Product:
        """The factors as engines take them; cached until a setting changes, or made each call if one is learned."""
        kept = self._cached
        if kept is None:  # after a copy
            kept = self._cached = CachedProduct.of(self, None)
        found = self._now(make_product(self, kept) if kept.learned else kept.product)
        similarity = called(found.similarity)
        return found if similarity is found.similarity else replace(found, similarity=similarity)

    def _now(self, product: Product) -> Product:
        return product  # subclasses may change it from step to step

    pair_positive = property(lambda self: self.product.positive, doc="The pair loss of positive pairs.")
    pair_negative = property(lambda self: self.product.negative, doc="The pair loss of negative pairs.")
    over_positive = property(lambda self: self.product.over_positive, doc="The set of positive pairs, or of all.")
    over_negative = property(lambda self: self.product.over_negative, doc="The set of negative pairs.")

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value; False if weights are held constant or drawn at random."""
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
        dense, found = self.engine == "dense" or self._is_small(call), None
        product, plan = (product.at(call.shape[0]), None) if dense else self._planned(product, call.shape[0])
        x, y = tensors.widen(call.embeddings, call.ref_emb)
        if (value := None if dense else by_list(self, call, relation, product, (x, y))) is not None:
            return value
        rows = product.similarity.prepared(x, y)
        if plan is not None:
            found = by_other_engine(self, call, relation, product, plan, (x, y), rows)
        if found is not None:
            self._warn(call, relation, product, Had(*found[1:]))
            return found[0].to(x.dtype)
        # work that is not split over ranks is repeated on each, so each must draw the same random numbers
        ranks = None if call.ranks is None or not product.draws else call.ranks
        with nullcontext() if ranks is None else ranks.same_draws(x.device):
            more: Any = {"once": self.listed_once, "raw": (x, y), "ranks": call.ranks}
            pairs = dense_pairs(product, *rows, relation, call.indices, **more)
            if self.listed_apart and call.indices is not None:
                check_apart(self.owner, pairs.positive, pairs.negative)
            self._warn(call, relation, product, Had(pairs.had_positive, pairs.had_negative))
            product = memories.bind(self, product, relation, call, self.training) if product.remembers else product
            return dense_value(product, pairs).to(x.dtype)

    def _is_small(self, call: Call) -> bool:
        """Whether "auto" uses the dense engine for any loss with so few pairs; known without a plan."""
        (n, m), least = call.shape, auto.LEAST.get(call.embeddings.device.type, auto.Least(0, 0))
        small = n * m < min(least.operators, auto.SHARED) and n * m * m < auto.MOST
        return small and self.engine == "auto" and call.indices is None

    def _explanation(self, call: Call) -> Explanation:
        relation, product = self._relation(call), self.product
        if 0 in call.shape:
            self._warn(call, relation, product, None)
            return unexplained(_zero(call))
        product, raw = product.at(len(call.embeddings)), tensors.widen(call.embeddings, call.ref_emb)
        rows = product.similarity.prepared(*raw)
        pairs = dense_pairs(product, *rows, relation, call.indices, once=self.listed_once, raw=raw)
        self._warn(call, relation, product, Had(pairs.had_positive, pairs.had_negative))
        return explain(memories.bind(self, product, relation, call, False), pairs)

    def _relation(self, call: Call) -> Relation:
        return call.relation().projected(self.anchors, among=self.among_representatives)

    @constant_when_compiled
    def _plan_once(self, rows: int) -> Plan:
        """The plan for a batch of `rows` rows; a compiled call keeps that of its first run."""
        return make_plan(self.product.at(rows))

    def _planned(self, product: Product, rows: int) -> tuple[Product, Plan]:
        """The product for a batch of `rows` rows and its plan, cached until a setting of the loss or a part changes."""
        if torch.compiler.is_compiling():
            return product.at(rows), self._plan_once(rows)
        kept = self._cached
        if kept is None or kept.learned or product is not kept.product:
            product = product.at(rows)
            return product, make_plan(product)
        return kept.plan(rows)

    def _warn(self, call: Call, relation: Relation, product: Product, had: Had | None) -> None:
        """Warn once why a batch has nothing to learn from; on a GPU at a later call, which avoids a stall."""
        if self._warned or call.indices is not None or torch.compiler.is_compiling():
            return
        if had is None:
            self._say("it is empty")
            return
        if relation.device.type == "cpu" and not product.wants_both and bool(had.had_positive.any()):
            return  # most batches, in few steps
        teaches = _teaching(product, had).any()
        if relation.device.type == "cuda":
            self.heed()
            self._deferred.note(1 - teaches.to(torch.int64))
        elif relation.device.type == "cpu" and not bool(teaches):
            self._say(had.reason())

    def heed(self) -> None:
        """Emit the warning about an earlier batch on a GPU, if one is due."""
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
    """Anchors [n] with the pairs that a loss needs, before mining."""
    if product.wants_both:
        return had.had_positive & had.had_negative
    return had.had_positive if product.groups.needs == "positive" else had.anchors


def _zero(call: Call) -> Tensor:
    """A zero connected to the autograd graph, for a batch without rows or references."""
    x, y = tensors.widen(call.embeddings, call.reference)
    return x.sum() * 0 if y is None else x.sum() * 0 + y.sum() * 0

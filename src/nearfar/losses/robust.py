"""`RobustLoss`: the product of pair loss x uncertainty set x groups x link, as a PyTorch module.

    F = max over p in U of  Σ p_ij l_ij  (- penalty),   per group, joined by a link and reduced

Named losses (nearfar.losses) are one-line recipes of it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearfar._utils.checks import Deferred, DegenerateBatchWarning, check_choice
from nearfar._utils.process_group import ALONE
from nearfar._utils.renamed import NewKeywords
from nearfar._utils.shortcuts import check_part
from nearfar._utils.tensors import check_embeddings
from nearfar.engines import (
    Tiling,
    check_tiled,
    dense_pairs,
    dense_value,
    fused_value,
    listed_value,
    plain_parts,
    takes_lists,
    tiled_value,
    untiled,
    worth_tiling,
)
from nearfar.groups.groupings import REDUCTIONS, AnchorSign, Grouping, Product, Reduction
from nearfar.links import Link
from nearfar.losses.arguments import Engine, check_engine, for_each_sign, grouping
from nearfar.losses.call import Call, Labels, dealt, low_type, raw, zero
from nearfar.losses.degenerate import Had
from nearfar.losses.explanation import Explanation, explain, unexplained
from nearfar.miners import Miner
from nearfar.pairs import PairLoss
from nearfar.relations.index_tuples import check_apart
from nearfar.relations.relation import Relation
from nearfar.relations.representatives import Anchors
from nearfar.sets.base import UncertaintySet
from nearfar.similarity import Cosine, Similarity, called

__all__ = ["Call", "Labels", "Loss", "RobustLoss", "dealt"]


class Loss(NewKeywords, nn.Module, ABC):
    """A metric-learning loss: called with embeddings and labels, and able to explain itself."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = type(self).__name__
        """Whom messages name; a loss inside another one bears the outer name."""

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
        """Validate the embeddings, switch autocast off, compute the value."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            return self._value(call)

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
        """Validate the embeddings, switch autocast off, explain the value."""
        check_embeddings(self.owner, "embeddings", call.embeddings)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            return self._explanation(call)


class RobustLoss(Loss):
    """A loss that is a worst case over pair weights.

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

    pair_positive: PairLoss
    pair_negative: PairLoss
    anchors: Anchors = "representatives"
    """Which rows act as anchors when class representatives are marked."""
    among_representatives: bool = False
    """Negative pairs of two representatives count, even where the relation leaves them out."""
    listed_once: bool = False
    """A pair that an index tuple lists several times, as triplets do, counts once."""
    listed_apart: bool = False
    """A pair that an index tuple lists both as positive and as negative is an error."""
    tile: int | None = None
    """Rows in a strip of the tiled engine; None for a height that suits the processor's cache."""

    def __init__(
        self,
        *,
        pair: PairLoss | tuple[PairLoss, PairLoss],
        over: UncertaintySet | tuple[UncertaintySet, UncertaintySet],
        groups: str | Grouping = "batch",
        link: Link | None = None,
        miner: Miner | None = None,
        reduction: Reduction = "mean",
        similarity: Similarity | None = None,
        members: Literal["negative", "all"] = "negative",
        engine: Engine = "auto",
    ) -> None:
        super().__init__()
        owner = self.owner
        check_choice(owner, "reduction", reduction, REDUCTIONS)
        check_choice(owner, "members", members, ("negative", "all"))
        check_engine(owner, engine)
        groups = grouping(owner, groups)
        if reduction != "mean" and not groups.per_anchor:
            raise ValueError(
                f"{owner}: reduction={reduction!r} needs one group per anchor, but groups are "
                f'{type(groups).__name__}, whose value is one number; use zero="drop" on the set to leave zeros out.'
            )
        self.pair_positive, negative = for_each_sign(owner, "pair", pair, PairLoss, "nf.pairs.Hinge()")
        if negative is self.pair_positive:  # a module registered twice would have its parameters twice in `state_dict`
            object.__setattr__(self, "pair_negative", negative)
        else:
            self.pair_negative = negative
        self.over_positive, self.over_negative = for_each_sign(owner, "over", over, UncertaintySet, "nf.sets.KL(0.1)")
        for name, value, kind, such_as in (
            ("link", link, Link, "nf.links.HingeLink()"),
            ("miner", miner, Miner, "nf.miners.Hard()"),
            ("similarity", similarity, Similarity, "nf.similarity.Cosine()"),
        ):
            if value is not None:
                check_part(owner, name, value, kind, such_as)
        groups.check(self.over_positive, self.over_negative)
        self.groups = groups
        self.link = link
        self.miner = miner
        self.reduction: Reduction = reduction
        self.similarity = similarity if similarity is not None else Cosine()
        self.members = members
        self.engine = engine
        if engine == "tiled":
            check_tiled(owner, self.product)
        self._warned = False
        self._deferred = Deferred()

    @property
    def product(self) -> Product:
        """The factors, as an engine takes them."""
        return Product(
            called(self.similarity),
            self.pair_positive,
            self.pair_negative,
            *self._sets(),
            self.groups,
            self.link,
            self.miner,
            self.reduction,
            self.members == "all",
        )

    def _sets(self) -> tuple[UncertaintySet, UncertaintySet]:
        """The sets of positive and negative pairs as they are now; a loss may change them from step to step."""
        return self.over_positive, self.over_negative

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value: not where weights are held constant on purpose, or drawn."""
        return all(
            x.exact_gradient for x in (self.pair_positive, self.pair_negative, self.over_positive, self.over_negative)
        )

    def _value(self, call: Call) -> Tensor:
        relation = self._relation(call)
        if 0 in call.shape:
            self._warn(call, relation, None)
            return zero(call).expand(len(call.embeddings)) if self.reduction == "none" else zero(call)
        product = self.product
        x, y = raw(call)
        if self._lists(call, relation, product):
            apart = self.owner if self.listed_apart else None
            return listed_value(product, x, y, relation, call.indices or (), once=self.listed_once, apart=apart)
        rows, cols = product.similarity.prepared(x, y)
        found = None
        if self.engine == "fused" and call.indices is None and call.ranks is None:
            found = fused_value(self.owner, product, relation, rows, cols, low_type(call), plain=self._plain())
        if found is None and self._tiles(call, relation, product):
            twice = self.engine == "auto" and call.ranks is None
            tiling = Tiling(self.owner, product, relation, self.tile, twice, call.ranks or ALONE)
            found = tiled_value(tiling, rows, cols)
        if found is not None:
            self._warn(call, relation, Had(*found[1:]))
            return found[0]
        # what is not dealt out to ranks is done whole on each: the same numbers, so the same draws too
        ranks = call.ranks if product.draws else None
        with nullcontext() if ranks is None else ranks.same_draws(rows.device):
            pairs = dense_pairs(product, rows, cols, relation, call.indices, once=self.listed_once)
            if self.listed_apart and call.indices is not None:
                check_apart(self.owner, pairs.positive, pairs.negative)
            self._warn(call, relation, Had(pairs.had_positive, pairs.had_negative))
            return dense_value(product, pairs)

    def _explanation(self, call: Call) -> Explanation:
        relation = self._relation(call)
        if 0 in call.shape:
            self._warn(call, relation, None)
            return unexplained(zero(call))
        product = self.product
        rows, cols = product.similarity.prepared(*raw(call))
        pairs = dense_pairs(product, rows, cols, relation, call.indices, once=self.listed_once)
        self._warn(call, relation, Had(pairs.had_positive, pairs.had_negative))
        return explain(product, pairs)

    def _relation(self, call: Call) -> Relation:
        return call.relation().projected(self.anchors, among=self.among_representatives)

    def _lists(self, call: Call, relation: Relation, product: Product) -> bool:
        """Whether this call has an index tuple that is evaluated as a list."""
        if call.indices is None or self.engine == "dense" or call.ranks is not None:
            return False
        return takes_lists(product, call.indices, relation, asked=self.engine == "tiled")

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _plain(self) -> bool:
        """Whether the parts allow shortcuts; a compiled call takes the answer of its first one."""
        return plain_parts(self.product)

    def _tiles(self, call: Call, relation: Relation, product: Product) -> bool:
        """Whether this call goes to the tiled engine."""
        if self.engine == "tiled":
            return call.indices is None and dealt(call, product)
        if self.engine == "dense" or call.indices is not None or torch.compiler.is_compiling():
            return False
        worth = self.engine == "fused" or worth_tiling(product, relation, call.ranks or ALONE)
        return worth and dealt(call, product) and untiled(product) is None

    def _warn(self, call: Call, relation: Relation, had: Had | None) -> None:
        """Say once why a batch holds nothing to learn from; on a GPU, a call later and without a stall."""
        if self._warned or call.indices is not None or torch.compiler.is_compiling():
            return
        if had is None:
            self._say("it is empty")
            return
        teaches = self._teaching(had).any()
        if relation.device.type == "cuda":
            if self._deferred.take():
                self._say("an earlier batch had no pair to learn from")
            self._deferred.note(1 - teaches.to(torch.int64))
        elif relation.device.type == "cpu" and not bool(teaches):
            self._say(had.reason())

    def _teaching(self, had: Had) -> Tensor:
        """Anchors [n] with the pairs that this loss needs, whatever a miner later keeps."""
        linked = isinstance(self.groups, AnchorSign) and self.link is not None and self.link.both
        if linked or self.groups.needs == "both" or (self.miner is not None and self.miner.both):
            return had.had_positive & had.had_negative
        return had.had_positive if self.groups.needs == "positive" else had.anchors

    def _say(self, reason: str) -> None:
        self._warned = True
        warnings.warn(
            f"{self.owner}: this batch has nothing to learn from, because {reason}; its pairs cost 0. "
            "Draw several samples of several classes into each batch.",
            DegenerateBatchWarning,
            stacklevel=4,
        )

    def extra_repr(self) -> str:  # noqa: D102
        over: Any = (
            self.over_positive if self.over_positive is self.over_negative else (self.over_positive, self.over_negative)
        )
        return f"over={over}, groups={type(self.groups).__name__}, reduction={self.reduction}, engine={self.engine}"

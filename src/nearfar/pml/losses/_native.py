"""`Native`: a PML loss computed by one of nearfar's losses whenever the result is the same."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.tensors import check_finite
from nearfar.engines import dense_value, recordings
from nearfar.engines.dense import keep as kept_pairs
from nearfar.engines.recordings import PAIRS, Given, settings
from nearfar.groups._groupings import Product
from nearfar.groups._triplets import At, index
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, RobustLoss
from nearfar.miners import ScoredPairs
from nearfar.pml._native import (
    SCALARS,
    Indices,
    Kept,
    Mined,
    Setup,
    is_ours,
    keep,
    masks,
    quick_scores,
    record,
    setup,
    suit,
)
from nearfar.relations.index_tuples import as_pairs, check_apart, indexed

__all__ = ["Native"]

SMALL = 2**16  # largest number of pairs for which a CPU batch goes to the dense engine with as few checks as possible
RECORDED, LISTED = 2**20, 2**23  # longest index tuples that are recorded, and scored from the whole matrix, on a GPU
WHOLE = (torch.int64, torch.int32)  # index dtypes that torch accepts; it reads others as masks, or rejects them


class Native:
    """Mixin placed before a PML loss; `recipe` makes the nearfar loss from its settings.

        class NTXentLoss(Native, losses.NTXentLoss):
            settings = ("temperature",)

            def recipe(self, known: Setup) -> RobustLoss:
                return NTXent(temperature=self.temperature, reduction=known.reduction, similarity=known.similarity)

    The nearfar loss is cached while the settings, the distance and the reducer stay the same.
    """

    settings: ClassVar[tuple[str, ...]] = ()  # attributes that `recipe` reads
    reads: ClassVar[tuple[str, ...]] = ()  # those of them that are read from a tensor
    least: ClassVar[tuple[int, int]] = (0, 0)
    """Number of rows below which PML is faster on a CPU, without and with an index tuple."""
    tuples: ClassVar[bool] = True  # whether nearfar's loss treats index tuples like PML's
    references: ClassVar[bool] = True  # whether nearfar's loss treats reference rows like PML's
    once: ClassVar[bool] = False  # whether a pair listed twice counts once, because PML computes the loss from masks

    # attributes of PML's class
    distance: Any
    reducer: Any
    embedding_regularizer: Any
    embedding_reg_weight: Any

    def recipe(self, known: Setup) -> RobustLoss | None:
        """The nearfar loss for the present settings; None if there is none."""
        return None

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss; arguments as in PML.

        `ids` and `ref_ids` identify the samples of the rows and references; equal samples form no pair. Only
        nearfar's losses use them.
        """
        value = self._compute(embeddings, labels, indices_tuple, ref_emb, ref_labels, ids, ref_ids)
        if value is None:
            if ids is not None or ref_ids is not None:
                raise ValueError(f"{type(self).__name__}: PML computes this call, which takes no ids; leave them out.")
            value = super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels)  # type: ignore[misc]
        return value

    @property
    def robust(self) -> RobustLoss:
        """The nearfar loss with the present settings; `loss.robust.explain(...)` shows the weights behind a value."""
        found = self._keep()
        if found is None:
            raise ValueError(  # an AttributeError would be replaced by torch's own
                f"{type(self).__name__}: PML computes this loss with these settings; ours has none of them to explain."
            )
        return found

    def explain(self, embeddings: Tensor, labels: Tensor | None = None, *args: Any, **kwargs: Any) -> Explanation:
        """The value, and the pair weights behind it, as `RobustLoss.explain` gives them."""
        return self.robust.explain(embeddings, labels, *args, **kwargs)

    @property
    def owner(self) -> str:
        """The name used in messages."""
        return type(self).__name__

    def of_all_ranks(self, call: Call) -> Tensor:
        """The loss of a call that `nf.Distributed` gathered from all processes."""
        if call.ref_emb is not None and not self.references:
            raise ValueError(f"{self.owner}: takes no reference inside nf.Distributed; wrap the native loss.")
        return self._regularized(self.robust._value(replace(call, owner=self.owner)), call.embeddings)

    def _compute(
        self, embeddings: Any, labels: Any, indices: Any, ref_emb: Any, ref_labels: Any, ids: Any, ref_ids: Any
    ) -> Tensor | None:
        """The value by the nearfar loss; None if PML must compute it."""
        # the cheapest check first, because for a small batch PML must start without delay
        here = isinstance(embeddings, Tensor) and embeddings.ndim > 0 and embeddings.device.type == "cpu"
        few = here and ids is None and ref_ids is None and len(embeddings) < self.least[indices is not None]
        quick = "cpu" in recordings.DEVICES and (indices is None or bool(getattr(indices, "carried", ())))
        if few and not quick:
            return None
        if (ref_emb is not None and not self.references) or (indices is not None and not self.tuples):
            return None
        if not suit(embeddings, labels, ref_emb, ref_labels):
            return None
        # PML returns 0 if there is at most one pair of each sign
        columns = len(embeddings if ref_emb is None else ref_emb)
        if len(embeddings) * columns <= 4 or (indices is not None and not _several(indices)):
            return None
        loss = self._keep()
        if loss is None:
            return None
        named = ids is not None or ref_ids is not None
        given = embeddings, labels, ref_emb, ref_labels
        try:
            value = None if named else self._recorded(loss, given, indices, (len(embeddings), columns))
            if value is None and not few:
                call = Call(loss.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids)
                value = self._value(loss, call, named=named)
        except ValueError:  # invalid rows or indices: PML handles them in its own way
            return None
        return None if value is None else self._regularized(value, embeddings)

    def _regularized(self, value: Tensor, embeddings: Tensor) -> Tensor:
        """The value plus the penalty on the embeddings, if there is one."""
        if self.embedding_regularizer is None:
            return value
        penalty: Tensor = value + self.embedding_reg_weight * self.embedding_regularizer(embeddings)
        return penalty

    def _keep(self) -> RobustLoss | None:
        """The nearfar loss for the present settings, made again if one of them changed."""
        found: RobustLoss | None = keep(self, self._look).value
        return found

    def _look(self) -> RobustLoss | None:
        if not is_ours(self):
            return None
        parts: list[str] = self._sub_loss_names()  # type: ignore[attr-defined]
        if self.embedding_regularizer is not None:
            parts = [*parts, "embedding_reg_loss"]
        found = setup(self.distance, self.reducer, parts)
        if found is None:
            return None
        known, key = found
        values = tuple(getattr(self, name) for name in self.settings)
        if not all(isinstance(value, SCALARS) for value in values):
            return None
        made: tuple[Any, RobustLoss | None] | None = self.__dict__.get("_made")
        if made is None or made[0] != (id(self), key, values):  # a copy of this object makes its own
            # in a tuple, because a module would enter the state dict
            made = self.__dict__["_made"] = (id(self), key, values), self._make(known)
        return made[1]

    def _make(self, known: Setup) -> RobustLoss | None:
        try:
            loss = self.recipe(known)
        except (TypeError, ValueError):  # a setting that nearfar rejects and PML may accept
            return None
        if loss is not None:
            loss.owner, loss._warned = type(self).__name__, True  # like PML, silent if there is nothing to learn from
            loss.listed_once = loss.listed_apart = self.once
        return loss

    def _value(self, loss: RobustLoss, call: Call, *, named: bool) -> Tensor:
        """The value without a recording of the facade; nearfar's loss may have one."""
        device, pairs = call.embeddings.device.type, call.shape[0] * call.shape[1]
        if named or pairs > (SMALL if device in recordings.TRACED else 0):
            return loss._judged(call)
        with torch.autocast(device_type=device, enabled=False):
            return self._dense_value(loss, call, None)

    def _recorded(self, loss: RobustLoss, given: Given, indices: Any, shape: tuple[int, int]) -> Tensor | None:
        """The value by a recording: of all pairs, of a miner's answer, of measures of pairs or of a list of triplets.

        None if there is no recording; on a GPU, a call with an index tuple is then computed as it would be recorded.
        """
        device, pairs = cast(Tensor, given[0]).device, shape[0] * shape[1]
        marks, traced = _marks(indices, shape), device.type in recordings.TRACED
        if device.type not in recordings.DEVICES or pairs > (SMALL if traced else PAIRS):
            return None
        if (indices is not None and not marks) if traced else (indices is None or len(indices[0]) > LISTED):
            return None
        at, mined = (None, marks) if indices is None else self._mined(loss, given, indices, marks)
        given, run = (*given, *mined), partial(self._run, at)
        value = None
        if at is None or len(mined[0]) <= RECORDED:
            value = record(loss._replays, (self._told(loss, device), at, len(mined)), run, loss, given)
        if value is None and not traced:
            with torch.autocast(device_type=device.type, enabled=False):
                return run(loss, given)
        return value

    def _told(self, loss: RobustLoss, device: torch.device) -> Any:
        """What a recording of the loss depends on besides the tensors of a call."""
        kept: Kept = self.__dict__["_kept"]
        if kept.told is None:
            kept.told = settings(loss, loss.product.parts, device)
        return kept.told

    def _mined(self, loss: RobustLoss, given: Given, indices: Any, marks: Indices) -> tuple[At | None, Indices]:
        """How to read triplets from scores, None for pairs; and the tensors that stand for the index tuple."""
        if _lists_triplets(loss.product, indices):
            valid = isinstance(indices, Mined) and indices.unchanged
            at = flat if valid and not torch.are_deterministic_algorithms_enabled() else index
            return at, marks or _pad(indices)
        x, labels, ref_emb, ref_labels = given
        call = Call(loss.owner, cast(Tensor, x), labels, indices, ref_emb, ref_labels)
        return None, marks or self._measures(loss, call, labels, call.embeddings)

    def _run(self, at: At | None, loss: RobustLoss, given: Any) -> Tensor:
        """The value of the tensors that are recorded."""
        x, labels, ref_emb, ref_labels, *mined = given
        call = Call(loss.owner, x, labels, None, ref_emb, ref_labels)
        if at is not None:
            return self._listed_value(loss, call, _triplets(mined), at)
        return self._dense_value(loss, call, _masks(mined, call.shape) if mined else None)

    def _listed_value(self, loss: RobustLoss, call: Call, triplets: Indices, at: At) -> Tensor:
        """The value of those triplets of a list that count."""
        (a, p, n, counted), product, scores = triplets, loss.product, self._scores(loss, call)
        pairs = self._pairs(loss, product, call, scores, (counted, counted))
        losses, measure = cast(Any, product.groups).rule.listed(product, pairs, (a, p, n), at=at)
        value: Tensor = product.over_negative.value(losses[None], (measure & counted)[None])
        return value[0]

    def _dense_value(self, loss: RobustLoss, call: Call, measures: tuple[Tensor, ...] | None) -> Tensor:
        """The value from all scores, with as few checks as possible."""
        product, scores = loss.product, self._scores(loss, call)
        if call.indices is not None and product.groups.scope == "sign":
            a, p, b, n = as_pairs(call.indices)
            near, far = product.positive(scores[a, p], +1), product.negative(scores[b, n], -1)
            return (product.over_positive.value(near[None]) + product.over_negative.value(far[None]))[0]
        return dense_value(product, kept_pairs(product, self._pairs(loss, product, call, scores, measures)))

    def _scores(self, loss: RobustLoss, call: Call) -> Tensor:
        """The scores [n, m], computed with PML's distance if they take more than a product of rows."""
        wide = torch.promote_types(call.embeddings.dtype, torch.float32)
        x, others = call.embeddings.to(wide), None if call.ref_emb is None else call.ref_emb.to(wide)
        if (found := quick_scores(loss.product.similarity, x, others)) is not None:
            return found
        check_finite("", "embeddings", call.embeddings)
        if call.ref_emb is not None:
            check_finite("", "ref_emb", call.ref_emb)
        numbers: Tensor = self.distance(x, others)
        return numbers if self.distance.is_inverted else -numbers

    def _pairs(
        self, loss: RobustLoss, product: Product, call: Call, scores: Tensor, measures: tuple[Tensor, ...] | None
    ) -> ScoredPairs:
        """The pairs of a small batch, with their measures if these are given."""
        relation, listed = call.relation(), None
        # every two rows are a pair, of one sign or the other
        every = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        if call.indices is not None and _lists_triplets(product, call.indices):
            listed = (call.indices[0], call.indices[1], call.indices[2])
            measures = every, every  # not used
        elif measures is None:
            measures = self._measures(loss, call, call.labels, scores)
        rows, (positive, negative) = (call.embeddings, call.reference), measures
        return ScoredPairs(
            scores, positive, negative, every, every, relation, product.similarity, *rows, listed, mined=True
        )

    def _measures(self, loss: RobustLoss, call: Call, labels: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        """Measures [n, m] of positive and negative pairs: masks, or how often the index tuple lists each."""
        if call.indices is None:
            return masks(labels, call.ref_labels)
        if mined := _marks(call.indices, call.shape):
            return _masks(mined, call.shape)
        positive, negative = indexed(call.indices, call.shape, once=self.once)
        if self.once:
            check_apart(loss.owner, positive, negative)
            return positive, negative
        return positive.to(like.dtype), negative.to(like.dtype)


def _lists_triplets(product: Product, indices: Indices) -> bool:
    """Whether an index tuple lists triplets, and the loss takes them one by one."""
    return len(indices) == 3 and product.groups.takes_triplets


def _marks(indices: Any, shape: tuple[int, int]) -> Indices:
    """What a miner's index tuple carries; empty for any other."""
    return indices.marks(shape) if isinstance(indices, Mined) else ()


def _masks(marks: Sequence[Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Measures [n, m] of positive and negative pairs, of these or of the hardest pair of each anchor."""
    if len(marks) == 2:
        return marks[0], marks[1]
    anchors, far, near = marks
    none = anchors.new_zeros(shape)
    return none.scatter(1, far[:, None], anchors[:, None]), none.scatter(1, near[:, None], anchors[:, None])


def _triplets(listed: Sequence[Tensor]) -> Indices:
    """Triplets (anchor, positive, negative) and which of them count, also from the hardest pairs of each anchor."""
    if len(listed) == 4:
        return tuple(listed)
    anchors, far, near = listed
    return torch.arange(len(anchors), device=anchors.device), far, near, anchors


def flat(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The entries of a matrix at valid places; on a GPU the gradient of `matrix[rows, columns]` sorts them first."""
    return matrix.reshape(-1).gather(0, rows * matrix.shape[1] + columns)


def _pad(triplets: Any) -> tuple[Tensor, ...]:
    """A list of triplets, filled up to a power of two, of which there are few, and a mask of those that count."""
    have = len(triplets[0])
    length = have if have > RECORDED else 1 << max(have - 1, 15).bit_length()
    counted = torch.arange(length, device=triplets[0].device) < have
    return *(pad(each, (0, length - have)) for each in triplets), counted


def _several(indices: Any) -> bool:
    """Whether this is a valid index tuple with more than one pair of a sign."""
    if not isinstance(indices, tuple | list) or len(indices) not in (3, 4):
        return False
    formed = isinstance(indices, Mined) or all(
        isinstance(each, Tensor) and each.ndim == 1 and each.dtype in WHOLE for each in indices
    )
    return formed and any(len(each) > 1 for each in indices)

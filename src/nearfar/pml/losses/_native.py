"""`Native`: a PML loss computed by one of nearfar's losses whenever the result is the same."""

from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.tensors import check_finite
from nearfar.engines import dense_value, recordings
from nearfar.engines.dense import keep
from nearfar.engines.recordings import PAIRS, settings
from nearfar.groups._groupings import Product
from nearfar.groups._triplets import At, index
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, RobustLoss
from nearfar.miners import ScoredPairs
from nearfar.pml._native import SCALARS, Indices, Mined, Setup, is_ours, masks, record, setup, suit
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
        if here and ids is None and ref_ids is None and len(embeddings) < self.least[indices is not None]:
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
        try:
            value = self._value(loss, Call(loss.owner, embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids))
        except ValueError:  # invalid rows or indices: PML handles them in its own way
            return None
        return self._regularized(value, embeddings)

    def _regularized(self, value: Tensor, embeddings: Tensor) -> Tensor:
        """The value plus the penalty on the embeddings, if there is one."""
        if self.embedding_regularizer is None:
            return value
        penalty: Tensor = value + self.embedding_reg_weight * self.embedding_regularizer(embeddings)
        return penalty

    def _keep(self) -> RobustLoss | None:
        """The nearfar loss for the present settings, made again if one of them changed."""
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
        kept: tuple[Any, RobustLoss | None] | None = self.__dict__.get("_kept_loss")
        if kept is None or kept[0] != (id(self), key, values):  # a copy of this object makes its own
            # in a tuple, because a module would enter the state dict
            kept = ((id(self), key, values), self._make(known))
            self.__dict__["_kept_loss"] = kept
        return kept[1]

    def _make(self, known: Setup) -> RobustLoss | None:
        try:
            loss = self.recipe(known)
        except (TypeError, ValueError):  # a setting that nearfar rejects and PML may accept
            return None
        if loss is not None:
            loss.owner, loss._warned = type(self).__name__, True  # like PML, silent if there is nothing to learn from
            loss.listed_once = loss.listed_apart = self.once
        return loss

    def _value(self, loss: RobustLoss, call: Call) -> Tensor:
        named, device = call.ids is not None or call.ref_ids is not None, call.embeddings.device.type
        recorded = device in recordings.DEVICES - recordings.TRACED  # not on a CPU
        mined = recorded and call.indices is not None and len(call.indices[0]) <= LISTED
        most = PAIRS if mined else 0 if recorded or device != "cpu" else SMALL
        if named or call.shape[0] * call.shape[1] > most:
            return loss._judged(call)
        with torch.autocast(device_type=device, enabled=False):
            return self._mined_value(loss, call) if mined else self._dense_value(loss, call, None)

    def _mined_value(self, loss: RobustLoss, call: Call) -> Tensor:
        """The value of an index tuple by a recording: of measures of pairs, or of a list of triplets."""
        product = loss.product
        if triplets := _lists_triplets(product, call):
            mined = _pad(call.indices)
            valid = isinstance(call.indices, Mined) and call.indices.unchanged
            at = flat if valid and not torch.are_deterministic_algorithms_enabled() else index
        else:
            mined = self._measures(loss, call, call.labels, call.embeddings)
        given: Any = (call.embeddings, call.labels, call.ref_emb, call.ref_labels, *mined)

        def run(loss: RobustLoss, given: Any) -> Tensor:
            x, labels, ref_emb, ref_labels, *mined = given
            one = Call(loss.owner, x, labels, None, ref_emb, ref_labels)
            return self._listed_value(loss, one, mined, at) if triplets else self._dense_value(loss, one, (*mined,))

        many = triplets and len(call.indices[0]) > RECORDED  # type: ignore[index]
        key = None if many else settings(loss, product.parts, call.embeddings.device)
        value: Tensor | None = None if key is None else record(loss._replays, (key, triplets and at), run, loss, given)
        return run(loss, given) if value is None else value

    def _listed_value(self, loss: RobustLoss, call: Call, triplets: list[Tensor], at: At) -> Tensor:
        """The value of those triplets of a list that count."""
        (a, p, n, counted), product, scores = triplets, loss.product, self._scores(call)
        pairs = self._pairs(loss, product, call, scores, (counted, counted))
        losses, measure = cast(Any, product.groups).rule.listed(product, pairs, (a, p, n), at=at)
        value: Tensor = product.over_negative.value(losses[None], (measure & counted)[None])
        return value[0]

    def _dense_value(self, loss: RobustLoss, call: Call, measures: tuple[Tensor, ...] | None) -> Tensor:
        """The value from all scores, with as few checks as possible."""
        product, scores = loss.product, self._scores(call)
        if call.indices is not None and product.groups.scope == "sign":
            a, p, b, n = as_pairs(call.indices)
            near, far = product.positive(scores[a, p], +1), product.negative(scores[b, n], -1)
            return (product.over_positive.value(near[None]) + product.over_negative.value(far[None]))[0]
        return dense_value(product, keep(product, self._pairs(loss, product, call, scores, measures)))

    def _scores(self, call: Call) -> Tensor:
        """The scores [n, m], computed with PML's distance."""
        check_finite("", "embeddings", call.embeddings)
        if call.ref_emb is not None:
            check_finite("", "ref_emb", call.ref_emb)
        wide = torch.promote_types(call.embeddings.dtype, torch.float32)
        others = None if call.ref_emb is None else call.ref_emb.to(wide)
        numbers: Tensor = self.distance(call.embeddings.to(wide), others)
        return numbers if self.distance.is_inverted else -numbers

    def _pairs(
        self, loss: RobustLoss, product: Product, call: Call, scores: Tensor, measures: tuple[Tensor, ...] | None
    ) -> ScoredPairs:
        """The pairs of a small batch, with their measures if these are given."""
        relation, listed = call.relation(), None
        # every two rows are a pair, of one sign or the other
        every = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        if call.indices is not None and _lists_triplets(product, call):
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
        mined = call.indices.masks(call.shape) if isinstance(call.indices, Mined) else None
        if mined is not None:
            return mined
        positive, negative = indexed(call.indices, call.shape, once=self.once)
        if self.once:
            check_apart(loss.owner, positive, negative)
            return positive, negative
        return positive.to(like.dtype), negative.to(like.dtype)


def _lists_triplets(product: Product, call: Call) -> bool:
    """Whether an index tuple lists triplets, and the loss takes them one by one."""
    return call.indices is not None and len(call.indices) == 3 and product.groups.takes_triplets


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
    formed = all(isinstance(each, Tensor) and each.ndim == 1 and each.dtype in WHOLE for each in indices)
    return formed and any(len(each) > 1 for each in indices)

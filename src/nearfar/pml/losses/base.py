"""`Loss`: the base class of PML's losses, with PML's signature of a call.

A loss is written in one of two ways, or in both:

`_recipe`    its factors: a `RobustLoss`, which every engine computes without lists of pairs.
`_elements`  its parts as PML's reducers take them: {name: losses of single rows, pairs or triplets}.

A call takes the recipe if there is one and it knows the reducer (`native`); else the elements, which any reducer
reduces. A distance never decides: `self.similarity` has its scores, whoever wrote it.

    class MyLoss(Loss):
        names = ("pos_loss", "neg_loss")                          # its parts; ("loss",) where none are named

        def __init__(self, margin: float = 1, **settings: Unpack[Settings]) -> None:
            super().__init__(settings)                            # distance, reducer, regularizer, collect_stats
            self.margin = margin
            self._make(record=["margin"])                         # last: makes the recipe

        def get_default_distance(self) -> BaseDistance:           # LpDistance() where it is left out
            return CosineSimilarity()

        def get_default_reducer(self) -> BaseReducer:             # MeanReducer() where it is left out
            return AvgNonZeroReducer()

        def _recipe(self, reducer: Translation) -> RobustLoss:    # leave it out if there are no factors
            return RobustLoss(pair=..., over=reducer.over, similarity=self.similarity)   # or reduction=reducer.how

        def _elements(self, call: Call) -> LossDict:
            a, p, b, n = call.pairs()                             # or call.triplets(), call.masks()
            s = call.scores(self.similarity)                      # larger = more similar
            m = self.score(self.margin)                           # a margin in the distance's units, as a score
            return {"pos_loss": part(torch.relu(m - s[a, p]), (a, p), "pos_pair"),
                    "neg_loss": part(torch.relu(s[b, n] - m), (b, n), "neg_pair")}

Losses with class vectors derive from `ClassLoss` (classes.py).
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import DegenerateBatchWarning
from nearfar._utils.tensors import check_embeddings
from nearfar.losses.robust import Call as Checked
from nearfar.losses.robust import Labels, RobustLoss
from nearfar.pml._names import check_names
from nearfar.pml._records import Records
from nearfar.pml._reductions import Translation, as_ours, for_parts, translated
from nearfar.pml._settings import Settings, chosen_distance
from nearfar.pml._tuples import Indices
from nearfar.pml.distances import BaseDistance, LpDistance, Number, score_of, similarity_of
from nearfar.pml.losses.elements import Call, LossDict, nothing, number, part
from nearfar.pml.reducers import (
    AvgNonZeroReducer,
    BaseReducer,
    DivisorReducer,
    MeanReducer,
    SumReducer,
)
from nearfar.relations.index_tuples import check_indices
from nearfar.similarity import Similarity

__all__ = ["Call", "Loss", "LossDict", "nothing", "number", "part"]


class Loss(Records, ABC):
    """Base class of losses.

    Args:
        settings: the keyword arguments, see `Settings`.
        fixed: whether only the default distance is allowed.

    Attributes:
        robust: the native recipe; `loss.robust.explain(...)` shows the weights behind a value.
        distance: PML's distance.
        reducer: PML's reducer; as in PML `MultipleReducers` where the loss has several parts.
        similarity: our similarity with the distance's scores.
    """

    robust: RobustLoss
    names: tuple[str, ...] = ("loss",)
    """The parts of the loss, as in PML."""
    native: tuple[type[BaseReducer], ...] = (MeanReducer, AvgNonZeroReducer, SumReducer)
    """The reducers that the recipe knows."""
    known: type = Settings
    """The TypedDict of the keyword arguments."""
    once = False
    """Whether a pair that an index tuple lists twice counts once (PML computes the loss from masks)."""
    lists = False
    """Whether a call with an index tuple is computed from the elements, which are lists as short as the tuple."""
    reads_rows = False
    """Whether it reads embeddings before its recipe does, which checks them."""
    reads_tuple = False
    """Whether it reads an index tuple before its recipe does, which checks it."""

    def __init__(self, settings: Settings, *, fixed: bool = False) -> None:
        check_names(self, settings, self.known)
        super().__init__(settings.get("collect_stats"))
        owner = type(self).__name__
        self.distance = chosen_distance(owner, settings, self.get_default_distance(), fixed=fixed)
        self.embedding_regularizer = settings.get("embedding_regularizer")
        self.embedding_reg_weight = settings.get("embedding_reg_weight", 1.0)
        self._given = settings.get("reducer")
        self._factored = self._warned = False

    def get_default_distance(self) -> BaseDistance:
        """The distance where none is given."""
        return LpDistance()

    def get_default_reducer(self) -> BaseReducer:
        """The reducer where none is given."""
        return MeanReducer()

    def sub_loss_names(self) -> list[str]:
        """The names of the parts, with those of the regularizers that are given."""
        return [*self._sub_loss_names(), *self.all_regularization_loss_names()]

    def _sub_loss_names(self) -> list[str]:
        return list(self.names)

    def all_regularization_loss_names(self) -> list[str]:
        """The names of the parts that regularizers add."""
        return [] if self.embedding_regularizer is None else ["embedding_reg_loss"]

    @property
    def similarity(self) -> Similarity:
        """Our similarity with the distance's scores."""
        return similarity_of(self.distance)

    def score(self, number: Number) -> Number:
        """Convert a number in the distance's units, such as a margin, to a score."""
        return score_of(self.distance, number)

    def set_reducer(self, reducer: Any) -> None:
        """Take a reducer: as in PML a copy, one per part where there are several."""
        chosen = self.get_default_reducer() if reducer is None else as_ours(type(self).__name__, reducer)
        if type(chosen) is DivisorReducer and DivisorReducer not in self.native:
            raise TypeError(
                f"{type(self).__name__}: reducer must be another than DivisorReducer, which needs a divisor that only "
                "MarginLoss and ProxyAnchorLoss have; use MeanReducer."
            )
        self.reducer = for_parts(chosen, self.sub_loss_names())

    def _make(self, record: Iterable[str] = ()) -> None:
        """Take the reducer and make the recipe; the last line of `__init__`.

        Args:
            record: attributes that PML's record keeper logs.
        """
        self.add_to_recordable_attributes(list_of_names=list(record))
        self.set_reducer(self._given)
        reducer = translated(self.reducer, self._sub_loss_names())
        watched = self.collect_stats or getattr(self.distance, "collect_stats", False)
        if reducer is None or reducer.kind not in self.native or watched:
            return
        robust = self._recipe(reducer)
        if robust is not None:
            self.robust = self._take(robust)
            self._factored = type(self).compute_loss is Loss.compute_loss

    def _recipe(self, reducer: Translation) -> RobustLoss | None:
        """The factors, with the reducer as our reduction; None where the loss has none."""
        return None

    def _elements(self, call: Call) -> LossDict:
        """The parts of the loss without those of regularizers."""
        raise TypeError(f"{type(self).__name__} has no losses of single rows, pairs or triplets.")

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Labels,
        indices_tuple: Indices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        """The parts of the loss as a reducer takes them; a subclass may write its own, as in PML."""
        return self._elements(self._call(embeddings, labels, indices_tuple, ref_emb, ref_labels, None, None))

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a differentiable scalar.

        Args:
            embeddings: [n, d].
            labels: [n] integers.
            indices_tuple: a miner's tuple.
            ref_emb: [m, d] reference rows; by default the batch is its own reference and no row is paired with itself.
            ref_labels: [m] integers.
            ids: [n] the sample of each row; equal `ids` and `ref_ids` are the same sample and are not paired.
            ref_ids: [m] likewise.
        """
        return self._finish(self._call(embeddings, labels, indices_tuple, ref_emb, ref_labels, ids, ref_ids))

    def of_all_ranks(self, call: Checked) -> Tensor:
        """The loss of a call that `nf.Distributed` has gathered from all ranks, which share the work."""
        names = (call.ref_labels, call.ids, call.ref_ids)
        own = replace(self._call(call.embeddings, call.labels, None, call.ref_emb, *names), ranks=call.ranks)
        with nullcontext() if call.ranks is None else call.ranks.same_draws(call.embeddings.device):
            return self._finish(own)

    @property
    def owner(self) -> str:
        """Whom messages name."""
        return type(self).__name__

    def _finish(self, call: Call) -> Tensor:
        """The loss of a call, with its regularizers."""
        if not self._factored or (self.lists and call.indices is not None):
            return self._reduced(call)
        value = self._value(call)
        if self.embedding_regularizer is not None:
            value = value + self.embedding_reg_weight * self.embedding_regularizer(call.embeddings)
        return value

    def _reduced(self, call: Call) -> Tensor:
        """The loss from its elements; half precision is computed in float32."""
        self.reset_stats()
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            wide = torch.promote_types(call.embeddings.dtype, torch.float32)
            rows, others = (x if x is None else x.to(wide) for x in (call.embeddings, call.ref_emb))
            assert rows is not None  # noqa: S101
            call = replace(call, embeddings=rows, ref_emb=others)
            if type(self).compute_loss is not Loss.compute_loss:
                same = call.ref_emb is None
                others, names = (rows, call.labels) if same else (call.ref_emb, call.ref_labels)
                parts = self.compute_loss(rows, call.labels, call.indices, others, names)  # type: ignore[arg-type]
            else:
                parts = self._elements(call)
            if call.indices is None and not any(isinstance(each["losses"], Tensor) for each in parts.values()):
                self._say_once()
            parts = {**parts, **self._regularized(call)}
            value: Tensor = self.reducer(parts, rows, call.labels)
            return value

    def _say_once(self) -> None:
        """Say once that a batch without a tuple has no pair to learn from."""
        if not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: this batch has nothing to learn from, because no two rows make a pair that it "
                "compares; it costs 0. Draw several samples of several classes into each batch.",
                DegenerateBatchWarning,
                stacklevel=5,
            )

    def _regularized(self, call: Call) -> LossDict:
        """The parts that regularizers add."""
        if self.embedding_regularizer is None:
            return {}
        return {"embedding_reg_loss": number(self.embedding_regularizer(call.embeddings) * self.embedding_reg_weight)}

    def _call(
        self,
        embeddings: Tensor,
        labels: Labels,
        indices: Indices | None,
        ref_emb: Tensor | None,
        *names: Tensor | None,
    ) -> Call:
        owner = type(self).__name__
        early = self.reads_tuple and indices is not None
        finite = early or self.reads_rows or not self._factored  # else the recipe looks at values
        check_embeddings(owner, "embeddings", embeddings, finite=finite)
        device = embeddings.device  # as in PML, labels may come from another
        ref_labels, ids, ref_ids = (x.to(device) if isinstance(x, Tensor) else x for x in names)
        labels = labels.to(device) if isinstance(labels, Tensor) else labels
        call = Call(owner, embeddings, labels, None, ref_emb, ref_labels, ids, ref_ids)
        if indices is None:
            return call
        if self.reads_tuple or not self._factored or not _tensors(indices):
            check_indices(owner, indices, (len(embeddings), call.columns))
        return replace(call, indices=tuple(part.to(device) for part in indices))

    def _value(self, call: Call) -> Tensor:
        """The loss by its recipe, without its regularizer."""
        return call.into(self.robust)

    def _take(self, robust: RobustLoss) -> RobustLoss:
        """Take a recipe, and let its error messages name this loss."""
        robust.owner = type(self).__name__
        robust.listed_once = robust.listed_apart = self.once
        return robust

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "robust":
                raise
            raise AttributeError(
                f"{type(self).__name__}: there is no recipe (`robust`) with this reducer, or while numbers are "
                f"collected; it knows {', '.join(kind.__name__ for kind in self.native)}."
            ) from None


def _tensors(indices: object) -> bool:
    """Whether these are several tensors, whatever they hold."""
    return isinstance(indices, tuple | list) and all(isinstance(part, Tensor) for part in indices)

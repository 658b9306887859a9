"""PML's reducers: from the losses of rows, pairs or triplets to one number.

A reducer is called as in PML, `reducer(loss_dict, embeddings, labels)`. Where a loss is a recipe and its reducer one
that the recipe knows (_reductions.py), none of these lists is ever made: the recipe has a reduction of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nearfar.pml._names import Recorded, check_names
from nearfar.pml._records import Records
from nearfar.pml._theirs import theirs

__all__ = [
    "AvgNonZeroReducer",
    "BaseReducer",
    "ClassWeightedReducer",
    "DivisorReducer",
    "DoNothingReducer",
    "MeanReducer",
    "MultipleReducers",
    "PerAnchorReducer",
    "SumReducer",
    "ThresholdReducer",
]

__getattr__, __dir__ = theirs(__name__)

LossInfo = dict[str, Any]
"""One part of a loss: "losses" (a tensor, or 0), "indices" (rows, or a tuple for pairs and triplets), "reduction_type"
("element", "pos_pair", "neg_pair", "triplet", "already_reduced"), and "divisor" where the loss has one."""
LossDict = dict[str, LossInfo]
"""The parts of a loss by name."""

TUPLES = {"pos_pair": 2, "neg_pair": 2, "triplet": 3}
"""How many index tensors belong to the losses of a kind."""


class BaseReducer(Records):
    """Base class of reducers; a subclass says how the losses of each kind become a number.

    A subclass writes `element_reduction(losses, indices, embeddings, labels)`, and `pos_pair_reduction`,
    `neg_pair_reduction`, `triplet_reduction` if it treats them otherwise.
    """

    stats: tuple[str, ...] = ("losses_size",)
    losses_size: int

    def __init__(self, **settings: Unpack[Recorded]) -> None:
        check_names(self, settings)
        super().__init__(settings.get("collect_stats"))

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Tensor | None) -> Any:
        """Reduce the one part of a loss to a number.

        Args:
            loss_dict: {name: part}; see `LossInfo`.
            embeddings: [n, d]; a part without losses gives a zero in their graph.
            labels: [n].
        """
        self.reset_stats()
        if len(loss_dict) != 1:
            raise ValueError(
                f"{type(self).__name__}: it reduces one part of a loss, but {len(loss_dict)} came "
                f"({', '.join(loss_dict)}); wrap it as MultipleReducers."
            )
        (info,) = loss_dict.values()
        losses, indices, kind, more = self.unpack_loss_info(info)
        return self.reduce_the_loss(losses, indices, kind, more, embeddings, labels)

    def unpack_loss_info(self, loss_info: LossInfo) -> tuple[Any, Any, str, dict[str, Any]]:
        """Losses, indices, kind, and further arguments of the reduction."""
        return loss_info["losses"], loss_info["indices"], loss_info["reduction_type"], {}

    def reduce_the_loss(
        self,
        losses: Any,
        loss_indices: Any,
        reduction_type: str,
        kwargs: dict[str, Any],
        embeddings: Tensor,
        labels: Tensor | None,
    ) -> Tensor:
        """Reduce the losses of one kind."""
        if self.collect_stats:
            self.losses_size = len(losses) if isinstance(losses, Tensor) and losses.ndim else 1
        if not isinstance(losses, Tensor) and losses == 0:
            return self.zero_loss(embeddings)
        _check_sizes(type(self).__name__, losses, loss_indices, reduction_type)
        reduction: Callable[..., Tensor] = getattr(self, f"{reduction_type}_reduction")
        return reduction(losses, loss_indices, embeddings, labels, **kwargs)

    def already_reduced_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None
    ) -> Tensor:
        """The number itself."""
        return losses if losses.ndim == 0 else losses[0]

    def element_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        """Reduce losses [k] of the rows `loss_indices` [k]."""
        raise TypeError(f"{type(self).__name__} does not say how losses of rows are reduced.")

    def pos_pair_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        """Reduce losses [k] of the positive pairs `loss_indices`."""
        return self.element_reduction(losses, loss_indices, embeddings, labels, **more)

    def neg_pair_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        """Reduce losses [k] of the negative pairs `loss_indices`."""
        return self.element_reduction(losses, loss_indices, embeddings, labels, **more)

    def triplet_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        """Reduce losses [k] of the triplets `loss_indices`."""
        return self.element_reduction(losses, loss_indices, embeddings, labels, **more)

    def zero_loss(self, embeddings: Tensor) -> Tensor:
        """A zero that keeps the graph."""
        return (embeddings * 0).sum()


def _check_sizes(owner: str, losses: Any, indices: Any, kind: str) -> None:
    if kind == "already_reduced":
        fits = isinstance(losses, Tensor) and losses.numel() == 1
    elif kind == "element":
        fits = isinstance(indices, Tensor) and len(losses) == len(indices)
    elif kind in TUPLES:
        fits = len(indices) == TUPLES[kind] and all(len(part) == len(losses) for part in indices)
    else:
        raise ValueError(
            f"{owner}: reduction_type must be element, pos_pair, neg_pair, triplet or already_reduced, but is {kind!r}."
        )
    if not fits:
        raise ValueError(f"{owner}: losses and indices of the kind {kind} do not belong together; give one index each.")


class MeanReducer(BaseReducer):
    """The mean of all losses.

    >>> part = {"losses": torch.tensor([1.0, 3.0]), "indices": torch.tensor([0, 1]), "reduction_type": "element"}
    >>> MeanReducer()({"loss": part}, torch.zeros(2, 4), torch.tensor([0, 0]))
    tensor(2.)
    """

    def element_reduction(self, losses: Tensor, *rest: Any, **more: Any) -> Tensor:  # noqa: D102
        return losses.mean()


class SumReducer(MeanReducer):
    """The sum of all losses."""

    def element_reduction(self, losses: Tensor, *rest: Any, **more: Any) -> Tensor:  # noqa: D102
        return losses.sum()


class ThresholdReducer(BaseReducer):
    """The mean of the losses above `low` and below `high`.

    Args:
        low: losses at or below it are left out; None for no bound.
        high: losses at or above it are left out; None for no bound.
        settings: see `_names.Recorded`.
    """

    stats = (*BaseReducer.stats, "num_past_filter", "num_above_low", "num_below_high")

    def __init__(self, low: float | None = None, high: float | None = None, **settings: Unpack[Recorded]) -> None:
        super().__init__(**settings)
        if low is None and high is None:
            raise ValueError("ThresholdReducer: low or high must be given, but both are None.")
        self.low, self.high = low, high
        self.add_to_recordable_attributes(list_of_names=["low", "high"])

    def element_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        above = torch.ones_like(losses, dtype=torch.bool) if self.low is None else losses > self.low
        below = torch.ones_like(losses, dtype=torch.bool) if self.high is None else losses < self.high
        kept = losses[above & below]
        if self.collect_stats:
            self.num_past_filter = len(kept)
            self.num_above_low = 0 if self.low is None else int(above.sum())
            self.num_below_high = 0 if self.high is None else int((above & below).sum())
        return kept.mean() if len(kept) else self.zero_loss(embeddings)


class AvgNonZeroReducer(ThresholdReducer):
    """The mean of the losses above zero."""

    def __init__(self, **settings: Unpack[Recorded]) -> None:
        super().__init__(low=0, **settings)


class DivisorReducer(BaseReducer):
    """The sum divided by the loss's own divisor: the default of `MarginLoss` and `ProxyAnchorLoss`."""

    stats = (*BaseReducer.stats, "divisor")

    def unpack_loss_info(self, loss_info: LossInfo) -> tuple[Any, Any, str, dict[str, Any]]:  # noqa: D102
        losses, indices, kind, more = super().unpack_loss_info(loss_info)
        if kind != "already_reduced":
            if "divisor" not in loss_info:
                raise ValueError("DivisorReducer: this loss has no divisor; use MeanReducer, or another.")
            more = {"divisor": loss_info["divisor"]}
            if self.collect_stats:
                self.divisor = more["divisor"]
        return losses, indices, kind, more

    def element_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        divisor = more.get("divisor", 1)
        return losses.sum() / divisor if divisor != 0 else self.zero_loss(embeddings)


class ClassWeightedReducer(BaseReducer):
    """The mean of the losses times the weight of the class of their anchor (or row).

    Args:
        weights: [classes] weights.
        settings: see `_names.Recorded`.
    """

    def __init__(self, weights: Tensor, **settings: Unpack[Recorded]) -> None:
        super().__init__(**settings)
        self.weights = weights

    def element_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        if not isinstance(labels, Tensor):
            raise ValueError("ClassWeightedReducer: labels are missing; they say which weight a loss has.")
        rows = loss_indices if isinstance(loss_indices, Tensor) else loss_indices[0]
        weights = self.weights.to(losses.device, losses.dtype)
        return (losses * weights[labels[rows]]).mean()


class DoNothingReducer(BaseReducer):
    """The parts of the loss as they are."""

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Tensor | None) -> Any:
        """Return `loss_dict`."""
        return loss_dict


def _mean_of_each(values: Tensor, counts: Tensor) -> Tensor:
    """Sum of each row of values [n, m] over its count [n]; 0 where that is 0."""
    return torch.where(counts > 0, values.sum(dim=1) / counts.clamp_min(1), 0.0)


class PerAnchorReducer(BaseReducer):
    """First one value per anchor, then another reducer over anchors; for losses of rows or pairs.

    Args:
        reducer: reduces the values of all rows; `MeanReducer()` where none is given.
        aggregation_func: takes a matrix [n, n] with the losses of an anchor in its row and 0 elsewhere, and how many
            they are [n]; returns one value per anchor [n]. Their mean where none is given.
        settings: see `_names.Recorded`.
    """

    def __init__(
        self,
        reducer: nn.Module | None = None,
        aggregation_func: Callable[[Tensor, Tensor], Tensor] = _mean_of_each,
        **settings: Unpack[Recorded],
    ) -> None:
        super().__init__(**settings)
        self.reducer = MeanReducer() if reducer is None else reducer
        self.aggregation_func = aggregation_func

    def element_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        part = {"losses": losses, "indices": loss_indices, "reduction_type": "element"}
        found: Tensor = self.reducer({"loss": part}, embeddings, labels)
        return found

    def pos_pair_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        anchors, others = loss_indices
        n = len(embeddings)
        width = max(n, int(others.max()) + 1 if len(others) else 0)  # a reference may be wider than the batch
        matrix = losses.new_zeros(n, width).index_put((anchors, others), losses)
        listed = torch.zeros(n, width, dtype=torch.bool, device=losses.device).index_put(
            (anchors, others), torch.ones_like(losses, dtype=torch.bool)
        )
        values = self.aggregation_func(matrix, listed.sum(dim=1))
        return self.element_reduction(values, torch.arange(n, device=losses.device), embeddings, labels)

    def neg_pair_reduction(  # noqa: D102
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **more: Any
    ) -> Tensor:
        return self.pos_pair_reduction(losses, loss_indices, embeddings, labels)

    def triplet_reduction(self, *rest: Any, **more: Any) -> Tensor:  # noqa: D102
        raise TypeError("PerAnchorReducer: losses of triplets have no single pair; use a loss of pairs.")


class MultipleReducers(BaseReducer):
    """One reducer per part of a loss, and the sum of what they return.

    Args:
        reducers: {name of the part: reducer}.
        default_reducer: for parts that are not named; `MeanReducer()` where none is given.
        settings: see `_names.Recorded`.
    """

    def __init__(
        self,
        reducers: Mapping[str, nn.Module],
        default_reducer: nn.Module | None = None,
        **settings: Unpack[Recorded],
    ) -> None:
        super().__init__(**settings)
        self.reducers = nn.ModuleDict(dict(reducers))
        self.default_reducer = MeanReducer() if default_reducer is None else default_reducer

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Tensor | None) -> Any:
        """Reduce each part by its reducer."""
        self.reset_stats()
        values = [self.of(name)({name: part}, embeddings, labels) for name, part in loss_dict.items()]
        return self.sub_loss_reduction(torch.stack([value.reshape(()) for value in values]), embeddings, labels)

    def of(self, name: str) -> nn.Module:
        """The reducer of a part."""
        return self.reducers[name] if name in self.reducers else self.default_reducer  # noqa: SIM401 - has no get

    def sub_loss_reduction(
        self, sub_losses: Tensor, embeddings: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Join the values [k] of the parts."""
        return sub_losses.sum()

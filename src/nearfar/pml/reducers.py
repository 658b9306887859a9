"""PML's reducers, from terms to a scalar: each maps to our reduction over anchors and our set over pairs."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from nearfar._utils.tensors import weighted
from nearfar.groups.groupings import Reduction
from nearfar.pml._names import Recorded, check_names
from nearfar.pml._theirs import theirs
from nearfar.sets import Dual, Mean, UncertaintySet

__all__ = ["AvgNonZeroReducer", "DivisorReducer", "MeanReducer", "SumReducer"]

__getattr__, __dir__ = theirs(__name__)


@dataclass(frozen=True, eq=False)
class Total(Mean):
    """The sum F = Σ wᵢlᵢ: the mean without its denominator; its weights sum to the measure, not to 1."""

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return w.to(l.dtype)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return weighted(l, w).sum(dim=1)


class Reducer(nn.Module, ABC):
    """Base class of reducers.

    Attributes:
        how: our reduction, if there is one term per anchor or positive pair.
        over: our uncertainty set, if pairs or triplets are the terms.
    """

    how: Reduction
    over: UncertaintySet

    def __init__(self, **settings: Unpack[Recorded]) -> None:
        super().__init__()
        check_names(self, settings)


class MeanReducer(Reducer):
    """The mean of all terms."""

    how, over = "mean", Mean()


class AvgNonZeroReducer(Reducer):
    """The mean of the terms above zero."""

    how, over = "nonzero", Mean(zero="drop")


class SumReducer(Reducer):
    """The sum of all terms."""

    how, over = "sum", Total()


class DivisorReducer(Reducer):
    """The sum divided by the loss's own denominator: the default of `MarginLoss` and `ProxyAnchorLoss`."""

    how, over = "mean", Mean(zero="drop")

"""What a reducer is in nearfar's own words: a reduction over anchors, and a set over pairs or triplets."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nearfar._utils.tensors import weighted
from nearfar.groups.groupings import Reduction
from nearfar.pml import reducers
from nearfar.pml._theirs import PACKAGE
from nearfar.sets import Dual, Mean, UncertaintySet

__all__ = ["Translation", "as_ours", "for_parts", "translated"]


@dataclass(frozen=True, eq=False)
class Total(Mean):
    """The sum F = Σ wᵢlᵢ: the mean without its denominator; its weights sum to the measure, not to 1."""

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return w.to(l.dtype)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return weighted(l, w).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Translation:
    """A reducer as a recipe takes it.

    Args:
        kind: the reducer's class.
        how: our reduction, if there is one term per anchor or positive pair.
        over: our uncertainty set, if pairs or triplets are the terms.
    """

    kind: type[nn.Module]
    how: Reduction
    over: UncertaintySet


KNOWN = {
    each.kind: each
    for each in (
        Translation(reducers.MeanReducer, "mean", Mean()),
        Translation(reducers.AvgNonZeroReducer, "nonzero", Mean(zero="drop")),
        Translation(reducers.SumReducer, "sum", Total()),
        Translation(reducers.DivisorReducer, "mean", Mean(zero="drop")),
    )
}


def translated(reducer: nn.Module, parts: Iterable[str]) -> Translation | None:
    """The reducer of a loss with these parts in our words; None where it is not one of four, or collects numbers.

    Only the exact classes are known: a subclass may reduce in another way.
    """
    if isinstance(reducer, reducers.MultipleReducers):
        if type(reducer) is not reducers.MultipleReducers:
            return None
        inner = [reducer.of(name) for name in parts]
    else:
        inner = [reducer]
    if len({type(each) for each in inner}) != 1 or any(getattr(each, "collect_stats", True) for each in inner):
        return None
    return KNOWN.get(type(inner[0]))


def as_ours(owner: str, reducer: Any) -> nn.Module:
    """A reducer of PML's as the same one of ours; any other that is called like one stays as it is."""
    kind = type(reducer)
    if not kind.__module__.startswith(f"{PACKAGE}.reducers"):
        if isinstance(reducer, type) or not isinstance(reducer, nn.Module):
            raise TypeError(
                f"{owner}: reducer must be a reducer such as nearfar.pml.reducers.MeanReducer(), but came as "
                f"{reducer!r}."
            )
        return reducer
    more = {"collect_stats": reducer.collect_stats}
    name = kind.__name__
    if name == "MultipleReducers":
        inner = {key: as_ours(owner, each) for key, each in reducer.reducers.items()}
        return reducers.MultipleReducers(inner, as_ours(owner, reducer.default_reducer), **more)
    if name == "PerAnchorReducer":
        return reducers.PerAnchorReducer(as_ours(owner, reducer.reducer), reducer.aggregation_func, **more)
    if name == "ThresholdReducer":
        return reducers.ThresholdReducer(reducer.low, reducer.high, **more)
    if name == "ClassWeightedReducer":
        return reducers.ClassWeightedReducer(reducer.weights, **more)
    made: nn.Module = getattr(reducers, name)(**more)
    return made


def for_parts(reducer: nn.Module, parts: list[str]) -> nn.Module:
    """The reducer of a loss with these parts: as in PML a copy of it for each, if there are several."""
    if isinstance(reducer, reducers.MultipleReducers | reducers.DoNothingReducer):
        return reducer
    if len(parts) == 1:
        return copy.deepcopy(reducer)
    return reducers.MultipleReducers({name: copy.deepcopy(reducer) for name in parts})

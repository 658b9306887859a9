"""Arguments that many classes here share: the distance, the reducer, the regularizers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nearfar.pml._names import Recorded
from nearfar.pml.distances import Distance
from nearfar.pml.reducers import Reducer

Regularizer = Callable[[Tensor], Tensor]
"""Rows [n, d] -> a number: `regularizers.LpRegularizer`, or any function of that form."""


class MinerSettings(Recorded, total=False):
    """Keyword arguments of every miner."""

    distance: Distance | None


class Settings(MinerSettings, total=False):
    """Keyword arguments of every loss."""

    reducer: Reducer | None
    embedding_regularizer: Regularizer | None
    embedding_reg_weight: float


class ClassSettings(Settings, total=False):
    """Further keyword arguments of losses with learned class vectors."""

    weight_regularizer: Regularizer | None
    weight_reg_weight: float
    weight_init_func: Callable[[Tensor], object] | None


def chosen_distance(owner: str, given: MinerSettings, default: Distance, *, fixed: bool = False) -> Distance:
    """The given distance, or the default; with `fixed` only the default is allowed."""
    distance = given.get("distance")
    if distance is None:
        return default
    if not isinstance(distance, Distance):
        raise TypeError(
            f"{owner}: distance must be CosineSimilarity, DotProductSimilarity or LpDistance of nearfar.pml.distances, "
            f"but came as {type(distance).__module__}.{type(distance).__name__}."
        )
    if fixed and repr(distance) != repr(default):
        raise ValueError(f"{owner}: distance must be {default!r}, but came as {distance!r}; leave it out.")
    return distance


def chosen_reducer(owner: str, given: Settings, default: Reducer, allowed: tuple[type[Reducer], ...]) -> Reducer:
    """The given reducer, or the default."""
    reducer = given.get("reducer")
    if reducer is None:
        return default
    if not isinstance(reducer, allowed):
        raise TypeError(
            f"{owner}: reducer must be {', '.join(kind.__name__ for kind in allowed)} of nearfar.pml.reducers, "
            f"but came as {type(reducer).__module__}.{type(reducer).__name__}."
        )
    return reducer

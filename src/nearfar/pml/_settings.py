"""Arguments that many classes here share: the distance, the reducer, the regularizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nearfar.pml._names import Recorded
from nearfar.pml.distances import BaseDistance, as_ours

__all__ = ["ClassSettings", "MinerSettings", "Regularizer", "Settings", "chosen_distance"]

Regularizer = Callable[[Tensor], Tensor]
"""Rows [n, d] -> a number: `regularizers.LpRegularizer`, or any function of that form."""


class MinerSettings(Recorded, total=False):
    """Keyword arguments of every miner."""

    distance: nn.Module | None


class Settings(MinerSettings, total=False):
    """Keyword arguments of every loss."""

    reducer: nn.Module | None
    embedding_regularizer: Regularizer | None
    embedding_reg_weight: float


class ClassSettings(Settings, total=False):
    """Further keyword arguments of losses with learned class vectors."""

    weight_regularizer: Regularizer | None
    weight_reg_weight: float
    weight_init_func: Callable[[Tensor], object] | None


def chosen_distance(owner: str, given: MinerSettings, default: BaseDistance, *, fixed: bool = False) -> Any:
    """The given distance, or the default; with `fixed` only the default is allowed.

    A distance of PML's becomes the same one of ours. A distance that a user wrote stays as it is: `similarity_of` and
    `score_of` of `nearfar.pml.distances` read it like ours.
    """
    distance = given.get("distance")
    if distance is None:
        return default
    found = as_ours(owner, distance)
    if fixed and repr(found) != repr(default):
        raise ValueError(f"{owner}: distance must be {default!r}, but came as {distance!r}; leave it out.")
    return found

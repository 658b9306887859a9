"""Uncertainty sets: the weights that the worst case over a group of losses may choose from."""

from typing import Never

from nearfar._utils.keywords import no_such_name
from nearfar.sets.base import UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.entropic import KL
from nearfar.sets.kl_ball import KLBall
from nearfar.sets.linear import Mean, Worst
from nearfar.sets.stream import Dual
from nearfar.sets.top_k import TopK, Trimmed
from nearfar.sets.wrapped import CalibratedKL, DetachedWeights, PowerWeights, Sampled

__all__ = [
    "KL",
    "CalibratedKL",
    "ChiSquare",
    "DetachedWeights",
    "Dual",
    "KLBall",
    "Mean",
    "PowerWeights",
    "Sampled",
    "TopK",
    "Trimmed",
    "UncertaintySet",
    "Worst",
]


def __getattr__(name: str) -> Never:
    """Raise an AttributeError that suggests the nearest existing name."""
    raise no_such_name("nearfar.sets", name, __all__)

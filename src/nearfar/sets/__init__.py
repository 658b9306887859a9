"""Uncertainty sets: the weights that the worst case over a group of losses may choose from."""

from nearfar._utils.keywords import suggest_names
from nearfar.sets.base import UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.entropic import KL, KLBall
from nearfar.sets.linear import Mean, Worst
from nearfar.sets.remembered import Remembered
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
    "Remembered",
    "Sampled",
    "TopK",
    "Trimmed",
    "UncertaintySet",
    "Worst",
]
__getattr__ = suggest_names("nearfar.sets", __all__)

"""Uncertainty sets: which weights the worst case may choose from. Each file opens with the problem it solves."""

from nearfar.sets.base import Dual, UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.entropic import KL, KLBall
from nearfar.sets.linear import Mean, TopK, Worst
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
    "UncertaintySet",
    "Worst",
]

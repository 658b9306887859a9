"""Uncertainty sets: which weights the worst case may choose from. Each file opens with the problem it solves."""

from typing import Never

from nearfar._utils.renamed import no_such_name
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


def __getattr__(name: str) -> Never:
    """Only what is not there is asked here."""
    raise no_such_name("nearfar.sets", name)

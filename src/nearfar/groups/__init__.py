"""Groupings: which pairs share one set of weights (the batch, a sign, an anchor, a positive pair, all triplets)."""

from nearfar.groups._groupings import Anchor, AnchorSign, Balanced, Batch, Grouping, Problem, Product, Sign
from nearfar.groups._ranking import Bins, Ranking
from nearfar.groups._triplets import AngularScore, Positive, Rule, SemiHardBand, Triplets

__all__ = [
    "Anchor",
    "AnchorSign",
    "AngularScore",
    "Balanced",
    "Batch",
    "Bins",
    "Grouping",
    "Positive",
    "Problem",
    "Product",
    "Ranking",
    "Rule",
    "SemiHardBand",
    "Sign",
    "Triplets",
]

"""Evaluation: neighbours, retrieval and clustering scores, error bars, comparison, verification."""

from nearfar.evaluation.bootstrap import Interval
from nearfar.evaluation.clustering import k_means
from nearfar.evaluation.neighbours import Neighbours, neighbours
from nearfar.evaluation.summary import ClassRow, Comparison, Evaluation, compare, evaluate
from nearfar.evaluation.verification import Verification, verification

__all__ = [
    "ClassRow",
    "Comparison",
    "Evaluation",
    "Interval",
    "Neighbours",
    "Verification",
    "compare",
    "evaluate",
    "k_means",
    "neighbours",
    "verification",
]

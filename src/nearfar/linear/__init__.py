"""Linear metric learning with certified steps: objectives of a matrix A, descent, CCP, and the convex reference."""

from typing import TYPE_CHECKING, Any

from nearfar._utils.extras import need
from nearfar.linear._ccp import ccp
from nearfar.linear._convex import psd_reference
from nearfar.linear._descent import descend, safe_step
from nearfar.linear._learning_rate import StepGuard, Suggestion, suggest_step
from nearfar.linear._objective import ContrastiveObjective, TripletObjective

if TYPE_CHECKING:
    from nearfar.linear._learner import TripletLearner

__all__ = [
    "ContrastiveObjective",
    "StepGuard",
    "Suggestion",
    "TripletLearner",
    "TripletObjective",
    "ccp",
    "descend",
    "psd_reference",
    "safe_step",
    "suggest_step",
]


def __getattr__(name: str) -> Any:
    """Import `TripletLearner`, which needs scikit-learn, on first access."""
    if name == "TripletLearner":
        need("sklearn", "TripletLearner", "linear")
        from nearfar.linear._learner import TripletLearner

        return TripletLearner
    raise AttributeError(f"module 'nearfar.linear' has no attribute {name!r}")

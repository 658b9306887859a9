"""Linear metric learning with certificates: objectives of a matrix A, safe steps, CCP, and the convex reference."""

from typing import TYPE_CHECKING, Any

from nearfar._utils.extras import need
from nearfar.linear.ccp import ccp
from nearfar.linear.convex import psd_reference
from nearfar.linear.descent import descend, safe_step
from nearfar.linear.objective import ContrastiveObjective, TripletObjective

if TYPE_CHECKING:
    from nearfar.linear.learner import TripletLearner

__all__ = ["ContrastiveObjective", "TripletLearner", "TripletObjective", "ccp", "descend", "psd_reference", "safe_step"]


def __getattr__(name: str) -> Any:
    """Import `TripletLearner`, which alone needs scikit-learn, on first access."""
    if name == "TripletLearner":
        need("sklearn", "TripletLearner", "linear")
        from nearfar.linear.learner import TripletLearner

        return TripletLearner
    raise AttributeError(f"module 'nearfar.linear' has no attribute {name!r}")

"""Linear metric learning with certificates: objectives of a matrix A, safe steps, CCP, and the convex reference."""

from nearfar.linear.ccp import ccp
from nearfar.linear.convex import psd_reference
from nearfar.linear.descent import descend, safe_step
from nearfar.linear.learner import TripletLearner
from nearfar.linear.objective import ContrastiveObjective, TripletObjective

__all__ = ["ContrastiveObjective", "TripletLearner", "TripletObjective", "ccp", "descend", "psd_reference", "safe_step"]

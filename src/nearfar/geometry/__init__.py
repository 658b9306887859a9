"""Triplet separation and the distance of a space to it (Xu et al. 2022), thickness, and measures of collapse."""

from nearfar.batches import Violations, violations
from nearfar.geometry.collapse import Collapse, Pull, active_triplets, collapse, effective_rank, pull
from nearfar.geometry.isometry import Separation, hausdorff_distance, isometric_error
from nearfar.geometry.ladder import ladder
from nearfar.geometry.metric_bounds import isometric_bound, least_spread, lift, separated_metric
from nearfar.geometry.repair import Repair, repair
from nearfar.geometry.rigid import NearIsometry, hausdorff_between, isometric_error_between, near_isometry
from nearfar.geometry.separation import HardTriplet, hardest_triplet, hardness, is_triplet_separated
from nearfar.geometry.thickness import Constants, Thickness, constants, thickness

__all__ = [
    "Collapse",
    "Constants",
    "HardTriplet",
    "NearIsometry",
    "Pull",
    "Repair",
    "Separation",
    "Thickness",
    "Violations",
    "active_triplets",
    "collapse",
    "constants",
    "effective_rank",
    "hardest_triplet",
    "hardness",
    "hausdorff_between",
    "hausdorff_distance",
    "is_triplet_separated",
    "isometric_bound",
    "isometric_error",
    "isometric_error_between",
    "ladder",
    "least_spread",
    "lift",
    "near_isometry",
    "pull",
    "repair",
    "separated_metric",
    "thickness",
    "violations",
]

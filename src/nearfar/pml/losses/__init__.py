"""PML's losses by their names; each is a recipe of `RobustLoss`, held as `loss.robust`."""

from nearfar.pml._theirs import theirs
from nearfar.pml.losses.classes import ArcFaceLoss, ProxyAnchorLoss, ProxyNCALoss
from nearfar.pml.losses.margin import MarginLoss
from nearfar.pml.losses.memory import CrossBatchMemory
from nearfar.pml.losses.pairs import (
    ContrastiveLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
)
from nearfar.pml.losses.softmax import CircleLoss, NPairsLoss, NTXentLoss, SupConLoss
from nearfar.pml.losses.triplets import AngularLoss, TripletMarginLoss

__all__ = [
    "AngularLoss",
    "ArcFaceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CrossBatchMemory",
    "GeneralizedLiftedStructureLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "NPairsLoss",
    "NTXentLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SupConLoss",
    "TripletMarginLoss",
]

__getattr__, __dir__ = theirs(__name__)

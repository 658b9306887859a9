"""PML's losses by their names; each is a recipe of `RobustLoss`, held as `loss.robust`."""

from nearfar.pml._theirs import theirs
from nearfar.pml.losses.centers import SoftTripleLoss, SubCenterArcFaceLoss
from nearfar.pml.losses.classes import ArcFaceLoss, ProxyAnchorLoss, ProxyNCALoss
from nearfar.pml.losses.classification import (
    CosFaceLoss,
    LargeMarginSoftmaxLoss,
    NormalizedSoftmaxLoss,
    SphereFaceLoss,
)
from nearfar.pml.losses.margin import MarginLoss
from nearfar.pml.losses.memory import CrossBatchMemory
from nearfar.pml.losses.neighbors import GenericPairLoss, IntraPairVarianceLoss, NCALoss, TupletMarginLoss
from nearfar.pml.losses.pairs import (
    ContrastiveLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
)
from nearfar.pml.losses.ranking import FastAPLoss, RankedListLoss, SmoothAPLoss
from nearfar.pml.losses.softmax import CircleLoss, NPairsLoss, NTXentLoss, SupConLoss
from nearfar.pml.losses.triplets import AngularLoss, TripletMarginLoss
from nearfar.pml.losses.views import BaseLossWrapper, MultipleLosses, SelfSupervisedLoss, VICRegLoss

__all__ = [
    "AngularLoss",
    "ArcFaceLoss",
    "BaseLossWrapper",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CrossBatchMemory",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "GenericPairLoss",
    "IntraPairVarianceLoss",
    "LargeMarginSoftmaxLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "MultipleLosses",
    "NCALoss",
    "NPairsLoss",
    "NTXentLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "RankedListLoss",
    "SelfSupervisedLoss",
    "SmoothAPLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
    "VICRegLoss",
]

__getattr__, __dir__ = theirs(__name__)

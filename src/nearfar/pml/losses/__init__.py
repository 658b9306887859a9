"""PML's losses; the classes named here use nearfar's code whenever the result is the same."""

from nearfar.pml._modules import delegate
from nearfar.pml.losses._classes import ArcFaceLoss, CosFaceLoss
from nearfar.pml.losses._pairs import (
    CircleLoss,
    ContrastiveLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NTXentLoss,
    SupConLoss,
    TupletMarginLoss,
)
from nearfar.pml.losses._triplets import MarginLoss, TripletMarginLoss

__all__ = [
    "ArcFaceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "GeneralizedLiftedStructureLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SupConLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
]

__getattr__, __dir__ = delegate(__name__)

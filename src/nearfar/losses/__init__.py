"""Every named loss, one class each: a recipe of `RobustLoss`. `docs/guides/which-loss.md` says which to use when."""

from nearfar.losses.anchored import HAP2S, GeneralizedLifted, LiftedStructure, MultiSimilarity
from nearfar.losses.dro import DroChiSquare, DroKL, DroKLGrouped, DroTopK, DroTopKPN, DroWorst
from nearfar.losses.mean import BinomialDeviance, Contrastive, Margin
from nearfar.losses.proxies import ArcFace, ProxyAnchor, ProxyNCA
from nearfar.losses.softmax import Circle, NPair, NTXent, SupCon
from nearfar.losses.triplet import Angular, Triplet

__all__ = [
    "HAP2S",
    "Angular",
    "ArcFace",
    "BinomialDeviance",
    "Circle",
    "Contrastive",
    "DroChiSquare",
    "DroKL",
    "DroKLGrouped",
    "DroTopK",
    "DroTopKPN",
    "DroWorst",
    "GeneralizedLifted",
    "LiftedStructure",
    "Margin",
    "MultiSimilarity",
    "NPair",
    "NTXent",
    "ProxyAnchor",
    "ProxyNCA",
    "SupCon",
    "Triplet",
]

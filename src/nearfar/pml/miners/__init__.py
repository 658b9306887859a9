"""PML's miners; the classes named here use nearfar's code whenever the result is the same."""

from nearfar.pml._modules import delegate
from nearfar.pml.miners._native import BatchHardMiner, MultiSimilarityMiner, PairMarginMiner, TripletMarginMiner

__all__ = ["BatchHardMiner", "MultiSimilarityMiner", "PairMarginMiner", "TripletMarginMiner"]

__getattr__, __dir__ = delegate(__name__)

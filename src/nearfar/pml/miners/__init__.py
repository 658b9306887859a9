"""PML's miners: they choose pairs or triplets of a batch, as index tuples.

A miner that returns pairs gives (anchor, positive, anchor, negative), one that returns triplets (anchor, positive,
negative). Where nearfar has a miner of the same rule, that one is used and its mask is converted to a list.
"""

from nearfar.pml._theirs import theirs
from nearfar.pml.miners.base import BaseMiner
from nearfar.pml.miners.easy_hard import BatchEasyHardMiner, BatchHardMiner
from nearfar.pml.miners.pairs import HDCMiner, MultiSimilarityMiner, PairMarginMiner, UniformHistogramMiner
from nearfar.pml.miners.triplets import (
    AngularMiner,
    DistanceWeightedMiner,
    EmbeddingsAlreadyPackagedAsTriplets,
    TripletMarginMiner,
)

__all__ = [
    "AngularMiner",
    "BaseMiner",
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "DistanceWeightedMiner",
    "EmbeddingsAlreadyPackagedAsTriplets",
    "HDCMiner",
    "MultiSimilarityMiner",
    "PairMarginMiner",
    "TripletMarginMiner",
    "UniformHistogramMiner",
]

__getattr__, __dir__ = theirs(__name__)

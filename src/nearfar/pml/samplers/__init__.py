"""PML's samplers: which samples make a batch."""

from nearfar.pml._theirs import theirs
from nearfar.pml.samplers.hierarchical import HierarchicalSampler
from nearfar.pml.samplers.m_per_class import MPerClassSampler
from nearfar.pml.samplers.triplets import FixedSetOfTriplets
from nearfar.pml.samplers.tuples import TuplesToWeightsSampler

__all__ = ["FixedSetOfTriplets", "HierarchicalSampler", "MPerClassSampler", "TuplesToWeightsSampler"]

__getattr__, __dir__ = theirs(__name__)

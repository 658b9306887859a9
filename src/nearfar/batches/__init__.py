"""Batch samplers for a DataLoader, and the other tools of alternating projections (Can et al. 2019)."""

from nearfar._utils.keywords import suggest_names
from nearfar.batches._hard_classes import HardClasses
from nearfar.batches._m_per_class import MPerClass
from nearfar.batches._mined import MinedNegatives
from nearfar.batches._pairs import QueryPairs
from nearfar.batches._proximal import Proximal
from nearfar.batches._representatives import Representatives
from nearfar.batches._violations import Violations, violations

__all__ = [
    "HardClasses",
    "MPerClass",
    "MinedNegatives",
    "Proximal",
    "QueryPairs",
    "Representatives",
    "Violations",
    "violations",
]
__getattr__ = suggest_names("nearfar.batches", __all__)

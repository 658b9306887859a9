"""Batch samplers for a DataLoader, and what alternating projections (Can et al. 2019) need beside a loss."""

from nearfar.batches.hard_classes import HardClasses
from nearfar.batches.m_per_class import MPerClass
from nearfar.batches.proximal import Proximal
from nearfar.batches.representatives import Representatives
from nearfar.batches.violations import Violations, violations

__all__ = ["HardClasses", "MPerClass", "Proximal", "Representatives", "Violations", "violations"]

"""Diagnose an embedding space or a training run: healthy, collapsing, stalled or only slow; and suggest remedies."""

from nearfar.doctor._callback import Doctor
from nearfar.doctor._embeddings import diagnose
from nearfar.doctor._findings import Diagnosis, Finding
from nearfar.doctor._prescription import Prescription, prescribe
from nearfar.doctor._run import diagnose_journal, diagnose_run
from nearfar.doctor._thresholds import Thresholds

__all__ = [
    "Diagnosis",
    "Doctor",
    "Finding",
    "Prescription",
    "Thresholds",
    "diagnose",
    "diagnose_journal",
    "diagnose_run",
    "prescribe",
]

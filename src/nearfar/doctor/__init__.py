"""Diagnose an embedding space or a training run: healthy, collapsing, stalled or only slow; and suggest remedies."""

from nearfar.doctor.callback import Doctor
from nearfar.doctor.embeddings import diagnose
from nearfar.doctor.findings import Diagnosis, Finding
from nearfar.doctor.prescription import Prescription, prescribe
from nearfar.doctor.run import diagnose_journal, diagnose_run
from nearfar.doctor.thresholds import Thresholds

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

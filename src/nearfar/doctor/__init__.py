"""The doctor: diagnoses whether a space or a run is healthy, collapsing, stalled or only slow, with remedies."""

from nearfar.doctor.callback import Doctor
from nearfar.doctor.findings import Diagnosis, Finding
from nearfar.doctor.history import diagnose_journal
from nearfar.doctor.prescription import Prescription, diagnose_run, prescribe
from nearfar.doctor.space import diagnose
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

"""What a line of results contains besides scores: test classes, a summary of the journal, and the device."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nearfar import __version__
from nearfar.doctor import diagnose_run
from nearfar.doctor._looks import read_looks
from nearfar.evaluation import Evaluation
from nearfar.runs import _journal as journal

Plain = dict[str, Any]
POINTS = 20  # steps whose loss is stored
MOST_CLASSES = 256  # with more, classes are left out, so that a line of results stays at a few kB


def by_class(found: Evaluation) -> Plain:
    """The number of queries, R@1 and MAP@R of each test class, in the order of the labels; empty with many classes."""
    rows = sorted(found.per_class, key=lambda row: row.label)
    if not 0 < len(rows) <= MOST_CLASSES:
        return {}
    return {
        "queries": [row.queries for row in rows],
        "recall@1": [round(row.recall_at_1, 4) for row in rows],
        "map_at_r": [round(row.map_at_r, 4) for row in rows],
    }


def of_journal(folder: Path, batch: int) -> Plain:
    """A summary of the journal of a run with batches of `batch` samples.

    `loss`: [step, value] at about twenty steps; `looks`: [step, spread, effective rank, recall] of the doctor;
    `findings`: name -> the worst severity, and the first and the last step at which it was found, while training;
    `verdict`: name -> severity of the diagnosis at the end; `seconds`; `images_per_second` after the first ten steps.
    """
    entries = journal.read(folder / "journal.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    every = max(1, len(steps) // POINTS)
    chosen = [*steps[::every], *steps[-1:]] if steps and steps[-1] is not steps[::every][-1] else steps[::every]
    return {
        "loss": [[entry["step"], float(f"{entry['loss']:.5g}")] for entry in chosen],
        "looks": [[sight.step, *_short(sight.spread, sight.rank, sight.recall)] for sight in read_looks(entries)],
        "findings": _findings(entries),
        "verdict": {each.name: each.severity for each in diagnose_run(folder).findings},
        "seconds": steps[-1]["time"] if steps else None,
        "images_per_second": _pace(steps, batch),
    }


def _short(*values: float | None) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in values]


def _findings(entries: Sequence[Mapping[str, Any]]) -> Plain:
    """Each finding during training, with its worst severity and its first and last step."""
    order = ("note", "warning", "alarm")
    found: Plain = {}
    for entry in entries:
        for name, severity in entry.get("doctor", {}).items():
            finding = found.setdefault(name, {"severity": severity, "first": entry["step"]})
            finding["last"] = entry["step"]
            finding["severity"] = max(finding["severity"], severity, key=order.index)
    return found


def _pace(steps: Sequence[Mapping[str, Any]], batch: int) -> float | None:
    """Images per second, without the first ten steps."""
    later = steps[min(10, len(steps) // 2) :]
    seconds = float(later[-1]["time"] - later[0]["time"]) if later else 0.0
    return round(batch * (len(later) - 1) / seconds, 1) if seconds > 0 else None


def device() -> Plain:
    """The device that trains, and the versions."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"nearfar": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }

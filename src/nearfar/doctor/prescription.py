"""The diagnosis of a run folder, and its remedy as a changed configuration for the next run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.doctor.findings import Diagnosis, Finding
from nearfar.doctor.history import Outcome, diagnose_journal
from nearfar.runs import journal
from nearfar.runs.config import Config, apply_flags, flat, load, to_tree
from nearfar.runs.parts import check

__all__ = ["Prescription", "against", "diagnose_run", "prescribe"]


@dataclass(frozen=True)
class Prescription:
    """A remedy as a configuration that can be trained.

    Attributes:
        finding: the finding that it treats, the worst of the run.
        config: the run's configuration with the remedy's flags.
        changes: the changes, one line each, such as "loss.mining: hard -> semihard".
    """

    finding: Finding
    config: Config
    changes: tuple[str, ...]

    def text(self) -> str:
        """The prescription as text."""
        return f"{self.finding.severity}: {self.finding.name}. Changed: {'; '.join(self.changes)}."


def diagnose_run(folder: Path) -> Diagnosis:
    """Diagnose a run folder from its journal, and its configuration if there is one.

    Raises:
        FileNotFoundError: the folder holds no journal.
    """
    path, written, scores = (folder / name for name in ("journal.jsonl", "config.yaml", "scores.json"))
    if not path.is_file():
        raise FileNotFoundError(f"doctor: {folder} holds no journal.jsonl; name the folder that `nearfar train` wrote.")
    return diagnose_journal(
        journal.read(path),
        config=load(written) if written.is_file() else None,
        tested=Outcome.of(json.loads(scores.read_text(encoding="utf-8"))) if scores.is_file() else None,
    )


def prescribe(folder: Path) -> Prescription:
    """Turn the remedy of a run's worst finding into a configuration, to train from the start.

    Raises:
        FileNotFoundError: the folder holds no journal or no configuration.
        ValueError: nothing above a note was found, its remedy is not a change of configuration, or changes nothing.
    """
    found = diagnose_run(folder)
    if found.healthy:
        raise ValueError(f"doctor: {folder} is healthy, so that there is nothing to change.")
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"doctor: {folder} holds no config.yaml, so that there is nothing to change.")
    ill = [finding for finding in found.findings if finding.severity != "note"]
    return against(ill[0], load(folder / "config.yaml"))


def against(finding: Finding, config: Config) -> Prescription:
    """Apply the flags of a finding to a configuration."""
    if not finding.flags:
        raise ValueError(f"doctor: the remedy for {finding.name!r} is no change of configuration: {finding.remedy}")
    cured = apply_flags(config, finding.flags)
    check(cured)
    before, after = flat(to_tree(config)), flat(to_tree(cured))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        raise ValueError(
            f"doctor: the configuration already has the remedy for {finding.name!r}; what is left: {finding.remedy}"
        )
    return Prescription(
        finding, cured, tuple(f"{name}: {_word(before.get(name))} -> {_word(after.get(name))}" for name in names)
    )


def _word(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

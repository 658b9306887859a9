"""`prescribe`: turn the worst finding of a run into a changed configuration for the next run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.doctor._findings import Finding
from nearfar.doctor._run import diagnose_run
from nearfar.runs._config import apply_flags, flat, load, to_tree
from nearfar.runs._parts import check
from nearfar.runs._sections import Config


@dataclass(frozen=True)
class Prescription:
    """A remedy as a configuration that can be trained.

    Attributes:
        finding: the worst finding of the run.
        config: the run's configuration with the flags of the remedy.
        changes: one line per change, such as "loss.mining: hard -> semihard".
    """

    finding: Finding
    config: Config
    changes: tuple[str, ...]

    def text(self) -> str:
        """The finding and the changes in one line."""
        return f"{self.finding.severity}: {self.finding.name}. Changed: {'; '.join(self.changes)}."


def prescribe(folder: Path) -> Prescription:
    """Apply the remedy of a run's worst finding to its configuration, to train from the start.

    Raises:
        FileNotFoundError: the folder holds no journal or no configuration.
        ValueError: the run is healthy, or the remedy would not change its configuration.
    """
    found = diagnose_run(folder)
    if found.healthy:
        raise ValueError(f"doctor: {folder} is healthy, so there is nothing to change.")
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"doctor: {folder} holds no config.yaml, so there is nothing to change.")
    ill = [finding for finding in found.findings if finding.severity != "note"]
    return apply_remedy(ill[0], load(folder / "config.yaml"))


def apply_remedy(finding: Finding, config: Config) -> Prescription:
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
    changes = (f"{name}: {_format(before.get(name))} -> {_format(after.get(name))}" for name in names)
    return Prescription(finding, cured, tuple(changes))


def _format(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

"""Findings, each with its evidence and a remedy, and the diagnosis that collects them."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

from nearfar._utils.html import table

Severity = Literal["note", "warning", "alarm"]
ORDER: tuple[Severity, ...] = ("alarm", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    Attributes:
        name: a short name, such as "class collapse".
        severity: "note": good to know; "warning": look into it; "alarm": the run is lost unless something changes.
        evidence: the numbers behind it, in a sentence.
        remedy: what to change, in a sentence that names options of `nearfar train`.
        rows: the rows concerned, worst first, for findings about rows.
        flags: the remedy as flags of `nearfar train`, such as ("loss.mining", "semihard"); empty if flags cannot
            express it.
    """

    name: str
    severity: Severity
    evidence: str
    remedy: str
    rows: tuple[int, ...] = ()
    flags: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.severity}: {self.name}. {self.evidence} {self.remedy}"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a space or a run: its findings and the measures behind them.

    Attributes:
        findings: alarms first.
        measures: the numbers that were examined, by name.
    """

    findings: tuple[Finding, ...]
    measures: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def healthy(self) -> bool:
        """Whether there is no finding above a note."""
        return all(finding.severity == "note" for finding in self.findings)

    def __contains__(self, name: object) -> bool:
        return any(finding.name == name for finding in self.findings)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """An HTML table for notebooks, one row per finding, alarms first."""
        rows = [(each.severity, each.name, each.evidence, each.remedy) for each in self.findings]
        if not rows:
            return f"<p>{escape(verdict(self.findings))}</p>"
        head = ("", "finding", "evidence", "what to change")
        return table(head, rows, caption=verdict(self.findings), words=range(4))

    def text(self, width: int = 100) -> str:
        """The diagnosis in words."""
        lines = [verdict(self.findings)]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.name}")
            for part in (finding.evidence, finding.remedy):
                lines += textwrap.wrap(part, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as values that JSON can hold."""
        return {
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "measures": self.measures,
        }


def verdict(findings: tuple[Finding, ...]) -> str:
    """The first line of a diagnosis: healthy, or the number of alarms and warnings."""
    counts = {word: sum(finding.severity == word for finding in findings) for word in ORDER}
    if not counts["alarm"] and not counts["warning"]:
        return "Healthy." if not counts["note"] else f"Healthy, with {_many(counts['note'], 'note')}."
    return f"Not healthy: {', '.join(_many(count, word) for word, count in counts.items() if count)}."


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count > 1)}"


def conclude(findings: Iterable[Finding], measures: dict[str, Any]) -> Diagnosis:
    """Build a diagnosis, sorted by severity with alarms first."""
    return Diagnosis(tuple(sorted(findings, key=lambda finding: ORDER.index(finding.severity))), measures)


def list_rows(rows: Iterable[int], most: int = 10) -> str:
    """Format row numbers for a sentence.

    >>> list_rows(range(10)), list_rows(range(12))
    ('0, 1, 2, 3, 4, 5, 6, 7, 8, 9', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more')
    """
    numbers = [str(row) for row in rows]
    return ", ".join(numbers[:most]) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")

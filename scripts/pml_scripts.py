"""The table of two training scripts, before and after the import was changed: written into docs/start/from-pml.md.

python scripts/pml_scripts.py            write the table anew, from benchmarks/results/pml_scripts_cpu.json

`tests/pml/test_scripts.py` holds the page to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start" / "from-pml.md"
RESULTS = ROOT / "benchmarks" / "results" / "pml_scripts_cpu.json"
START, END = "<!-- pml_scripts -->\n", "<!-- /pml_scripts -->"


def table(told: dict[str, Any]) -> str:
    """The section: what was run, and the seconds of both."""
    said = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    lines = [
        f"CPU seconds ({told['device']}), medians of some runs on a machine that others used too; {said}.",
        "",
        "| script | part | PML | `nearfar.pml` | PML / ours |",
        "|---|---|---|---|---|",
    ]
    for row in told["results"]:
        for part, before in row["seconds"]["PML"].items():
            after = row["seconds"]["nearfar"][part]
            lines.append(f"| {row['script']} | {part} | {before:.2f} | {after:.2f} | {before / after:.2f} |")
    return "\n".join(lines) + "\n"


def shown(page: str) -> str:
    """What the page has between its marks."""
    return page.split(START)[1].split(END)[0]


def main() -> None:
    """Write the section into the page."""
    page = PAGE.read_text(encoding="utf-8")
    made = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    write_text(PAGE, page.replace(START + shown(page) + END, START + made + END))


if __name__ == "__main__":
    main()

"""Two training scripts of benchmarks/pml_scripts with PML, and with the import replaced by nearfar.pml.

    python benchmarks/speed/pml_scripts.py                 some minutes, CPU, one thread a process
    python benchmarks/speed/pml_scripts.py --rounds 1      does it run at all?

The two libraries take turns, each script in a new process; medians of CPU seconds, of rank 0 if there are two
processes. Results are written to benchmarks/results/pml_scripts_cpu.json, and from there to docs/start/from-pml.md by
scripts/pml_scripts.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_metric_learning as theirs
import torch

import nearfar
from nearfar._utils.files import write_text

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results"
SCRIPTS = {"triplets, one process": "triplets.py", "multi-similarity, two processes": "two_processes.py"}
LIBRARIES = {"PML": "pytorch_metric_learning", "nearfar": "nearfar.pml"}


def replace_imports(text: str, library: str) -> str:
    """A script with the imports of one library."""
    return text.replace("from pytorch_metric_learning", f"from {LIBRARIES[library]}")


def once(script: str, library: str, folder: Path) -> dict[str, Any]:
    """Run a script in a new process, and parse its last line."""
    file = folder / script
    write_text(file, replace_imports((HERE / "pml_scripts" / script).read_text(encoding="utf-8"), library))
    process = subprocess.run([sys.executable, str(file)], check=True, capture_output=True, text=True, encoding="utf-8")
    found: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians of both libraries."""
    runs: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for library, found in runs.items():
                found.append(once(SCRIPTS[name], library, Path(folder)))
    parts = runs["PML"][0]["seconds"]
    seconds = {
        library: {part: statistics.median(run["seconds"][part] for run in found) for part in parts}
        for library, found in runs.items()
    }
    ends = {library: {key: x for key, x in found[0].items() if key != "seconds"} for library, found in runs.items()}
    return {"script": name, "file": SCRIPTS[name], "rounds": rounds, "seconds": seconds, "ends": ends}


def main() -> None:
    """Measure both scripts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--scripts", nargs="*", choices=tuple(SCRIPTS), metavar="SCRIPT")
    given = parser.parse_args()
    file = given.out / "pml_scripts_cpu.json"
    held = json.loads(file.read_text(encoding="utf-8"))["results"] if given.scripts and file.exists() else []
    for name in given.scripts or SCRIPTS:  # written as it goes, and what was measured of other scripts stays
        held = [row for row in held if row["script"] != name] + [measure(name, given.rounds)]
        print(held[-1], flush=True)
        write(file, sorted(held, key=lambda row: list(SCRIPTS).index(row["script"])))


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the results."""
    versions = {
        "nearfar": nearfar.__version__,
        "torch": torch.__version__,
        "pytorch-metric-learning": theirs.__version__,
    }
    record = {"device": "one thread a process", "versions": versions, "results": rows}
    write_text(file, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

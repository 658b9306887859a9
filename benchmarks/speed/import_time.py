"""Time of `import nearfar` beside `import torch`: medians over new processes.

    python benchmarks/speed/import_time.py                  about a minute
    python benchmarks/speed/import_time.py --rounds 5       less

Each process imports torch and then nearfar, so that both are measured under the same load; nearfar's time is the sum,
because it imports torch. Bytecode is compiled before the first round, as pip does when it installs. CPU seconds are
counted, without the start of Python. The goal is a ratio of 1.15.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import nearfar
from nearfar._utils.files import write_text

RESULTS = Path(__file__).parents[1] / "results"
GOAL = 1.15
CODE = """
import time
begun = time.process_time()
import torch
middle = time.process_time()
import nearfar
print(middle - begun, time.process_time() - begun)
"""


def seconds(compiled: str) -> tuple[float, float]:
    """CPU seconds of both imports in a new process; `compiled` is the folder of the bytecode."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    sources = {"PYTHONPATH": str(Path(nearfar.__file__).parents[1]), "PYTHONPYCACHEPREFIX": compiled}
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", env=kept | sources, check=True)
    theirs, ours = map(float, done.stdout.split())
    return theirs, ours


def measure(rounds: int) -> dict:
    """Medians of the two times, and of their ratio."""
    with tempfile.TemporaryDirectory() as compiled:
        seconds(compiled)  # compiles, and reads the disk
        took = [seconds(compiled) for _ in range(rounds)]
    ratios = sorted(ours / theirs for theirs, ours in took)
    torch, ours = (statistics.median(column) for column in zip(*took, strict=True))
    return {
        "rounds": rounds,
        "seconds": {"torch": round(torch, 4), "nearfar": round(ours, 4)},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(each, 4) for each in ratios],
        "goal": GOAL,
        "versions": {"python": platform.python_version(), "torch": version("torch"), "nearfar": nearfar.__version__},
    }


def page(found: dict) -> str:
    software = ", ".join(f"{name} {word}" for name, word in found["versions"].items())
    least, *_, most = found["ratios"]
    lines = [
        "# Import time",
        f"Medians of {found['rounds']} processes, CPU seconds. {software}.",
        "| import | CPU s | beside torch |\n|---|---|---|\n"
        f"| torch | {found['seconds']['torch']:.2f} | 1.00 |\n"
        f"| nearfar, which imports torch | {found['seconds']['nearfar']:.2f} | {found['ratio']:.2f} |",
        f"The goal is {found['goal']}; single processes lie between {least:.2f} and {most:.2f}.",
    ]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "import_cpu.json")
    args = parser.parse_args()
    found = measure(args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, json.dumps(found, indent=1) + "\n")
    write_text(args.out.with_suffix(".md"), page(found))
    print(page(found))


if __name__ == "__main__":
    main()

"""`hardness`, the shrink s* and the cheap bounds of both distances: time and memory, each in a new process.

    python benchmarks/speed/geometry.py                    60,000 x 128 (s* of 5,000), some minutes on two cores
    python benchmarks/speed/geometry.py --rows 5000        seconds

The goals are 40 seconds on two cores and 300 MB above what is held when the call begins. Rows are unit rows like those
of a trained network: class centers and noise, five rows a class. Seconds by the clock include other work on the
machine; seconds of the processor are of all threads together. On a busy machine two threads wait for each other:
OMP_NUM_THREADS=1 measures the work alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before NumPy is loaded

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import nearfar as nf
from nearfar import geometry

RESULTS = Path(__file__).parents[1] / "results"
SHRUNK = 5000
BARS = {"seconds": 40, "MB": 300}
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hardness": geometry.hardness,
    "hardness, on the sphere": lambda x, y: geometry.hardness(x, y, metric="angle"),
    "isometric_error, bounds": lambda x, y: geometry.isometric_error(x, y, solve=False).upper,
    "hausdorff_distance, bounds": lambda x, y: geometry.hausdorff_distance(x, y, solve=False).upper,
    "repair (s*), 5,000 rows": lambda x, y: geometry.repair(x[:SHRUNK], y[:SHRUNK]).shrink,
}


def draw_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    y = torch.arange(rows) // 5
    centers = torch.randn(int(y.max()) + 1, width, generator=noise)
    return normalize(centers[y] + 0.9 * torch.randn(rows, width, generator=noise)), y


def resident(key: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MB; Linux only."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {key} in /proc/self/status")


def one(name: str, rows: int, width: int) -> dict[str, Any]:
    x, y = draw_rows(rows, width)
    geometry.hardness(x[:2000], y[:2000])  # libraries are loaded before memory is looked at
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    clock, cpu = time.perf_counter(), time.process_time()
    found = CALLS[name](x, y)
    seconds = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    return {"call": name, **seconds, "MB": resident("VmHWM") - before, "value": float(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--one", help="one call, in this process; prints JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.rows, given.width)))
        return
    entries = []
    for name in CALLS:
        again = [sys.executable, __file__, "--one", name, "--rows", str(given.rows), "--width", str(given.width)]
        entries.append(json.loads(subprocess.run(again, check=True, capture_output=True, encoding="utf-8").stdout))
        print(entries[-1], flush=True)
    versions = {"nearfar": nf.__version__, "torch": torch.__version__, "python": platform.python_version()}
    config = {"rows": given.rows, "width": given.width, "threads": torch.get_num_threads()}
    record = {"config": config, "versions": versions, "bars": BARS, "load": os.getloadavg(), "results": entries}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "geometry_cpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# Geometry, CPU: {given.rows:,} x {given.width}",
        "",
        f"Threads: {config['threads']}; each call in a process of its own; memory above what is held when it begins. "
        f"Bars: {BARS['seconds']} s, {BARS['MB']} MB. Load of the machine at the end (1, 5, 15 minutes): "
        f"{', '.join(f'{x:.1f}' for x in record['load'])}. {versions}.",
        "",
        "| call | seconds by the clock | seconds of the processor | MB |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {e['call']} | {e['seconds']:.1f} | {e['cpu_seconds']:.1f} | {e['MB']:.0f} |" for e in entries]
    (RESULTS / "geometry_cpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

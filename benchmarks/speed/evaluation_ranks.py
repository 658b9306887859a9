"""300,000 x 128 test vectors evaluated by 1, 2 and 4 processes: time, peak memory of a process, equal scores.

    python benchmarks/speed/evaluation_ranks.py [--rows 300000] [--width 128] [--processes 1 2 4] [--threads 1]

Vectors lie in a folder that is mapped into memory, as `nearfar embed -o all.vectors` writes it. Each count is a real
`nearfar evaluate --processes N`. `cpu_seconds` are those of all processes together, their starts included. Memory is
that of the largest process: its peak of anonymous memory (`own_mib`), and its peak with the pages of files that it has
read (`with_file_mib`, VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from nearfar.evaluation.vectors_folder import write_folder


def status(process: int, key: str) -> int:
    """A number of /proc/<process>/status in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = [line for line in text.splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(lines[0].split()[1]) if lines else 0


def descendants(process: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    except OSError:
        return [process]
    return [process, *(each for child in children for each in descendants(int(child)))]


class Peaks(threading.Thread):
    """The largest memory of any process below one, looked at four times a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.whole, self.own, self.ended = process, 0, 0, threading.Event()

    def run(self) -> None:
        """Look until `ended` is set."""
        while not self.ended.wait(0.25):
            for each in descendants(self.process):
                self.whole = max(self.whole, status(each, "VmHWM"))
                self.own = max(self.own, status(each, "RssAnon"))


def cpu_seconds() -> float:
    """Seconds of processors that ended processes have used: what a busy machine does not change much."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def measure(folder: Path, processes: int, threads: int) -> dict[str, object]:
    """One evaluation by some processes."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "nearfar", "evaluate", "all.vectors", "--json", f"{processes}.json"]
    began, used = time.monotonic(), cpu_seconds()
    running = subprocess.Popen([*words, "--processes", str(processes)], cwd=folder, env=env, stdout=subprocess.DEVNULL)
    peaks = Peaks(running.pid)
    peaks.start()
    code = running.wait()
    peaks.ended.set()
    peaks.join()
    if code:
        sys.exit(f"{processes} processes ended with {code}")
    scores = json.loads((folder / f"{processes}.json").read_text(encoding="utf-8"))
    return {
        "processes": processes,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - used, 1),
        "own_mib": peaks.own >> 20,
        "with_file_mib": peaks.whole >> 20,
        "scores": scores,
    }


def main() -> None:
    """Write the vectors, evaluate them, and print a line a count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--classes", type=int, default=60_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    centers, y = random.normal(size=(args.classes, args.width)), np.arange(args.rows) % args.classes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chunks = (
            (centers[y[at : at + 10_000]] + 1.5 * random.normal(size=(len(y[at : at + 10_000]), args.width))).astype(
                "f4"
            )
            for at in range(0, args.rows, 10_000)
        )
        write_folder(folder / "all.vectors", chunks, {"y": y})
        first: object = None
        for processes in args.processes:
            found = measure(folder, processes, args.threads)
            scores = found.pop("scores")
            first = first or scores
            print(json.dumps({**found, "equal": scores == first}), flush=True)


if __name__ == "__main__":
    main()

"""Time of every loss in this checkout and in another one, in turns, and beside PML in small batches.

    git worktree add ../before REVISION
    python benchmarks/speed/checkouts.py ../before                    1,024 and 4,096 rows: time here / time there
    python benchmarks/speed/checkouts.py ../before --sizes 32 64 128 --name small
                                                                      PML's time / ours, here and there

Each checkout has a process of its own with one thread; both measure a subject of `nearfar bench` in turns, forward and
backward, in CPU seconds. The table shows medians, and is written to benchmarks/results/checkouts_cpu.md, or the file of
another --name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import IO, cast

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMALL = 256
"""Rows up to which PML is measured too."""
WARM = 5
"""Calls before the first that is timed; the fourth is recorded."""
WORKER = """
import statistics, sys, time, torch
from nearfar.bench import SUBJECTS
torch.set_num_threads(1)
torch.manual_seed(0)
steps = {}
def step_of(name, rows, peer):
    one = SUBJECTS[name]
    labels = torch.arange(rows) // 4
    if peer:
        from pytorch_metric_learning import losses, miners
        return one.peer and one.peer(rows, WIDTH, losses, miners), labels
    return one.make(rows, WIDTH, "auto"), labels
for line in sys.stdin:
    name, rows, peer, calls = eval(line)
    key = name, rows, peer
    if key not in steps:
        if steps and next(iter(steps))[:2] != (name, rows):
            steps.clear()
        step, labels = step_of(*key)
        x = torch.randn(rows, WIDTH, requires_grad=True)
        steps[key] = step and (lambda step=step, x=x, labels=labels: step(x, labels).backward())
        for _ in range(WARM if step else 0):
            steps[key]()
    taken = []
    for _ in range(calls if steps[key] else 0):
        start = time.thread_time()
        steps[key]()
        taken.append(time.thread_time() - start)
    print(statistics.median(taken) if steps[key] else None, flush=True)
"""


class Worker:
    """A process of one checkout that times subjects."""

    def __init__(self, checkout: Path, width: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        code = WORKER.replace("WIDTH", str(width)).replace("WARM", str(WARM))
        command = [sys.executable, "-W", "ignore", "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, **pipes, encoding="utf-8")
        self.input, self.output = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)

    def time(self, name: str, rows: int, peer: bool, calls: int) -> float | None:
        """Seconds of a step; None where PML lacks the loss."""
        self.input.write(f"{(name, rows, peer, calls)!r}\n")
        self.input.flush()
        found = self.output.readline().strip()
        return None if found == "None" else float(found)


def compare(name: str, rows: int, workers: list[Worker], rounds: int) -> list[float | None]:
    """Median seconds here, there, and of PML for small batches."""
    small = rows <= SMALL
    first, theirs = (workers[0].time(name, rows, peer, 1) or 1.0 for peer in (False, small))
    calls, more = (max(1, min(20, int(0.05 / taken))) for taken in (first, theirs))
    times: list[list[float | None]] = [[], [], []]
    for _ in range(rounds):
        times[0].append(workers[0].time(name, rows, False, calls))
        times[1].append(workers[1].time(name, rows, False, calls))
        times[2].append(workers[0].time(name, rows, True, more) if small else None)
    return [None if None in each else median(x for x in each if x is not None) for each in times]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--losses", nargs="+")
    parser.add_argument("--name", default="checkouts", help="of the file that is written")
    given = parser.parse_args()
    from nearfar.bench import SUBJECTS

    columns = ("loss", "rows", "here, ms", "there, ms", "here / there", "PML / here", "PML / there")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    workers = [Worker(ROOT, given.width), Worker(given.other, given.width)]
    for rows in given.sizes:
        for name in given.losses or SUBJECTS:
            here, there, peer = compare(name, rows, workers, given.rounds)
            if here is None or there is None:
                continue
            peers = ["-" if peer is None else f"{peer / x:.2f}" for x in (here, there)]
            cells = [name, f"{rows:,}", f"{1e3 * here:.3g}", f"{1e3 * there:.3g}", f"{here / there:.2f}", *peers]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    head = "# This checkout beside another, one thread, forward and backward"
    about = f"d = {given.width}; medians of CPU milliseconds."
    RESULTS.joinpath(f"{given.name}_cpu.md").write_text("\n".join([head, "", about, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

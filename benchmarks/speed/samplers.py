"""Time of a batch from each sampler: 60,000 samples in 11,000 classes of two samples or more.

    python benchmarks/speed/samplers.py            some seconds on one core
    python benchmarks/speed/samplers.py --batches 200 --width 512

The goal is 0.3 ms a batch, in the median, for both samplers. The worst batch is the first of an epoch or a projection,
which plans all the others. Hard classes search a table with one row for each class at every batch, so their time grows
with the width; the goal excludes them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import nearfar as nf
from nearfar.batches import MPerClass, Representatives
from nearfar.batches._sampler import GlobalBatches

RESULTS = Path(__file__).parents[1] / "results"
BAR = 0.3


def labels(samples: int, classes: int) -> np.ndarray:
    """Two samples of each class, and the rest spread at random."""
    random = np.random.default_rng(0)
    rest = random.integers(0, classes, samples - 2 * classes)
    return random.permutation(np.concatenate([np.arange(classes), np.arange(classes), rest]))


def contestants(y: np.ndarray, size: int) -> dict[str, GlobalBatches]:
    """The samplers, by name."""
    return {
        "MPerClass, 4 a class": MPerClass(y, classes=size // 4, samples=4),
        "Representatives, 2 a class": Representatives(y, batch_size=size),
        "Representatives, 4 a class": Representatives(y, batch_size=size, samples=4),
        "Representatives, 2 a class, M = 1": Representatives(y, batch_size=size, steps=1),
        "Representatives, hard classes": Representatives(y, batch_size=size, hard_classes=True),
    }


def fill(sampler: GlobalBatches, width: int) -> None:
    """Fill the table with a row for every class."""
    if isinstance(sampler, Representatives) and sampler.hard_classes is not None:
        table = sampler.hard_classes
        table.update(torch.arange(table.classes), torch.nn.functional.normalize(torch.randn(table.classes, width)))


def measure(name: str, sampler: GlobalBatches, batches: int, width: int) -> dict[str, object]:
    torch.manual_seed(0)
    fill(sampler, width)
    times: list[float] = []
    while len(times) < batches:
        batch = iter(sampler)
        for _ in range(min(len(sampler), batches - len(times))):
            start = time.perf_counter()
            next(batch)
            times.append(1e3 * (time.perf_counter() - start))
    middle = statistics.median(times)
    entry = {"sampler": name, "steps": len(sampler), "ms": round(middle, 4), "worst_ms": round(max(times), 2)}
    print(f"{name:36s} {middle:8.4f} ms  worst {max(times):7.2f} ms  {len(sampler):5d} batches a round")
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--classes", type=int, default=11_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=2500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    y = labels(given.samples, given.classes)
    entries = [
        measure(name, sampler, given.batches, given.width) for name, sampler in contestants(y, given.size).items()
    ]
    versions = {
        "nearfar": nf.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    print(versions)
    RESULTS.mkdir(exist_ok=True)
    record = {"config": vars(given), "versions": versions, "bar_ms": BAR, "results": entries}
    (RESULTS / "samplers_cpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = ["| sampler | batches a round | median ms | worst ms |", "|---|---:|---:|---:|"]
    lines += [f"| {e['sampler']} | {e['steps']} | {e['ms']} | {e['worst_ms']} |" for e in entries]
    note = (
        f"A batch of {given.size} rows out of {given.samples:,} samples in {given.classes:,} classes; {given.batches} "
        f"batches, one thread; hard classes: a table {given.width} wide. The goal is {BAR} ms, hard classes apart. "
        f"{versions}.\n"
    )
    (RESULTS / "samplers_cpu.md").write_text(f"# Samplers, CPU\n\n{note}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

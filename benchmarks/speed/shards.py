"""The index of tar shards, and M-per-class batches from it: a million samples in 50,000 classes.

    python benchmarks/speed/shards.py              a minute or two on one core
    python benchmarks/speed/shards.py --samples 100000 --classes 5000

The index is made up (no pictures are written), in the form that a pass over the shards would give. The goals: it takes
at most 64 MB on disk and in memory, and a batch of 32 classes with 4 samples each is planned, down to shard, offset and
size of every picture, in at most 0.5 ms. Times are the best of several rounds. A second, long-tailed data set (class
sizes fall as 1/rank) shows what an epoch costs where classes differ; real shards show how fast a pass is.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import resource
import statistics
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nearfar as nf
from nearfar._utils.files import Arrays, read_arrays, write_arrays
from nearfar.batches import MPerClass
from nearfar.data._pictures import Pictures
from nearfar.data._samples import PackedNames, part
from nearfar.data._shards import Members, ShardIndex, open_index
from nearfar.data._splits import class_disjoint

RESULTS = Path(__file__).parents[1] / "results"
MEGABYTES, MILLISECONDS = 64.0, 0.5
EACH = 10_000
"""Samples in a shard."""


def even(samples: int, classes: int) -> np.ndarray:
    """Labels of classes of one size, in random order."""
    return np.random.default_rng(0).permutation(np.arange(samples) % classes)


def long_tailed(samples: int, classes: int) -> np.ndarray:
    """Two samples of each class, and the rest in proportion to 1/rank."""
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, classes + 1)
    rest = random.choice(classes, samples - 2 * classes, p=share / share.sum())
    return random.permutation(np.concatenate([np.arange(classes), np.arange(classes), rest]))


def made_up(labels: np.ndarray) -> tuple[tuple[Path, ...], Arrays]:
    """The arrays of an index of shards with 10,000 pictures each, of 20 to 200 kB."""
    samples = len(labels)
    random = np.random.default_rng(1)
    size = random.integers(20_000, 200_000, samples).astype(np.uint32)
    first = np.append(np.arange(0, samples, EACH), samples)
    blocks = 512 * (2 - (-size.astype(np.int64) // 512) + 1)  # a header each for picture and label, and their data
    begins = np.concatenate([np.cumsum(blocks[a:b]) - blocks[a:b] for a, b in itertools.pairwise(first)])
    shards = tuple(Path(f"photographs-{number:05d}.tar") for number in range(len(first) - 1))
    names = PackedNames.pack(f"{row // EACH:05d}/{row:08d}.jpg" for row in range(samples))
    classes = PackedNames.pack(f"product {number:06d}" for number in range(int(labels.max()) + 1))
    return shards, {
        "first": first,
        "offset": begins + 512,
        "size": size,
        "labels": labels.astype(np.int32),
        "sides": np.empty(0, dtype=np.int8),
        "stamps": np.zeros((len(shards), 2), dtype=np.int64),
        "names_data": names.data,
        "names_start": names.start,
        "classes_data": classes.data,
        "classes_start": classes.start,
    }


def best(rounds: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def held(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """What was made, the megabytes that it holds, and the most that making it took."""
    tracemalloc.start()
    found = make()
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found, now / 1e6, most / 1e6


def split(index: ShardIndex) -> list[Any]:
    """The data set as `open_data` gives it: half of the classes on each side."""
    whole = Pictures(Members(index), index.labels, index.names, index.classes)
    return [part(whole, rows) for rows in class_disjoint(whole, 0.5, seed=0)]


def planned(index: ShardIndex, labels: np.ndarray, batches: int, rounds: int) -> dict[str, float]:
    """Milliseconds to plan a batch: the median of the fastest round, an epoch's first batch, the mean of an epoch."""
    start = time.perf_counter()
    sampler = MPerClass(labels, classes=32, samples=4)
    made = time.perf_counter() - start
    medians, firsts = [], []
    for _ in range(rounds):
        times = []
        sampler.step = 0
        sampler._plan = None
        batch = iter(sampler)
        for _ in range(min(batches, len(sampler))):
            start = time.perf_counter()
            index.locate(next(batch))
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times))
        firsts.append(times[0])
    mean = (min(firsts) + min(medians) * (len(sampler) - 1)) / len(sampler)
    found = {"median_ms": min(medians), "epoch_start_ms": min(firsts), "mean_ms": mean, "sampler_ms": 1e3 * made}
    return {**{name: round(value, 4) for name, value in found.items()}, "batches_an_epoch": len(sampler)}


def passed(folder: Path, samples: int) -> float:
    """Samples a second of a pass over a real shard, with a picture of 20 kB and a label each."""
    with tarfile.open(folder / "s.tar", "w") as archive:
        for row in range(samples):
            for name, data in ((f"{row:08d}.jpg", b"\0" * 20_000), (f"{row:08d}.cls", str(row % 100).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    start = time.perf_counter()
    open_index([folder / "s.tar"], None, None)
    return samples / (time.perf_counter() - start)


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shards, arrays = made_up(even(given.samples, given.classes))
    path = folder / "index.npz"
    write_arrays(path, arrays)

    def load() -> ShardIndex:
        return ShardIndex.from_arrays(shards, read_arrays("shards", path))

    index = load()
    _, holds, most = held(load)
    sides, whole, _ = held(lambda: split(load()))
    result: dict[str, Any] = {
        "disk_mb": round(path.stat().st_size / 1e6, 2),
        "memory_mb": round(holds, 2),
        "memory_with_split_mb": round(whole, 2),
        "opening_peak_mb": round(most, 2),
        "open_s": round(best(given.rounds, load), 3),
        "even": planned(index, index.labels, given.batches, given.rounds),
        "train side of the split": planned(index, sides[0].labels, given.batches, given.rounds),
    }
    result["long tail"] = planned(index, long_tailed(given.samples, given.classes), given.batches, 1)
    result["pass_samples_a_second"] = round(passed(folder, 5000))
    scale = 1024 if sys.platform != "darwin" else 1
    result["process_peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(given, Path(folder))
    bars = {
        "index on disk": (result["disk_mb"], MEGABYTES, "MB"),
        "index in memory": (result["memory_mb"], MEGABYTES, "MB"),
        "index in memory with its split": (result["memory_with_split_mb"], MEGABYTES, "MB"),
        "batch, median": (result["even"]["median_ms"], MILLISECONDS, "ms"),
        "batch, mean over an epoch with its start": (result["even"]["mean_ms"], MILLISECONDS, "ms"),
    }
    for name, (value, bar, unit) in bars.items():
        print(f"{name:42s} {value:9.4f} {unit}   goal {bar} {unit}   {value / bar:.3f} of it")
    print(json.dumps(result, indent=1))
    versions = {
        "nearfar": nf.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    ratios = {name: round(value / bar, 4) for name, (value, bar, _) in bars.items()}
    record = {"config": vars(given), "versions": versions, "bars": ratios, "results": result}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "shards.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

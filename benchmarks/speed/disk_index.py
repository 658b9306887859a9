"""Indices on disk, from a memory-mapped array: time and memory to build, bytes on disk, recall, time of a search.

    python benchmarks/speed/disk_index.py                              1,000,000 x 64, a few minutes on two cores
    python benchmarks/speed/disk_index.py --rows 100000 --kinds hnsw   one more row in the same table

Vectors lie around 10,000 centers, in 24 of 64 directions and some noise in all: like those of a trained network. Each
kind is built in a new process; its memory is the peak of resident anonymous memory above that of an idle process, pages
of mapped files left out, since the system takes those back when it needs them. Searches are single ones, 200 of them,
in a process that has just opened the index.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from nearfar.evaluation import DiskIndex, build_index

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, CHUNK, QUERIES = 64, 1 << 17, 200


def write_rows(path: Path, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    basis, centers = torch.randn(24, WIDTH, generator=generator), torch.randn(10_000, 24, generator=generator)
    x = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, WIDTH))
    for at in range(0, rows, CHUNK):
        many = min(CHUNK, rows - at)
        inside = centers[torch.randint(10_000, (many,), generator=generator)]
        inside = (inside + 0.5 * torch.randn(many, 24, generator=generator)) @ basis
        x[at : at + many] = (inside + 0.2 * torch.randn(many, WIDTH, generator=generator)).numpy()
    x.flush()


def anonymous() -> int:
    """Resident bytes of this process that are not mapped files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return 1024 * int(found[1]) if found else 0


def measure_build(rows: Path, folder: Path, kind: str, answers: multiprocessing.Queue) -> None:
    """Build in this process; return the seconds and the peak memory."""
    x, ended = np.load(rows, mmap_mode="r"), threading.Event()
    idle = peak = anonymous()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    build_index(folder, x, kind=kind)
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    answers.put((seconds, peak - idle))


def measure_search(rows: Path, folder: Path, answers: multiprocessing.Queue) -> None:
    """Open and search in this process: seconds to open, and of the median search."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    index = DiskIndex(folder)
    opened = time.perf_counter() - start
    x = np.load(rows, mmap_mode="r")
    chosen = np.random.default_rng(0).integers(len(x), size=QUERIES)
    seconds = []
    for row in chosen:
        query = torch.from_numpy(np.array(x[row : row + 1]))
        start = time.perf_counter()
        index.search(query, 10)
        seconds.append(time.perf_counter() - start)
    answers.put((opened, float(np.median(seconds)), index.recall["recall"], index.effort))


def alone(act, *args):
    """The result of `act` in a new process."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=act, args=(*args, answers))
    process.start()
    found = answers.get()
    process.join()
    return found


def main() -> None:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="*", default=["exact", "ivfpq"], choices=["exact", "ivf", "ivfpq", "hnsw"])
    parser.add_argument("--out", type=Path, default=RESULTS / "disk_index_cpu.json")
    args = parser.parse_args()
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"rows": []}
    report["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "faiss": version("faiss-cpu"),
    }
    report["threads"] = os.environ.get("OMP_NUM_THREADS", "all")
    with tempfile.TemporaryDirectory() as home:
        rows = Path(home) / "x.npy"
        write_rows(rows, args.rows)
        for kind in args.kinds:
            folder = Path(home) / kind
            seconds, peak = alone(measure_build, rows, folder, kind)
            opened, search, recall, effort = alone(measure_search, rows, folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
            found = {
                "kind": kind,
                "vectors": args.rows,
                "build_s": seconds,
                "peak_mb": peak / 1e6,
                "disk_mb": size / 1e6,
            }
            found |= {"open_s": opened, "search_ms": 1000 * search, "recall": recall, "effort": effort}
            report["rows"] = [r for r in report["rows"] if (r["kind"], r["vectors"]) != (kind, args.rows)] + [found]
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            args.out.with_suffix(".md").write_text(table(report), encoding="utf-8")
    print(table(report))


def table(report: dict) -> str:
    lines = [f"Indices on disk, vectors of width {WIDTH} from a mapped file, {report['threads']} thread(s).", ""]
    columns = ("kind", "vectors", "build", "peak memory", "on disk", "open", "one search", "recall@10", "effort")
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in report["rows"]:
        sizes = f"{row['build_s']:.0f} s | {row['peak_mb']:.0f} MB | {row['disk_mb']:.0f} MB | {row['open_s']:.2f} s"
        found = f"{row['search_ms']:.1f} ms | {100 * row['recall']:.1f}% | {row['effort'] or '-'}"
        lines.append(f"| {row['kind']} | {row['vectors']:,} | {sizes} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

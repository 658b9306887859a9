"""Time and memory of evaluation against faiss and pytorch-metric-learning (PML), interleaved, on one thread.

    python benchmarks/speed/evaluate.py                        all parts: about half an hour on one core
    python benchmarks/speed/evaluate.py --parts neighbors evaluation --sizes 6000      a minute

Parts: the ten nearest of all rows among themselves; the whole retrieval evaluation (ours with its intervals over
classes, recall@K, MRR and per-class rows, which PML's AccuracyCalculator lacks); peak memory beyond that before the
call, in a new process; and k-means with a fifth as many clusters as rows. Rows have 512 columns: a center per class and
noise, so that recall@1 is that of a trained network. 6,000 rows are 100 classes of 60, as CUB's test set is; 60,000
rows are 12,000 classes of 5, as that of Stanford Online Products is. `the product alone` is the minimum of an exact
search, unless it multiplies each pair once, as ours does where it pays. Times are CPU seconds; compare ratios within
one run, because seconds depend on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import nearfar as nf
from nearfar.evaluation import neighbors
from nearfar.evaluation._k_means import runs

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, K = 512, 10
NOISE = {6000: 1.7, 60000: 1.0}
EACH = {6000: 60, 60000: 5}
PARTS = ("neighbors", "evaluation", "memory", "k-means")
BARS = {"neighbors": ("faiss", 1.3), "evaluation": ("PML", 1.0)}
Run = Callable[[], object]


def help_faiss() -> str:
    """Select the kernels of the OpenBLAS in faiss's wheel, which is of 2021 and does not recognize newer processors."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "avx512f" in cpu.read_text(encoding="utf-8"):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")  # read when faiss is imported, later
    return os.environ.get("OPENBLAS_CORETYPE", "as detected")


def space(rows: int) -> tuple[Tensor, Tensor]:
    """Rows [n, 512] about a center per class, of unit length, and their classes, in no order."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.arange(rows) // EACH.get(rows, 5))[torch.randperm(rows, generator=generator)]
    basis = torch.randn(64, WIDTH, generator=generator)
    centers = torch.randn(int(y.max()) + 1, 64, generator=generator)
    x = torch.empty(rows, WIDTH)
    for start in range(0, rows, 1000):
        part = y[start : start + 1000]
        x[start : start + 1000] = normalize(
            (centers[part] + NOISE.get(rows, 1.0) * torch.randn(len(part), 64, generator=generator)) @ basis
        )
    return x, y


def searches(x: Tensor) -> dict[str, Run]:
    """Functions that find the ten nearest of each row, without itself."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN, FaissKNN

    def product() -> None:
        tile = torch.empty(2000, 2000)
        for rows in torch.split(x, 2000):
            for columns in torch.split(x, 2000):
                torch.mm(rows, columns.T, out=tile)

    runs: dict[str, Run] = {"nearfar": lambda: neighbors(x, k=K), "the product alone": product}
    peer = CustomKNN(CosineSimilarity(), batch_size=1000)
    runs["PML without faiss"] = lambda: peer(x, K, x, True)
    try:
        import faiss
    except ImportError:
        return runs
    faiss.omp_set_num_threads(1)

    def flat() -> object:
        index = faiss.IndexFlatIP(WIDTH)
        index.add(x.numpy())
        return index.search(x.numpy(), K + 1)

    with_faiss = FaissKNN()
    return runs | {"faiss": flat, "PML with faiss": lambda: with_faiss(x, K, x, True)}


def evaluations(x: Tensor, y: Tensor) -> dict[str, Run]:
    """Functions that compute all retrieval scores."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    wanted = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    options = {"include": wanted, "k": "max_bin_count", "device": torch.device("cpu")}
    bare = AccuracyCalculator(knn_func=CustomKNN(CosineSimilarity(), batch_size=1000), **options)
    runs: dict[str, Run] = {
        "nearfar": lambda: nf.evaluate(x, y),
        "PML without faiss": lambda: bare.get_accuracy(x, y),
    }
    try:
        import faiss  # noqa: F401
    except ImportError:
        return runs
    judge = AccuracyCalculator(**options)
    return runs | {"PML with faiss": lambda: judge.get_accuracy(x, y)}


def time_in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each, in turns; with several rounds the first one is discarded."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + (rounds > 1)):
        for name, run in runs.items():
            start = time.process_time()
            run()
            spent = time.process_time() - start
            print(f"  {name:<20} {spent:8.2f} s", flush=True)
            if turn or rounds == 1:
                seconds[name].append(spent)
    return seconds


def resident(entry: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MB; Linux only."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def growth(task: tuple[str, int]) -> tuple[str, float]:
    """Peak memory in MB beyond that before the call; runs in a new process."""
    name, rows = task
    torch.set_num_threads(1)
    x, y = space(rows)
    small = slice(0, 2000)
    runs = {"neighbors": lambda x, y: neighbors(x, k=K), "evaluate": lambda x, y: nf.evaluate(x, y)}
    runs[name](x[small], y[small])  # what is loaded once is not counted
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    runs[name](x, y)
    return name, resident("VmHWM") - before


def clusters(rows: int, starts: int) -> dict[str, float]:
    """Seconds of k-means with a fifth as many clusters as rows, after each start."""
    x, _ = space(rows)
    spent, begin = {}, time.process_time()
    for number, run in enumerate(runs(x, rows // 5, restarts=starts), start=1):
        spent[str(number)] = time.process_time() - begin
        print(f"  k-means after {number} starts: {spent[str(number)]:.1f} s, inertia {run.inertia:.1f}", flush=True)
    return spent


def rounds_of(rows: int, asked: int | None) -> int:
    return asked or (7 if rows <= 10_000 else 1)


def measure(part: str, rows: int, args: argparse.Namespace) -> dict[str, object]:
    """One part at one size."""
    if part == "memory":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            return dict(pool.map(growth, [("evaluate", rows), ("neighbors", rows)]))
    if part == "k-means":
        return dict(clusters(rows, args.starts))
    x, y = space(rows)
    who = searches(x) if part == "neighbors" else evaluations(x, y)
    chosen = {name: run for name, run in who.items() if args.who is None or name in ("nearfar", *args.who)}
    return dict(time_in_turns(chosen, rounds_of(rows, args.rounds)))


def table(part: str, rows: int, found: dict[str, object]) -> str:
    """One part as Markdown."""
    if part == "memory":
        lines = [
            f"## Peak of memory above the rows, {rows:,} x {WIDTH} (goal: 200 MB)",
            "",
            "| run | MB |",
            "|---|---|",
        ]
        return "\n".join(lines + [f"| {name} | {value:.0f} |" for name, value in found.items()])
    if part == "k-means":
        title = f"## k-means, {rows // 5:,} clusters of {rows:,} x {WIDTH} (goal: 600 s)"
        return "\n".join(
            [title, "", "| starts | CPU s |", "|---|---|", *(f"| {name} | {s:.0f} |" for name, s in found.items())]
        )
    about = {"neighbors": f"{K} nearest of each row", "evaluation": "whole retrieval evaluation"}[part]
    median = {name: statistics.median(values) for name, values in found.items()}
    lines = [
        f"## {about[0].upper()}{about[1:]}, {rows:,} x {WIDTH}",
        "",
        "| who | median CPU s | nearfar / it |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {s:.2f} | {median['nearfar'] / s:.2f} |" for name, s in median.items()]
    word, bar = BARS[part]
    return "\n".join([*lines, "", f"Goal: nearfar / {word} at most {bar}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(EACH))
    parser.add_argument("--rounds", type=int, help="else 7 up to 10,000 rows, 1 beyond")
    parser.add_argument("--who", nargs="*", help="whom to run beside nearfar, such as faiss; else all")
    parser.add_argument("--starts", type=int, default=3, help="of k-means")
    parser.add_argument("--out", type=Path, default=RESULTS / "evaluate_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"parts": {}}
    report["versions"] = versions()
    report["config"] = {"width": WIDTH, "k": K, "samples per class": {str(n): e for n, e in EACH.items()}, "threads": 1}
    report["config"]["OPENBLAS_CORETYPE"] = help_faiss()
    for rows in args.sizes:
        for part in args.parts:
            if part in ("memory", "k-means") and rows < 10_000:
                continue  # goals are for large problems
            print(f"{part}, {rows:,} rows", flush=True)
            report["parts"][f"{part} {rows}"] = measure(part, rows, args)
            write(args.out, report)
    print(args.out.with_suffix(".md").read_text(encoding="utf-8"))


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "faiss-cpu", "pytorch-metric-learning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def write(out: Path, report: dict) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    software = ", ".join(f"{name} {word}" for name, word in report["versions"].items())
    tables = []
    for part in PARTS:
        for key, found in report["parts"].items():
            name, rows = key.rsplit(" ", 1)
            if name == part:
                tables.append(table(part, int(rows), found))
    parts = [
        "# Evaluation: time and memory",
        f"One thread, CPU seconds, runs interleaved in one process, medians. {software}.",
        *tables,
    ]
    out.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

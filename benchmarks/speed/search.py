"""Search over 1,000,000 x 128 vectors on two cores: exact, IVF and HNSW; recall against exact, queries per second.

    python benchmarks/speed/search.py                           about five minutes on two cores
    python benchmarks/speed/search.py --rows 100000             half a minute

Two sets, of unit length, cosine: `clustered` (10,000 centers and noise in 32 directions of 128: what a trained network
gives) and `uniform` (no structure at all: the hardest case for an approximate index, stated for honesty). 1,000 queries
are searched at once, with IVF at several numbers of probes. Seconds belong to the machine, those of the clock also to
whatever else it is doing; recall does not.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before NumPy is loaded

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nearfar.evaluation import Index

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, QUERIES, K = 128, 1000, 10
Row = dict[str, str | float]


def clustered(rows: int, generator: torch.Generator) -> Tensor:
    basis = torch.randn(32, WIDTH, generator=generator)
    centers = torch.randn(10_000, 32, generator=generator)
    y = torch.randint(len(centers), (rows,), generator=generator)
    return normalize((centers[y] + 0.7 * torch.randn(rows, 32, generator=generator)) @ basis)


def uniform(rows: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(rows, WIDTH, generator=generator))


SETS = {"clustered": clustered, "uniform": uniform}


def timed(index: Index, queries: Tensor, rounds: int = 2) -> tuple[Tensor, float, float]:
    """The places found, and the least seconds of a few rounds: by the clock, and of the processor."""
    clock, cpu = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        places = index.search(queries, K).places
        clock.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return places, min(clock), min(cpu)


def indexes(x: Tensor, kinds: list[str]) -> Iterator[tuple[str, Index, float]]:
    """Name, index and CPU seconds to build it, exact first; of IVF one index with several numbers of probes."""
    for kind in ("exact", *kinds):
        start = time.process_time()
        index = Index(x, kind=kind)
        built = time.process_time() - start
        if kind != "ivf":
            yield kind, index, built
            continue
        usual = index.effort
        for probes in (max(1, usual // 16), max(1, usual // 4), usual):
            index.effort = probes
            yield (
                f"ivf, {probes} of {index.plan.cells} cells" + (" (default)" if probes == usual else ""),
                index,
                built,
            )


def study(name: str, rows: int, kinds: list[str]) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x = SETS[name](rows + QUERIES, generator)
    x, queries = x[:rows], x[rows:]
    found: list[Row] = []
    exact = None
    for kind, index, built in indexes(x, kinds):
        places, clock, cpu = timed(index, queries)
        exact = places if exact is None else exact
        hits = (places[:, :, None] == exact[:, None, :]).any(dim=2).float().mean()
        speed = {"queries_per_s": QUERIES / clock, "queries_per_cpu_s": QUERIES / cpu}
        found.append({"index": kind, "build_cpu_s": built, **speed, "recall": float(hits)})
        print(name, found[-1], flush=True)
    return found


def table(rows: list[Row]) -> str:
    exact = rows[0]["queries_per_cpu_s"]
    columns = ("index", "build, CPU s", "queries / s", "queries / CPU s", "against exact", "recall@10")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        speed = (
            f"{row['queries_per_s']:,.0f} | {row['queries_per_cpu_s']:,.0f} | {row['queries_per_cpu_s'] / exact:.1f} x"
        )
        lines.append(f"| {row['index']} | {row['build_cpu_s']:.0f} | {speed} | {100 * row['recall']:.1f}% |")
    return "\n".join(lines)


def main() -> None:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--kinds", nargs="*", default=["ivf"], choices=["ivf", "hnsw"])
    parser.add_argument("--out", type=Path, default=RESULTS / "search_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(2)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"sets": {}}
    report["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "faiss-cpu": version("faiss-cpu"),
    }
    report["config"] = {
        "rows": args.rows,
        "width": WIDTH,
        "queries": QUERIES,
        "k": K,
        "threads": 2,
        "similarity": "cosine",
    }
    for name in args.sets:
        report["sets"][name] = study(name, args.rows, args.kinds)
        write(args.out, report)
    print(args.out.with_suffix(".md").read_text(encoding="utf-8"))


def write(out: Path, report: dict) -> None:
    told = ", ".join(f"{name} {word}" for name, word in report["versions"].items())
    rows = report["config"]["rows"]
    parts = [f"# Search over {rows:,} x {WIDTH} vectors, two threads, {QUERIES:,} queries at once", told + "."]
    for name, found in report["sets"].items():
        parts += [f"## {name.capitalize()}", table(found)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

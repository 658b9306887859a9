"""The work of each rank of a `Distributed` loss, relative to one process, at large batches.

    python benchmarks/speed/rank_work.py                        all losses at 8,192 rows, some at 16,384
    python benchmarks/speed/rank_work.py --sizes 4096 --losses SupCon DroKL

CPU seconds of forward and backward, the minimum of several rounds (other work only adds to them), one thread a process.
As many processes compute the whole batch, each for itself and at the same time, as there are ranks afterwards, so that
both find the processor equally busy. The result is the share of the rank with the most work, times the number of ranks:
1 is an even split without overhead.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gathered import RESULTS, batch

import nearfar as nf
from nearfar._utils.files import write_text

L = nf.losses
BAR = 1.3
LOSSES: dict[str, Callable[[int], Any]] = {
    "MultiSimilarity": lambda size: L.MultiSimilarity(),
    "SupCon": lambda size: L.SupCon(),
    "LiftedStructure": lambda size: L.LiftedStructure(),
    "Triplet-all": lambda size: L.Triplet(),
    "Triplet-hard": lambda size: L.Triplet(mining="hard"),
    "Triplet-hardest": lambda size: L.Triplet(mining="hardest"),
    "DroKL": lambda size: L.DroKL(),
    "DroTopK": lambda size: L.DroTopK(k=2 * size),
}
SIZES = {8192: tuple(LOSSES), 16384: ("SupCon", "Triplet-hard", "DroKL")}
"""Rows, and the losses that are measured with them."""


def seconds(loss: Any, rows: torch.Tensor, labels: torch.Tensor, rounds: int) -> float:
    """The minimum of CPU seconds of one step, after a warm-up step."""
    times = []
    for _ in range(rounds + 1):
        leaf = rows.clone().requires_grad_()
        start = time.process_time()
        loss(leaf, labels).backward()
        times.append(time.process_time() - start)
    return min(times[1:])


def work(rank: int, world: int, file: str, names: list[str], size: int, width: int, rounds: int) -> None:
    """One process: the whole batch by itself, then its part of it as one of several."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    rows, labels = batch(size, width)
    mine = slice(size * rank // world, size * (rank + 1) // world)
    found = {}
    for name in names:
        dist.barrier()
        alone = seconds(LOSSES[name](size), rows, labels, rounds)
        dist.barrier()
        found[name] = alone, seconds(nf.Distributed(LOSSES[name](size)), rows[mine], labels[mine], rounds)
    Path(f"{file}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, names: list[str], size: int, width: int, rounds: int) -> list[dict[str, tuple[float, float]]]:
    """Seconds alone and as a rank, by loss, of each process."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/meet"
        mp.spawn(work, args=(world, file, names, size, width, rounds), nprocs=world)
        return [json.loads(Path(f"{file}.{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def measure(worlds: list[int], names: list[str], size: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """For each loss: seconds of one process, and for each number of ranks the largest share times that number."""
    table: dict[str, dict[str, Any]] = {name: {} for name in names}
    for world in worlds:
        ranks = run(world, names, size, width, rounds)
        for name, row in table.items():
            alone = min(rank[name][0] for rank in ranks)
            row.setdefault("alone_s", alone)
            row[f"ranks_{world}"] = world * max(rank[name][1] for rank in ranks) / alone
    return table


def page(rows: dict[str, dict[str, dict[str, Any]]], worlds: list[int], width: int) -> str:
    """The results as Markdown."""
    lines = [
        f"d = {width}, one thread a process, CPU s, torch {torch.__version__}, {platform.machine()}. The figure is",
        f"the work of the busiest rank times the number of ranks, with that of one process as 1; the goal is {BAR}.",
        "",
        "| loss | B | one process, s | " + " | ".join(f"{world} ranks" for world in worlds) + " |",
        "|---|---|---|" + "---|" * len(worlds),
    ]
    for size, table in rows.items():
        for name, row in table.items():
            cells = " | ".join(f"{row[f'ranks_{world}']:.2f}" for world in worlds)
            lines.append(f"| {name} | {int(size):,} | {row['alone_s']:.2f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print the figures and write no file")
    given = parser.parse_args()
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for size in given.sizes:
        names = given.losses or list(SIZES.get(size, LOSSES))
        rows[str(size)] = measure(given.worlds, names, size, given.width, given.rounds)
    text = page(rows, given.worlds, given.width)
    print(text)
    if given.dry:
        return
    setting = {name: value for name, value in vars(given).items() if name != "dry"}
    found = {"setting": setting, "torch": torch.__version__, "nearfar": nf.__version__, "bar": BAR, "rows": rows}
    write_text(RESULTS / "rank_work_cpu.md", text)
    write_text(RESULTS / "rank_work_cpu.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

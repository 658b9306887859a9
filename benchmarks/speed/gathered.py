"""What each of several processes works for a `Distributed` loss, as a share of one process with the whole batch.

    python benchmarks/speed/gathered.py            about a minute on two cores

CPU seconds of forward and backward, medians, on one thread a process; the goal is a share of about 1 / processes. The
share holds all that a rank does: gathering rows, its strips, and adding up gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nearfar as nf

RESULTS = Path(__file__).parents[1] / "results"
L = nf.losses
LOSSES = {
    "MultiSimilarity with its miner": L.MultiSimilarity,
    "SupCon": L.SupCon,
    "Triplet, all": L.Triplet,
    "Triplet, hard": lambda: L.Triplet(mining="hard"),
    "LiftedStructure": L.LiftedStructure,
    "DroTopK, k = 2B": lambda: L.DroTopK(k=8192),
    "DroKL": L.DroKL,
    "DroChiSquare": lambda: L.DroChiSquare(rho=1.0),
}


def seconds(loss: Any, rows: torch.Tensor, labels: torch.Tensor, rounds: int) -> float:
    """The median CPU seconds of one step."""
    times = []
    for _ in range(rounds + 1):
        leaf = rows.clone().requires_grad_()
        start = time.process_time()
        loss(leaf, labels).backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])  # the first warms up


def batch(size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(size, width), torch.arange(size) // 4


def work(rank: int, world: int, file: str, size: int, width: int, rounds: int) -> None:
    """One rank: its part of the batch through every loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    rows, labels = batch(size, width)
    mine = slice(size * rank // world, size * (rank + 1) // world)
    found = {
        name: seconds(nf.Distributed(make()) if world > 1 else make(), rows[mine], labels[mine], rounds)
        for name, make in LOSSES.items()
    }
    Path(f"{file}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, size: int, width: int, rounds: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/meet"
        mp.spawn(work, args=(world, file, size, width, rounds), nprocs=world)
        return [json.loads(Path(f"{file}.{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    alone = run(1, given.size, given.width, given.rounds)[0]
    table: dict[str, Any] = {name: {"alone_s": alone[name]} for name in LOSSES}
    for world in given.worlds:
        ranks = run(world, given.size, given.width, given.rounds)
        for name in LOSSES:
            table[name][f"share_{world}"] = [rank[name] / alone[name] for rank in ranks]
    lines = [
        f"B = {given.size} in all, d = {given.width}, one thread a process, torch {torch.__version__}, "
        f"{platform.machine()}.",
        "",
        "| loss | one process, CPU s | " + " | ".join(f"{w} ranks: least to most" for w in given.worlds) + " |",
        "|---|---|" + "---|" * len(given.worlds),
    ]
    for name, row in table.items():
        shares = (row[f"share_{world}"] for world in given.worlds)
        cells = " | ".join(f"{min(share):.2f} to {max(share):.2f}" for share in shares)
        lines.append(f"| {name} | {row['alone_s']:.3f} | {cells} |")
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gathered_cpu.md").write_text(text, encoding="utf-8")
    versions = {"torch": torch.__version__, "nearfar": nf.__version__}
    found = {"setting": vars(given), **versions, "rows": table}
    (RESULTS / "gathered_cpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Resident memory over 2,000 steps of ten losses: alone, in strips, with a memory, in chunks, on two ranks.

    python benchmarks/speed/leaks.py            about five minutes on two quiet cores

A step embeds 48 to 64 rows with a linear layer, calls the loss, backpropagates and updates the parameters; batches
change in size, which would expose caches by size. Each way runs in new processes, loss after loss. The result is the
slope of a line through the resident memory of the second half, in MB per 1,000 steps: a matrix of 64 x 64 float32 that
is retained at every step would give 16, an object of one kilobyte 1. The goal is 0.5.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import nearfar as nf
from nearfar._utils.files import write_text

RESULTS = Path(__file__).parents[1] / "results"
BAR = 0.5
L = nf.losses
LOSSES: dict[str, Callable[..., Any]] = {
    "Contrastive": L.Contrastive,
    "Triplet, hard": lambda **more: L.Triplet(mining="hard", **more),
    "MultiSimilarity": L.MultiSimilarity,
    "SupCon": L.SupCon,
    "NTXent": L.NTXent,
    "LiftedStructure": L.LiftedStructure,
    "Margin": L.Margin,
    "DroTopK": lambda **more: L.DroTopK(k=100, **more),
    "DroKL": L.DroKL,
    "DroChiSquare": lambda **more: L.DroChiSquare(rho=1.0, **more),
}
WAYS = {
    "alone": lambda make: make(),
    "in strips": lambda make: make(engine="tiled"),
    "memory": lambda make: nf.CrossBatchMemory(make(), size=256),
    "chunks": lambda make: make(),
    "two ranks": lambda make: nf.Distributed(make()),
    "two ranks, memory": lambda make: nf.Distributed(nf.CrossBatchMemory(make(engine="tiled"), size=256)),
}


def memory_of_steps(loss: Any, steps: int, chunk: int | None) -> Iterator[tuple[int, float]]:
    """Resident MB after each twentieth step."""
    torch.manual_seed(0)
    encoder, process = nn.Linear(32, 16), psutil.Process()
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss.parameters()], lr=1e-3)
    for step in range(steps):
        n = 48 + 4 * (step % 5)
        x, y = torch.randn(n, 32), torch.arange(n) // 4
        if chunk is None:
            loss(encoder(x), y).backward()
        else:
            nf.cached_step(encoder, x, y, loss, chunk)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            yield step + 1, process.memory_info().rss / 2**20


def slope(found: list[tuple[int, float]]) -> float:
    """MB per 1,000 steps over the second half."""
    step, resident = np.array(found[len(found) // 2 :]).T
    return float(np.polyfit(step / 1000, resident, 1)[0])


def work(rank: int, world: int, way: str, folder: str, steps: int) -> None:
    """All losses, one way, in this process."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    slopes = {}
    for name, make in LOSSES.items():
        found = list(memory_of_steps(WAYS[way](make), steps, 16 if way == "chunks" else None))
        slopes[name] = {
            "slope": slope(found),
            "first": found[0][1],
            "middle": found[len(found) // 2][1],
            "last": found[-1][1],
        }
    write_text(Path(folder) / f"{rank}.json", json.dumps(slopes))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(way: str, steps: int) -> dict[str, Any]:
    """For each loss, the slope of the rank that grew most."""
    world = 2 if way.startswith("two ranks") else 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(world, way, folder, steps), nprocs=world)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
    return {name: max((rank[name] for rank in ranks), key=lambda row: row["slope"]) for name in LOSSES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    table = {way: measure(way, given.steps) for way in given.ways}
    most = max(row["slope"] for rows in table.values() for row in rows.values())
    lines = [
        f"{given.steps:,} steps of 48 to 64 rows a loss and way, slope of resident memory over the second half in MB "
        f"per 1,000 steps (of two ranks the larger); torch {torch.__version__}, {platform.machine()}. "
        f"The most is {most:.2f}; the goal is {BAR}.",
        "",
        "| loss | " + " | ".join(table) + " |",
        "|---|" + "---:|" * len(table),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{table[way][name]['slope']:.2f}" for way in table) + " |" for name in LOSSES
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    versions = {"torch": torch.__version__, "nearfar": nf.__version__}
    setting = {"steps": given.steps, "bar": BAR}
    write_text(given.out / "leaks_cpu.md", text)
    write_text(
        given.out / "leaks_cpu.json",
        json.dumps({"setting": setting, **versions, "most": most, "rows": table}, indent=1) + "\n",
    )
    if most > BAR:
        raise SystemExit(f"leaks: resident memory grows by {most:.2f} MB per 1,000 steps, but the goal is {BAR}.")


if __name__ == "__main__":
    main()

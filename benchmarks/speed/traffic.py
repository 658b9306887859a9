"""What the ranks of a run send each other: counted with 2 to 4 processes, and predicted up to 1,024.

    python benchmarks/speed/traffic.py               count, predict, draw, and write the page's table
    python benchmarks/speed/traffic.py --from FILE   the table and the picture alone, from results/traffic.json

A step of a rank with b of N = b·W rows of width d, and a network of P parameters, in bytes that it receives:

    rows        4·N·d·(W-1)/W      gathered, so that every rank has the whole batch
    slopes      8·N·d·(W-1)/W      gradients of all rows, summed over ranks by a ring
    duals       c·N                what the sets exchange: c is counted
    network     8·P·(W-1)/W        gradients averaged by DDP; with training.shard 12·P·(W-1)/W
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nearfar as nf
from nearfar._utils.files import write_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "traffic.json"
PAGE, PICTURE = ROOT / "docs" / "guides" / "several-gpus.md", ROOT / "docs" / "images" / "traffic.png"
BEGIN, END = "<!-- traffic: begin -->", "<!-- traffic: end -->"
LOSSES = {
    "MultiSimilarity": nf.losses.MultiSimilarity,
    "SupCon": nf.losses.SupCon,
    "DroKL": nf.losses.DroKL,
    "DroTopK": lambda: nf.losses.DroTopK(k="8B"),
}
WORLDS = (1, 2, 8, 64, 256, 1024)
NODE, INSIDE, BETWEEN, HOP = 8, 450e9, 50e9, 10e-6
"""Assumed: GPUs of a machine, bytes a second and GPU inside it (NVLink 4) and between machines (400 Gb/s), and seconds
a hop; a collective takes 2·log2(W) hops."""
IMAGE, LOSS, LOSS_ROWS, FIXED = 1 / 7000, 7.9e-3, 32768, 1.0e-3
"""Measured on one H200: seconds an image of EfficientNet-Lite0 (compiled), seconds of MultiSimilarity at so many rows
of 512 numbers, which grow with the square of the rows, and its least time."""
PARAMETERS, WIDTH, ROWS = 4.0e6, 512, 128


def received(kind: str, size: int, world: int) -> float:
    """Bytes that a rank receives in a collective of `size` bytes a rank."""
    return size * (world - 1) * (1 if kind == "all_gather" else 2 / world)


def counted(kind: str, real, seen: Counter[str], world: int):
    @functools.wraps(real)
    def call(*given, **more):
        tensor = given[1] if kind == "all_gather" else given[0]
        rows = "wide" if tensor.ndim > 1 and tensor.shape[-1] == seen["width"] else "narrow"
        seen[f"{kind} {rows}"] += received(kind, tensor.numel() * tensor.element_size(), world)
        return real(*given, **more)

    return call


def work(rank: int, world: int, file: str, size: int, width: int) -> None:
    """One rank: count what every loss exchanges, then time it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    rows, labels = torch.randn(size, width), torch.arange(size) // 4
    mine = slice(size * rank // world, size * (rank + 1) // world)
    plain, found = {kind: getattr(dist, kind) for kind in ("all_gather", "all_reduce")}, {}
    for name, make in LOSSES.items():
        loss, seen, times = nf.Distributed(make()), Counter(width=width), []
        for turn in range(4):
            for kind, real in plain.items():  # the second call: the first compares settings too
                setattr(dist, kind, counted(kind, real, seen, world) if turn == 1 else real)
            leaf = rows[mine].clone().requires_grad_()
            dist.barrier()
            start = time.perf_counter()
            loss(leaf, labels[mine]).backward()
            times.append(time.perf_counter() - start)
        found[name] = {**seen, "seconds": statistics.median(times[1:])}
    Path(f"{file}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int, size: int, width: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/meet"
        mp.spawn(work, args=(world, file, size, width), nprocs=world)
        return json.loads(Path(f"{file}.0.json").read_text(encoding="utf-8"))


def exchange(world: int, rows: int, width: int, *, bytes_of_row: int = 4, whole: bool = True) -> tuple[float, float]:
    """Bytes of rows and of slopes; a rank that is sent the slopes of its own rows alone receives half."""
    share = (world - 1) / world
    return bytes_of_row * rows * width * share, (2 if whole else 1) * bytes_of_row * rows * width * share


def seconds(size: float, world: int) -> float:
    """The time of a collective in which every rank receives so many bytes."""
    if world == 1:
        return 0.0
    return size / (INSIDE if world <= NODE else BETWEEN) + 2 * math.log2(world) * HOP


def step(world: int, rows_a_rank: int, **how) -> dict[str, float]:
    """The predicted step of a rank, in seconds: the network's gradients travel during its backward pass."""
    rows = world * rows_a_rank
    network = rows_a_rank * IMAGE
    loss = max(FIXED, LOSS * (rows / LOSS_ROWS) ** 2 / world)
    sizes = exchange(world, rows, WIDTH, **how)
    talk = sum(seconds(size, world) for size in sizes)
    averaged = seconds(8 * PARAMETERS * (world - 1) / world, world)
    whole = network + loss + talk + max(0.0, averaged - network / 2)
    alone = network + max(FIXED, LOSS * (rows_a_rank / LOSS_ROWS) ** 2)
    return {"rows": rows, "bytes": sum(sizes), "talk": talk, "loss": loss, "step": whole, "efficiency": alone / whole}


WAYS = {
    "as it is: float32, all slopes to all": {},
    "each rank gets its own gradients": {"whole": False},
    "and rows in bf16": {"whole": False, "bytes_of_row": 2},
}


def counted_table(found) -> str:
    """What was counted, against the formulas."""
    setting = found["setting"]
    lines = [
        f"Received by a rank in one call, counted against the formula ({setting['size']:,} rows in all, width "
        f"{setting['width']}, gloo on loopback; c is the bytes of the duals a row):",
        "",
        "| loss | W | rows | slopes | c | seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for world, losses in found["counted"].items():
        rows, slopes = exchange(int(world), setting["size"], setting["width"])
        for name, seen in losses.items():
            narrow = seen.get("all_gather narrow", 0) + seen.get("all_reduce narrow", 0)
            lines.append(
                f"| {name} | {world} | {seen.get('all_gather wide', 0) / rows:.2f} x | "
                f"{seen.get('all_reduce wide', 0) / slopes:.2f} x | {narrow / setting['size']:.0f} | "
                f"{seen['seconds']:.2f} |"
            )
    return "\n".join(lines)


def predicted_table() -> str:
    """The page's table."""
    lines = [
        f"Predicted for {ROWS} rows a rank of width {WIDTH}, EfficientNet-Lite0:",
        "",
        "| W | rows N | received, MB | exchange, ms | step, ms | efficiency | own gradients alone | and bf16 rows |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for world in WORLDS:
        plain, *others = (step(world, ROWS, **how) for how in WAYS.values())
        cells = [f"{plain['rows']:,}", f"{plain['bytes'] / 1e6:.1f}"]
        cells += [f"{1e3 * plain[key]:.2f}" for key in ("talk", "step")]
        cells += [f"{each['efficiency']:.0%}" for each in (plain, *others)]
        lines.append(f"| {world:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    worlds = [2**power for power in range(11)]
    for name, how in WAYS.items():
        axes.plot(worlds, [100 * step(world, ROWS, **how)["efficiency"] for world in worlds], label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"GPUs, {ROWS} rows each")
    axes.set_ylabel("efficiency, % (predicted)")
    axes.legend(frameon=False)
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--from", dest="made", type=Path)
    given = parser.parse_args()
    if given.made is None:
        counts = {str(world): measured(world, given.size, given.width) for world in given.worlds}
        found = {"setting": {"size": given.size, "width": given.width}, "torch": torch.__version__, "counted": counts}
        write_text(RESULTS, json.dumps(found, indent=1) + "\n")
    else:
        found = json.loads(given.made.read_text(encoding="utf-8"))
    text = predicted_table()
    print(counted_table(found), text, sep="\n\n")
    draw()
    if PAGE.is_file() and BEGIN in (page := PAGE.read_text(encoding="utf-8")):
        before, rest = page.split(BEGIN)
        write_text(PAGE, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

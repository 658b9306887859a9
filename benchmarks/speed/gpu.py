"""Dense, compiled dense and tiled on a GPU: time, memory and waits of the host, B = 128 ... 32,768 and beyond, d = 512.

    python benchmarks/speed/gpu.py                             three to four minutes on an H200
    python benchmarks/speed/gpu.py --device cpu --sizes 64 128 --wide 256      does it run at all?

float32 throughout. "compiled" is `torch.compile` of the dense engine, at a few sizes, because each costs some ten
seconds of compilation that is not counted. Memory is what CUDA counts beyond the embeddings and their gradient. Waits
are the places where a step makes the host wait for the device (`torch.cuda.set_sync_debug_mode`). A run that is short
of time (--budget) leaves out what is left; the order is: dense and tiled at all sizes, then compiled.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nearfar._utils.files import write_text
from nearfar.bench import SUBJECTS, Patience, Plan, Row, measure
from nearfar.bench.memory import peak_on_gpu
from nearfar.bench.pages import as_json, growth_table, markdown
from nearfar.bench.study import about
from nearfar.bench.subjects import backward, batch, our_step

RESULTS = Path(__file__).parents[1] / "results"
LOSSES = ("MultiSimilarity", "SupCon", "LiftedStructure", "Triplet hard", "DroTopK", "DroKL")
SIZES, WIDE, COMPILED = (128, 512, 2048, 8192, 32768), (65536, 131072), (128, 2048)
WIDTH = 512


def waits(name: str, engine: str, rows: int, device: str) -> int | None:
    """How often the host waits for the device in one step, or None without CUDA."""
    if device != "cuda":
        return None
    step, (e, y) = our_step(SUBJECTS[name], rows, WIDTH, engine, device), batch(rows, WIDTH, device)
    backward(step, e, y)  # what is set up once does not count
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            backward(step, e, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in heard)


def plans(given: argparse.Namespace) -> Iterator[Plan]:
    """What is measured, the most wanted first."""
    common = Plan(width=WIDTH, device=given.device, peers=False, patience=Patience(given.rounds, 2.0))
    for name in given.losses:
        yield replace(common, losses=(name,), sizes=tuple(given.sizes), engines=("dense", "tiled"))
    for name in given.losses:
        if given.wide:
            yield replace(common, losses=(name,), sizes=tuple(given.wide), engines=("tiled",))
    for size in given.compiled:
        for name in given.losses:
            yield replace(common, losses=(name,), sizes=(size,), engines=("compiled",))


def counted(given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name in given.losses:
        for engine in ("dense", "tiled"):
            try:
                number = waits(name, engine, 2048, given.device)
            except RuntimeError as error:
                number = None
                print(f"waits of {name}, {engine}: {error}", flush=True)
            found.append({"loss": name, "engine": engine, "rows": 2048, "waits": number})
    return found


def heights(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory of tiled by the rows in a strip, at the largest of the sizes; None is the engine's own choice."""
    found, rows = [], max(given.sizes)
    for name in given.losses[:3] if given.heights else ():
        e, y = batch(rows, WIDTH, given.device)
        for height in (None, *given.heights):
            step: Any = our_step(SUBJECTS[name], rows, WIDTH, "tiled", given.device)
            step.tile = height
            took = peak_on_gpu(step, e, y)
            found.append({"loss": name, "rows": rows, "strip": height, **asdict(took)})
            print(found[-1], flush=True)
    return found


def shown(row: Row) -> list[tuple[str, ...]]:
    return [
        (
            row.loss,
            f"{row.rows:,}",
            who,
            cell.failed if cell.seconds is None else f"{1e3 * cell.seconds:.2f}",
            f"{row.x_limit(who) or 0:.1f}",
            "-" if cell.megabytes is None else f"{cell.megabytes:,.0f}",
        )
        for who, cell in row.cells.items()
    ]


def write(out: Path, rows: list[Row], more: dict[str, list[dict[str, Any]]], plan: Plan) -> None:
    known = about(plan)
    known["config"] = {key: known["config"][key] for key in ("width", "device", "patience")}
    record = {**known, **more, "results": [row.to_dict() for row in rows]}
    write_text(out / "gpu.json", as_json(record))
    told = ", ".join(f"{name} {word}" for name, word in known["versions"].items() if word)
    lines = [line for row in sorted(rows, key=lambda row: (row.loss, row.rows)) for line in shown(row)]
    waiting = [(each["loss"], each["engine"], str(each["waits"])) for each in more["waits"]]
    strips = [(x["loss"], f"{x['rows']:,}", str(x["strip"] or "its own"), x["failed"] or f"{1e3 * x['seconds']:.1f}",
               f"{x['megabytes'] or 0:,.0f}") for x in more["heights"]]  # fmt: skip
    tiled = [row for row in rows if "tiled" in row.cells]
    parts = [
        f"# Dense, compiled dense and tiled: {known['device']}, d = {WIDTH}, float32",
        f"Forward and backward, four rows a class, by the clock, medians of up to {plan.patience.rounds}; {told}.",
        markdown(("loss", "B", "engine", "ms", "x limit", "MB"), lines),
        "## Waits of the host in a step at 2,048 rows\n\n" + markdown(("loss", "engine", "waits"), waiting),
        "## Tiled, by the rows in a strip\n\n" + markdown(("loss", "B", "rows in a strip", "ms", "MB"), strips),
        "## Growth of tiled\n\n" + growth_table(tiled, "tiled"),
    ]
    write_text(out / "gpu.md", "\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(SUBJECTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--wide", type=int, nargs="*", default=list(WIDE), help="sizes for tiled alone")
    parser.add_argument("--compiled", type=int, nargs="*", default=list(COMPILED), help="sizes for compiled dense")
    parser.add_argument(
        "--heights", type=int, nargs="*", default=[512, 1024, 2048, 4096], help="rows in a strip to try"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    begin, rows = time.monotonic(), list[Row]()
    more = {"waits": counted(given), "heights": heights(given) if given.device == "cuda" else []}
    for plan in plans(given):
        if time.monotonic() - begin > given.budget:
            print(f"out of time before {plan.losses[0]}, {plan.sizes}, {plan.engines}", flush=True)
            continue
        torch.compiler.reset()  # else the eighth compilation gives up and runs dense
        for row in measure(plan):
            rows.append(row)
            print(f"{time.monotonic() - begin:5.0f} s ", *shown(row), flush=True)
        write(given.out, rows, more, plan)


if __name__ == "__main__":
    main()

"""Time and memory of every loss and miner against pytorch-metric-learning (PML) and the limit, over sizes and widths.

    python benchmarks/speed/tiled.py                              a sweep over sizes: about an hour on one core
    python benchmarks/speed/tiled.py --losses SupCon DroTopK --sizes 1024 4096
    python benchmarks/speed/tiled.py --part auto --threads 2      `engine="auto"` against dense
    python benchmarks/speed/tiled.py --part largest               the largest batch in 1 GB, of the sweep's rows

It uses `nearfar.bench` with more sizes and rounds than `nearfar bench`. Rows are written to benchmarks/results as they
come and replace earlier ones, so that a sweep can be made in parts. The figure shows the losses of `nearfar bench`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded; PyTorch's threads are set below

import argparse
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text
from nearfar.bench import SUBJECTS, Limits, Patience, Plan, Row, measure
from nearfar.bench._figure import draw
from nearfar.bench._pages import as_json, growth_table, line, markdown, setting, table
from nearfar.bench._results import growth
from nearfar.bench._study import about

RESULTS = Path(__file__).parents[1] / "results"
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DENSE_UP_TO = {"Triplet all": 1024, "Triplet smooth": 1024, "Triplet semihard": 1024, "Triplet hardest": 1024,
               "Triplet balanced": 1024, "Angular": 1024, "LiftedStructure": 4096}  # fmt: skip
"""Rows beyond which dense needs many gigabytes; 8,192 elsewhere."""


def known(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else []


def keep(file: Path, new: dict[str, Any], keys: tuple[str, ...], head: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a result to the file; it replaces an earlier one with the same keys."""
    order = list(SUBJECTS)
    rows = [each for each in known(file) if any(each[key] != new[key] for key in keys)] + [new]
    rows.sort(key=lambda each: (order.index(each["loss"]), [each[key] for key in keys[1:]]))
    write_text(file, as_json({**head, "results": rows}))
    return rows


def plan_of(given: argparse.Namespace, **more: Any) -> Plan:
    patience = Patience(given.rounds, given.seconds)
    limits = Limits(given.megabytes, given.step_seconds)
    common = {"width": given.width, "threads": given.threads, "patience": patience, "limits": limits}
    return Plan(**{"losses": tuple(given.losses), "sizes": tuple(given.sizes), **common, **more})


def sweep(given: argparse.Namespace) -> None:
    """Ours beside PML and the limit, with memory."""
    file, plan = given.out / "bench_cpu.json", plan_of(given)
    found = [Row.from_dict(each) for each in known(file)]
    for row in measure(plan):
        print(line(row, "auto"), flush=True)
        kept = keep(file, row.to_dict(), ("loss", "width", "threads", "rows"), about(plan))
        found = [Row.from_dict(each) for each in kept]
    write_sweep(file, found, plan)


def write_sweep(file: Path, found: list[Row], plan: Plan) -> None:
    parts = ["# Every loss and miner, CPU", setting(plan, about(plan)["versions"])]
    parts.append(
        "General way: see docs/guides/engines.md. Where a size is missing, a step there took longer than was allowed."
    )

    def setup(row: Row) -> tuple[int, int]:
        return row.threads, row.width

    for (threads, width), group in groupby(sorted(found, key=setup), setup):
        rows = list(group)
        parts += [f"## d = {width}, {threads} thread{'s' * (threads > 1)}", table(rows, "auto")]
        parts += ["Growth, slopes on logarithmic axes from 4,096 rows on:", growth_table(rows, "auto")]
        if (threads, width) == (1, 128):
            shown = [row for row in rows if SUBJECTS[row.loss].usual]
            draw(file.with_suffix(".png"), shown or rows, "auto", setting=about(plan))
    write_text(file.with_suffix(".md"), "\n\n".join(parts) + "\n")
    record = json.loads(file.read_text(encoding="utf-8"))
    main = [row for row in found if setup(row) == (1, 128)]
    write_text(file, as_json({**record, "exponents": growth(main, "auto")}))


def against_dense(given: argparse.Namespace) -> None:
    """`auto` over dense, in turns; medians of nine."""
    file, kept = given.out / "auto_cpu.json", list[dict[str, Any]]()
    for name in given.losses:
        sizes = tuple(size for size in given.sizes if size <= DENSE_UP_TO.get(name, 8192))
        plan = plan_of(given, losses=(name,), sizes=sizes, engines=("auto", "dense"), peers=False, memory=False)
        for row in measure(plan):
            ratio = row.over("auto", "dense")
            print(f"{row.loss:<26} {row.rows:>6,} rows  {row.threads} threads  auto / dense {ratio:.2f}", flush=True)
            keys = ("loss", "threads", "rows")
            kept = keep(file, row.to_dict() | {"auto_over_dense": ratio}, keys, about(plan))
    write_text(file.with_suffix(".md"), auto_table(kept))


def auto_table(kept: Iterable[dict[str, Any]]) -> str:
    rows = {(each["loss"], each["threads"], each["rows"]): each["auto_over_dense"] for each in kept}
    sizes, threads = sorted({key[2] for key in rows}), sorted({key[1] for key in rows})
    lines = [
        [loss, str(number), *(_ratio(rows.get((loss, number, size))) for size in sizes)]
        for loss in dict.fromkeys(key[0] for key in rows)
        for number in threads
    ]
    over = [f"{loss}, {rows_:,} rows, {number} threads: {ratio:.2f}"
            for (loss, number, rows_), ratio in rows.items() if ratio > 1.1]  # fmt: skip
    above = "Goal: at most 1.1. Above it: " + ("; ".join(over) or "none") + "."
    head = ["loss", "threads", *(f"{size:,}" for size in sizes)]
    return f'# engine="auto" over dense, time, medians of nine in turns\n\n{markdown(head, lines)}\n\n{above}\n'


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def largest(given: argparse.Namespace) -> None:
    """From the sweep at d = 128: the largest batch whose step fits in 1 GB, with embeddings and gradient."""
    found = [Row.from_dict(each) for each in known(given.out / "bench_cpu.json")]
    by_loss: dict[str, list[Row]] = {}
    for row in found:
        if (row.width, row.threads) == (128, 1):
            by_loss.setdefault(row.loss, []).append(row)
    head = ("loss or miner", "largest B in 1 GB", "MB there", "s there", "the next size")
    text = markdown(head, [in_a_gigabyte(rows) for rows in by_loss.values()])
    title = "# The largest batch in 1 GB, d = 128, one thread; embeddings and gradient counted"
    write_text(given.out / "largest_cpu.md", f"{title}\n\n{text}\n")
    print(text)


def in_a_gigabyte(rows: list[Row]) -> tuple[str, ...]:
    ended = [row for row in rows if _all(row) <= 1024]
    last = ended[-1]
    after = next((row for row in rows if row.rows > last.rows), None)
    shown = f"{last.rows:,}" if after is not None and _all(after) < float("inf") else f">= {last.rows:,}"
    beyond = "not tried" if after is None else after.cells["auto"].failed or f"{_all(after):,.0f} MB"
    return last.loss, shown, f"{_all(last):,.0f}", f"{last.cells['auto'].seconds:,.1f}", beyond


def _all(row: Row) -> float:
    """Megabytes of a step with its embeddings and their gradient."""
    took = row.cells["auto"].megabytes
    return float("inf") if took is None else took + 2 * row.rows * row.width * 4 / 2**20


PARTS = {"sweep": sweep, "auto": against_dense, "largest": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="sweep")
    parser.add_argument("--losses", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10.0, help="of turns for one loss at one size")
    parser.add_argument("--megabytes", type=float, default=4096.0, help="that one step may take")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="that one step may take")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results")
    given = parser.parse_args()
    PARTS[given.part](given)


if __name__ == "__main__":
    main()

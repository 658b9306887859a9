"""Write the tables of benchmarks/RESULTS-speed.md and results/bench_gpu.md from the results, and draw the figures.

    python benchmarks/speed/speed_report.py                    write the tables and draw the figures
    python benchmarks/speed/speed_report.py --session FOLDER   first copy the results of a GPU session from the folder

The text between `<!-- NAME -->` and `<!-- /NAME -->` in the report is made by the function of that name.
`tests/project/test_bench_page.py` compares the report and the figures with the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text
from nearfar._utils.tables import markdown
from nearfar.bench import PEER, SUBJECTS, Row
from nearfar.bench._figure import draw
from nearfar.bench._subjects import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "RESULTS-speed.md"
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PROBES = ("correctness", "small", "graphs", "big", "session")
"""Result files of a GPU session; they are stored as results/gpu_NAME.json."""
SMALL = 2048
"""The most rows of a small batch."""
LARGE = 32768
"""Rows of the table of large batches."""
SHOWN = ("MultiSimilarity", "SupCon", "LiftedStructure", "Triplet hard", "DroTopK")
"""Losses in the figure of the GPU."""


def record(name: str) -> Any:
    """The content of a results file, or None."""
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def rows_of(found: Any) -> list[Row]:
    """The rows of a results file; rows with the same loss, size and precision are joined."""
    by_key: dict[tuple[str, int, str], Row] = {}
    for each in (Row.from_dict(row) for row in found["results"]):
        before = by_key.get(each.key)
        by_key[each.key] = each if before is None else replace(before, cells={**before.cells, **each.cells})
    order, precisions = list(SUBJECTS), list(PRECISIONS)
    return sorted(by_key.values(), key=lambda row: (order.index(row.loss), precisions.index(row.precision), row.rows))


def cpu_rows() -> list[Row]:
    """The rows of the CPU: one thread, d = 128."""
    found = record("bench_cpu.json")["results"]
    return rows_of({"results": [each for each in found if (each["width"], each["threads"]) == (128, 1)]})


def gpu_record() -> Any:
    """The results of a GPU session: small and large batches together."""
    small, large = record("gpu_small.json"), record("gpu_big.json")
    return {**small, "results": small["results"] + large["results"]}


def gpu_rows() -> list[Row]:
    """The rows of the GPU."""
    return rows_of(gpu_record())


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; large ones without decimals."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def milliseconds(row: Row | None, who: str = "auto") -> str:
    """Milliseconds of an engine or PML, or the word for its failure."""
    cell = row.cells.get(who) if row else None
    if cell is None:
        return "-"
    return cell.word or "-" if cell.seconds is None else number(1e3 * cell.seconds, 2 if cell.seconds < 1e-2 else 1)


def against_peer(row: Row | None) -> str:
    """PML's time over ours, or the word for its failure."""
    if row is None or PEER not in row.cells:
        return "-"
    return row.cells[PEER].word or number(row.over(PEER, "auto"))


def software(found: Any) -> str:
    """The device and the versions of a results file."""
    versions = ", ".join(f"{name} {word}" for name, word in found["versions"].items() if word)
    return f"{found['device']}, d = {found['config']['width']}; {versions}."


def pivot(rows: Iterable[Row], columns: Sequence[tuple[str, Any]], precision: str = "float32") -> str:
    """A line for each loss; a column is its head and a function of the rows by size."""
    by_loss: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.precision == precision:
            by_loss.setdefault(row.loss, {})[row.rows] = row
    lines = [(loss, *(make(at) for _, make in columns)) for loss, at in by_loss.items()]
    return markdown(("loss or miner", *(head for head, _ in columns)), lines)


# Blocks of the report


def cpu_picture() -> str:
    """The figure of the CPU."""
    return "![Time and memory against the rows of a batch on a CPU, beside PML](../docs/images/bench-cpu.png)"


def gpu_picture() -> str:
    """The figure of the GPU."""
    return "![Time and memory against the rows of a batch on a GPU](../docs/images/bench-gpu.png)"


def cpu() -> str:
    """Every loss on the CPU: time over the limit, PML's time over ours, and memory."""
    found = record("bench_cpu.json")
    head = software({**found, "device": f"{found['device']}, one thread", "config": {"width": 128}})
    columns = [
        ("x limit, 4,096", lambda at: number(at[4096].x_limit("auto")) if 4096 in at else "-"),
        *((f"PML / ours, {n:,}", lambda at, n=n: against_peer(at.get(n))) for n in (128, 1024, 4096)),
        ("MB, 16,384", lambda at: number(at[16384].cells["auto"].megabytes, 0) if 16384 in at else "-"),
    ]
    return f"{head}\n\n{pivot(cpu_rows(), columns)}"


def small_batches() -> str:
    """Every loss on the GPU at 128 and 2,048 rows, in float32."""
    columns = [
        *((f"ms, {n:,}", lambda at, n=n: milliseconds(at.get(n))) for n in (128, SMALL)),
        *((f"PML / ours, {n:,}", lambda at, n=n: against_peer(at.get(n))) for n in (128, SMALL)),
        ("launches", lambda at: _launches(at.get(128), "auto")),
        ("PML's", lambda at: _launches(at.get(128), PEER)),
    ]
    return f"{software(gpu_record())}\n\n{pivot((row for row in gpu_rows() if row.rows <= SMALL), columns)}"


def large_batches() -> str:
    """32,768 rows on the GPU in every precision."""
    by: dict[str, dict[str, Row]] = {}
    for row in gpu_rows():
        if row.rows == LARGE:
            by.setdefault(row.loss, {})[row.precision] = row
    precisions = [name for name in PRECISIONS if any(name in each for each in by.values())]
    lines = [
        (loss, *(milliseconds(each.get(name)) for name in precisions),
         *(number(each[name].x_limit("auto") if name in each else None) for name in precisions),
         number(next(iter(each.values())).cells["auto"].megabytes, 0))
        for loss, each in by.items()
    ]  # fmt: skip
    return markdown(("loss", *(f"{p}, ms" for p in precisions), *(f"{p}, x limit" for p in precisions), "MB"), lines)


def graphs() -> str:
    """How CUDA graphs change the time of a step, in a sentence for each way to make one."""
    found = record("gpu_graphs.json")
    if found is None:
        return "Not measured yet."
    lines = []
    for way, words in (("by hand", "captured by hand"), ("compiled", "`torch.compile(mode='reduce-overhead')`")):
        cases = [each for each in found["results"] if each["case"].startswith(f"{way}, ")]
        good = sorted(each["ms"] for each in cases if "failed" not in each and each.get("ok", True))
        bad = [each["case"].split(", ")[1] for each in cases if "failed" in each or not each.get("ok", True)]
        middle = f"median {good[len(good) // 2]:.2f} ms, {good[0]:.2f} to {good[-1]:.2f}" if good else "none"
        lines.append(f"- {words}: {len(good)} of {len(cases)} losses, {middle}; failed: {', '.join(bad) or 'none'}")
    eager = sorted(each["eager ms"] for each in found["results"] if "eager ms" in each)
    return "\n".join([f"- eager: median {eager[len(eager) // 2]:.2f} ms, {eager[0]:.2f} to {eager[-1]:.2f}", *lines])


def correctness() -> str:
    """The largest error of a gradient in each engine and precision, and the loss that has it."""
    found = record("gpu_correctness.json")
    if found is None:
        return "Not measured yet."
    worst: dict[str, dict[str, tuple[float, str]]] = {}
    failed = []
    for each in found["results"]:
        loss, engine, precision, rows = each["case"].rsplit(", ", 3)
        row = worst.setdefault(f"{engine}, {precision}", {})
        if isinstance(each.get("gradient"), float):
            row[rows] = max(row.get(rows, (0.0, "")), (each["gradient"], loss))
        else:
            failed.append(f"{each['case']}: {str(each.get('failed', '-')).split(':')[0]}")
    sizes = sorted({rows for row in worst.values() for rows in row}, key=lambda rows: int(rows.split()[0]))
    lines = [
        (way, *(f"{row[rows][0]:.0e} ({row[rows][1]})" if rows in row else "-" for rows in sizes))
        for way, row in worst.items()
    ]
    return markdown(("engine, precision", *sizes), lines) + "".join(f"\n\nFailed: {each}." for each in failed)


def gathered() -> str:
    """The work of one rank as a share of one process."""
    return _table_of("gathered_cpu.md")


def rank_work() -> str:
    """The work of the busiest rank times the number of ranks, over that of one process."""
    return _table_of("rank_work_cpu.md")


def _table_of(name: str) -> str:
    """The table in a Markdown file of results."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


BLOCKS = (cpu_picture, cpu, gpu_picture, small_batches, large_batches, graphs, correctness, gathered, rank_work)


def fill_blocks(text: str) -> str:
    """The report with every block made anew from the results."""
    for make in BLOCKS:
        name = make.__name__
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{make()}\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    return text


# All results of the GPU


def gpu_tables() -> str:
    """Everything that a GPU session measured: times, CUDA graphs, errors of gradients."""
    parts = ["# Losses on a GPU", software(gpu_record()), "## Times", all_times(gpu_rows())]
    if (found := record("gpu_graphs.json")) is not None:
        cases = {each["case"]: each for each in found["results"]}
        rows = [
            (loss, number(cases.get(f"by hand, {loss}, auto", {}).get("eager ms"), 2),
             _graph(cases.get(f"by hand, {loss}, auto", {})), _graph(cases.get(f"compiled, {loss}", {})))
            for loss in dict.fromkeys(case.split(", ")[1] for case in cases)
        ]  # fmt: skip
        head = ("loss", "eager, ms", "captured by hand, ms", "reduce-overhead, ms")
        parts += ["## CUDA graphs", markdown(head, rows)]
    if (found := record("gpu_correctness.json")) is not None:
        by: dict[str, dict[str, dict[str, Any]]] = {}
        for each in found["results"]:
            loss, engine, precision, size = each["case"].rsplit(", ", 3)
            by.setdefault(f"{loss}, {size}", {})[f"{engine}, {precision}"] = each
        ways = list(dict.fromkeys(way for cases in by.values() for way in cases))
        rows = [(loss, *(_error(cases.get(way, {})) for way in ways)) for loss, cases in by.items()]
        parts += ["## Errors of gradients", markdown(("loss", *ways), rows)]
    return "\n\n".join(parts) + "\n"


def all_times(rows: Iterable[Row]) -> str:
    """A line for each loss, size and precision: milliseconds of every engine and PML, then ratios, launches, memory."""
    rows = list(rows)
    names = {who: None for row in rows for who in row.cells}
    engines = [*(who for who in names if who != PEER), *([PEER] if PEER in names else [])]
    head = ["loss", "B", "precision", *(f"{who}, ms" for who in engines), "limit, ms", "auto x limit", "PML / auto",
            "launches", "PML launches", "MB"]  # fmt: skip
    lines = [
        [row.loss, f"{row.rows:,}", row.precision, *(milliseconds(row, who) for who in engines),
         number(None if row.limit is None else 1e3 * row.limit, 2), number(row.x_limit("auto")),
         number(row.over(PEER, "auto")), *(_launches(row, who) for who in ("auto", PEER)),
         number(row.cells["auto"].megabytes if "auto" in row.cells else None, 0)]
        for row in rows
    ]  # fmt: skip
    full = [place for place in range(len(head)) if place < 3 or any(line[place] != "-" for line in lines)]
    return markdown([head[place] for place in full], [[line[place] for place in full] for line in lines])


def _launches(row: Row | None, who: str) -> str:
    count = row.cells[who].launches if row and who in row.cells else None
    return "-" if count is None else f"{count:,}"


def _graph(case: dict[str, Any]) -> str:
    if "failed" in case:
        return str(case["failed"]).split(":")[0]
    return f"{number(case.get('ms'), 2)}{'' if case.get('ok', True) else ' (wrong)'}"


def _error(case: dict[str, Any]) -> str:
    gradient = case.get("gradient")
    return f"{gradient:.0e}" if isinstance(gradient, float) else str(case.get("failed", "-")).split(":")[0]


# Figures


def pictures() -> dict[str, tuple[list[Row], Any]]:
    """The rows of each figure, and the setting below it."""
    cpu, gpu = record("bench_cpu.json"), gpu_record()
    usual = [row for row in cpu_rows() if SUBJECTS[row.loss].usual]
    shown = [row for row in gpu_rows() if row.loss in SHOWN and "auto" in row.cells]
    return {
        "bench-cpu": (usual, {**cpu, "config": {**cpu["config"], "threads": 1, "width": 128}}),
        "bench-gpu": (shown, {**gpu, "config": {**gpu["config"], "device": "cuda"}}),
    }


def digest(rows: Sequence[Row]) -> str:
    """A short hash of the rows of a figure, which is stored beside it."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def take(folder: Path) -> list[Path]:
    """Copy the results files of a GPU session."""
    copies = []
    for name in PROBES:
        if (folder / f"{name}.json").exists():
            copies.append(RESULTS / f"gpu_{name}.json")
            write_text(copies[-1], (folder / f"{name}.json").read_text(encoding="utf-8"))
    return copies


def main() -> None:
    """Copy results if asked, draw the figures, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", type=Path, help="the output folder of a GPU session")
    given = parser.parse_args()
    if given.session is not None:
        print(*(f"copied: {file.relative_to(ROOT)}" for file in take(given.session)), sep="\n")
    for name, (rows, setting) in pictures().items():
        source = IMAGES / f"{name}.source"
        if not source.exists() or source.read_text(encoding="utf-8").strip() != digest(rows):
            draw(IMAGES / f"{name}.png", rows, "auto", setting=setting)
            write_text(source, digest(rows) + "\n")
    write_text(RESULTS / "bench_gpu.md", gpu_tables())
    write_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

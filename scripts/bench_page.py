"""The figures of docs/bench.md, taken from benchmarks/results: nobody writes them by hand.

    python scripts/bench_page.py                       write the tables into docs/bench.md and draw its pictures
    python scripts/bench_page.py --session FOLDER      first take over the results of benchmarks/gpu.py

What stands between `<!-- NAME -->` and `<!-- /NAME -->` in the page is made by the function of that name here.
`tests/test_bench_page.py` holds the page and the pictures against the results.
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
from nearfar.bench import PEER, SUBJECTS, Row
from nearfar.bench.figure import draw
from nearfar.bench.pages import markdown
from nearfar.bench.subjects import PRECISIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, IMAGES = ROOT / "docs" / "bench.md", ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PROBES = ("correctness", "small", "graphs", "big", "session")
"""Result files of a session, which lie here as gpu_NAME.json."""
SMALL = 2048
"""The most rows of a small batch."""
SHOWN = ("MultiSimilarity", "SupCon", "LiftedStructure", "Triplet hard", "DroTopK")
"""Losses of the GPU's picture."""


def record(name: str) -> Any:
    """A file of results, or None."""
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def rows_of(told: Any) -> list[Row]:
    """The rows of a file of results; those of the same loss, size and precision are one."""
    found: dict[tuple[str, int, str], Row] = {}
    for each in (Row.from_dict(row) for row in told["results"]):
        before = found.get(each.key)
        found[each.key] = each if before is None else replace(before, cells={**before.cells, **each.cells})
    order, precisions = list(SUBJECTS), list(PRECISIONS)
    return sorted(found.values(), key=lambda row: (order.index(row.loss), precisions.index(row.precision), row.rows))


def cpu_rows() -> list[Row]:
    """The rows of the CPU: one thread, d = 128."""
    told = [each for each in record("bench_cpu.json")["results"] if (each["width"], each["threads"]) == (128, 1)]
    return rows_of({"results": told})


def gpu_record() -> Any:
    """What a session measured: small batches and large ones together."""
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


def milliseconds(row: Row, who: str) -> str:
    """Milliseconds of a contestant, or the word for its failure."""
    cell = row.cells.get(who)
    if cell is None:
        return "-"
    return cell.word or "-" if cell.seconds is None else number(1e3 * cell.seconds, 2 if cell.seconds < 1e-2 else 1)


def software(told: Any) -> str:
    """The device and the versions of a file of results."""
    versions = ", ".join(f"{name} {word}" for name, word in told["versions"].items() if word)
    width = told["width"] if "width" in told else told["config"]["width"]
    return f"{told['device']}, d = {width}; {versions}."


def cpu() -> str:
    """The table of the CPU."""
    rows = {row.key: row for row in cpu_rows()}
    head = ["loss or miner", *(f"x limit, {n:,}" for n in (128, 1024, 4096, 16384)),
            *(f"PML / ours, {n:,}" for n in (128, 1024, 4096)), *(f"MB, {n:,}" for n in (4096, 16384))]  # fmt: skip
    lines = []
    for loss in dict.fromkeys(row.loss for row in rows.values()):
        at = {n: rows.get((loss, n, "float32")) for n in (128, 1024, 4096, 16384)}
        lines.append([
            loss,
            *(number(row.x_limit("auto")) if row else "-" for row in at.values()),
            *(_against_peer(at[n]) for n in (128, 1024, 4096)),
            *(number(row.cells["auto"].megabytes, 0) if (row := at[n]) else "-" for n in (4096, 16384)),
        ])  # fmt: skip
    told = record("bench_cpu.json")
    said = f"{told['device']}, one thread, d = 128; {software(told).split('; ')[1]}"
    return f"{said}\n\n{markdown(head, lines)}"


def _against_peer(row: Row | None) -> str:
    if row is None or PEER not in row.cells:
        return "-"
    return row.cells[PEER].word or number(row.over(PEER, "auto"))


def cpu_picture() -> str:
    """The picture of the CPU."""
    return "![Time and memory against the rows of a batch on a CPU, beside PML](images/bench-cpu.png)"


def gpu_picture() -> str:
    """The picture of the GPU."""
    return "![Time and memory against the rows of a batch on a GPU](images/bench-gpu.png)"


def small_batches() -> str:
    """Small batches on a GPU."""
    return f"{software(gpu_record())}\n\n{pivot(row for row in gpu_rows() if row.rows <= SMALL)}"


def large_batches() -> str:
    """Large batches on a GPU."""
    return pivot(row for row in gpu_rows() if row.rows > SMALL)


def pivot(rows: Iterable[Row]) -> str:
    """A line a loss, size and precision; milliseconds of each engine and of PML, then what is told of `auto`."""
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


def _launches(row: Row, who: str) -> str:
    count = row.cells[who].launches if who in row.cells else None
    return "-" if count is None else f"{count:,}"


def graphs() -> str:
    """CUDA graphs of each loss."""
    told = record("gpu_graphs.json")
    if told is None:
        return "Not measured yet."
    cases = {each["case"]: each for each in told["results"]}
    losses = dict.fromkeys(case.split(", ")[1] for case in cases)
    lines = []
    for loss in losses:
        hand, made = cases.get(f"by hand, {loss}, auto", {}), cases.get(f"compiled, {loss}", {})
        lines.append((loss, number(hand.get("eager ms"), 2), _case(hand), _case(made)))
    return markdown(("loss", "eager, ms", "captured by hand, ms", "reduce-overhead, ms"), lines)


def _case(told: dict[str, Any]) -> str:
    if "failed" in told:
        return str(told["failed"]).split(":")[0]
    return f"{number(told.get('ms'), 2)}{'' if told.get('ok', True) else ' (wrong)'}"


def correctness() -> str:
    """The error of each loss's gradient on each engine, in each precision."""
    told = record("gpu_correctness.json")
    if told is None:
        return "Not measured yet."
    by: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for each in told["results"]:
        loss, engine, precision, rows = each["case"].rsplit(", ", 3)
        by.setdefault(f"{loss}, {rows}", {})[engine, precision] = each
    ways = list(dict.fromkeys(way for cases in by.values() for way in cases))
    lines = [(loss, *(_error(cases.get(way, {})) for way in ways)) for loss, cases in by.items()]
    return markdown(("loss", *(f"{engine}, {precision}" for engine, precision in ways)), lines)


def _error(told: dict[str, Any]) -> str:
    gradient = told.get("gradient")
    return f"{gradient:.0e}" if isinstance(gradient, float) else str(told.get("failed", "-")).split(":")[0]


def one_import() -> str:
    """PML's losses and miners beside those of `nearfar.pml`."""
    told = record("one_import_cpu.json")
    cells = {(each["script"], each["width"], each["rows"]): each for each in told["results"]}
    sizes = sorted({rows for _, _, rows in cells})
    lines = [
        (script, str(width), *(_ratio(cells.get((script, width, n))) for n in sizes))
        for script, width in dict.fromkeys(key[:2] for key in cells)
    ]
    widths = " and ".join(str(width) for width in sorted({width for _, width, _ in cells}))
    head = ("script", "d", *(f"{n:,} rows" for n in sizes))
    return f"{software({**told, 'width': widths})}\n\n{markdown(head, lines)}"


def _ratio(told: dict[str, Any] | None) -> str:
    return "-" if told is None else told.get("failed") or f"{told['ratio']:.2f}"


BLOCKS = (cpu_picture, cpu, gpu_picture, small_batches, large_batches, graphs, correctness, one_import)


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    for make in BLOCKS:
        name = make.__name__
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{make()}\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    return text


def pictures() -> dict[str, tuple[list[Row], Any]]:
    """The rows of each picture, and what its foot says."""
    cpu, gpu = record("bench_cpu.json"), gpu_record()
    usual = [row for row in cpu_rows() if SUBJECTS[row.loss].usual]
    shown = [row for row in gpu_rows() if row.loss in SHOWN and "auto" in row.cells]
    return {
        "bench-cpu": (usual, {**cpu, "config": {**cpu["config"], "threads": 1, "width": 128}}),
        "bench-gpu": (shown, {**gpu, "config": {**gpu["config"], "device": "cuda"}}),
    }


def digest(rows: Sequence[Row]) -> str:
    """What a picture was drawn from, as a short hash; it lies beside the picture."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def take(folder: Path) -> list[Path]:
    """Take over the result files of a session."""
    taken = []
    for name in PROBES:
        if (folder / f"{name}.json").exists():
            taken.append(RESULTS / f"gpu_{name}.json")
            write_text(taken[-1], (folder / f"{name}.json").read_text(encoding="utf-8"))
    return taken


def main() -> None:
    """Take over results if asked, draw the pictures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", type=Path, help="the --output of benchmarks/gpu.py")
    given = parser.parse_args()
    if given.session is not None:
        print(*(f"taken: {file.relative_to(ROOT)}" for file in take(given.session)), sep="\n")
    for name, (rows, setting) in pictures().items():
        source = IMAGES / f"{name}.source"
        if not source.exists() or source.read_text(encoding="utf-8").strip() != digest(rows):
            draw(IMAGES / f"{name}.png", rows, "auto", setting=setting)
            write_text(source, digest(rows) + "\n")
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

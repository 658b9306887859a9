"""The figures of README.md, taken from benchmarks/results.

    python scripts/readme.py          write the figures into README.md and draw docs/images/scaling.png

The text between `<!-- NAME -->` and `<!-- /NAME -->` in README.md and docs/start/from-pml.md is written
by the function of that name. A test compares pages and picture with the results.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text
from nearfar.bench._figure import draw
from nearfar.bench._results import Cell, Row

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "scaling.png"
SHOWN = ("MultiSimilarity + miner", "NTXent", "Triplet all")


def record(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def times(ratio: float) -> str:
    """A ratio in two digits."""
    return f"{ratio:.0f}x" if ratio >= 9.5 else f"{ratio:.1f}x"


def one_import() -> str:
    """What the changed import gains on a CPU, and what native losses gain on a GPU."""
    gains, gpu = (_ratios(128), _ratios(1024)), _gpu()
    small, large = (f"{times(statistics.median(x))} ({times(min(x))} to {times(max(x))})" for x in gains)
    return (
        f"On one CPU thread the changed import is {small} as fast at 128 rows, and {large}\n"
        f"at 1,024: median and range over {len(gains[0])} and {len(gains[1])} combinations of loss and miner. "
        f"On an H200, native losses are\n{times(statistics.median(gpu))} as fast as PML's in the median of "
        f"{len(gpu)} cases, and slower in {sum(x < 1 for x in gpu) or 'none'}."
    )


def _ratios(rows: int) -> list[float]:
    """PML's time over ours for every script that both ran."""
    results = record("one_import_cpu.json")["results"]
    return [row["ratio"] for row in results if "ratio" in row and (row["rows"], row["width"]) == (rows, 128)]


def every_import() -> str:
    """What the changed import gains on a CPU, for every script that was measured."""
    told = record("one_import_cpu.json")
    rows = [row for row in told["results"] if row["width"] == 128]
    sizes = sorted({row["rows"] for row in rows})
    said = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    scripts = tuple(dict.fromkeys(row["script"] for row in rows))
    return "\n".join([*_imports(scripts, sizes, 128), "", f"d = 128; {said}."])


def _imports(scripts: Sequence[str], sizes: Sequence[int], width: int) -> list[str]:
    """The lines of a table: PML's time over ours."""
    results = record("one_import_cpu.json")["results"]
    found = {(row["script"], row["rows"], row["width"]): row for row in results if "ratio" in row}
    lines = [
        "| PML's time / ours, CPU, one thread | " + " | ".join(f"{rows:,} rows" for rows in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for script in scripts:
        cells = (found.get((script, rows, width)) for rows in sizes)
        lines.append(f"| `{script}` | " + " | ".join(times(each["ratio"]) if each else "-" for each in cells) + " |")
    return lines


def _gpu() -> list[float]:
    """PML's time over ours for every native loss on a GPU, in float32, up to 2,048 rows."""
    rows = [row for row in record("gpu_small.json")["results"] if row["rows"] <= 2048 and row["precision"] == "float32"]
    both = [(row["cells"]["PML"], row["cells"]["auto"]) for row in rows if "PML" in row["cells"]]
    return [peer["seconds"] / ours["seconds"] for peer, ours in both if peer.get("seconds") and ours.get("seconds")]


def _is(row: Mapping[str, Any], loss: str, rows: int) -> bool:
    return row["loss"] == loss and row["rows"] == rows and row["width"] == 128 and row["threads"] == 1


def scaling() -> str:
    """What the picture says, in one sentence."""
    cells = next(r["cells"] for r in record("bench_cpu.json")["results"] if _is(r, SHOWN[0], 16384))
    return (
        f"![Time and memory against the rows of a batch, beside PML]({PICTURE.relative_to(ROOT).as_posix()})\n\n"
        f"*16,384 rows take {cells['auto']['megabytes']:,.0f} MB with multi-similarity and its miner, and the numbers "
        "are those of the whole matrix.*"
    )


def drawn_rows() -> list[Row]:
    """The rows of the picture."""
    kept = [
        r for r in record("bench_cpu.json")["results"] if r["loss"] in SHOWN and (r["width"], r["threads"]) == (128, 1)
    ]
    names = ("seconds", "megabytes", "failed")
    return [
        Row(
            **{key: r[key] for key in ("loss", "rows", "width", "threads", "limit", "rounds")},
            cells={who: Cell(*(cell[name] for name in names)) for who, cell in r["cells"].items()},
        )
        for r in sorted(kept, key=lambda r: (SHOWN.index(r["loss"]), r["rows"]))
    ]


def digest() -> str:
    """What the picture was drawn from, as a short hash; it lies beside the picture."""
    return hashlib.sha256(repr(drawn_rows()).encode()).hexdigest()[:16]


def filled(text: str, *makers: Callable[[], str]) -> str:
    """A page with every figure as the results have it."""
    for make in makers:
        name = make.__name__
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{make()}\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    return text


PAGES = {PAGE: (one_import, scaling), ROOT / "docs" / "start" / "from-pml.md": (every_import,)}


def main() -> None:
    """Write the page, and draw the picture."""
    about = record("bench_cpu.json")
    draw(PICTURE, drawn_rows(), "auto", setting={**about, "config": {**about["config"], "threads": 1, "width": 128}})
    write_text(PICTURE.with_suffix(".source"), digest() + "\n")
    for page, makers in PAGES.items():
        write_text(page, filled(page.read_text(encoding="utf-8"), *makers))


if __name__ == "__main__":
    main()

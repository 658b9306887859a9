"""Write the tables and the figure of docs/papers/beyond/theorem.md from the results of theorem.py and projections.py.

python benchmarks/quality/beyond_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.figure import figure_file
from nearfar._utils.files import write_text
from nearfar.plot import style

ROOT = Path(__file__).parents[2]
PAGE, IMAGE = ROOT / "docs" / "papers" / "beyond" / "theorem.md", ROOT / "docs" / "images" / "beyond-theorem.png"
RESULTS = ROOT / "benchmarks" / "results"
LINES = {"lift": "error of the lift", "V": "V, largest violation", "H": "H", "formula": "d_iso of metrics"}


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3g}"


def between(low: float, high: float) -> str:
    return number(high) if high - low < 2e-4 else f"{number(low)} to {number(high)}"


def with_half(found: dict[str, Any], digits: int = 3) -> str:
    half = "" if found["half"] is None else f" ± {found['half']:.{digits}f}"
    return f"{found['mean']:.{digits}f}{half}"


def search_lines(found: dict[str, Any]) -> list[str]:
    classes, ladders, maps = found["classes"], found["ladders"], found["euclidean"]
    lines = [
        "| rows | H | d_iso: metrics | on a line | with N - 1 dimensions | error of the lift |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in found["sets"].items():
        values = [number(row["H"]), number(row["metrics"]), between(*row["line"]), between(*row["space"])]
        lines.append(f"| {name.replace('|', chr(92) + '|')} | {' | '.join(values)} | {number(row['lift'])} |")
    drawn = ", ".join(f"{number(ladders[k]['largest'])} of {ladders[k]['draws']:,} with {k}" for k in sorted(ladders))
    return [
        *lines,
        "",
        "`|` separates classes; in the last row, a ladder, `||` and `|||` separate larger groups. A range begins at",
        "the proved lower bound and ends at the best map found.",
        "",
        f"* **Classes:** {classes['draws']:,} metrics of 3 to 9 points. Formula and linear program differ by at most "
        f"{classes['formula_off']:.0e}; the",
        f"  largest d_iso/H is {number(classes['largest'])}, and {classes['above_half']} have more than H/2.",
        "* **Nested ladders** (each draw improved in three steps), the largest d_iso/H:",
        f"  {drawn} rungs.",
        f"* **Euclidean maps** into N - 1 dimensions: {maps['draws']} sets of 4 to 8 rows; the largest d_iso/H of the "
        f"best map found is",
        f"  {number(maps['largest'])}. The lift broke its bound {maps['lift_broken']} times and reached "
        f"{maps['largest_lift']:.0%} of it.",
        "",
        f"`python benchmarks/quality/theorem.py search`, {found['seconds'] / 60:.0f} minutes on a share of two cores.",
    ]


def run_lines(record: dict[str, Any]) -> list[str]:
    points = [point for run in record["runs"] for point in run["points"]]
    batches, half = 10 * len(points), sum(point["at_half"] for point in points)
    off = max(point["off"] for point in points)
    lines = ["| | H | d_iso of metrics | V | error of the lift | R@1, % |", "|---|--:|--:|--:|--:|--:|"]
    for name, row in record["table"].items():
        cells = [with_half(row[key]) for key in ("H", "formula", "V", "lift")]
        lines.append(f"| {name} | {' | '.join(cells)} | {with_half(row['recall@1'], 1)} |")
    return [
        "![H, V, the bounds and R@1 along runs on CUB](../../images/beyond-theorem.png)",
        "",
        "*A linear head on frozen EfficientNet-Lite0 features of CUB, B = 128, 300 steps, three seeds; means over ten",
        "fixed batches of 60 test rows (12 classes of 5), unit rows. V is for ε₊ = .6 and ε₋ = 1.2.*",
        "",
        *lines,
        "",
        "Mean ± half a 95% t-interval over three seeds, at the first and the last step.",
        "",
        f"Of {batches} batches {half} have d_iso = H/2. The linear program (two of ten batches) differs from the",
        f"formula by at most {off:.0e}.",
        "",
        "`python benchmarks/quality/theorem.py runs --path FOLDER`, on two cores.",
    ]


def projection_lines(record: dict[str, Any], title: str) -> list[str]:
    fixed = [v for v in record["variants"] if v.startswith("M:")]
    loose = [v for v in record["variants"] if not v.startswith("M:")]
    names = {v: v.replace("M:", "M = ").replace("converged:", "converged, ρ = ") for v in record["variants"]}
    head = [*(names[v] for v in record["variants"]), *(f"{names[c]} less {names[f]}" for c in loose for f in fixed)]
    lines = [f"| {title} | {' | '.join(head)} | projections, median length |", f"|---|{'--:|' * (len(head) + 1)}"]
    for name, row in record["table"].items():
        if row[loose[0]]["recall@1"]["half"] is None:  # one seed
            continue
        cells = [with_half(row[v]["recall@1"], 1) if v in row else "-" for v in record["variants"]]
        for c in loose:
            for f in fixed:
                less = row.get(c, {}).get(f"less {f}")
                cells.append(
                    "-" if less is None else f"{less['mean']:+.1f} ± {less['half'] or 0:.1f} ({less['verdict']})"
                )
        last = row.get(loose[0], {})
        lines.append(f"| {name} | {' | '.join(cells)} | {last['projections']:.1f}, {last['median_length']:.0f} steps |")
    return lines


def draw(record: dict[str, Any]) -> None:
    names = list(dict.fromkeys(run["loss"] for run in record["runs"]))
    with figure_file(IMAGE, (8.6, 5.0), 2, len(names), sharex=True, height_ratios=(2, 1)) as axes:
        for column, name in enumerate(names):
            runs = [run["points"] for run in record["runs"] if run["loss"] == name]
            step, (top, low) = [point["step"] for point in runs[0]], axes[:, column]
            means = {key: np.mean([[point[key] for point in run] for run in runs], axis=0) for key in LINES}
            for color, (key, label) in zip(style.COLORS, LINES.items(), strict=False):
                top.plot(step, means[key], color=color, label=label)
            top.fill_between(step, means["H"] / 2, means["H"] * 2 / 3, color=style.GRAY, alpha=0.3, label="H/2 to 2H/3")
            for run in runs:
                low.plot(step, [point["recall@1"] for point in run], color=style.GRAY)
            top.set(title=name, ylim=(0, None), ylabel="distance" if not column else "")
            low.set(xlabel="step", ylabel="R@1, %" if not column else "")
            for ax in (top, low):
                style.plain(ax)
        axes[0, -1].legend(fontsize=8, frameon=False)


def fill(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    return head + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found, record = (
        json.loads((RESULTS / f"theorem-{x}.json").read_text(encoding="utf-8")) for x in ("search", "runs")
    )
    text = fill(fill(text, "search", search_lines(found)), "runs", run_lines(record))
    draw(record)
    lines = []
    for data in ("vectors", "glyphs"):
        if (file := RESULTS / f"projections-{data}.json").exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            title = {"vectors": "CUB", "glyphs": "glyphs"}[data]
            lines += [*projection_lines(found, f"R@1, {title}, {found['steps']} steps"), ""]
    write_text(PAGE, fill(text, "projections", lines[:-1]))


if __name__ == "__main__":
    main()

"""Write the tables and figures of docs/papers/beyond: results of theorem.py, projections.py, sizes.py and memory.py.

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
PAGES, IMAGES = ROOT / "docs" / "papers" / "beyond", ROOT / "docs" / "images"
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
    with figure_file(
        IMAGES / "beyond-theorem.png", (8.6, 5.0), 2, len(names), sharex=True, height_ratios=(2, 1)
    ) as axes:
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


def less(cell: dict[str, Any]) -> str:
    """A difference with its interval and verdict."""
    return f"{cell['mean']:+.1f} ± {cell['half']:.1f} ({cell['verdict']})"


def size_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        "| MAP@R, test classes | tuned e | tuned | e = 8, less tuned | mean, less tuned |",
        "|---|--:|--:|--:|--:|",
    ]
    for wrong, rows in sorted(found["test"].items()):
        for name, row in rows.items():
            cells = [with_half(row["tuned"], 1), less(row["8"]), less(row["mean"])]
            lines.append(f"| {name}, {100 * float(wrong):.0f}% wrong labels | {row['size']:g} | {' | '.join(cells)} |")
    defaults = ", ".join(f"{name} {size:.0f}" for name, size in found["defaults"].items())
    low, high = found["confidence"]
    return [
        "![MAP@R against effective pairs a row](../../images/beyond-sizes.png)",
        "",
        "*Left: a linear head on frozen features of CUB, MAP@R on 20 held-out training classes, B = 80, hinge losses;",
        "bands are 95% t-intervals over three seeds. Right: the photographs study on CUB (whole networks, 200 steps,",
        "B = 80), K, ρ and γ as effective pairs, γ by the losses of frozen features.*",
        "",
        *lines,
        "",
        "± is half a 95% t-interval over three seeds; differences are paired by seed. The tuned size is the best of",
        "eight on the held-out classes with right labels.",
        "",
        f"At 95% confidence, ten batches ask for {low:.1f} to {high:.1f} of 79 pairs a row. The library's defaults",
        f"8B, 40B and .3 are worth, before training: {defaults}.",
        "",
        f"`python benchmarks/quality/sizes.py --path FOLDER`, {found['seconds'] / 60:.0f} minutes on shared cores.",
    ]


def study_curves(found: dict[str, Any], rows: int = 80) -> dict[str, list[tuple[float, float]]]:
    """Effective pairs a row and held-out MAP@R of the photographs study; γ by the losses of frozen features."""
    study = json.loads((RESULTS / "photographs-cub.json").read_text(encoding="utf-8"))["methods"]
    members, curves = rows * (rows - 1), {}
    kinds = {
        "TopK": ("DRO-TopK, hinge", "k", lambda v: min(2 * v, rows - 1)),
        "chi-square": ("DRO-chi-square, hinge", "rho", lambda v: members / (1 + 2 * v * rows / members) / rows),
        "KL": ("DRO-KL, hinge", "gamma", lambda v: float(np.interp(v, *found["gamma"]))),
    }
    for name, (method, key, size) in kinds.items():
        chosen = study[method]["chosen"]
        held = {k.removeprefix(f"{key} = ").removesuffix("B"): v for k, v in chosen["held_out"].items() if key in k}
        usual = {"TopK": 8.0, "chi-square": 40.0, "KL": 0.3}[name]
        points = {float(value): 100 * score for value, score in held.items()}
        points[usual] = 100 * max(v for k, v in chosen["held_out"].items() if k.startswith("lr"))
        curves[name] = sorted((size(value), score) for value, score in points.items())
    return curves


def draw_sizes(found: dict[str, Any]) -> None:
    with figure_file(IMAGES / "beyond-sizes.png", (8.6, 3.4), 1, 2) as grid:
        axes = grid[0]
        for color, (name, row) in zip(style.COLORS, found["curves"].items(), strict=False):
            x, mean = [float(size) for size in row], np.array([each["mean"] for each in row.values()])
            half = np.array([each["half"] for each in row.values()])
            axes[0].plot(x, mean, "o-", color=color, label=name, markersize=3)
            axes[0].fill_between(x, mean - half, mean + half, color=color, alpha=0.15)
        for color, (name, points) in zip(style.COLORS, study_curves(found).items(), strict=False):
            axes[1].plot(*zip(*points, strict=True), "o-", color=color, label=name, markersize=3)
        for ax, title in zip(axes, ("head on frozen features", "photographs study"), strict=True):
            ax.set(xscale="log", xlabel="effective pairs a row", title=title)
            style.plain(ax)
        axes[0].set(ylabel="MAP@R, %")
        axes[0].legend(fontsize=8, frameon=False)


def memory_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, cells in found["table"].items():
        lines += [
            f"| {name}: exact value {cells['exact']:.3f} | value - exact | length | bias² | variance | cosine |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for size, row in cells["rows"].items():
            for variant, each in row.items():
                numbers = [f"{each['value']:+.3f}", *(f"{each[key]:.2f}" for key in ("length", "bias", "variance"))]
                lines.append(f"| B = {size}, {variant} | {' | '.join(numbers)} | {each['cosine']:.2f} |")
        lines.append("")
    minutes = f"{found['seconds'] / 60:.0f} minutes on a share of two cores"
    return [
        *lines,
        f"{found['draws']} batches, head held fixed; length, bias² and variance relative to the exact gradient;",
        "cosine of one batch's gradient with it.",
        "",
        f"`python benchmarks/quality/memory.py static --path FOLDER`, {minutes}.",
    ]


def trained_lines(found: dict[str, Any]) -> list[str]:
    lines = ["| MAP@R, test classes | B | mean | less the same B | less B = 500 |", "|---|---|--:|--:|--:|"]
    for name, row in found["table"].items():
        for cell, each in row.items():
            keys = [f"less {cell.split(',')[0]}", "less B = 500"]
            others = [less(each[key]) if key in each else "-" for key in keys]
            lines.append(f"| {name} | {cell} | {with_half(each, 1)} | {' | '.join(others)} |")
    return [
        *lines,
        "",
        f"{found['passes']} passes over the training samples in every run, rate 1e-3.",
        "± is half a 95% t-interval over three seeds; differences are paired by seed.",
        "",
        f"`python benchmarks/quality/memory.py train --path FOLDER`, {found['seconds'] / 60:.0f} minutes.",
    ]


def write(page: str, parts: dict[str, list[str]]) -> None:
    """Fill the marked parts of a page."""
    file = PAGES / page
    text = file.read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = fill(text, name, lines)
    write_text(file, text)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    record = read("theorem-runs")
    draw(record)
    lines = []
    for data, title in (("vectors", "CUB"), ("glyphs", "glyphs")):
        if (RESULTS / f"projections-{data}.json").exists():
            found = read(f"projections-{data}")
            lines += [*projection_lines(found, f"R@1, {title}, {found['steps']} steps"), ""]
    search = search_lines(read("theorem-search"))
    write("theorem.md", {"search": search, "runs": run_lines(record), "projections": lines[:-1]})
    sizes = read("sizes")
    draw_sizes(sizes)
    write("sizes.md", {"sizes": size_lines(sizes)})
    kept = {"static": memory_lines(read("memory-static")), "train": trained_lines(read("memory-train"))}
    write("memory.md", kept)


if __name__ == "__main__":
    main()

"""Output of results: a line per row while it runs, and JSON, Markdown and a PNG at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text
from nearfar.bench.figure import draw
from nearfar.bench.study import Cell, Plan, Row, about, growth
from nearfar.bench.subjects import PEER

__all__ = ["as_json", "growth_table", "line", "markdown", "record", "report", "setting", "table", "write"]

AUTO = "auto"
"""The default engine, which is not mentioned."""
HEAD = ("loss", "B", "ms", "x limit", "PML / ours", "MB", "PML MB")


def line(row: Row, who: str) -> str:
    """Format one row for a terminal.

    >>> from nearfar.bench.study import Cell
    >>> line(Row("SupCon", 1024, 128, 1, 0.002, 9, {"auto": Cell(0.005, 17.2), "PML": Cell(0.015, 96.0)}), "auto")
    'SupCon                      1,024 rows      5.0 ms    2.5 x limit   PML 3.0 x as long     17 MB   PML 96 MB'
    """
    mine, theirs = row.cells[who], row.cells.get(PEER)
    head = f"{row.loss if who == AUTO else f'{row.loss}, {who}':<24} {row.rows:>8,} rows"
    if mine.seconds is None:
        return f"{head}   failed: {mine.failed}"
    text = f"{head} {_ms(mine):>8} ms {_number(row.x_limit(who)):>6} x limit"
    if theirs is None:
        return f"{text}{'':<23}{_mb(mine):>6} MB"
    if theirs.seconds is None:
        return f"{text}   {f'PML: {theirs.failed}':<20}{_mb(mine):>6} MB"
    ratio = f"PML {_number(row.over(PEER, who))} x as long"
    return f"{text}   {ratio:<20}{_mb(mine):>6} MB   PML {_mb(theirs)} MB"


def table(rows: Iterable[Row], who: str) -> str:
    """A Markdown table of the engine `who` beside PML; a failure is named in place of its number."""
    lines = [
        (row.loss, f"{row.rows:,}", _ms(row.cells[who]), _number(row.x_limit(who)),
         _peer(row, _number(row.over(PEER, who))), _mb(row.cells[who]),
         _peer(row, _mb(row.cells.get(PEER, Cell()))))
        for row in rows
    ]  # fmt: skip
    return markdown(HEAD, lines)


def growth_table(rows: Sequence[Row], who: str) -> str:
    """A Markdown table of the exponents of time and memory against B."""
    found = growth(rows, who)
    lines = [(loss, _number(each["time"], 2), _number(each["memory"], 2)) for loss, each in found.items()]
    return markdown(("loss", "time ~ B^", "memory ~ B^"), lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def report(rows: Sequence[Row], plan: Plan) -> str:
    """The whole report in Markdown."""
    known, who = about(plan), plan.engines[0]
    missing = known["versions"]["pytorch-metric-learning"] is None
    parts = [
        f"# nearfar bench: {known['device']}, {plan.threads} thread{'s' * (plan.threads > 1)}, d = {plan.width}",
        setting(plan, known["versions"]),
        "pytorch-metric-learning (PML) is not installed: its columns are empty." if missing else "",
        table(rows, who),
        *(f'## engine="{other}"\n\n{table(rows, other)}' for other in plan.engines[1:]),
        f"## Growth\n\nSlopes on logarithmic axes, from 4,096 rows on or over the three largest sizes.\n\n"
        f"{growth_table(rows, who)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def setting(plan: Plan, versions: Mapping[str, Any]) -> str:
    """A paragraph about how it was measured."""
    software = ", ".join(f"{name} {word}" for name, word in versions.items() if word)
    clock = "CPU seconds" if plan.device == "cpu" and plan.threads == 1 else "by the clock"
    return (
        f"Forward and backward, four rows a class, float32; contestants in turns, medians of up to "
        f"{plan.patience.rounds} rounds ({clock}). x limit: over the time of `(E @ E.T) @ E`. MB: peak of a step "
        f"beyond the embeddings and their gradient, in a process of its own. A step failed where it wanted more than "
        f"{plan.limits.megabytes:,.0f} MB (memory) or {plan.limits.seconds:,.0f} s (time). {software}."
    )


def record(rows: Sequence[Row], plan: Plan) -> dict[str, Any]:
    """The whole record for JSON."""
    exponents = {who: growth(rows, who) for who in plan.engines}
    return {**about(plan), "exponents": exponents, "results": [row.to_dict() for row in rows]}


def as_json(found: Mapping[str, Any]) -> str:
    """JSON with one result per line, numbers with five digits."""
    plain = _plain(found)
    results = ",\n".join("  " + json.dumps(each, allow_nan=False) for each in plain.pop("results"))
    head = json.dumps(plain, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "results": [\n{results}\n ]\n}}\n'


def write(folder: Path, rows: Sequence[Row], plan: Plan, name: str = "bench") -> list[Path]:
    """Write `bench.json`, `bench.md` and `bench.png`, and return their paths."""
    files = [folder / f"{name}.{kind}" for kind in ("json", "md", "png")]
    write_text(files[0], as_json(record(rows, plan)))
    write_text(files[1], report(rows, plan))
    draw(files[2], rows, plan.engines[0], setting=about(plan))
    return files


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _ms(cell: Cell) -> str:
    if cell.seconds is None:
        return cell.failed or "-"
    ms = 1e3 * cell.seconds
    return f"{ms:.2f}" if ms < 1 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _mb(cell: Cell) -> str:
    return (cell.failed or "-") if cell.megabytes is None else f"{cell.megabytes:,.0f}"


def _peer(row: Row, number: str) -> str:
    cell = row.cells.get(PEER)
    return "-" if cell is None else cell.failed or number


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"

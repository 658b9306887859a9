"""Output of a benchmark: a line per row and JSON while it runs, Markdown and a PNG at the end."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json, markdown, round_numbers
from nearfar.bench._figure import draw
from nearfar.bench._results import Cell, Row, growth
from nearfar.bench._study import Plan, about
from nearfar.bench._subjects import PEER, PRECISIONS, SUBJECTS

AUTO = "auto"  # the default engine, whose name is left out
USUAL = "float32"  # the default precision, whose name is left out
SAME = ("width", "threads", "engines")  # keys that must be equal for a run to be resumed
HEAD = ("loss", "B", "ms", "x limit", "PML / ours", "MB", "PML MB")


def line(row: Row, who: str) -> str:
    """Format one row for a terminal.

    >>> from nearfar.bench import Cell
    >>> line(Row("SupCon", 1024, 128, 1, 0.002, 9, {"auto": Cell(0.005, 17.2), "PML": Cell(0.015, 96.0)}), "auto")
    'SupCon                      1,024 rows      5.0 ms    2.5 x limit   PML 3.0 x as long     17 MB   PML 96 MB'
    """
    mine, theirs = row.cells[who], row.cells.get(PEER)
    name = ", ".join([row.loss, *([who] if who != AUTO else []), *([row.precision] if row.precision != USUAL else [])])
    head = f"{name:<24} {row.rows:>8,} rows"
    if mine.seconds is None:
        return f"{head}   failed: {mine.failed}"
    text = f"{head} {_ms(mine):>8} ms {_number(row.x_limit(who)):>6} x limit"
    if mine.launches is not None:
        text += f" {mine.launches:>5} launches"
    if theirs is None:
        return f"{text}{'':<23}{_mb(mine):>6} MB"
    if theirs.seconds is None:
        return f"{text}   {f'PML: {theirs.failed}':<20}{_mb(mine):>6} MB"
    ratio = f"PML {_number(row.over(PEER, who))} x as long"
    return f"{text}   {ratio:<20}{_mb(mine):>6} MB   PML {_mb(theirs)} MB"


def table(rows: Iterable[Row], who: str) -> str:
    """A Markdown table of the engine `who` next to PML; a failed cell names the reason."""
    lines = [
        (row.loss, f"{row.rows:,}", _ms(row.cells[who]), _number(row.x_limit(who)),
         _peer(row, _number(row.over(PEER, who))), _mb(row.cells[who]),
         _peer(row, _mb(row.cells.get(PEER, Cell()))))
        for row in rows
    ]  # fmt: skip
    return markdown(HEAD, lines)


def contest(rows: Iterable[Row]) -> str:
    """A Markdown table with a line for each engine and for PML; a failed cell names the reason."""
    head = ("loss", "B", "precision", "engine", "ms", "x limit", "PML / it", "launches", "MB")
    lines = [
        (row.loss, f"{row.rows:,}", row.precision, who, _ms(cell), _number(row.x_limit(who)),
         _number(None if who == PEER else row.over(PEER, who)), _count(cell), _mb(replace(cell, failed="")))
        for row in rows
        for who, cell in row.cells.items()
    ]  # fmt: skip
    return markdown(head, lines)


def growth_table(rows: Sequence[Row], who: str) -> str:
    """A Markdown table of the exponents of time and memory against B."""
    found = growth(rows, who)
    lines = [(loss, _number(each["time"], 2), _number(each["memory"], 2)) for loss, each in found.items()]
    return markdown(("loss", "time ~ B^", "memory ~ B^"), lines)


def report(rows: Sequence[Row], plan: Plan) -> str:
    """The whole report in Markdown."""
    found, who = about(plan), plan.engines[0]
    missing = found["versions"]["pytorch-metric-learning"] is None
    threads = f", {plan.threads} thread{'s' * (plan.threads > 1)}" if plan.device == "cpu" else ""
    parts = [
        f"# nearfar bench: {found['device']}{threads}, d = {plan.width}",
        setting(plan, found["versions"]),
        "pytorch-metric-learning (PML) is not installed: its columns are empty." if missing else "",
        table(rows, who) if len(plan.engines) == len(plan.precisions) == 1 and not plan.launches else contest(rows),
        f"## Growth\n\nSlopes on logarithmic axes, from 4,096 rows on or over the three largest sizes.\n\n"
        f"{growth_table(rows, who)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def setting(plan: Plan, versions: Mapping[str, Any]) -> str:
    """A paragraph about the protocol."""
    software = ", ".join(f"{name} {word}" for name, word in versions.items() if word)
    clock = "CPU seconds" if plan.device == "cpu" and plan.threads == 1 else "by the clock"
    alone, most = ", in a process of its own", f"{plan.limits.megabytes:,.0f} MB"
    if plan.device != "cpu":
        alone, most = ", as CUDA counts", "the device has"
    counted = (
        " Launches: kernels that a step starts on a GPU, operators that it calls on a CPU." if plan.launches else ""
    )
    return (
        f"Forward and backward, four rows a class, {', '.join(plan.precisions)}; contestants in turns, medians of up "
        f"to {plan.patience.rounds} rounds ({clock}). x limit: over the time of `(E @ E.T) @ E` in the same precision. "
        f"MB: peak of a step beyond the embeddings and their gradient{alone}. A step failed where it wanted more than "
        f"{most} (memory) or {plan.limits.seconds:,.0f} s (time).{counted} {software}."
    )


def record(rows: Sequence[Row], plan: Plan) -> dict[str, Any]:
    exponents = {who: growth(rows, who) for who in plan.engines}
    return {**about(plan), "exponents": exponents, "results": [row.to_dict() for row in rows]}


def write(folder: Path, rows: Sequence[Row], plan: Plan, name: str = "bench") -> list[Path]:
    """Write `bench.json`, `bench.md` and `bench.png`, and return their paths."""
    files = [folder / f"{name}.{kind}" for kind in ("json", "md", "png")]
    rows = keep(files[0], rows, plan)
    write_text(files[1], report(rows, plan))
    draw(files[2], rows, plan.engines[0], setting=about(plan))
    return files


def keep(file: Path, rows: Iterable[Row], plan: Plan) -> list[Row]:
    """Write the JSON of the rows so far, and return them in the order of tables."""
    names, precisions = list(SUBJECTS), list(PRECISIONS)
    ordered = sorted(rows, key=lambda row: (names.index(row.loss), precisions.index(row.precision), row.rows))
    write_text(file, as_json(record(ordered, plan)))
    return ordered


def known(file: Path, plan: Plan) -> list[Row]:
    """The rows of an earlier run to resume; ValueError if it had another machine, width or software."""
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [Row.from_dict(each) for each in found["results"]]
        before = {key: found[key] for key in ("device", "versions")} | {key: found["config"][key] for key in SAME}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"bench: {file} holds no results to resume; name another folder with --out.") from None
    mine = about(plan)
    now = round_numbers({key: mine[key] for key in ("device", "versions")} | {key: mine["config"][key] for key in SAME})
    for key, value in now.items():
        if before[key] != value:
            raise ValueError(
                f"bench: {file} cannot be resumed: its {key} was {before[key]!r}, and is {value!r} now; name another "
                "folder with --out."
            )
    return rows


def _ms(cell: Cell) -> str:
    if cell.seconds is None:
        return cell.word or "-"
    ms = 1e3 * cell.seconds
    return f"{ms:.2f}" if ms < 1 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _mb(cell: Cell) -> str:
    return (cell.word or "-") if cell.megabytes is None else f"{cell.megabytes:,.0f}"


def _count(cell: Cell) -> str:
    return "-" if cell.launches is None else f"{cell.launches:,}"


def _peer(row: Row, number: str) -> str:
    cell = row.cells.get(PEER)
    return "-" if cell is None else cell.word or number


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"

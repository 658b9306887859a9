"""`nearfar bench`: measure time and memory of the losses on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import parse_numbers
from nearfar.cli.commands.completion import loss_names

if TYPE_CHECKING:
    from nearfar.bench import Plan, Row

__all__ = ["bench", "make_plan"]

SIZES = {"cpu": (128, 512, 2048, 8192), "cuda": (128, 512, 2048, 8192, 32768, 131072, 262144, 1048576)}
QUICK = (128, 1024)


def bench(
    loss: Annotated[
        list[str] | None,
        typer.Option(help="A loss or miner; can be repeated. Default: a selection.", autocompletion=loss_names),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Batch sizes, comma-separated. Default: 128 to 8192, on a GPU 1048576.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of embeddings. Default: 128, GPU 512.", min=1)] = None,
    threads: Annotated[int, typer.Option(help="Number of CPU threads that PyTorch uses.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    engines: Annotated[str | None, typer.Option(help="Engines, comma-separated. Default: auto, GPU all.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="float32, tf32, bf16, fp16, comma-separated. Default: float32, on a GPU float32,bf16."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json, bench.md and bench.png.")] = Path("nearfar-bench"),
    quick: Annotated[bool, typer.Option(help="Small batches and few rounds: seconds, not minutes.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Time limit in seconds.", min=0)] = None,
    resume: Annotated[bool, typer.Option(help="Continue the bench.json in the output folder.")] = False,
) -> None:
    """Measure time and memory of the losses, compared with pytorch-metric-learning and the two-product limit."""
    from nearfar.bench import write

    more = {"losses": tuple(loss or ()), "threads": threads, "seconds": seconds}
    plan = make_plan(device, quick=quick, sizes=sizes, width=width, engines=engines, precision=precision, **more)
    out.mkdir(parents=True, exist_ok=True)  # fail now if the folder cannot be created, not in two minutes
    rows = _measure(plan, out / "bench.json", resume=resume)
    if not rows:
        raise ValueError("nothing was measured in the time that there was; give more --seconds.")
    for file in write(out, rows, plan):
        say(f"written: {file}")


def _measure(plan: Plan, file: Path, *, resume: bool) -> list[Row]:
    """Measure, print each row, and write the file after each row."""
    from nearfar.bench import measure
    from nearfar.bench._pages import keep, known, line
    from nearfar.bench._study import peer_version

    if plan.peers and peer_version() is None:
        say("pytorch-metric-learning (PML) is not installed, so only our losses are measured.")
    rows = known(file, plan) if resume else []
    with Progress("measuring") as watch:

        def shown(what: str, done: int, total: int) -> None:
            watch("measuring", done, total)  # one stage, so that the time left is that of all
            watch.to(done, what)

        for row in measure(plan, shown, rows):
            rows.append(row)
            keep(file, rows, plan)
            for engine in plan.engines:
                say(line(row, engine))
    return rows


def make_plan(
    device: str,
    *,
    quick: bool = False,
    sizes: str | None = None,
    width: int | None = None,
    engines: str | None = None,
    precision: str | None = None,
    **more: Any,
) -> Plan:
    """Make the plan for a device from the options of the command; `more` are fields of the plan."""
    from nearfar.bench import Limits, Patience, Plan, offered

    gpu = device == "cuda"
    plan = Plan(
        device=device,
        sizes=(QUICK if quick else SIZES.get(device, QUICK)) if sizes is None else parse_numbers("--sizes", sizes),
        width=width or (512 if gpu else 128),
        engines=_split(engines) or ("auto",),
        patience=Patience(3, 0.5) if quick else Patience(25, 1.0) if gpu else Patience(9, 4.0),
        limits=Limits(4096, 1) if quick else Limits(4096, 30 if gpu else 10),
        precisions=_split(precision) or (("float32", "bf16") if gpu else ("float32",)),
        launches=8192 if gpu else 2048,
        **more,
    )
    return replace(plan, engines=offered(device)) if engines is None and gpu else plan


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()

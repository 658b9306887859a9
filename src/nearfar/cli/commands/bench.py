"""`nearfar bench`: measure time and memory of the losses on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.completion import loss_names
from nearfar.cli.commands.shared import one_sentence

if TYPE_CHECKING:
    from nearfar.bench import Plan

__all__ = ["bench", "numbers", "planned", "register"]


def bench(
    loss: Annotated[
        list[str] | None,
        typer.Option(
            help="A loss or miner by its name in the tables; several times for several.", autocompletion=loss_names
        ),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Rows of a batch, with commas; else 128 to 8192.")] = None,
    width: Annotated[int, typer.Option(help="Numbers in an embedding.", min=1)] = 128,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch on a CPU.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for bench.json, bench.md and bench.png.")] = Path("nearfar-bench"),
    quick: Annotated[bool, typer.Option(help="Small sizes and few rounds: seconds in place of minutes.")] = False,
) -> None:
    """Time the losses, and measure their memory, beside pytorch-metric-learning and the two-product limit."""
    with one_sentence("bench"):
        from nearfar.bench import measure, write
        from nearfar.bench.pages import line
        from nearfar.bench.study import peer_version

        plan = planned(tuple(loss or ()), sizes, width, threads, device, quick=quick)
        out.mkdir(parents=True, exist_ok=True)  # fail now if the folder cannot be created, not in two minutes
        if peer_version() is None:
            say("pytorch-metric-learning (PML) is not installed, so that ours stand alone.")
        rows = []
        with Progress("measuring") as watch:
            for row in measure(plan, watch):
                rows.append(row)
                for engine in plan.engines:
                    say(line(row, engine))
        for file in write(out, rows, plan):
            say(f"written: {file}")


def planned(losses: tuple[str, ...], sizes: str | None, width: int, threads: int, device: str, *, quick: bool) -> Plan:
    """Build the plan from the options."""
    from nearfar.bench import Limits, Patience, Plan

    usual = (128, 1024) if quick else (128, 512, 2048, 8192)
    return Plan(
        losses=losses,
        sizes=usual if sizes is None else numbers(sizes),
        width=width,
        threads=threads,
        device=device,
        engines=("auto",) if device == "cpu" else ("dense", "compiled", "tiled"),
        patience=Patience(3, 0.5) if quick else Patience(9, 4.0),
        limits=Limits(4096, 1) if quick else Limits(4096, 10),
    )


def numbers(text: str) -> tuple[int, ...]:
    """Parse sizes separated by commas.

    >>> numbers("128,1_024")
    (128, 1024)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"sizes must be whole numbers with commas between, but came as {text!r}; try 128,1024."
        ) from None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)

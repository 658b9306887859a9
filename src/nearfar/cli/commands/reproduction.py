"""`nearfar reproduce`: reproduce the figures and claims of a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nearfar._utils.checks import check_choice
from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.shared import one_sentence

__all__ = ["register", "reproduce"]

STUDIES = ("descent", "isometry", "profs", "dro", "noise")
TRAINED = STUDIES[2:]
"""Studies that train networks: they take a data set, seeds and the options of a training."""


def reproduce(
    study: Annotated[
        str, typer.Argument(help=f"Which study: {', '.join(STUDIES)}.", autocompletion=lambda: list(STUDIES))
    ],
    folder: Annotated[
        Path | None, typer.Option(help="Folder for figures and numbers; a stopped study continues there.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="profs, dro, noise: glyphs (default), omniglot, cub, flowers, cars, sop, inshop, folder or vectors."
        ),
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Path of the data.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each configuration; default 3.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Batches per run; default: the study's own number.", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 1,
    seconds: Annotated[float | None, typer.Option(help="Begin no run after this time; call again to continue.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="float32, bf16, fp16 or float64; default: bf16 for photographs on a GPU, else float32."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A file of weights for the network's trunk.")] = None,
    quick: Annotated[bool, typer.Option(help="A smoke test: few and short runs.")] = False,
) -> None:
    """Reproduce a paper's figures and check its claims."""
    with one_sentence("reproduce"):
        from importlib import import_module

        check_choice("reproduce", "study", study, STUDIES)
        target = folder or Path(f"nearfar-{study}")
        options: dict[str, Any] = {"quick": quick}
        if study in TRAINED:
            options |= {"path": path, "steps": steps, "jobs": jobs, "seconds": seconds}
            options |= {"precision": precision, "weights": weights}
            options |= {name: value for name, value in (("data", data), ("seeds", seeds)) if value is not None}
        with Progress(f"study {study}", shown=study not in TRAINED):  # training studies have their own progress bar
            import_module(f"nearfar.studies.{study}").reproduce(target, **options)
        say(f"figures and numbers: {target}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(reproduce)

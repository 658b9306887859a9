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
"""Studies that train networks, and so take a data set and seeds."""


def reproduce(
    study: Annotated[
        str, typer.Argument(help=f"Which study: {', '.join(STUDIES)}.", autocompletion=lambda: list(STUDIES))
    ],
    folder: Annotated[
        Path | None, typer.Option(help="Where figures and numbers go; a stopped study goes on there.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="profs, dro, noise: glyphs, omniglot, cub, cars, sop or inshop.")
    ] = "glyphs",
    path: Annotated[Path | None, typer.Option(help="Where the data lie.")] = None,
    seeds: Annotated[int, typer.Option(help="How many.", min=1)] = 3,
    steps: Annotated[int | None, typer.Option(help="Batches a run, in place of the study's own number.", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side.", min=1)] = 1,
    quick: Annotated[bool, typer.Option(help="Fewer repetitions, for a first look.")] = False,
) -> None:
    """Reproduce a paper's figures and check its claims."""
    with one_sentence("reproduce"):
        from importlib import import_module

        check_choice("reproduce", "study", study, STUDIES)
        target = folder or Path(f"nearfar-{study}")
        options: dict[str, Any] = {"quick": quick}
        if study in TRAINED:
            options |= {"data": data, "path": path, "seeds": seeds, "steps": steps, "jobs": jobs}
        with Progress(f"study {study}", shown=study not in TRAINED):  # those that train have a bar of their own
            import_module(f"nearfar.studies.{study}").reproduce(target, **options)
        say(f"figures and numbers: {target}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(reproduce)

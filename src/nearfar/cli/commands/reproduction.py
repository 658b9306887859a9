"""`nearfar reproduce`: reproduce the figures and claims of a paper."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nearfar._utils.checks import check_choice
from nearfar._utils.console import say
from nearfar._utils.progress import Progress

STUDIES = ("descent", "isometry", "profs", "dro", "noise")
TRAINED = STUDIES[2:]  # studies that train networks, and so take a data set and seeds
IN_PARTS = ("profs", "dro")


def reproduce(
    study: Annotated[
        str, typer.Argument(help=f"Which study: {', '.join(STUDIES)}.", autocompletion=lambda: list(STUDIES))
    ],
    folder: Annotated[Path | None, typer.Option(help="Output folder; a stopped study continues there.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="profs, dro, noise: glyphs (default), omniglot, vectors, cub, flowers, cars, sop, inshop or folder."
        ),
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Folder of the data.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: 3.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps in a run. Default: by study.", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Number of concurrent runs.", min=1)] = 1,
    seconds: Annotated[float | None, typer.Option(help="Time limit; run again to continue.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bf16, fp16 or float64. Default: by device.")] = None,
    weights: Annotated[Path | None, typer.Option(help="File with weights of the network's trunk.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Another network, such as torchvision:googlenet. Default: by data.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Dimensions of the embedding. Default: by data.", min=1)] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="Tables and figures, joined by commas. profs: table, lengths, first, ablation; "
            "dro: imbalance, k, grouped, variants, time."
        ),
    ] = None,
    checkpoints: Annotated[
        int, typer.Option(help="Score the test classes so often, and report the best checkpoint too.", min=0)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, for a first look.")] = False,
) -> None:
    """Reproduce a paper's figures and check its claims."""
    from importlib import import_module

    check_choice("reproduce", "study", study, STUDIES)
    target = folder or Path(f"nearfar-{study}")
    options: dict[str, Any] = {"quick": quick}
    if parts is not None:
        if study not in IN_PARTS:
            raise ValueError(f"reproduce: {study} has no parts; leave --parts out, or take {' or '.join(IN_PARTS)}.")
        options["parts"] = parts.split(",")
    if study in TRAINED:
        told = {"data": data, "seeds": seeds}
        options |= {"path": path, "steps": steps, "jobs": jobs, "seconds": seconds}
        options |= {"precision": precision, "weights": weights, "network": network, "width": width}
        options["checkpoints"] = checkpoints
        options |= {name: value for name, value in told.items() if value is not None}
    with Progress(f"study {study}", shown=study not in TRAINED):  # those that train have a bar of their own
        import_module(f"nearfar.studies.{study}").reproduce(target, **options)
    say(f"figures and numbers: {target}")

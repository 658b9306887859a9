"""`nearfar inspect`: look through a data set for copies, wrong labels, odd classes and strangers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import check_suffix
from nearfar.cli.commands.embedding import Trust

if TYPE_CHECKING:
    from nearfar.inspection import Inspection


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="DATA|VECTORS", help="A folder, manifest, shards, vectors (.npz), or glyphs.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML page to write.")] = Path("inspection.html"),
    out: Annotated[Path, typer.Option("--csv", help="CSV to write, for nearfar train --data.corrections.")] = Path(
        "inspection.csv"
    ),
    model: Annotated[
        Path | None,
        typer.Option(help="A run folder or a model's file, to embed pictures. Default: lite0 if it is installed."),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of the pictures named in the vectors.")] = None,
    labels: Annotated[str | None, typer.Option(help="Where the labels of shards are, as data.labels.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Where the pictures of shards are, as data.inputs.")] = None,
    near: Annotated[int, typer.Option(min=1, help="Number of neighbors of each sample.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    trust_model: Trust = False,
) -> None:
    """Look through a data set for copies, wrong labels, odd classes and strangers."""
    from nearfar.inspection import inspect as look
    from nearfar.inspection import write_page

    check_suffix("--output", output, {".html": "a page"})
    check_suffix("--csv", out, {".csv": "corrections"})
    options: dict[str, Any] = {"near": near, "seed": seed, "labels": labels, "inputs": inputs}
    if model is not None:
        options |= _network(model, trust_model)
    with Progress(f"inspecting {source}") as watch:
        found = look(source, **options, watch=watch)
        found = found if images is None else _with_pictures(found, images)
        write_page(output, found, title=f"Inspection of {Path(source).name}")
    found.save(out)
    say(f"{found.text()}\npage: {output}\ncorrections: {out} (nearfar train --data.corrections {out})")


def _network(path: Path, trust_model: bool) -> dict[str, Any]:
    from nearfar.cli.commands.networks import load_model

    network = load_model(path, trust_model=trust_model)
    return {"model": network.run, "transform": network.transform or network.assumed(None, imagenet=False)}


def _with_pictures(found: Inspection, images: Path) -> Inspection:
    """Show the pictures in a folder on the page; names lead to them."""
    from nearfar.report._inputs import image_reader

    return replace(found, material=replace(found.material, picture=image_reader(images, found.material.names)))

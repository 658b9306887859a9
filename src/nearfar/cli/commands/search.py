"""`nearfar index`, `search` and `export`: from vectors to neighbors, from a network to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.checks import check_choice
from nearfar._utils.console import Terminal, say
from nearfar._utils.files import plain_target
from nearfar._utils.progress import Progress
from nearfar.cli.commands.embedding import Trust
from nearfar.cli.commands.shared import one_sentence, save_json

if TYPE_CHECKING:
    from nearfar.evaluation import Index, Neighbors, Vectors

__all__ = [
    "Trust",
    "export",
    "index",
    "records",
    "register",
    "search",
    "show",
    "sides",
]

SHOWN = 10
"""Queries whose neighbors are printed."""
JUDGED = 1000
"""Queries on which an approximate index is measured at most."""


def index(
    vectors: Annotated[Path, typer.Argument(metavar="VECTORS|RUN", help="A vectors.npz, or a run folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the index goes.")],
    kind: Annotated[str, typer.Option(help="exact, or ivf or hnsw (approximate, by faiss).")] = "exact",
    similarity: Annotated[str, typer.Option(help="cosine, dot or euclidean.")] = "cosine",
    cells: Annotated[int | None, typer.Option(min=1, help="ivf: how many cells.")] = None,
    probes: Annotated[int | None, typer.Option(min=1, help="ivf: how many of them a query looks at.")] = None,
) -> None:
    """Make an index of vectors, for `nearfar search`."""
    with one_sentence("index"):
        from nearfar.evaluation import Index, Vectors

        plain_target(output)
        found = Vectors.load(vectors)
        options: dict[str, Any] = {"similarity": similarity, "kind": kind, "cells": cells, "probes": probes}
        with Progress(f"indexing {len(found):,} vectors"):
            made = Index(found, **options)
            made.save(output)
        say(f"{output}: {made!r}")


def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="Made by `nearfar index`.")],
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="A vectors.npz, or a run folder.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many neighbors.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write all neighbors to this file.")] = None,
) -> None:
    """Find the nearest vectors of an index.

    For an approximate index it also measures and prints the share of the exact neighbors that it finds.
    """
    with one_sentence("search"):
        from nearfar.evaluation import Index, Vectors

        made, asked = Index.load(index), Vectors.load(queries)
        with Progress(f"searching {len(made):,} vectors for {len(asked):,} queries"):
            found = made.search(asked, k)
        show(made, asked, found)
        if json is not None:
            save_json(json, records(made, asked, found))
        if made.kind != "exact":
            few = asked.x[:JUDGED]
            with Progress("measuring the recall against exact search"):
                recall = made.measured_recall(few, k)
            say(f"Measured recall@{k} of {made.kind} against exact search: {100 * recall:.1f}% ({len(few):,} queries).")


def show(made: Index, asked: Vectors, found: Neighbors) -> None:
    """A table of the neighbors of the first queries, one row each."""
    from rich.table import Table

    table = Table(title=f"Nearest of {len(made):,} vectors ({made.similarity})", title_justify="left", show_lines=True)
    table.add_column("query", overflow="fold")
    table.add_column("nearest first, with scores", overflow="fold")
    names = made.names(found)
    for row in range(min(SHOWN, len(asked))):
        scores = found.scores[row].tolist()
        line = ", ".join(f"{name} ({score:.3f})" for name, score in zip(names[row], scores, strict=True))
        table.add_row(str(row) if asked.name is None else asked.name[row], line)
    console = Terminal()
    console.print(table)
    if len(asked) > SHOWN:
        console.print(f"... and {len(asked) - SHOWN:,} more queries; --json FILE keeps them all.")


def records(made: Index, asked: Vectors, found: Neighbors) -> list[dict[str, Any]]:
    """For each query its name and its neighbors' names, rows and scores, without entries that were not found."""
    every = []
    rows = zip(made.names(found), found.places.tolist(), found.scores.tolist(), strict=True)
    for query, (names, places, scores) in enumerate(rows):
        near = [
            {"name": name, "row": place, "score": score}
            for name, place, score in zip(names, places, scores, strict=True)
            if place >= 0
        ]
        every.append({"query": str(query) if asked.name is None else asked.name[query], "neighbors": near})
    return every


def export(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, a .safetensors or a torch.export .pt2 file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    kind: Annotated[
        str,
        typer.Option("--format", help="onnx (a graph that runs without us) or safetensors (weights to load again)."),
    ] = "onnx",
    shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 3,224,224, where the model holds no example.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference allowed, as a share of the largest entry.")
    ] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the random batches that are compared.")] = 0,
    trust_model: Trust = False,
) -> None:
    """Write a model as ONNX, after onnxruntime gave the same vectors on random batches; or its weights.

    The batch dimension is dynamic. If the vectors differ, no file is written.

    For a run, mean and deviation become part of the graph, which takes photographs as uint8 in 0..255; size and crop
    are stored in the metadata, where `nearfar embed` reads them.

    As safetensors, weights and all that is needed to build the network again (nearfar.models.load) go into one file.
    """
    with one_sentence("export"):
        import torch

        from nearfar.cli.commands.networks import load_model
        from nearfar.evaluation import export_onnx

        check_choice("export", "--format", kind, ("onnx", "safetensors"))
        plain_target(output)
        if kind == "safetensors":
            say(_as_weights(model, output))
            return
        network = load_model(model, trust_model=trust_model)
        if network.module is None:
            raise ValueError(f"{model} cannot be exported again; name a run folder or a torch.export (.pt2) file.")
        example = network.example if shape is None else torch.randn(2, *sides(shape))
        if example is None:
            raise ValueError(f"{model} holds no example; tell the shape of one sample, such as --shape 3,224,224.")
        with Progress("exporting and comparing"):
            options: dict[str, Any] = {"transform": network.transform, "tolerance": tolerance, "seed": seed}
            written = export_onnx(network.module, example, output, **options)
        say(str(written))


def _as_weights(model: Path, output: Path) -> str:
    """Write a .safetensors file that `models.load` reads; gives what it holds in words."""
    from nearfar.models.saved import read

    if output.suffix != ".safetensors":
        raise ValueError(f"the output of --format safetensors must end in .safetensors, but is {output}.")
    saved = read(model)
    saved.save(output)
    network, count = saved.network, sum(p.numel() for p in saved.model.parameters())
    shape = " x ".join(map(str, network.inputs))
    return f"{output}: {network.name} on {shape}, {network.embedding_dim} dimensions, {count:,} parameters"


def sides(shape: str) -> list[int]:
    """Parse a shape such as "3,224,224".

    >>> sides("3,224,224")
    [3, 224, 224]
    """
    words = shape.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--shape must be whole numbers from 1 on, such as 3,224,224, but came as {shape!r}.")
    return [int(word) for word in words]


def register(app: typer.Typer) -> None:
    """Add index, search and export to the app."""
    for command in (index, search, export):
        app.command()(command)

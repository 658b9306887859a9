"""`nearfar index` and `nearfar search`: build an index of vectors, and search it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import Terminal, say
from nearfar._utils.files import plain_target
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import check_suffix, save_json
from nearfar.cli.commands.embedding import Trust

if TYPE_CHECKING:
    from nearfar.evaluation import DiskIndex, Index, Neighbors, Vectors
    from nearfar.serve import Answer

SHOWN = 10  # queries whose neighbors are printed
JUDGED = 1000  # maximum number of queries on which an index in one file is measured

IndexPath = Annotated[Path, typer.Argument(metavar="INDEX", help="File or folder made by `nearfar index`.")]
Network = Annotated[
    Path | None,
    typer.Option("--model", metavar="RUN|MODEL", help="The network of the vectors, if the index holds none."),
]
Images = Annotated[Path | None, typer.Option(help="Folder with the pictures that the vectors are named after.")]


def index(
    vectors: Annotated[
        Path, typer.Argument(metavar="VECTORS|RUN", help="A vectors.npz, a folder of vectors, or a run.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="A file (.npz) to search in memory, or a folder (.index or no suffix) on disk."
        ),
    ],
    kind: Annotated[
        str, typer.Option(help="exact; folders only: int8, bits; by faiss: ivf, hnsw, ivfpq (folders only).")
    ] = "exact",
    similarity: Annotated[str, typer.Option(help="Similarity: cosine, dot or euclidean.")] = "cosine",
    cells: Annotated[int | None, typer.Option(min=1, help="ivf, ivfpq: number of cells.")] = None,
    probes: Annotated[int | None, typer.Option(min=1, help="ivf in a file: number of cells to search.")] = None,
    code_bytes: Annotated[
        int | None, typer.Option(min=1, help="ivfpq: bytes per vector, a divisor of its width.")
    ] = None,
    rerank: Annotated[
        int,
        typer.Option(
            min=0, help="ivfpq, int8, bits: (most) candidates per result to rank again by their vectors; 0 for none."
        ),
    ] = 8,
    recall: Annotated[float, typer.Option(help="Folder: the measured recall@10 that a search should reach.")] = 0.95,
    chunk: Annotated[int | None, typer.Option(min=1, help="Folder: vectors in a part (hnsw: in a graph).")] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="hnsw in a folder: number of threads; with several, graphs vary.")
    ] = 1,
    model: Annotated[
        Path | None,
        typer.Option(metavar="RUN|MODEL", help="Folder: a network to store in it, for searches by photograph."),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="As in `nearfar embed`.")] = None,
    imagenet: Annotated[bool, typer.Option("--imagenet", help="As in `nearfar embed`.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="File of `nearfar calibrate`: queries without a near neighbor are unknown.")
    ] = None,
) -> None:
    """Build an index of vectors for `nearfar search` and `nearfar serve`.

    A folder is built in chunks. After an interruption, run the same command again to continue.
    """
    from nearfar.evaluation import Calibration, Vectors

    check_suffix("--output", output, {".npz": "a file", ".index": "a folder", "": "a folder"})
    made: Index | DiskIndex
    options: dict[str, Any] = {"kind": kind, "similarity": similarity, "cells": cells}
    options["calibration"] = None if calibration is None else Calibration.load(calibration)
    if output.suffix == ".npz":
        if kind in ("ivfpq", "int8", "bits") or model is not None:
            what = "--model" if model is not None else kind
            raise ValueError(f"{what} needs a folder: name an output that does not end in .npz.")
        made = _in_a_file(output, Vectors.load(vectors), options | {"probes": probes})
    else:
        if probes is not None:
            raise ValueError("--probes is for an index in a file; set --recall for a folder.")
        options |= {"code_bytes": code_bytes, "rerank": rerank, "recall": recall, "chunk": chunk, "threads": threads}
        made = _in_a_folder(output, Vectors.load(vectors), model, size, imagenet, options)
    say(f"{output}: {made!r}")
    if said := _recall(made):
        say(said)
    if said := threshold_of(made):
        say(said)


def threshold_of(made: Index | DiskIndex) -> str:
    """The threshold of an index and what it promises, in one sentence; empty without a calibration."""
    found = made.calibration
    if found is None:
        return ""
    from nearfar.evaluation._calibration import PROMISE

    trial = "queries of classes that are not in the index" if found.per == "query" else "pairs of different classes"
    sure = "" if found.guaranteed is None else f", with {found.confidence:.0%} confidence, which {PROMISE}"
    return f"Unknown is what scores {found.usable:.4f} or less: at most {found.far:g} of {trial} pass{sure}."


def _in_a_file(output: Path, found: Vectors, options: dict[str, Any]) -> Index:
    from nearfar.evaluation import Index

    plain_target(output)
    with Progress(f"indexing {len(found):,} vectors"):
        made = Index(found, **options)
        made.save(output)
    return made


def _in_a_folder(
    output: Path, found: Vectors, model: Path | None, size: int | None, imagenet: bool, options: dict[str, Any]
) -> DiskIndex:
    from nearfar.evaluation import build_index

    if model is None:
        if size is not None or imagenet:
            raise ValueError("--size and --imagenet need --model; name it, or leave them out.")
        return build_index(output, found, progress=True, **options)
    from nearfar.cli.commands.networks import load_model
    from nearfar.cli.commands.photographs import describe_transform
    from nearfar.evaluation._fingerprint import check_same_network

    if not model.is_dir() and model.suffix not in (".onnx", ".safetensors"):
        raise ValueError(f"--model must be a run folder, an .onnx or a .safetensors file, not {model}.")
    network = load_model(model)
    assumed = network.assumed(size, imagenet)
    mark = network.mark(assumed)
    check_same_network("index", ("the vectors", found.fingerprint), (str(model), mark))
    if found.fingerprint is None:
        from dataclasses import replace

        found = replace(found, fingerprint=mark)
    kept = describe_transform(network.transform or assumed)
    with tempfile.TemporaryDirectory() as aside:
        file = model
        if model.is_dir():
            from nearfar.models.saved import read

            file = Path(aside) / "network.safetensors"
            read(model).save(file)
        return build_index(output, found, progress=True, network=file, preprocessing=kept, **options)


def _recall(made: Index | DiskIndex) -> str:
    """The recall that was measured when an index in a folder was built, in one sentence."""
    from nearfar.evaluation import DiskIndex

    if not isinstance(made, DiskIndex) or not made.recall["queries"]:
        return ""
    share, k, queries = 100 * made.recall["recall"], made.recall["k"], made.recall["queries"]
    what = "candidates a result" if made.plan.coded else f"{'candidates' if made.kind == 'hnsw' else 'cells'} a query"
    return (
        f"Recall@{k} against exact search, measured on {queries:,} of its own vectors when it was built: {share:.1f}% "
        f"with {made.effort:,} {what}."
    )


def search(
    index: IndexPath,
    queries: Annotated[
        str,
        typer.Argument(
            metavar="QUERIES",
            help="A photograph, a folder of them, a sentence, a file of texts, a vectors.npz, a folder of vectors, "
            "or a run.",
        ),
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of neighbors.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write all neighbors to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write all neighbors to this HTML page, with pictures.")] = None,
    images: Images = None,
    model: Network = None,
    trust_model: Trust = False,
) -> None:
    """Search an index for the neighbors of photographs, texts or vectors.

    For an approximate index, the share of the exact neighbors that it finds is printed too.
    """
    from nearfar.evaluation import DiskIndex, open_index

    for target in (json, page):
        if target is not None:
            plain_target(target)
    if page is not None:
        check_suffix("--page", page, {".html": "a page"})
    made = open_index(index)
    asked = _read_queries(made, index, queries, model, trust_model)
    with Progress(f"searching {len(made):,} vectors for {len(asked):,} queries"):
        found = made.search(asked, k)
    show(made, asked, found)
    if said := threshold_of(made):
        say(said)
    if json is not None:
        save_json(json, records(made, asked, found))
    if page is not None:
        _write_page(page, made, asked, found, index, queries, images)
    if isinstance(made, DiskIndex):
        if said := _recall(made):
            say(said)
    elif made.kind != "exact":
        few = asked.x[:JUDGED]
        with Progress("measuring the recall against exact search"):
            recall = made.measured_recall(few, k)
        say(f"Measured recall@{k} of {made.kind} against exact search: {100 * recall:.1f}% ({len(few):,} queries).")


def _read_queries(made: Index | DiskIndex, index: Path, queries: str, model: Path | None, trust_model: bool) -> Vectors:
    """The queries as vectors; photographs and texts pass through the network of the index."""
    from nearfar.cli.commands.embedding import rephrase_errors
    from nearfar.cli.commands.photographs import need_network, network_of
    from nearfar.data._texts import shorten
    from nearfar.evaluation import Vectors

    path, there = Path(queries), _exists(queries)
    if there and not need_network(path):
        if model is not None:
            raise ValueError(f"--model embeds photographs and texts, and {queries} holds vectors; leave it out.")
        return Vectors.load(path)
    network = network_of(made, index, model, trust_model=trust_model)
    named = Path(queries).suffix and " " not in queries  # a misspelled file, not a sentence
    if not there and (named or network is None or not network.takes_texts):
        also = "" if named else f", and {index} holds no network that reads it as a sentence"
        raise FileNotFoundError(f"there is no file or folder {queries}{also}.")
    if network is None:
        raise ValueError(f"{index} holds no network to embed queries with; name its run or model with --model.")
    if not there:
        return Vectors(network.vector(queries)[None], name=(shorten(queries),), fingerprint=network.mark)
    with rephrase_errors():
        return network.vectors(path)


def _exists(queries: str) -> bool:
    """Whether there is a file or folder of this name; a long sentence is none."""
    try:
        return Path(queries).exists()
    except (OSError, ValueError):
        return False


def _write_page(
    page: Path,
    made: Index | DiskIndex,
    asked: Vectors,
    found: Neighbors,
    index: Path,
    queries: str,
    images: Path | None,
) -> None:
    """Write the gallery."""
    from nearfar.data._texts import shorten
    from nearfar.report._pictures import as_picture
    from nearfar.serve import Found, Searcher, Thumbnails, write_gallery
    from nearfar.serve._pictures import data_uri, encode

    source = Path(queries) if _exists(queries) else None
    home = None if source is None else source if source.is_dir() else source.parent
    shown = Thumbnails(made, images)

    def of_query(row: int, name: str) -> str | None:
        if asked.images is not None:
            return data_uri(encode(as_picture(asked.images[row])))
        if home is None:
            return None
        try:
            return data_uri(encode(as_picture(home / name)))
        except OSError:
            return None

    names = [str(row) for row in range(len(asked))] if asked.name is None else asked.name
    answers = Searcher(made).answers(found)
    every = [
        Found(f"{name}{_unknown(made, answers[row])}", of_query(row, name), answers[row])
        for row, name in enumerate(names)
    ]
    about = f"{len(asked):,} {'query' if len(asked) == 1 else 'queries'}, nearest of {len(made):,} vectors by "
    title = f"{shorten(queries) if source is None else source.name} in {index.name}"
    write_gallery(page, title, f"{about}{made.similarity}.", every, lambda r: data_uri(shown.get(r)))
    pictured = any(shown.get(answer.row) for each in answers for answer in each)
    hint = "" if pictured else " (without pictures: nearfar embed --thumbnails 96, or --images FOLDER, brings them)"
    say(f"page: {page}{hint}")


def _unknown(made: Index | DiskIndex, near: Sequence[Answer]) -> str:
    """What to write behind the name of a query whose nearest neighbor does not pass."""
    return ": unknown" if made.knows(near[0].score if near else -math.inf) is False else ""


def show(made: Index | DiskIndex, asked: Vectors, found: Neighbors) -> None:
    """A table of the neighbors of the first queries, one row each."""
    from rich.table import Table

    from nearfar.serve import Searcher

    table = Table(title=f"Nearest of {len(made):,} vectors ({made.similarity})", title_justify="left", show_lines=True)
    table.add_column("query", overflow="fold")
    table.add_column("nearest first, with scores", overflow="fold")
    for row, near in enumerate(Searcher(made).answers(found)[:SHOWN]):
        between = "\n" if any(" " in one.name for one in near) else ", "
        line = between.join(f"{one.name} ({one.score:.3f})" for one in near)
        name = str(row) if asked.name is None else asked.name[row]
        table.add_row(f"{name}{_unknown(made, near)}", line)
    console = Terminal()
    console.print(table)
    if len(asked) > SHOWN:
        console.print(f"... and {len(asked) - SHOWN:,} more queries; --json FILE keeps them all.")


def records(made: Index | DiskIndex, asked: Vectors, found: Neighbors) -> list[dict[str, Any]]:
    """For each query its name and its neighbors' names, rows and scores, without entries that were not found.

    An index with a calibration also says whether the query is `known`.
    """
    from nearfar.serve import Searcher

    names = range(len(asked)) if asked.name is None else asked.name
    return [
        {"query": str(name)}
        | ({} if made.calibration is None else {"known": not _unknown(made, near)})
        | {"neighbors": [{"name": x.name, "row": x.row, "score": x.score} for x in near]}
        for name, near in zip(names, Searcher(made).answers(found), strict=True)
    ]

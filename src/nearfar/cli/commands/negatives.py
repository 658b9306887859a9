"""`nearfar mine`: hard negatives of each sample over a whole collection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import say
from nearfar.cli.commands.command import Extra, check_one, load_labeled
from nearfar.cli.commands.embedding import Trust, clear_parts, compute
from nearfar.cli.launch import Processes, Restarts, launch, name_of_launch, place

if TYPE_CHECKING:
    from nearfar.evaluation._mine import Search

OWN = "embeddings.vectors"  # in the folder: the embeddings of DATA


def mine(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL|VECTORS", help="The network that embeds DATA, or labeled vectors.")
    ],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="Labeled samples, as in `nearfar embed`.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write; an interrupted command continues in it.")
    ] = Path("mined"),
    more: Extra = None,
    gallery: Annotated[Path | None, typer.Option(help="Labeled vectors to mine instead of the samples.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="The most negatives of a sample.")] = 10,
    ranks: Annotated[str, typer.Option(help="Window of ranks among the negatives, such as 10,100.")] = "1,100",
    scores: Annotated[str, typer.Option(help="Window of scores, such as 0.2,0.8; an end may be left out.")] = ",",
    margin: Annotated[
        float | None,
        typer.Option(help="Leave out negatives at or above the nearest positive's score less this margin."),
    ] = None,
    teacher: Annotated[Path | None, typer.Option(help="Vectors of another network that judge --margin.")] = None,
    index: Annotated[Path | None, typer.Option(help="Search this index of the references instead of all.")] = None,
    similarity: Annotated[str, typer.Option(help="Similarity: cosine, dot or euclidean.")] = "cosine",
    batch_size: Annotated[int, typer.Option(min=1, help="Number of samples in a batch that is embedded.")] = 256,
    trust_model: Trust = False,
    processes: Processes = None,
    again: Restarts = 0,
) -> None:
    """Mine hard negatives: the nearest samples of other classes, for each sample.

    The folder holds chunks of samples, one .npz file each: `places` [n, k] (rows of the references, -1 for none), their
    `scores`, and the score of the nearest `positive`. `nearfar.evaluation.Mined.load` reads them all.
    """
    from nearfar.evaluation._chunks import PLAN

    check_one("DATA", data, more)
    rule = {"k": k, "ranks": parse_window("--ranks", ranks, int), "scores": parse_window("--scores", scores, float)}
    others = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if output.exists() and PLAN not in others and any(name != OWN and name[0] != "." for name in others):
        raise FileExistsError(f"{output} holds other files ({others[0]}); name a new folder for the negatives.")
    if launch(processes, again):
        return
    if data is not None:
        _embed(source, data, output, batch_size, trust_model)
    _mine(
        _search(source if data is None else output / OWN, gallery, teacher, index, rule, margin, similarity), output, k
    )


def parse_window(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, Any]:
    """Parse the two ends of a window; None for one that is left out.

    >>> parse_window("--scores", "0.2,", float)
    (0.2, None)
    """
    try:
        first, last = (kind(end) if end.strip() else None for end in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be two numbers, such as 10,100, but came as {text!r}.") from None
    return first, last


def _embed(model: Path, data: Path, output: Path, batch_size: int, trust_model: bool) -> None:
    """Embed the samples into the folder; ranks wait for the first, which joins the chunks of all."""
    from nearfar.evaluation._chunks import Chunks

    rank, world = place()
    lines = compute(model, data, output / OWN, batch_size=batch_size, trust_model=trust_model, labeled=True)
    joined = Chunks("mine", output / ".embedded")
    if lines is not None:
        joined.mark_done(rank, world, name_of_launch())
        say(lines)
    joined.wait_for(range(1), world, name_of_launch())


def _search(
    vectors: Path,
    gallery: Path | None,
    teacher: Path | None,
    index: Path | None,
    rule: dict[str, Any],
    margin: float | None,
    similarity: str,
) -> Search:
    from nearfar.evaluation import Vectors, open_index
    from nearfar.evaluation._fingerprint import check_same_network
    from nearfar.evaluation._mine import Rule, Search

    if gallery is not None and teacher is not None:
        raise ValueError("--teacher judges samples among themselves; leave --gallery out, or call nf.mine in Python.")
    queries = load_labeled(vectors)
    found_in = None if gallery is None else load_labeled(gallery)
    if found_in is not None:
        check_same_network("mine", (str(vectors), queries.fingerprint), (str(gallery), found_in.fingerprint))
    judge = None if teacher is None else Vectors.load(teacher)
    chosen: Any = Rule(**rule, margin=margin, similarity=similarity)  # type: ignore[arg-type]
    return Search(queries, None, found_in, None, chosen, judge, None if index is None else open_index(index))


def _mine(search: Search, output: Path, k: int) -> None:
    """Mine this rank's chunks; the first rank waits for the others, and prints a summary."""
    from nearfar.evaluation._chunks import Chunks

    rank, world = place()
    found = none = 0
    for _ in search.chunks(output, rank=rank, world=world, progress=rank == 0):
        pass  # stored in its file
    store = Chunks("mine", output)
    if rank:
        store.mark_done(rank, world, name_of_launch())
        return
    store.wait_for(range(1, world), world, name_of_launch())
    for part in store.read_all(search.count_chunks):
        many = (part["places"] >= 0).sum(axis=1)
        found, none = found + int(many.sum()), none + int((many == 0).sum())
    for path in (*output.glob("done-*.txt"), *output.glob(".done-*.part")):
        path.unlink(missing_ok=True)
    Chunks("mine", output / ".embedded").clear()
    clear_parts(output / OWN)
    n = len(search.x)
    without = f"; {none:,} have none" if none else ""
    say(f"{output}: {found / n:.1f} hard negatives (of at most {k}) for each of {n:,} samples{without}.")

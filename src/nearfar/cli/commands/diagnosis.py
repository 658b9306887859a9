"""`nearfar diagnose`: whether an embedding space or a run is healthy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import save_json

if TYPE_CHECKING:
    from nearfar.doctor import Diagnosis


def diagnose(
    source: Annotated[Path, typer.Argument(metavar="RUN|VECTORS", help="A run folder, or a vectors.npz.")],
    margin: Annotated[float | None, typer.Option(help="Margin of the triplet loss in training, if any.")] = None,
    metric: Annotated[str, typer.Option(help="Metric: cosine or euclidean.")] = "cosine",
    rows: Annotated[int, typer.Option(help="Number of vectors to look at.", min=2)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed for choosing these vectors.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the full result to this JSON file.")] = None,
) -> None:
    """Diagnose an embedding space or a run, and propose remedies. Exit code 2 if it is not healthy."""
    with Progress(f"looking at {source}"):
        found = find_diagnoses(source, {"margin": margin, "metric": metric, "rows": rows, "seed": seed})
    if json is not None:
        save_json(json, {"source": str(source), **{name: each.to_dict() for name, each in found.items()}})
    for name, each in found.items():
        say(f"{name}: {each.text()}")
    if not all(each.healthy for each in found.values()):
        raise typer.Exit(2)


def find_diagnoses(source: Path, options: dict[str, Any]) -> dict[str, Diagnosis]:
    """Diagnose the journal and the vectors, if they exist."""
    from nearfar.doctor import diagnose_run

    found: dict[str, Diagnosis] = {}
    if (source / "journal.jsonl").is_file():
        found["The run"] = diagnose_run(source)
    if not source.is_dir() or (source / "embeddings.npz").is_file():
        found["The space"] = of_vectors(source, options)
    if not found:
        raise FileNotFoundError(f"{source} holds neither journal.jsonl nor embeddings.npz; name a run or vectors.npz.")
    return found


def of_vectors(source: Path, options: dict[str, Any]) -> Diagnosis:
    """Diagnose a file of vectors; not by `Vectors`, which refuses rows that are not finite: here they are a finding."""
    from nearfar._utils.arrays import labels_of, rows_of
    from nearfar._utils.files import read_arrays
    from nearfar.doctor import diagnose as judge

    path = source / "embeddings.npz" if source.is_dir() else source
    arrays = read_arrays("diagnose", path)
    for key in ("x", "y"):
        if key not in arrays:
            raise ValueError(f"{path} must hold {key}, but holds {', '.join(arrays) or 'nothing'}.")
    x, y = rows_of("diagnose", f"x in {path}", arrays["x"]), labels_of("diagnose", f"y in {path}", arrays["y"])
    return judge(x, y, **options)

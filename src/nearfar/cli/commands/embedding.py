"""`nearfar embed`: compute the embeddings of samples."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.checks import check_choice, printable
from nearfar._utils.console import say
from nearfar._utils.files import plain_target, write_arrays
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import Extra, check_one, check_suffix
from nearfar.cli.launch import Processes, Restarts, is_first, launch, name_of_launch, place

if TYPE_CHECKING:
    import numpy as np

    from nearfar.cli.commands.inputs import Samples
    from nearfar.evaluation import Vectors

FOLDER = ".vectors"  # how the name of a folder of vectors ends
NAMED = 3  # classes that are named in one line
Trust = Annotated[
    bool, typer.Option("--trust-model", help="Allow .pt and .pt2 files, which can run any code when they are read.")
]


def embed(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, or an .onnx, TorchScript .pt or torch.export .pt2 file."
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="glyphs:train, glyphs:test, an .npz with x (y, name), texts (.csv, .jsonl, .parquet, .txt), or a "
            "folder of images, flat or with one subfolder per class.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Output: a file (.npz) or a folder (.vectors).")],
    more: Extra = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of samples in a batch.")] = 256,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Side of the images in pixels, if the model does not define it. Default: 224."),
    ] = None,
    imagenet: Annotated[
        bool, typer.Option("--imagenet", help="Standardize images by ImageNet's mean, if the model does not.")
    ] = False,
    thumbnails: Annotated[int, typer.Option(min=0, help="Side of the thumbnails to store; 0 for none.")] = 0,
    on_corrupt: Annotated[
        str, typer.Option(help="What to do with unreadable images: stop, or skip them and list them at the end.")
    ] = "stop",
    trust_model: Trust = False,
    dtype: Annotated[str, typer.Option(help="Stored type: float32, float16, or bf16 (folders only).")] = ("float32"),
    processes: Processes = None,
    again: Restarts = 0,
) -> None:
    """Compute the embeddings of samples.

    After an interruption, run the same command again to continue, with any number of processes.

    A folder (.vectors) is memory-mapped when it is read, so it may be larger than the memory.

    Networks of runs and of `nearfar export` define their preprocessing. Other models get glyphs as 1 x 32 x 32 and
    images as 3 x size x size, both in 0..1, and the x of an .npz file as float32.
    """
    check_one("DATA", data, more)
    check_choice("embed", "--on-corrupt", on_corrupt, ("stop", "skip"))
    _check_output(output, dtype)
    if launch(processes, again):
        return
    options: dict[str, Any] = {"thumbnails": thumbnails, "on_corrupt": on_corrupt}
    options |= {"trust_model": trust_model, "dtype": dtype}
    lines = compute(model, data, output, batch_size=batch_size, size=size, imagenet=imagenet, **options)
    if lines is not None:
        clear_parts(output)
        say(lines)


def compute(
    model: Path,
    data: Path,
    output: Path,
    *,
    batch_size: int,
    size: int | None = None,
    imagenet: bool = False,
    thumbnails: int = 0,
    on_corrupt: Any = "stop",
    trust_model: bool = False,
    dtype: str = "float32",
    labeled: bool = False,
) -> str | None:
    """Write the embeddings, and return what to print; None on ranks other than the first.

    Chunks that were computed stay beside the output until `clear_parts`. With `labeled`, samples must have classes.
    """
    from nearfar.cli.commands.inputs import read_samples
    from nearfar.cli.commands.networks import load_model

    network = load_model(model, trust_model=trust_model)
    assumed = network.assumed(size, imagenet)
    drawn = str(data).startswith("glyphs")  # it has its own progress bar
    with Progress(f"reading {data}", shown=not drawn and is_first()), rephrase_errors():
        options: dict[str, Any] = {"thumbnails": thumbnails, "on_corrupt": on_corrupt}
        samples = read_samples(str(data), assumed=assumed, **options)
    if labeled and samples.y is None:
        raise ValueError(f"{data} holds no classes (y, or a folder for each), and negatives are of other classes.")
    key = hashlib.sha256(f"{samples.digest} {batch_size} {network.digest}".encode()).hexdigest()[:16]
    parts = output.with_name(f".{output.name}.{key}.parts")
    with rephrase_errors():
        inputs = samples.ready(network.transform)
        if not _share(network.run, inputs, batch_size, parts):
            return None
    pictures = data.is_dir()
    mark = network.mark(assumed if pictures else None)
    kept, line = _join(output, parts, len(inputs), batch_size, samples, mark, dtype)
    lines = [line]
    if pictures and network.transform is None:
        lines.append(f"{model} defines no preprocessing; images were given to it as {assumed} (--size, --imagenet).")
    if kept is not None and len(kept) < len(samples.name or ()):
        lines.append(list_unreadable(samples.name or (), set(kept.tolist())))
    return "\n".join(lines)


def _check_output(output: Path, dtype: str) -> None:
    """Refuse an output that cannot be written, before anything is computed."""
    from nearfar.evaluation.vectors_folder import DTYPES, check_target

    check_choice("embed", "--dtype", dtype, DTYPES)
    check_suffix("--output", output, {".npz": "a file", FOLDER: "a folder"})
    if output.suffix == FOLDER:
        check_target(output)
        return
    plain_target(output)
    if dtype == "bf16":
        raise ValueError(f"an .npz file cannot hold bf16; name an output that ends in {FOLDER}, or take float16.")


def _share(run: Any, inputs: Any, batch_size: int, parts: Path) -> bool:
    """Embed this rank's chunks into the folder `parts`; returns True on the first rank, when all ranks are done."""
    from nearfar.evaluation._chunks import Chunks
    from nearfar.evaluation._embed import embed_chunks

    rank, world = place()
    options: dict[str, Any] = {"batch_size": batch_size, "resume": parts, "rank": rank, "world": world}
    for _ in embed_chunks(run, inputs, progress=rank == 0, **options):
        pass  # stored in its file
    store = Chunks("embed", parts)
    if rank:
        store.mark_done(rank, world, name_of_launch())
        return False
    store.wait_for(range(1, world), world, name_of_launch())
    return True


def _join(
    output: Path, parts: Path, rows: int, batch_size: int, samples: Samples, mark: str | None, dtype: str
) -> tuple[np.ndarray | None, str]:
    """Write the vectors of all chunks; returns the rows that were kept (None for all), and a summary."""
    import numpy as np
    import torch

    from nearfar.evaluation import Vectors
    from nearfar.evaluation._embed import read_chunks
    from nearfar.evaluation.vectors_folder import as_stored, write_folder

    sound = [(len(part["x"]), part.get("y")) for part in read_chunks(parts, rows, batch_size) if part]
    if not sound:
        raise ValueError(f"all {rows} samples were left out, so there is nothing to embed.")
    numbers = [y for _, y in sound if y is not None]
    kept = np.concatenate(numbers) if numbers else None
    chunks = (part["x"] for part in read_chunks(parts, rows, batch_size) if part)
    fields = samples.fields(None if kept is None else torch.from_numpy(kept))
    if output.suffix == FOLDER:
        count = rows if kept is None else len(kept)
        beside = Vectors(torch.zeros(count, 0), **fields, fingerprint=mark).to_arrays()
        beside.pop("x")
        write_folder(output, chunks, beside, dtype)
        found = Vectors.load(output)
    else:
        found = Vectors(torch.from_numpy(np.concatenate(list(chunks))), **fields, fingerprint=mark)
        write_arrays(output, {**found.to_arrays(), "x": as_stored(found.x, dtype)})
    return kept, f"{output}: {len(found):,} vectors of width {found.x.shape[1]}{describe_classes(found)}"


@contextmanager
def rephrase_errors() -> Iterator[None]:
    """Phrase errors in terms of the command, and silence warnings about skipped images, which are listed at the end."""
    from nearfar.data._pictures import CorruptImageError, CorruptImageWarning

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CorruptImageWarning)
            yield
    except CorruptImageError as error:
        raise ValueError(str(error).replace('pass on_corrupt="skip"', "pass --on-corrupt skip")) from None


def list_unreadable(names: Sequence[str], kept: set[int]) -> str:
    """List the images that could not be read, one per line."""
    missing = [printable(name) for row, name in enumerate(names) if row not in kept]
    count = "1 image" if len(missing) == 1 else f"{len(missing):,} images"
    return "\n".join([f"{count} could not be read and {'was' if len(missing) == 1 else 'were'} left out:", *missing])


def describe_classes(found: Vectors) -> str:
    """The number of classes, and the names of the first ones."""
    if found.y is None:
        return ", without classes"
    count, names = len(set(found.y.tolist())), list(found.class_names().values())
    shown = ", ".join(map(printable, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    return f", {count:,} {'class' if count == 1 else 'classes'}{f' ({shown})' if names else ''}"


def clear_parts(output: Path) -> None:
    """Remove the chunks that this and earlier attempts stored for this output, and nothing else."""
    from nearfar.evaluation._chunks import Chunks

    for folder in output.parent.iterdir():
        key = folder.name.removeprefix(f".{output.name}.").removesuffix(".parts")
        if folder.name == f".{output.name}.{key}.parts" and re.fullmatch("[0-9a-f]{16}", key) and folder.is_dir():
            Chunks("embed", folder).clear()

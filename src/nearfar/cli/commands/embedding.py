"""`nearfar embed`: from samples to vectors."""

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
from nearfar._utils.files import plain_target
from nearfar._utils.progress import Progress
from nearfar.cli.commands.shared import Extra, one_only, one_sentence

if TYPE_CHECKING:
    from nearfar.evaluation import Vectors

__all__ = ["Trust", "advised", "clear_parts", "embed", "left_out", "of_classes", "register"]

NAMED = 3
"""Classes that are named in one line."""
Trust = Annotated[
    bool, typer.Option("--trust-model", help="Read a .pt or .pt2 file, which can run code of its author.")
]


def embed(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, or an .onnx, TorchScript .pt or torch.export .pt2 file."
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="glyphs:train, glyphs:test, an .npz with x (y, name), or a folder of images, flat or with a subfolder "
            "a class.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the vectors go.")],
    more: Extra = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 256,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Side of the images of a folder, in pixels, where the model does not say; else 224."),
    ] = None,
    imagenet: Annotated[
        bool, typer.Option("--imagenet", help="Shift and scale images by ImageNet's mean, where the model does not.")
    ] = False,
    thumbnails: Annotated[int, typer.Option(min=0, help="Keep thumbnails of this side; 0 for none.")] = 0,
    on_corrupt: Annotated[
        str, typer.Option(help="An image that cannot be read: stop, or skip it and list it at the end.")
    ] = "stop",
    trust_model: Trust = False,
) -> None:
    """Compute the vectors of samples, in order.

    If it is interrupted, the same command continues where it stopped.

    The network of a run, and one that `nearfar export` wrote, get their samples as in training. Another model gets
    glyphs as 1 x 32 x 32 and images as 3 x size x size, both in 0..1, and an .npz as its x in float32.
    """
    with one_sentence("embed"):
        from nearfar.cli.commands.inputs import read_samples
        from nearfar.cli.commands.networks import load_model
        from nearfar.evaluation import Vectors
        from nearfar.evaluation import embed as run

        one_only("DATA", data, more)
        check_choice("embed", "--on-corrupt", on_corrupt, ("stop", "skip"))
        plain_target(output)
        network = load_model(model, trust_model=trust_model)
        assumed = network.assumed(size, imagenet)
        drawn = data.startswith("glyphs")  # they have a bar of their own
        with Progress(f"reading {data}", shown=not drawn), advised():
            options: dict[str, Any] = {"thumbnails": thumbnails, "on_corrupt": on_corrupt}
            samples = read_samples(data, assumed=assumed, **options)
        key = hashlib.sha256(f"{samples.digest} {batch_size} {network.digest}".encode()).hexdigest()[:16]
        parts = output.with_name(f".{output.name}.{key}.parts")
        with advised():
            made = run(network.run, samples.ready(network.transform), batch_size=batch_size, resume=parts)
        x, rows = (made.x, made.y) if isinstance(made, Vectors) else (made, None)
        pictures = Path(data).is_dir()
        found = Vectors(x, **samples.fields(rows), fingerprint=network.mark(assumed if pictures else None))
        found.save(output)
        clear_parts(output)
        say(f"{output}: {len(found):,} vectors of width {x.shape[1]}{of_classes(found)}")
        if pictures and network.transform is None:
            say(f"{model} does not tell its preprocessing: images went in as {assumed} (--size, --imagenet).")
        if rows is not None and len(rows) < len(samples.name or ()):
            say(left_out(samples.name or (), set(rows.tolist())))


@contextmanager
def advised() -> Iterator[None]:
    """Phrase errors in terms of the command, and silence warnings about skipped images, which are listed at the end."""
    from nearfar.data.pictures import CorruptImageError, CorruptImageWarning

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CorruptImageWarning)
            yield
    except CorruptImageError as error:
        raise ValueError(str(error).replace('pass on_corrupt="skip"', "pass --on-corrupt skip")) from None


def left_out(names: Sequence[str], kept: set[int]) -> str:
    """List the images that could not be read, one per line."""
    missing = [printable(name) for row, name in enumerate(names) if row not in kept]
    count = "1 image" if len(missing) == 1 else f"{len(missing):,} images"
    return "\n".join([f"{count} could not be read and {'was' if len(missing) == 1 else 'were'} left out:", *missing])


def of_classes(found: Vectors) -> str:
    """The number of classes, and the names of the first ones."""
    if found.y is None:
        return ", without classes"
    count, names = len(set(found.y.tolist())), list(found.class_names().values())
    shown = ", ".join(map(printable, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    return f", {count:,} {'class' if count == 1 else 'classes'}{f' ({shown})' if names else ''}"


def clear_parts(output: Path) -> None:
    """Remove the chunks that `embed` kept for this output, of this and earlier attempts, and nothing else."""
    from nearfar.evaluation.embed import clear

    for folder in output.parent.iterdir():
        key = folder.name.removeprefix(f".{output.name}.").removesuffix(".parts")
        if folder.name == f".{output.name}.{key}.parts" and re.fullmatch("[0-9a-f]{16}", key) and folder.is_dir():
            clear(folder)


def register(app: typer.Typer) -> None:
    """Add embed to the app."""
    app.command()(embed)

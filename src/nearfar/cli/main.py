"""The command line application, with the commands `losses` and `report`; the others are in `nearfar.cli.commands`."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nearfar._utils.console import Terminal, guard_streams, say
from nearfar._utils.process_group import close
from nearfar._utils.progress import Progress
from nearfar.cli.commands import (
    bench,
    calibration,
    diagnosis,
    embedding,
    evaluation,
    exporting,
    inspecting,
    negatives,
    reproduction,
    search,
    serving,
    training,
    tune,
)
from nearfar.cli.commands.command import Command, check_suffix
from nearfar.cli.launch import Processes, is_first, launch, share_evaluation

app = typer.Typer(
    help="Deep metric learning for PyTorch: train, evaluate, diagnose and search embeddings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        from nearfar import __version__

        say(f"nearfar {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the options that stand before the command."""


def losses() -> None:
    """List all losses with their equations, factors and defaults."""
    from nearfar import losses as package

    table = Table(title="nearfar.losses", show_lines=True)
    for column in ("loss", "value", "algebra", "defaults"):
        table.add_column(column, overflow="fold")
    for name in sorted(package.__all__):
        value, algebra, defaults = describe(getattr(package, name))
        table.add_row(name, value, algebra, defaults)
    Terminal().print(table)


def describe(loss: type) -> tuple[str, str, str]:
    """The equation, the algebra and the defaults of a loss, from its docstring and signature."""
    paragraphs = inspect.getdoc(loss).split("\n\n")  # type: ignore[union-attr]
    algebra = next(text for text in paragraphs if text.startswith("Algebra:"))
    common = ("pair", "similarity", "miner", "engine")
    defaults = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(loss).parameters.values()
        if parameter.name not in common
    ]
    one_line = " ".join(algebra.removeprefix("Algebra:").split())
    return " ".join(paragraphs[1].split()), one_line, ", ".join(defaults)


def report(
    source: Annotated[Path, typer.Argument(help="A vectors.npz (x, y, and name or images), or a run folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML page to write.")] = Path("report.html"),
    images: Annotated[Path | None, typer.Option(help="Folder of the pictures named in the vectors.")] = None,
    outside: Annotated[bool, typer.Option("--outside", help="Allow names that lead out of --images.")] = False,
    queries: Annotated[int, typer.Option(help="Number of queries in the gallery.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    threshold: Annotated[
        Path | None, typer.Option("--calibration", help="File of `nearfar calibrate` to show.")
    ] = None,
    processes: Processes = None,
) -> None:
    """Write a self-contained HTML page about an embedding space: scores, gallery, map, confusion."""
    from nearfar import report as package
    from nearfar.evaluation import Calibration
    from nearfar.report._maps import without_tsne

    check_suffix("--output", output, {".html": "a page"})
    if launch(processes):
        return
    chosen = None if threshold is None else Calibration.load(threshold)
    options: dict[str, Any] = {"images": images or pictures_of(source), "outside": outside, "calibration": chosen}
    with share_evaluation("report"), Progress(f"report of {source}", shown=is_first()) as watch:
        package.write(output, source, queries=queries, seed=seed, watch=watch, **options)
    if not is_first():
        return
    if without_tsne():
        say(without_tsne())
    say(f"page: {output}")


def pictures_of(source: Path) -> Mapping[str, Any] | None:
    """The photographs of a run's test samples by name, if the run's data are files that still exist."""
    if not (source / "config.yaml").is_file():
        return None
    from nearfar.data import ByName, Tensors, Texts
    from nearfar.train._run import samples_of_test

    samples = samples_of_test(source)
    return None if samples is None or isinstance(samples, Tensors | Texts) else ByName(samples)


COMMANDS = (
    training.demo,
    training.train,
    training.config,
    training.recommend,
    tune.tune,
    evaluation.evaluate,
    evaluation.compare,
    calibration.calibrate,
    report,
    diagnosis.diagnose,
    inspecting.inspect,
    embedding.embed,
    negatives.mine,
    search.index,
    search.search,
    serving.serve,
    exporting.export,
    losses,
    bench.bench,
    reproduction.reproduce,
)
"""In the order of `nearfar --help`: train, judge, use, and the library's own."""
for command in COMMANDS:
    takes_keys = "words" in inspect.signature(command).parameters
    app.command(cls=Command, context_settings=training.KEYS if takes_keys else None)(command)


def main() -> None:
    """Entry point of the `nearfar` command."""
    guard_streams()
    code: str | int | None = None
    try:
        app()
    except SystemExit as end:
        code = end.code  # not the exception: its frames hold the network, and that holds the group
    close()
    sys.exit(code)

"""`nearfar train`, `config`, `demo` and `recommend`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar._utils.checks import nearest
from nearfar._utils.console import say
from nearfar._utils.extras import need
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import check_apart
from nearfar.cli.commands.completion import complete
from nearfar.cli.launch import Processes, Restarts, is_first, launch, restarts
from nearfar.runs._config import SECTIONS

if TYPE_CHECKING:
    from nearfar.train import Config

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [--section.key VALUE]... [--section '{key: VALUE}']...",
        help="A YAML file as printed by `nearfar config` (default: what suits the data), and keys to change.",
        show_default=False,
        autocompletion=complete,
    ),
]
Folder = Annotated[
    Path | None, typer.Option("--run", "--run-folder", help="Folder of the run. Default: a new folder in runs/.")
]
"""Two names, because torchrun takes --run for an abbreviation of one of its own options."""
OPTIONS = (
    "--run",
    "--run-folder",
    "--resume",
    "--protocol",
    "--apply-remedy",
    "--dry-run",
    "--processes",
    "--restarts",
    "--help",
)
KEYS = {"ignore_unknown_options": True}
"""Configuration keys are options that the parser does not know; they are passed on in `words`."""


def train(
    words: Words = None,
    run: Folder = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run from its last checkpoint, or from the start if it has none."),
    ] = False,
    protocol: Annotated[
        str | None, typer.Option(help="Choose weights by validation (held-out classes) or paper (best test score).")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Measure two steps and print data, batch, memory and time; train nothing.")
    ] = False,
    apply_remedy: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Train this run again with the doctor's remedy; flags change more keys."),
    ] = None,
    processes: Processes = None,
    again: Restarts = 0,
) -> None:
    """Train a network by a configuration. Flags set its keys, such as --training.steps 500.

    Several processes: --processes N. Several machines: torchrun ... -m nearfar train CONFIG --run-folder FOLDER.
    """
    from nearfar.train import fit
    from nearfar.train._folder import can_resume

    if dry and processes is not None:
        raise ValueError("--dry-run uses one process, but --processes came; leave one out.")
    if _launch(processes, again, run):
        return
    config, flags = read_words(words or ())
    if restarts() and run is not None and can_resume(run):  # restarted by the launcher after a process died
        config, flags, resume, protocol, apply_remedy = None, [], True, None, None
    if protocol is not None:
        flags.append(("training.protocol", protocol))
    if dry and resume:
        raise ValueError("--dry-run is for a new run, but --resume came; leave one out.")
    chosen = _choose_config(run, config, flags, resume, apply_remedy)
    if run is not None and chosen.data.path is not None:
        check_apart({"--run": run}, [Path(chosen.data.path)])
    if dry:
        _say_dry(chosen, run)
        return
    found = fit(chosen, run, resume=resume)
    if is_first():
        say(f"run: {found.folder}")


def _launch(processes: int | None, again: int, run: Path | None) -> bool:
    """Train in several processes if requested; if they may be restarted, first create the folder that they share."""
    if processes is not None and (processes > 1 or again):
        need("accelerate", "train: --processes", "processes", instead="leave it out")
    if not again or processes is None or run is not None:
        return launch(processes, again)
    from nearfar.train._folder import new_folder

    folder = new_folder()
    try:
        return launch(processes, again, ["--run", str(folder)])
    finally:
        with suppress(OSError):  # not empty: the run began
            folder.rmdir()


def _say_dry(config: Config, run: Path | None) -> None:
    from nearfar.train._dry_run import dry_run

    with Progress("looking at the first batch"):
        found = dry_run(config, run)
    for line in found.lines:
        say(line)
    if found.picture is not None:
        say(f"first batch: {found.picture}")
    if found.lines:
        say("nothing was trained; leave --dry-run out to begin")


def _choose_config(
    run: Path | None, config: Path | None, flags: Sequence[tuple[str, str]], resume: bool, ill: Path | None
) -> Config:
    """The configuration to train: from a file, of the run to resume, or with the remedy for an unhealthy run."""
    from nearfar.train import load

    if ill is not None:
        if resume or config is not None:
            what = "--resume" if resume else str(config)
            raise ValueError(f"--apply-remedy takes the configuration of {ill}, but {what} came; leave one out.")
        return _apply_remedy(ill, flags)
    if config is None and not resume:
        return _default_config(flags)
    return load(_config_to_resume(run, config, flags) if resume else config, flags)


def _default_config(flags: Sequence[tuple[str, str]]) -> Config:
    """The configuration that suits the data, if no file is named."""
    from nearfar.train._recipe import default_config

    found, words = default_config(flags)
    if words and is_first():
        say(words)
    return found


def _apply_remedy(ill: Path, flags: Sequence[tuple[str, str]]) -> Config:
    """The configuration of an unhealthy run, changed by the remedy of its worst finding, and then by flags."""
    from nearfar.doctor import prescribe
    from nearfar.runs._config import apply_flags

    remedy = prescribe(ill)
    say(f"doctor: {ill}: {remedy.text()} It is trained from the start.")
    return apply_flags(remedy.config, flags)


def _config_to_resume(run: Path | None, config: Path | None, flags: Sequence[tuple[str, str]]) -> Path:
    """The configuration of the run to resume, with the changes that docs/guides/resuming.md allows."""
    from nearfar.runs.changes import MAY_CHANGE

    if run is None:
        raise ValueError("--resume needs the folder of the run; name it with --run.")
    other = [name for name, _ in flags if name not in MAY_CHANGE]
    if config is not None or other:
        what = f"--{other[0]}" if other else str(config)
        raise ValueError(
            f"a resumed run keeps its own configuration, but {what} came; what may change: {', '.join(MAY_CHANGE)}."
        )
    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(f"{run} holds no run to resume; train without --resume.")
    return run / "config.yaml"


def read_words(words: Sequence[str], options: Sequence[str] = OPTIONS) -> tuple[Path | None, list[tuple[str, str]]]:
    """Parse the file of the configuration, if any, and flags: ("loss.k", "160") from --loss.k 160 or --loss.k=160."""
    config: Path | None = None
    found, rest = [], list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if config is None and not name.startswith("-"):
            config = Path(name + equals + value)
            continue
        if not name.startswith("--") or ("." not in name and name.removeprefix("--") not in SECTIONS):
            known = [*options, *(f"--{section}" for section in SECTIONS)]
            raise ValueError(f"there is no option {name}; {nearest(name, known)} Keys are set by --section.key value.")
        if not equals:
            if not rest:
                raise ValueError(f"{name} has no value; write {name} VALUE.")
            value = rest.pop(0)
        found.append((name.removeprefix("--"), value))
    return config, found


def config(words: Words = None) -> None:
    """Print a complete configuration with comments. Flags set its keys.

    A file is completed by defaults. Without a file: what suits the data, such as --data.path FOLDER, or the defaults.
    """
    from nearfar.runs._parts import check
    from nearfar.train import load, to_yaml
    from nearfar.train._recipe import default_config

    path, flags = read_words(words or ())
    chosen = load(path, flags)
    if path is None:
        with suppress(FileNotFoundError):  # the data are not on this machine
            chosen = default_config(flags)[0]
    check(chosen)
    say(to_yaml(chosen), end="")


def demo(
    folder: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("nearfar-demo"),
    steps: Annotated[int | None, typer.Option(help="Number of training steps.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and augmentation.", min=0)] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps, to check in seconds that everything works.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run in the folder; other files stay.")
    ] = False,
) -> None:
    """Train a small network to retrieve characters of unseen scripts, and write a report. Nothing is downloaded."""
    from nearfar.cli.demo import run

    run(folder, steps=steps, seed=seed, quick=quick, overwrite=overwrite)


def recommend(
    name: Annotated[str, typer.Argument(metavar="DATA", help="Name of the data set, such as folder, manifest or cub.")],
    path: Annotated[Path | None, typer.Option(help="Path of the data.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Largest batch that fits into memory. Default: 128; for photographs 80.", min=4)
    ] = None,
    memory: Annotated[float, typer.Option(help="Memory that the loss may use, in gigabytes.")] = 8.0,
) -> None:
    """Recommend loss, sampler and batch for a data set, with reasons and measured results."""
    import yaml

    from nearfar.cli.recommend import recommend as propose
    from nearfar.data import open_data
    from nearfar.data._splits import classes_apart
    from nearfar.train._recipe import are_photographs, recipe, recipe_for_texts

    data = open_data(name, path)
    apart, photographs = classes_apart(data.train, data.test), are_photographs(data)
    tree = recipe(data.train) if photographs else {"data": {}}
    if name == "texts":
        say(f"# These are {data.about}.")
        tree |= recipe_for_texts(data.train) | {"data": {"name": name, "path": str(path)}}
    if tree.get("batches", {}).get("name") == "QueryPairs":  # the labels of pairs say nothing about their batches
        say("# The queries of a batch are compared with its documents; no two of them are of one class.")
        say(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None), end="")
        return
    found = propose(
        data.train.labels,
        batch_size=batch_size or (80 if photographs else 128),
        memory=memory,
        validation=tree["data"].get("validation", 0.1),
        test=apart,
        photographs=photographs,
        rows=() if name == "texts" else None,  # those of pictures
    )
    for section, keys in found.config.items():
        named = section in ("loss", "batches")  # another loss has other arguments
        tree[section] = keys if named else {**tree.get(section, {}), **keys}
    tree["data"] = {**tree["data"], "name": name, "path": None if path is None else str(path)}
    for reason in found.reasons:
        say(f"# {reason}")
    say(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None), end="")

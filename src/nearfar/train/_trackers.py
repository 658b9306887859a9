"""Log the scalars of a run to TensorBoard, Weights & Biases and MLflow, through accelerate's trackers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nearfar._utils.extras import command, is_there, need
from nearfar._utils.files import first_line
from nearfar.runs._config import flat, to_tree
from nearfar.runs._sections import Config

PROJECT = "nearfar"  # the project of wandb and the experiment of MLflow, unless their own settings name another
INSTALL = {"tensorboard": command("tensorboard"), "wandb": "pip install wandb", "mlflow": "pip install mlflow"}
"""The command that installs each package."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker whose package, or accelerate, is not installed."""
    for name in names:
        if not is_there(name):
            raise ImportError(
                f"train: training.trackers names {name}, which is not installed; run {INSTALL[name]}, or leave it out."
            )
        need("accelerate", f"train: the tracker {name}", "processes", instead="leave it out")


@contextmanager
def open_trackers(
    config: Config, folder: Path, *, quiet: bool = False
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open the trackers of a configuration while the block runs; yields a function that logs a journal line.

    The name of the run folder becomes the name of the run. With `quiet`, on all ranks except the first, nothing is
    logged.
    """
    with ExitStack() as stack:
        opened: list[Any] = []
        for name in () if quiet else config.training.trackers:
            opened.append(_start(name, config, folder))
            stack.callback(opened[-1].finish)

        def log(entry: Mapping[str, Any]) -> None:
            values = {name: value for name, value in scalars(entry) if name not in ("step", "time")}
            for tracker in opened if values else ():
                tracker.log(values, step=entry["step"])

        yield log


def _start(name: str, config: Config, folder: Path) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind, called = LOGGER_TYPE_TO_CLASS[name], folder.resolve().name
    try:
        if name == "tensorboard":
            tracker = kind("tensorboard", logging_dir=str(folder))
        elif name == "wandb":
            tracker = kind(PROJECT, name=called)
        else:
            tracker = kind(PROJECT, run_name=called)
        if hasattr(tracker, "start"):  # older releases of accelerate start at once
            tracker.start()
        if name != "tensorboard":  # TensorBoard's would create further folders, and config.yaml is there anyway
            tracker.store_init_configuration(flat(to_tree(config)))
    except Exception as error:  # each tracker has its own errors: no network, no key, a full disk
        reason = first_line(error)
        raise RuntimeError(f"train: the tracker {name} did not start ({reason}); mend it, or leave it out.") from error
    return tracker


def scalars(entry: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a line of the journal, under names that every tracker accepts.

    >>> dict(scalars({"step": 3, "test recall@1": 0.5, "baselines": {"untrained": 0.1}, "finding": "collapse"}))
    {'step': 3, 'test/recall_at_1': 0.5, 'baselines/untrained': 0.1}
    """
    for key, value in entry.items():
        name = f"{place}{key}".replace(" ", "/").replace("@", "_at_")
        if isinstance(value, Mapping):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value

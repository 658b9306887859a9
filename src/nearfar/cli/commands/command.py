"""Shared by all commands: errors in one sentence, protection of inputs, reading and writing of files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from nearfar._utils.console import visible
from nearfar._utils.files import lies_in, protect

if TYPE_CHECKING:
    from nearfar.evaluation import Vectors

OUTPUTS = frozenset({"output", "json", "page", "out", "folder", "per_query", "run"})
"""Names of the parameters that a command writes to; every other path is an input."""
Extra = Annotated[list[str] | None, typer.Argument(hidden=True)]
"""Extra arguments, accepted so that a command can explain that it takes only one."""


class Command(TyperCommand):
    """A command whose errors are one sentence, and which never writes over one of its inputs."""

    def invoke(self, ctx: Any) -> Any:
        """Compare all outputs with all inputs, then run the command with its inputs protected."""
        # by annotation: older releases of typer keep paths as words here
        hints = inspect.get_annotations(inspect.unwrap(self.callback or Command), eval_str=True)
        inputs = list(_inputs(ctx.params, {name for name, hint in hints.items() if "Path" in str(hint)}))
        options = {param.name: param.opts[0] for param in self.params}
        named = {options[name]: ctx.params[name] for name in OUTPUTS & ctx.params.keys()}
        with one_sentence(self.name or ""):
            check_apart({option: Path(path) for option, path in named.items() if path is not None}, inputs)
            with protect(inputs):
                return super().invoke(ctx)


@contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """Turn errors that a user can cause into one line on standard error and exit code 1."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # RuntimeErrors by which a command ends
        raise
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
        raise SystemExit(_format_error(command, reason)) from None
    except MemoryError as error:
        reason = f"there is not enough memory: {error}" if str(error) else ""
        raise SystemExit(_format_error(command, reason)) from None
    except (ValueError, TypeError, ImportError, RuntimeError, OverflowError) as error:
        raise SystemExit(_format_error(command, str(error) or type(error).__name__)) from None


def _format_error(command: str, reason: str) -> str:
    """Format an error as one line; the command's name is prepended unless the message begins with it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return visible(f"nearfar {command}: {lines[0].removeprefix(f'{command}: ') if lines else 'failed'}")


def _inputs(params: Mapping[str, Any], paths: Set[str]) -> Iterator[Path]:
    """Collect the inputs: all arguments that are `paths`, and words that name an existing file."""
    for name, value in params.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            path = name in paths and each is not None
            if name not in OUTPUTS and (path or (isinstance(each, str) and os.path.isfile(each))):
                yield Path(each)


def check_apart(outputs: Mapping[str, Path], inputs: Iterable[Path]) -> None:
    """Refuse an output (by its option) that is also an input or another output, or that lies in an input folder.

    Symbolic and hard links are followed. In an input folder, pages may be overwritten; in a run folder, everything
    except the run's own files. Inputs that are missing are left to the command.
    """
    sources = [path for path in inputs if path.exists()]
    seen: dict[str, str] = {}
    for option, target in outputs.items():
        place = os.path.realpath(target)
        if place in seen:
            raise ValueError(f"{seen[place]} and {option} both name {target}; give each a file of its own.")
        seen[place] = option
        for source in sources if target.exists() else ():
            if target.samefile(source):
                raise ValueError(f"{option} {target} is {_describe(source, target)}; name another output.")
            if target.is_file() and source.is_dir() and _is_in(target, source):
                raise ValueError(f"{option} {target} is a file of {source}, which is read here; name another output.")


def _describe(source: Path, target: Path) -> str:
    return "what is read here" if source == target else f"{source}, which is read here"


def _is_in(target: Path, folder: Path) -> bool:
    """Whether writing to an existing file would overwrite part of an input folder."""
    from nearfar.train._folder import FILES, REPORT, is_run

    if is_run(folder):
        return any(target.samefile(folder / name) for name in FILES if name != REPORT and (folder / name).exists())
    if target.suffix == ".html":
        return False
    if lies_in(target, folder):
        return True
    linked = target.stat().st_nlink > 1  # a hard link may have its other name in the folder
    return linked and any(path.samefile(target) for path in folder.rglob("*") if path.is_file())


def check_suffix(option: str, path: Path, allowed: Mapping[str, str]) -> None:
    """Require a suffix that is allowed: a key of `allowed`, which maps it to what is written ("" for no suffix)."""
    if path.suffix not in allowed:
        ways = " or ".join(f"{f'end in {end}' if end else 'have no suffix'} ({what})" for end, what in allowed.items())
        raise ValueError(f"{option} must {ways}, but came as {path}.")


def check_one(what: str, first: object, more: list[str] | None) -> None:
    """Refuse a second folder or file if a command takes one."""
    if more:
        raise ValueError(f"one {what} is taken, but {' and '.join([str(first), *more])} came; run it once for each.")


def load_labeled(path: Path) -> Vectors:
    """Read vectors that must have labels."""
    from nearfar.evaluation import Vectors

    found = Vectors.load(path)
    if found.y is None:
        raise ValueError(f"{path} holds no y, the classes of its vectors; only labeled vectors can be scored.")
    return found


def save_json(path: Path, record: Any) -> None:
    """Write JSON, completely or not at all; NaN is an error."""
    import json

    from nearfar._utils.files import write_text

    write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 on, separated by commas.

    >>> parse_numbers("--shape", "3,224,224")
    (3, 224, 224)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} must be whole numbers from 1 on, such as 3,224,224, but came as {text!r}.")
    return tuple(map(int, parts))

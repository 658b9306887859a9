"""Where commands write: never over one of their inputs, and never a format that the name of the file does not say."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from nearfar._utils.files import lies_in, protected
from nearfar.cli.commands.shared import one_sentence

__all__ = ["OUTPUTS", "Command", "check_apart", "check_suffix"]

OUTPUTS = frozenset({"output", "json", "page", "out", "folder", "run"})
"""Names of the parameters that a command writes to; every other path is an input."""


class Command(TyperCommand):
    """A command that refuses an output that is one of its inputs, before it does anything."""

    def invoke(self, ctx: Any) -> Any:
        """Check all outputs against all inputs, and let nothing that runs write over an input."""
        # by annotation: older releases of typer keep paths as words here
        hints = inspect.get_annotations(inspect.unwrap(self.callback or Command), eval_str=True)
        inputs = list(_inputs(ctx.params, {name for name, hint in hints.items() if "Path" in str(hint)}))
        with one_sentence(self.name or ""):
            options = {param.name: param.opts[0] for param in self.params}
            named = {options[name]: ctx.params[name] for name in OUTPUTS & ctx.params.keys()}
            check_apart({option: Path(path) for option, path in named.items() if path is not None}, inputs)
        with protected(inputs):
            return super().invoke(ctx)


def _inputs(params: Mapping[str, Any], paths: Set[str]) -> Iterator[Path]:
    """The inputs: the arguments that are `paths`, and words that name a file."""
    for name, value in params.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            path = name in paths and each is not None
            if name not in OUTPUTS and (path or (isinstance(each, str) and os.path.isfile(each))):
                yield Path(each)


def check_apart(outputs: Mapping[str, Path], inputs: Iterable[Path]) -> None:
    """Refuse outputs that are an input, a file of an input folder, or one another.

    Links of both kinds are followed. In a folder that is read, pages may be written anew, and in the folder of a run
    everything but the run's own files.

    Args:
        outputs: by the option that names them.
        inputs: files and folders; those that are missing are left to the command.
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
                raise ValueError(f"{option} {target} is {_called(source, target)}; name another output.")
            if target.is_file() and source.is_dir() and _is_in(target, source):
                raise ValueError(f"{option} {target} is a file of {source}, which is read here; name another output.")


def _called(source: Path, target: Path) -> str:
    return "what is read here" if source == target else f"{source}, which is read here"


def _is_in(target: Path, folder: Path) -> bool:
    """Whether an existing file belongs to a folder that is read."""
    from nearfar.train.folder import FILES, REPORT, is_run

    if is_run(folder):
        return any(target.samefile(folder / name) for name in FILES if name != REPORT and (folder / name).exists())
    if target.suffix == ".html":
        return False
    if lies_in(target, folder):
        return True
    linked = target.stat().st_nlink > 1  # a hard link may have its other name in the folder
    return linked and any(path.samefile(target) for path in folder.rglob("*") if path.is_file())


def check_suffix(option: str, path: Path, allowed: Mapping[str, str]) -> None:
    """Require a suffix that says what is written.

    Args:
        option: the option that names the file.
        path: the file.
        allowed: suffix -> what is then written; "" stands for a name without a suffix.
    """
    if path.suffix not in allowed:
        ways = " or ".join(f"{f'end in {end}' if end else 'have no suffix'} ({what})" for end, what in allowed.items())
        raise ValueError(f"{option} must {ways}, but came as {path}.")

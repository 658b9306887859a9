"""Helpers of the commands: errors of one sentence, reading and writing files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.console import visible

if TYPE_CHECKING:
    from nearfar.evaluation import Vectors

__all__ = ["Extra", "labeled", "one_only", "one_sentence", "save_json"]

Extra = Annotated[list[str] | None, typer.Argument(hidden=True)]
"""Extra arguments, accepted so that a command can explain why it takes only one."""


def one_only(what: str, first: object, more: list[str] | None) -> None:
    """Refuse a second folder or file if a command takes one."""
    if more:
        raise ValueError(f"one {what} is taken, but {' and '.join([str(first), *more])} came; run it once for each.")


@contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """Turn errors that a user can cause into one line on standard error and exit code 1."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
        raise SystemExit(_said(command, reason)) from None
    except MemoryError as error:
        raise SystemExit(_said(command, f"there is not enough memory: {error}" if str(error) else "")) from None
    except (ValueError, TypeError, ImportError, RuntimeError, OverflowError) as error:
        raise SystemExit(_said(command, str(error) or type(error).__name__)) from None


def _said(command: str, reason: str) -> str:
    """Format an error as one line, without repeating the command's name if the message begins with it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return visible(f"nearfar {command}: {lines[0].removeprefix(f'{command}: ') if lines else 'failed'}")


def labeled(path: Path) -> Vectors:
    """Read vectors, which must have labels."""
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

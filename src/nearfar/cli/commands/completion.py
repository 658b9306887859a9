"""Shell completion of configuration values: `nearfar train --loss.name Mul<TAB>`."""

import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union

import typer


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the value of the key before it; suggest nothing elsewhere, so that the shell offers files."""
    before = ctx.params.get("words") or [""]
    return [value for value in values_of(before[-1].removeprefix("--")) if value.startswith(incomplete)]


def loss_names(incomplete: str) -> list[str]:
    """Complete the name of a loss for `nearfar bench`."""
    from nearfar.bench._subjects import SUBJECTS

    return [name for name in SUBJECTS if name.startswith(incomplete)]


def values_of(key: str) -> list[str]:
    """The allowed values of a key such as "loss.name" or "training.precision"; none if any value is allowed.

    >>> values_of("optimizer.name")
    ['adam', 'adamw', 'sgd']
    >>> values_of("batches")
    ['MPerClass', 'MinedNegatives', 'Representatives', 'QueryPairs']
    """
    from nearfar import models
    from nearfar.data._registry import NAMES
    from nearfar.runs import _parts as parts
    from nearfar.runs._sections import Config

    named: dict[str, Iterable[str]] = {
        "loss": parts.LOSSES,
        "batches": parts.SAMPLERS,
        "data": NAMES,
        "model": models.NAMES,
        **{f"loss.{name}": catalog for name, catalog in parts.INNER.items()},
    }
    section, _, name = key.partition(".")
    if section in named and name in ("", "name"):
        return list(named[section]) if name or section in ("loss", "batches") else []
    inner = key.removesuffix(".name")
    if inner in named:
        return list(named[inner])
    kind = typing.get_type_hints(Config).get(section)
    if not is_dataclass(kind) or name not in {field.name for field in fields(kind)}:
        return []
    return _choices(typing.get_type_hints(kind)[name])


def _choices(hint: Any) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return [str(value) for value in inner]
    if origin in (Union, types.UnionType, tuple):
        return [value for kind in inner for value in _choices(kind)]
    return ["true", "false"] if hint is bool else []

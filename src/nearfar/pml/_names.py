"""Errors for unknown keyword arguments, which name the nearest known one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import TypedDict


class Recorded(TypedDict, total=False):
    """Keyword arguments of every class of PML."""

    collect_stats: bool | None


def check_names(thing: object, given: Mapping[str, object], known: type = Recorded) -> None:
    """Refuse keywords that are neither arguments of the class of `thing` nor keys of `known`, a TypedDict.

    Raises:
        TypeError: a name is unknown; the message names the class and the nearest right name.
    """
    owner = type(thing).__name__
    shared = list(known.__annotations__)
    for name in given:
        if name not in shared:
            allowed = [*_own(type(thing)), *shared]
            raise TypeError(f"{owner}: there is no argument {name!r}; {_nearest(name, allowed)}")


def _own(kind: type) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _nearest(name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(allowed)}."

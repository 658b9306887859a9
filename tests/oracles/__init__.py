"""Slow reference values of every loss, in extended precision, from the equations alone.

The oracle of a loss is the function of losses.py that has its name: `dro_top_k` is that of `DroTopK`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from . import losses


def plain(name: str) -> str:
    """A name without capitals and underscores."""
    return name.replace("_", "").lower()


FOUND: dict[str, Callable[..., Any]] = {
    plain(name): function
    for name, function in inspect.getmembers(losses, inspect.isfunction)
    if not name.startswith("_") and function.__module__ == losses.__name__
}


def oracle_of(name: str) -> Callable[..., Any]:
    """The oracle of a loss by the name of its class."""
    return FOUND[plain(name)]

"""PML's `utils`: modules that are imported when somebody asks for them."""

from importlib import import_module
from typing import Any

from nearfar.pml._theirs import MODULES

__all__: list[str] = []

_KNOWN = [name.removeprefix("utils.") for name in MODULES if name.startswith("utils.")]


def __getattr__(name: str) -> Any:
    if name not in _KNOWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_KNOWN)}.")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_KNOWN})

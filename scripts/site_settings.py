"""Shows constructors that classes make of their settings in the reference, which is read from sources."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

from nearfar._utils.settings import Settings

PLACES = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}


class Constructors(griffe.Extension):
    """Gives each class with settings (`nearfar._utils.settings`) the constructor that it has when it is imported."""

    def on_class_members(self, *, cls: griffe.Class, **more: Any) -> None:
        """Called by griffe when it has read a class."""
        kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
        if not isinstance(kind, type) or not issubclass(kind, Settings) or not vars(kind).get("settings"):
            return
        written = {name: hint for base in kind.__mro__[::-1] for name, hint in inspect.get_annotations(base).items()}
        mine = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        given = [
            griffe.Parameter(
                name,
                annotation=str(written[name]),
                kind=PLACES[x.kind],
                default=None if x.default is x.empty else repr(x.default),
            )
            for name, x in kind.settings.items()
        ]
        for name in kind.settings:
            cls.members.pop(name, None)
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(mine, *given)))

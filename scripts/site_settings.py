"""Completes the reference, which is read from sources: constructors made of settings, equations of losses."""

from __future__ import annotations

import html
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import griffe

from nearfar import losses, pairs, sets
from nearfar._utils.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))
import equations

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


EQUATION = """<div class="equation">{tex}</div>

"""
FIGURE = """<figure class="weights" markdown="0"><img src="../images/losses/{name}.svg" alt="Pair weights of {name}">
<figcaption>Nine rows of three classes, and how strongly the loss attracts (blue) or repels (orange) each pair; darker
is stronger. <a href="../guides/losses.html#pictures-of-the-weights">All losses</a></figcaption></figure>
"""


class Equations(griffe.Extension):
    """Typesets the equation in the docstring of each loss, pair loss and set; a loss has its picture below."""

    def on_class(self, *, cls: griffe.Class, **more: Any) -> None:
        """Called by griffe when it has read a class."""
        room = cls.path.split(".")[1]
        offered = {"losses": losses, "pairs": pairs, "sets": sets}.get(room)
        if offered is None or cls.name not in offered.__all__ or cls.docstring is None:
            return
        found = equations.equation(cls.docstring.value)
        if found is not None and '"' not in found[0]:
            written, lines = found
            shown = EQUATION.format(tex=html.escape(equations.display(lines)))
            shown += FIGURE.format(name=cls.name) if room == "losses" else ""
            cls.docstring.value = cls.docstring.value.replace(written, shown, 1)

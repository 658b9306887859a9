"""The table that `engine="auto"` reads: from how many pairs an engine is the fastest, by device and scope.

The numbers lie in thresholds.json beside this file, are made by `nearfar bench --calibrate` and are read once, at
import. A device without an entry was not measured: `auto` is dense there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from nearfar.groups.groupings import Product

__all__ = ["ENGINES", "FILE", "GENERAL", "SCOPES", "Thresholds", "from_pairs", "parse", "read", "scope_of", "use"]

FILE = "thresholds.json"
GENERAL = "general"
"""The scope of a loss that the tiled engine has no fast path for."""
SCOPES = ("row", "batch", "lifted", "triplets", GENERAL)
"""What competes: pairs of a row, of the batch, of a row and a column (lifted structure), triplets; or see `GENERAL`."""
ENGINES = ("tiled", "fused")
"""Engines with a threshold; below all of them a call is dense."""
NEVER = sys.maxsize
REMEDY = "make it again with nearfar bench --calibrate"


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of one type of device.

    Args:
        scopes: scope -> engine -> number of pairs from which it is faster than every engine before it in the order
            dense, tiled, fused; an engine that is left out is never the fastest.
        measured: on what, in words; "" if the numbers were not measured by the command.

    >>> found = Thresholds({"row": {"tiled": 4096}, "batch": {"tiled": 1024}})
    >>> found.least["tiled"], found.pairs("row", "tiled"), found.pairs("row", "fused") == NEVER
    (1024, 4096, True)
    """

    scopes: Mapping[str, Mapping[str, int]]
    measured: str = ""
    least: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """The smallest threshold of each engine over all scopes: below it nothing else need be looked at."""

    def __post_init__(self) -> None:
        least = {engine: min((self.pairs(scope, engine) for scope in self.scopes), default=NEVER) for engine in ENGINES}
        object.__setattr__(self, "least", least)

    def pairs(self, scope: str, engine: str) -> int:
        """The number of pairs from which an engine is taken."""
        return self.scopes.get(scope, {}).get(engine, NEVER)


def parse(text: str, name: str = FILE) -> dict[str, Thresholds]:
    """Thresholds by type of device from JSON; ValueError in one sentence if it is not such a table."""
    try:
        devices = json.loads(text)["devices"]
        return {device: _device(f"{name}: {device}", told) for device, told in devices.items()}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f'{name} is no table of thresholds ({{"devices": {{"cpu": ...}}}}); {REMEDY}.') from None


def _device(where: str, told: Mapping[str, Any]) -> Thresholds:
    scopes = told["scopes"]
    if sorted(scopes) != sorted(SCOPES):
        raise ValueError(f"{where} must have the scopes {', '.join(SCOPES)}, but has {', '.join(scopes)}; {REMEDY}.")
    for scope, engines in scopes.items():
        for engine, pairs in engines.items():
            if engine not in ENGINES or type(pairs) is not int or pairs < 1:
                raise ValueError(
                    f"{where}: {scope} must give a whole number of pairs, at least 1, for {' or '.join(ENGINES)}, "
                    f"but gives {pairs!r} for {engine}; {REMEDY}."
                )
    return Thresholds(scopes, str(told["measured"]))


def read(path: Path | None = None) -> dict[str, Thresholds]:
    """The table of a file, or that of the package."""
    if path is None:
        return parse((files("nearfar.engines") / FILE).read_text(encoding="utf-8"))
    return parse(path.read_text(encoding="utf-8"), path.name)


def use(table: Mapping[str, Thresholds]) -> None:
    """Take another table in this process, such as that of your own machine: `use(read(path))`."""
    global TABLE
    TABLE = dict(table)


def from_pairs(device: str, scope: str, engine: str) -> int:
    """The number of pairs from which `auto` takes an engine on a type of device; `NEVER` where none was measured.

    >>> from_pairs("abacus", "row", "tiled") == NEVER
    True
    """
    known = TABLE.get(device)
    return NEVER if known is None else known.pairs(scope, engine)


def scope_of(product: Product) -> str:
    """The scope of a loss, from its grouping and link; `GENERAL` is not among the answers."""
    if product.wants_columns:
        return "lifted"
    if product.groups.scope in ("positive", "triplets"):
        return "triplets"
    return "row" if product.groups.per_anchor else "batch"


TABLE = read()
"""The table in use, by type of device."""

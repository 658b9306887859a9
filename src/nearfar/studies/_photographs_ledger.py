"""The ledger of a study: which configuration of each method was chosen, written before its test classes are read.

A test score is honest once: whoever tests a second configuration of a method after having seen the first one's score
chooses by the test. So the ledger fixes a method's configuration before its first test run, and refuses another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearfar._utils.files import read_text, write_text
from nearfar.runs.config import Config, flat, to_tree
from nearfar.studies import grid

FREE = {"training.seed", "data.path", "model.weights", *(".".join(key) for key in grid.MANNER)}
"""Keys that may differ: the seeds of a method, where files lie, and how fast they are read."""


class Ledger:
    """The chosen configurations of one data set, by method; kept in a file.

    Args:
        file: such as photographs-cub-chosen.json; it is read if it is there.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[str, dict[str, Any]] = json.loads(read_text("ledger", file)) if file.is_file() else {}

    def fix(self, method: str, config: Config, about: dict[str, Any]) -> None:
        """Write down the configuration of a method; nothing happens if the same one is there already.

        Raises:
            ValueError: another configuration of the method was fixed before.
        """
        wanted = _fixed(config)
        there = self.entries.get(method)
        if there is None:
            self.entries[method] = {**about, "config": wanted}
            write_text(self.file, json.dumps(self.entries, indent=1, ensure_ascii=False) + "\n")
            return
        was, now = there["config"], wanted
        other = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key) and not _new(key, was, now)]
        if other:
            key = other[0]
            raise ValueError(
                f"photographs: {method!r} may be tested with one configuration, in which {key} is {was.get(key)!r}, "
                f"but {now.get(key)!r} came; go on with what {self.file} says, or begin a new study in another folder."
            )

    def __contains__(self, method: object) -> bool:
        return method in self.entries

    def __getitem__(self, method: str) -> dict[str, Any]:
        return self.entries[method]


def _new(key: str, was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a key was added to the configuration, or taken from it, since the ledger was written."""
    told = key.startswith(("loss.", "batches."))  # these hold what was told and no defaults
    return not told and (key not in was or key not in now)


def _fixed(config: Config) -> dict[str, Any]:
    """The configuration by full key names, without what may differ between runs of one method."""
    tree: dict[str, Any] = json.loads(json.dumps(flat(to_tree(config))))
    return {key: value for key, value in tree.items() if key not in FREE}

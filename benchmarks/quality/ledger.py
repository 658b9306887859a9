"""The configuration that was chosen for each method, written before its test classes are read.

Testing a second configuration of a method after seeing the score of the first would be choosing by the test score.
Therefore the ledger stores a method's configuration before its first test run, and refuses any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearfar._utils.files import read_text, write_text
from nearfar.runs._config import flat, to_tree
from nearfar.runs._sections import Config
from nearfar.studies import grid

FREE = {"training.seed", "data.path", "model.weights", *(".".join(key) for key in grid.MANNER)}
"""Keys that may differ: the seed, paths, and keys that change only the speed."""


class Ledger:
    """The chosen configurations of one data set, by method, stored in a file.

    Args:
        file: such as photographs-cub-chosen.json; it is read if it is there.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[str, dict[str, Any]] = json.loads(read_text("ledger", file)) if file.is_file() else {}

    def fix(self, method: str, config: Config, about: dict[str, Any]) -> None:
        """Store the configuration of a method; nothing happens if the same one is there already.

        Raises:
            ValueError: another configuration of the method was fixed before.
        """
        wanted = _fixed_keys(config)
        there = self.entries.get(method)
        if there is None:
            self.entries[method] = {**about, "config": wanted}
            write_text(self.file, json.dumps(self.entries, indent=1, ensure_ascii=False) + "\n")
            return
        was, now = there["config"], wanted
        other = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key) and not _is_new(key, was, now)]
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


def _is_new(key: str, was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a key was added to the configuration, or taken from it, since the ledger was written."""
    given = key.startswith(("loss.", "batches."))  # these sections hold only keys that were given, no defaults
    return not given and (key not in was or key not in now)


def _fixed_keys(config: Config) -> dict[str, Any]:
    """The configuration by full key names, without the keys of `FREE`."""
    tree: dict[str, Any] = json.loads(json.dumps(flat(to_tree(config))))
    return {key: value for key, value in tree.items() if key not in FREE}

"""`Space`: the keys of a configuration that a search varies, each with its values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.checks import nearest
from nearfar._utils.files import read_text
from nearfar.runs import _parts as parts
from nearfar.runs._config import SECTIONS, apply_flags, flat, parse, read_yaml, to_tree
from nearfar.runs._sections import Config
from nearfar.studies.grid import MANNER
from nearfar.tune._ranges import Choices, Range, is_range, read_range, takes_fractions

EXAMPLE = "optimizer.lr: {low: 1e-4, high: 1e-2, log: true}"
REFUSED = {
    "data.name": "every trial is scored on the same data",
    "data.path": "every trial is scored on the same data",
    "data.labels": "every trial is scored on the same data",
    "data.inputs": "every trial is scored on the same data",
    "data.validation": "every trial learns from the same classes",
    "data.validation_classes": "every trial learns from the same classes",
    "data.on_corrupt": "every trial is scored on the same data",
    "data.outside": "every trial is scored on the same data",
    "training.seed": "a good seed is luck; --seeds averages over several",
    "training.protocol": "trials never see the test classes",
    "training.trackers": "it changes no score",
    **dict.fromkeys((f"{section}.{name}" for section, name in MANNER), "it changes no score"),
}
"""Keys that a search does not vary, and the reason."""


@dataclass(frozen=True, eq=False)
class Space:
    """The search space of one loss: a base configuration, and the keys that vary.

    Attributes:
        label: the name of the loss, followed by a number if several have the same name.
        base: the configuration that is changed.
        ranges: a mapping from each key to its values.
    """

    label: str
    base: Config
    ranges: Mapping[str, Range | Choices]

    def config(self, values: Mapping[str, Any]) -> Config:
        """The configuration with these values."""
        return apply_flags(self.base, [(key, json.dumps(value)) for key, value in values.items()])

    def check(self) -> None:
        """Check the configurations at the ends of every range and with each choice, before any trial is run."""
        first = {key: each.ends()[0] for key, each in self.ranges.items()}
        last = {key: each.ends()[-1] for key, each in self.ranges.items()}
        tried = [first, last]
        tried += [{**first, key: value} for key, each in self.ranges.items() for value in each.ends()[1:]]
        for values in tried:
            config = self.config(values)
            parts.check(config)
            parts.make_loss(config, classes=8)


def read_space(path: Path) -> Mapping[str, Any]:
    """Read a space from a YAML file."""
    if not path.is_file():
        raise FileNotFoundError(f"tune: there is no file {path}; a space has lines such as {EXAMPLE}.")
    tree = read_yaml(str(path), read_text("tune", path))
    return tree if isinstance(tree, Mapping) else {}


def spaces(config: Config, space: Mapping[str, Any]) -> list[Space]:
    """Build one space for each loss that is named under `loss`, or one for the configuration's own loss.

    Args:
        config: the configuration that is changed.
        space: a mapping from dotted keys to {low, high, log}, {low, high, step} or {choices: [...]}, and from `loss` to
            a list of losses. Each loss is a name, or a mapping in which ranges may stand for values and dotted keys
            apply to this loss only.
    """
    if not space:
        raise ValueError(f"tune: the space is empty; give it a line such as {EXAMPLE}.")
    common = {str(key): value for key, value in space.items() if key != "loss"}
    found = [_build(config, loss, common, label) for label, loss in _losses(space.get("loss"), config)]
    for each in found:
        if not each.ranges:
            raise ValueError(f"tune: nothing is searched for {each.label}; give it a range, such as {EXAMPLE}.")
        each.check()
    return found


def _losses(given: Any, config: Config) -> list[tuple[str, Any]]:
    """The label and the mapping of each loss."""
    if given is None:
        return [(config.loss.name, None)]
    if isinstance(given, Mapping) and set(given) == {"choices"}:
        given = given["choices"]
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if not listed:
        raise ValueError("tune: loss is an empty list; name one loss or more, or leave it out.")
    found: list[tuple[str, Any]] = []
    for each in listed:
        mapping = {"name": each} if isinstance(each, str) else each
        if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
            raise ValueError(f"tune: a loss must be a name, or a mapping with a name, but came as {each!r}.")
        name = mapping["name"]
        before = sum(other["name"] == name for _, other in found)
        found.append((f"{name} {before + 1}" if before else name, mapping))
    return found


def _build(config: Config, loss: Any, common: Mapping[str, Any], label: str) -> Space:
    own: dict[str, Any] = {}
    if loss is not None:
        own = {str(key): value for key, value in loss.items() if "." in str(key)}
        inner: dict[str, Any] = {}
        fixed = _split({key: value for key, value in loss.items() if "." not in str(key)}, "loss", inner)
        config = parse({**to_tree(config), "loss": fixed})
        own = {**inner, **own}
    searched = {**common, **own}
    ranges = {}
    for key in sorted(searched, key=lambda key: (key.startswith("loss."), SECTIONS.index(_section(key)))):
        if key in own and not is_range(own[key]):  # a single value, for this loss only
            config = apply_flags(config, [(key, json.dumps(own[key]))])
            continue
        ranges[key] = read_range(key, searched[key], fractions=takes_fractions(config, key))
    return Space(label, config, ranges)


def _section(key: str) -> str:
    """The section of a key; an error if the key may not be searched."""
    section = key.split(".")[0]
    if section not in SECTIONS:
        raise ValueError(f"tune: there is no {key}; {nearest(key, flat(to_tree(Config())))}")
    if key in REFUSED:
        raise ValueError(f"tune: {key} is not searched, since {REFUSED[key]}; leave it out.")
    return section


def _split(tree: Mapping[str, Any], place: str, ranges: dict[str, Any]) -> dict[str, Any]:
    """Move the ranges of a mapping to `ranges`, by their dotted keys; return the rest of the mapping."""
    fixed: dict[str, Any] = {}
    for key, value in tree.items():
        here = f"{place}.{key}"
        if is_range(value):
            ranges[here] = value
        else:
            fixed[str(key)] = _split(value, here, ranges) if isinstance(value, Mapping) else value
    return fixed


def as_tree(space: Mapping[str, Any]) -> Any:
    """Convert a space to plain JSON values, to compare it with that of an earlier search."""
    return json.loads(json.dumps(space, default=lambda x: list(x) if isinstance(x, Sequence) else str(x)))

"""`Space`: the keys of a configuration that a search varies, each with a `Range` of numbers or a list of `Choices`."""

import inspect
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.checks import nearest
from nearfar._utils.files import read_text
from nearfar.runs import _parts as parts
from nearfar.runs._config import SECTIONS, apply_flags, flat, parse, read_yaml, to_tree
from nearfar.runs._parts import INNER, LOSSES, SAMPLERS
from nearfar.runs._sections import Config
from nearfar.studies.grid import MANNER

WORDS = ("low", "high", "log", "step", "choices")
EXAMPLES = "{low: 1e-4, high: 1e-2, log: true}, {low: 0, high: 100, step: 10} or {choices: [64, 128]}"
FEW = 1000  # the largest number of steps in a range that is enumerated


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float  # the smallest value
    high: float  # the largest value
    log: bool = False  # sample evenly in the logarithm
    # the distance between two values, counted from `low`; None for any value, or any whole number
    step: float | None = None
    whole: bool = False  # only whole numbers

    def distribution(self, optuna: Any) -> Any:
        kind = optuna.distributions.IntDistribution if self.whole else optuna.distributions.FloatDistribution
        step = (self.step or 1) if self.whole else self.step
        return kind(self.low, self.high, log=self.log, step=step)

    def values(self) -> list[Any] | None:
        """All values, if there are few enough to enumerate."""
        step = self.step or (1 if self.whole else None)
        if step is None or (self.high - self.low) / step > FEW:
            return None
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]

    def ends(self) -> list[Any]:
        """The values that are checked before a search begins."""
        return [self.low, self.high]

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, value: Any) -> Any:
        return value

    def at_edge(self, value: Any) -> bool:
        """Whether a value lies in the outermost twentieth of the range, so that better ones may lie outside."""
        low, high, here = (math.log(x) if self.log else float(x) for x in (self.low, self.high, value))
        return not 0.05 <= (here - low) / (high - low) <= 0.95

    def __str__(self) -> str:
        how = " (log)" if self.log else f", step {self.step:g}" if self.step and self.step != 1 else ""
        return f"{self.low:g} to {self.high:g}{how}"


@dataclass(frozen=True)
class Choices:
    """A list of values of any kind: numbers, words, mappings."""

    options: tuple[Any, ...]

    def distribution(self, optuna: Any) -> Any:
        # of indices, since Optuna accepts no mappings as categories
        return optuna.distributions.CategoricalDistribution(tuple(range(len(self.options))))

    def values(self) -> list[Any]:
        return list(self.options)

    def ends(self) -> list[Any]:
        """All values: each is checked."""
        return list(self.options)

    def encode(self, value: Any) -> int:
        return [json.dumps(each) for each in self.options].index(json.dumps(value))

    def decode(self, value: int) -> Any:
        return self.options[value]

    def at_edge(self, value: Any) -> bool:
        """Always False: choices have no order."""
        return False

    def __str__(self) -> str:
        return ", ".join(each if isinstance(each, str) else json.dumps(each) for each in self.options)


def is_range(value: Any) -> bool:
    """Whether a value in a space describes several values."""
    return isinstance(value, Mapping) and bool({"low", "high", "choices"} & set(value))


def read_range(key: str, given: Any, *, fractions: bool = False) -> Range | Choices:
    """Read {low, high, log | step} or {choices: [...]}.

    If the key accepts `fractions`, only a whole step restricts it to whole numbers.

    >>> read_range("optimizer.lr", {"low": 1e-4, "high": 1e-2, "log": True})
    Range(low=0.0001, high=0.01, log=True, step=None, whole=False)
    >>> str(read_range("model.embedding_dim", {"choices": [64, 128]}))
    '64, 128'
    """
    if not is_range(given):
        raise ValueError(f"tune: the space of {key} came as {given!r}; write {EXAMPLES}.")
    for word in given:
        if word not in WORDS:
            raise ValueError(f"tune: the space of {key} has no {word}; {nearest(str(word), WORDS)}")
    if "choices" in given:
        return _choices(key, given)
    return _numbers(key, given, fractions)


def _choices(key: str, given: Mapping[str, Any]) -> Choices:
    options = given["choices"]
    if len(given) > 1:
        raise ValueError(f"tune: the space of {key} has choices and {next(w for w in given if w != 'choices')} too.")
    if not isinstance(options, list | tuple) or not options:
        raise ValueError(f"tune: the choices of {key} must be a list of one value or more, but came as {options!r}.")
    if len({json.dumps(each) for each in options}) < len(options):
        raise ValueError(f"tune: the choices of {key} hold a value twice; leave one out.")
    return Choices(tuple(options))


def _numbers(key: str, given: Mapping[str, Any], fractions: bool) -> Range:
    found = {word: given.get(word) for word in ("low", "high", "step") if word != "step" or given.get(word) is not None}
    for word, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"tune: {word} of {key} must be a number, but came as {value!r}; write {EXAMPLES}.")
    low, high, step = float(found["low"] or 0), float(found["high"] or 0), found.get("step")
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"tune: log of {key} must be true or false, but came as {log!r}.")
    if low >= high:
        raise ValueError(f"tune: the range of {key} from {low:g} to {high:g} is empty; low must be below high.")
    if log and low <= 0:
        raise ValueError(f"tune: the range of {key} begins at {low:g}; with log it must begin above 0.")
    if step is not None and ((log and step != 1) or not 0 < step <= high - low):
        why = "must be 1 with log" if log else f"must lie above 0 and within {high - low:g}"
        raise ValueError(f"tune: step of {key} {why}, but came as {step!r}.")
    if step is not None:  # the largest value that whole steps reach
        high = low + math.floor((high - low) / step + 1e-9) * step
    fractions = fractions and step is None
    if not fractions and all(isinstance(value, int) for value in found.values()):
        return Range(int(low), int(high), log, None if step is None else int(step), whole=True)
    if log and step is not None:
        raise ValueError(f"tune: step of {key} goes with log for whole numbers alone; leave step out.")
    return Range(low, high, log, None if step is None else float(step))


def takes_fractions(config: Config, key: str) -> bool:
    """Whether a key is typed as a float, so that {low: 0, high: 1} means every number between."""
    section, *path = key.split(".")
    here = getattr(config, section, None)
    if not path or here is None:
        return False
    if is_dataclass(here) and section not in ("loss", "batches"):
        hint = typing.get_type_hints(type(here)).get(path[0])
        return hint is float or float in typing.get_args(hint)
    kind = (LOSSES if section == "loss" else SAMPLERS).get(here.name)
    tree: Any = here.options
    for place, word in enumerate(path, start=1):
        if kind is None or word not in inspect.signature(kind).parameters:
            return False
        if place == len(path):
            return "float" in str(inspect.signature(kind).parameters[word].annotation)
        tree = tree.get(word) if isinstance(tree, Mapping) else None
        name = tree if isinstance(tree, str) else tree.get("name") if isinstance(tree, Mapping) else None
        kind = INNER.get(word, {}).get(str(name))
    return False


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

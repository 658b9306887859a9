"""`Range` and `Choices`: the values that a search may assign to one key of a configuration."""

from __future__ import annotations

import inspect
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from nearfar._utils.checks import nearest
from nearfar.runs._parts import INNER, LOSSES, SAMPLERS
from nearfar.runs._sections import Config

WORDS = ("low", "high", "log", "step", "choices")
EXAMPLES = "{low: 1e-4, high: 1e-2, log: true}, {low: 0, high: 100, step: 10} or {choices: [64, 128]}"
FEW = 1000
"""The largest number of steps in a range that is enumerated."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        low: the smallest value.
        high: the largest value.
        log: sample evenly in the logarithm.
        step: the distance between two values, counted from `low`; None for any value, or any whole number.
        whole: only whole numbers.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def distribution(self, optuna: Any) -> Any:
        """The range as an Optuna distribution."""
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
        """Convert a value for Optuna."""
        return value

    def decode(self, value: Any) -> Any:
        """Convert a value from Optuna."""
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
        """A categorical distribution over indices, since Optuna accepts no mappings as categories."""
        return optuna.distributions.CategoricalDistribution(tuple(range(len(self.options))))

    def values(self) -> list[Any]:
        """All values."""
        return list(self.options)

    def ends(self) -> list[Any]:
        """All values: each is checked."""
        return list(self.options)

    def encode(self, value: Any) -> int:
        """The index of a value."""
        return [json.dumps(each) for each in self.options].index(json.dumps(value))

    def decode(self, value: int) -> Any:
        """The value at an index."""
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

    Args:
        key: the key of the configuration, for messages.
        given: the value from YAML.
        fractions: whether the key accepts fractions; then two whole ends mean whole numbers only with a whole step.

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

"""Names that have changed: using an old one is an error that names the new one. No old name works.

refuse_key("optimizer.rate")          ValueError: config: optimizer.rate is now optimizer.lr.
Triplet(filter=...)                   TypeError: Triplet: filter= is now miner=.
nf.Memory                             AttributeError: nearfar.Memory is now nearfar.CrossBatchMemory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Self, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")

KEYS = {
    "optimiser": "optimizer",
    "optimizer.rate": "optimizer.lr",
    "optimizer.head": "optimizer.head_lr_mult",
    "optimizer.loss": "optimizer.loss_lr_mult",
    "optimizer.clip": "optimizer.max_grad_norm",
    "model.width": "model.embedding_dim",
    "model.neck": "model.bn_neck",
    "model.normalise": "model.normalize",
    "training.memory": "training.cross_batch_memory",
    "training.memory_warmup": "training.cross_batch_memory_warmup",
    "training.doctor": "training.diagnose_every",
    "training.near": "training.max_positive_distance",
    "training.tensorboard": "training.trackers",
    "training.far": "training.min_negative_distance",
}
"""Keys of a configuration."""
VALUES = {
    ("data.transform", "002"): "qi2020",
    ("data.transform", "004"): "can2019",
    ("training.precision", "no"): "float32",
    ("training.precision", "double"): "float64",
}
"""Values of a configuration that stood for a choice."""
KEYWORDS = {
    "filter": "miner",
    "atom": "zero_member",
    "slope_alike": "slope_positive",
    "slope_unlike": "slope_negative",
    "normalised": "normalized",
    "normalise": "normalize",
    "width": "embedding_dim",
    "neck": "bn_neck",
    "near": "max_positive_distance",
    "far": "min_negative_distance",
    "leading": "reference_starts_with_batch",
}
"""Keywords of constructors and functions."""
KEYWORDS_OF = {"Margin": {"threshold": "beta"}}
"""Keywords that changed in one class alone."""
NAMES = {
    "nearfar.Memory": "nearfar.CrossBatchMemory",
    "nearfar.Gathered": "nearfar.Distributed",
    "nearfar.mining": "nearfar.miners",
    "nearfar.batches.PerClass": "nearfar.batches.MPerClass",
    "nearfar.pairs.Score": "nearfar.pairs.Identity",
    "nearfar.sets.Expected": "nearfar.sets.DetachedWeights",
    "nearfar.miners.Filter": "nearfar.miners.Miner",
    "nearfar.report.recall_figure": "nearfar.plot.recall_curve",
    "nearfar.report.classes_figure": "nearfar.plot.class_recall",
}
"""Modules, classes and functions."""


def refuse_key(key: str) -> None:
    """Raise ValueError if a configuration key has a new name."""
    if key in KEYS:
        raise ValueError(f"config: {key} is now {KEYS[key]}.")


def refuse_value(key: str, value: object) -> None:
    """Raise ValueError if a configuration value has a new name."""
    if isinstance(value, str) and (key, value) in VALUES:
        raise ValueError(f"config: {key} {value!r} is now {VALUES[key, value]!r}.")


def new_keyword(owner: str, name: str, known: Iterable[str]) -> str | None:
    """The new name of a keyword, if the owner has that one and no longer the old one."""
    words, new = set(known), (KEYWORDS | KEYWORDS_OF.get(owner, {})).get(name)
    return new if name not in words and new in words else None


def refuse_keywords(owner: str, given: Iterable[str], function: Callable[..., object]) -> None:
    """Raise TypeError if a given keyword has a new name that the function takes."""
    suspects = [name for name in given if name in KEYWORDS or name in KEYWORDS_OF.get(owner, ())]
    known = inspect.signature(function).parameters if suspects else ()  # parts are made in training steps too
    for name in suspects:
        new = new_keyword(owner, name, known)
        if new is not None:
            raise TypeError(f"{owner}: {name}= is now {new}=.")


def refuse_unknown(owner: str, given: Iterable[str], function: Callable[..., object]) -> None:
    """Raise TypeError for keywords that a function does not take, with the new name of one that has changed."""
    refuse_keywords(owner, given, function)
    raise TypeError(f"{owner}: there is no keyword {', '.join(given)}; see help({owner}).")


def no_such_name(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have; it names the new one if there is one."""
    full = f"{module}.{name}"
    if full in NAMES:
        return AttributeError(f"{full} is now {NAMES[full]}.")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def new_name(name: str, known: Iterable[str]) -> str | None:
    """The present name of a class that a configuration calls by its old name, if it is among `known`."""
    words = set(known)
    for old, new in NAMES.items():
        if old.rpartition(".")[2] == name and new.rpartition(".")[2] in words:
            return new.rpartition(".")[2]
    return None


class NewKeywords:
    """Base of classes whose constructor refuses an old keyword with an error that names the new one."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Check the keywords, then create the object as usual."""
        refuse_keywords(cls.__name__, given, cls.__init__)
        return super().__new__(cls)


def new_keywords(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorate a function so that an old keyword is an error that names the new one."""

    @functools.wraps(function)
    def checked(*args: Given.args, **given: Given.kwargs) -> Made:
        refuse_keywords(function.__name__, given, function)
        return function(*args, **given)

    return checked

"""Which configuration keys may change when a run is resumed; a change of another key is an error that names it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from nearfar.runs._config import flat, parse, to_tree
from nearfar.runs._sections import Config

__all__ = ["MAY_CHANGE", "check_network", "check_resumable"]

MAY_CHANGE = tuple(
    f"{section}.{key.name}"
    for section in ("data", "model", "optimizer", "training")
    for key in fields(getattr(Config(), section))
    if "later" in key.metadata
)
"""Keys that may change when a run is resumed."""
INITIALIZATION = ("model.pretrained", "model.weights")
"""Keys that initialize a network, and that do not matter once there is a checkpoint."""


def check_resumable(before: Mapping[str, Any], now: Config, step: int) -> None:
    """Refuse to resume at `step` with a configuration that contradicts `before`, the tree in the checkpoint."""
    _check(before, now, lambda name: name not in MAY_CHANGE, f"a resumed run may change {', '.join(MAY_CHANGE)}")
    if now.training.length < step:
        raise ValueError(
            f"train: training.steps is {now.training.length:,}, but the run has taken {step:,} steps already; leave it "
            "out, or ask for more."
        )
    if now.training.baselines and not parse(before).training.baselines:
        raise ValueError(
            "train: training.baselines are scored before the first step, and this run began without them; leave it out."
        )


def check_network(before: Mapping[str, Any], now: Config) -> None:
    """Refuse weights whose network differs from the one in the configuration."""
    which = [name for name in flat(to_tree(now)) if name.startswith("model.") and name not in INITIALIZATION]
    _check(before, now, lambda name: name in (*which, "training.precision"), "only keys outside model may change")


def _check(before: Mapping[str, Any], now: Config, fixed: Callable[[str], bool], rule: str) -> None:
    then, today = flat(to_tree(parse(before))), flat(to_tree(now))
    others = [name for name in {**then, **today} if fixed(name) and then.get(name) != today.get(name)]
    if others:
        words = "; ".join(f"{name} was {_word(then.get(name))} and is now {_word(today.get(name))}" for name in others)
        raise ValueError(
            f"train: the checkpoint is of another configuration: {words}; put it back, or train anew ({rule})."
        )


def _word(value: Any) -> str:
    return "not set" if value is None else repr(value)

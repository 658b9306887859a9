"""Baselines of a run: R@1 on the test classes of the input, if it is a vector, and of the untrained network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nearfar._utils.progress import Watch
from nearfar.train.scores import score
from nearfar.train.state import TrainState

__all__ = ["KEY", "describe", "kept", "measured"]

KEY = "baselines"
"""Their key in the journal, at step 0."""
NAMES = {"input": "input vectors", "untrained": "untrained network", "trained": "trained network"}


def measured(state: TrainState, watch: Watch | None = None) -> dict[str, float]:
    """Measure the baselines, R@1 by name; this uses no random numbers and does not affect the run."""
    data, found = state.data, {}
    subjects: dict[str, nn.Module] = {"untrained": state.bare_model}
    if len(state.inputs.shape) == 1:
        subjects = {"input": nn.Flatten(), **subjects}
    for name, model in subjects.items():
        told = None if watch is None else _prefix(watch, NAMES[name])
        scored = score(model, data.test, state.plain, gallery=data.gallery, ks=(1,), watch=told, **state.evaluating)
        found[name] = round(scored.evaluation.recall[1], 6)
    return found


def _prefix(watch: Watch, name: str) -> Watch:
    """A watch whose stages begin with the name of what is scored."""
    return lambda what, done, total: watch(f"{name}, {what}", done, total)


def kept(entries: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """The baselines in a journal; None if it has none."""
    return next((dict(entry[KEY]) for entry in entries if isinstance(entry.get(KEY), Mapping)), None)


def describe(found: Mapping[str, float]) -> str:
    """Format the baselines as a line of text.

    >>> describe({"input": 0.973, "untrained": 0.41})
    'R@1 on the test classes: input vectors 97.3, untrained network 41.0'
    """
    return "R@1 on the test classes: " + ", ".join(f"{NAMES[name]} {100 * value:.1f}" for name, value in found.items())

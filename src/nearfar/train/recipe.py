"""The configuration of a run that nobody configured: what was measured on photographs, and on vectors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from nearfar.data import DataSet, transforms
from nearfar.data.registry import kind_of
from nearfar.data.samples import Samples
from nearfar.data.splits import Shares
from nearfar.models.registry import LARGE
from nearfar.runs.config import Config, changed, load, parse, read_yaml
from nearfar.train.source import opened
from nearfar.train.suited import default_transform, short_side

__all__ = ["are_photographs", "recipe", "usual"]

FILE = files("nearfar.train") / "photographs.yaml"
PASSES = 8.2
"""How often the recipe goes through the training photographs: 600 steps of 80 through CUB's 5,864."""
LEAST, MOST = 200, 20_000
"""Steps, whatever the number of photographs."""
VECTORS: dict[str, Any] = {"model": {"embedding_dim": None}, "optimizer": {"lr": 1e-4}}
"""For vectors: a head that begins as the identity. Of frozen features of CUB, which find 54.2 by themselves, it makes
56.0 in 1,000 steps, and a random head of 128 dimensions at 1e-3 44.0 (docs/guides/models.md)."""
OTHER_DATA, OTHER_NETWORKS = (None, "glyphs", "omniglot", "vectors"), ("small", "linear", "mlp")
"""Data sets and networks that have nothing to do with photographs."""


def usual(flags: Sequence[tuple[str, str]]) -> tuple[Config, str]:
    """The configuration that only flags were given for, and what is to be said of it.

    Photographs get the recipe, fitted to their number (`recipe`), vectors `VECTORS`, anything else the plain defaults;
    then flags apply.

    Args:
        flags: such as ("data.path", "photographs").
    """
    plain = load(None, flags)
    if plain.data.name is None and plain.data.path is not None:
        flags = [*flags, ("data.name", kind_of(plain.data.path))]
        plain = load(None, flags)
    spec = plain.data
    if spec.name == "vectors" and plain.model.name in (None, "linear") and plain.model.hidden is None:
        config = changed(parse(VECTORS), flags)
        return config, "these are vectors: the head begins as the identity (docs/guides/models.md); flags change it"
    if (
        spec.name in OTHER_DATA
        or plain.model.name in OTHER_NETWORKS
        or spec.transform not in (None, *transforms.CROPS)
        or (spec.size is not None and spec.size <= LARGE)
    ):
        return plain, ""
    data = opened(spec)
    if not are_photographs(data):
        return plain, ""
    tree = recipe(data.train, validation=spec.validation if _told(flags, "data", "validation") else None)
    if spec.size is not None and plain.model.name not in (None, tree["model"]["name"]):
        tree["data"]["train_size"] = None  # another network may take one size alone
    config = changed(parse(tree), flags)
    where = "docs/start/your-photographs.md"
    return config, f"these are photographs: the recipe for them is taken ({where}); flags change it"


def are_photographs(data: DataSet) -> bool:
    """Whether the samples are color pictures that are too large for the network `small`."""
    return default_transform(data) == "photographs" and short_side(data.train) > LARGE


def recipe(train: Samples, *, validation: float | None = None) -> dict[str, Any]:
    """The recipe for photographs as nested values, fitted to the training samples.

    The steps go `PASSES` times through them, a batch has no more classes than there are to learn from, and without a
    GPU everything is computed in float32.

    Args:
        train: the training side.
        validation: the share of its classes to hold out; None: as in the recipe.
    """
    tree: dict[str, Any] = read_yaml("recipe", FILE.read_text(encoding="utf-8"))
    if validation is not None:
        tree["data"]["validation"] = validation
    batches, plan = tree["batches"], tree["training"]
    batches["classes"] = min(batches["classes"], Shares.of(len(train.classes), tree["data"]["validation"]).learn)
    wanted = PASSES * len(train) / (batches["classes"] * batches["samples"])
    plan["steps"] = min(max(LEAST, round(wanted / 10) * 10), MOST)
    plan["evaluate_every"] = plan["steps"] if not tree["data"]["validation"] else max(1, plan["steps"] // 6)
    tree["optimizer"]["warmup"] = min(tree["optimizer"]["warmup"], plan["steps"] // 4)
    if not torch.cuda.is_available():
        plan["precision"] = "float32"
    return tree


def _told(flags: Sequence[tuple[str, str]], section: str, key: str) -> bool:
    """Whether a flag sets this key, or its whole section."""
    return any(name in (section, f"{section}.{key}") for name, _ in flags)

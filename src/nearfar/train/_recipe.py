"""Default configurations for photographs, vectors and texts."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from nearfar.data import DataSet, transforms
from nearfar.data._registry import kind_of
from nearfar.data._samples import Samples
from nearfar.data._splits import Shares
from nearfar.models.registry import LARGE
from nearfar.runs._config import apply_flags, load, parse, read_yaml
from nearfar.runs._sections import Config
from nearfar.train._build import default_transform, open_dataset, short_side
from nearfar.train._length import steps_of_passes

FILE = files("nearfar.train") / "photographs.yaml"
VECTORS: dict[str, Any] = {"model": {"embedding_dim": None}, "optimizer": {"lr": 1e-4}, "training": {"steps": "auto"}}
"""For vectors: a head that is initialized to the identity. On frozen features of CUB (R@1 54.2) it reaches 56.0 in
1,000 steps; a random head of 128 dimensions at lr 1e-3 reaches 44.0 (docs/guides/models.md)."""
TEXTS: dict[str, Any] = {"model": {"name": "text:static", "embedding_dim": None}}
"""For texts: token vectors, which train on a CPU in a minute; `text:FOLDER` is better and slower."""
OTHER_DATA, OTHER_NETWORKS = (None, "glyphs", "omniglot", "vectors"), ("small", "linear", "mlp")
"""Data sets and networks that are not for photographs."""


def default_config(flags: Sequence[tuple[str, str]]) -> tuple[Config, str]:
    """Build the configuration of a run without a configuration file from flags, and a message about it.

    Photographs get the recipe, fitted to their number (`recipe`), vectors get `VECTORS`, texts `TEXTS`, and any other
    data the plain defaults; then the flags, such as ("data.path", "photographs"), are applied.
    """
    plain = load(None, flags)
    if plain.data.name is None and plain.data.path is not None:
        flags = [*flags, ("data.name", kind_of(plain.data.path))]
        plain = load(None, flags)
    spec = plain.data
    if spec.name == "vectors" and plain.model.name in (None, "linear") and plain.model.hidden is None:
        config = apply_flags(parse(VECTORS), flags)
        return config, "these are vectors: the head begins as the identity (docs/guides/models.md); flags change it"
    if spec.name == "texts":
        return _for_texts(plain, flags)
    if (
        spec.name in OTHER_DATA
        or plain.model.name in OTHER_NETWORKS
        or spec.transform not in (None, *transforms.CROPS)
        or (spec.size is not None and spec.size <= LARGE)
    ):
        return plain, ""
    data = open_dataset(spec)
    if not are_photographs(data):
        return plain, ""
    given = any(name in ("data", "data.validation") for name, _ in flags)
    tree = recipe(data.train, validation=spec.validation if given else None)
    if spec.size is not None and plain.model.name not in (None, tree["model"]["name"]):
        tree["data"]["train_size"] = None  # the recipe's train_size fits its own network and data.size only
    config = apply_flags(parse(tree), flags)
    where = "docs/start/your-photographs.md"
    return config, f"these are photographs: the recipe for them is taken ({where}); flags change it"


def recipe_for_texts(train: Samples) -> dict[str, Any]:
    """The recipe for texts as nested values: `TEXTS`, and batches of pairs if the samples are pairs."""
    pairs = getattr(train, "records", None) is not None
    return {"model": dict(TEXTS["model"]), **({"batches": {"name": "QueryPairs"}} if pairs else {})}


def _for_texts(plain: Config, flags: Sequence[tuple[str, str]]) -> tuple[Config, str]:
    """The configuration for texts: of classes or of pairs, with token vectors unless an encoder is named."""
    data = open_dataset(plain.data)
    tree = recipe_for_texts(data.train)
    if plain.model.query:
        tree["model"]["name"] = None
    config = apply_flags(parse(tree), flags)
    encoder = config.model.name or f"{config.model.query} and {config.model.document}"
    return config, f"these are {data.about}; the encoder is {encoder} (docs/guides/text.md); flags change it"


def are_photographs(data: DataSet) -> bool:
    """Whether the samples are color pictures larger than those for the network `small`."""
    return default_transform(data) == "photographs" and short_side(data.train) > LARGE


def recipe(train: Samples, *, validation: float | None = None) -> dict[str, Any]:
    """The recipe for photographs as nested values, fitted to the training samples.

    A batch has at most as many classes as there are, and without a GPU the precision is float32. The run finds its
    length; evaluations and warm-up are fitted to the usual one. `validation`, if given, replaces the share of the
    classes that the recipe holds out.
    """
    tree: dict[str, Any] = read_yaml("recipe", FILE.read_text(encoding="utf-8"))
    if validation is not None:
        tree["data"]["validation"] = validation
    batches, plan = tree["batches"], tree["training"]
    batches["classes"] = min(batches["classes"], Shares.of(len(train.classes), tree["data"]["validation"]).learn)
    usual = steps_of_passes(len(train), batches["classes"] * batches["samples"])
    plan["evaluate_every"] = usual if not tree["data"]["validation"] else max(1, usual // 6)
    tree["optimizer"]["warmup"] = min(tree["optimizer"]["warmup"], usual // 4)
    if not torch.cuda.is_available():
        plan["precision"] = "float32"
    return tree

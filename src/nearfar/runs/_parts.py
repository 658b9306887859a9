"""Build the losses, samplers and their inner parts that a configuration names."""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from nearfar import batches, links, losses, miners, pairs, sets, similarity
from nearfar._utils.keywords import right_class, right_name
from nearfar.distributed import CrossBatchMemory
from nearfar.losses.annealing import Anneal
from nearfar.runs._sections import Config, ModelConfig, Part

Catalog = Mapping[str, Callable[..., Any]]


def _classes(module: ModuleType) -> Catalog:
    """The public classes that a module or package defines."""
    found = {name: x for name, x in vars(module).items() if inspect.isclass(x) and not name.startswith("_")}
    own = {name: x for name, x in found.items() if x.__module__.startswith(module.__name__)}
    return {name: x for name, x in own.items() if not inspect.isabstract(x)}


LOSSES = _classes(losses)
SAMPLERS: Catalog = {
    "MPerClass": batches.MPerClass,
    "MinedNegatives": batches.MinedNegatives,
    "Representatives": batches.Representatives,
    "QueryPairs": batches.QueryPairs,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MPerClass": {"classes": None, "samples": 4},
    "MinedNegatives": {"batch_size": 128},
    # by classes, so that each rank holds whole classes with their representatives
    "Representatives": {"batch_size": 128, "order": "classes"},
    "QueryPairs": {"batch_size": None},
}
"""Default arguments of the samplers."""
CLASSES = 32  # the default number of classes in a batch; all classes if there are fewer
PAIRS = 64  # the default number of pairs in a batch; one for each class if there are fewer
INNER: Mapping[str, Catalog] = {
    "pair": _classes(pairs),
    "similarity": _classes(similarity),
    "miner": _classes(miners),
    "over": _classes(sets),
    "link": _classes(links),
    "anneal": {"Anneal": Anneal},
    "loss": LOSSES,
}
"""Options of a loss that are objects: written as a name, or as a mapping with a name."""


def check(config: Config) -> None:
    """Raise an error for unknown names and options, before any data are read."""
    _check("loss", config.loss, LOSSES)
    _check("batches", config.batches, SAMPLERS)
    if config.training.cross_batch_memory and config.batches.name in ("Representatives", "QueryPairs"):
        raise ValueError(
            f"config: training.cross_batch_memory does not go with batches {config.batches.name}, which choose the "
            "pairs themselves; take MPerClass, or training.cross_batch_memory 0."
        )
    if config.data.workers and config.batches.name == "MinedNegatives":
        raise ValueError(
            "config: data.workers does not go with batches MinedNegatives, since workers draw batches before the "
            "negatives of these batches are mined; set data.workers 0."
        )


def make_loss(config: Config, *, classes: int, dim: int | None = None) -> Any:
    """Build the loss, within a `CrossBatchMemory` if configured.

    Losses with proxies need the number of training classes and `dim`, that of the embeddings (None: as configured).
    """
    given = {"classes": classes, "dim": dim or config.model.embedding_dim or ModelConfig().embedding_dim}
    loss = _make("loss", config.loss, LOSSES, given)
    plan = config.training
    if not plan.cross_batch_memory:
        return loss
    return CrossBatchMemory(loss, plan.cross_batch_memory, plan.cross_batch_memory_warmup)


def make_sampler(config: Config, labels: Any, *, rank: int, world: int, records: Any = None) -> Any:
    """Build the batch sampler over the training labels, for rank `rank` of `world`.

    `records` are those of pairs, see `nearfar.data.Texts`; None for data without pairs.
    """
    given: dict[str, Any] = {"seed": config.training.seed, "rank": rank, "world": world}
    kind = _kind("batches", config.batches, SAMPLERS)
    if (config.batches.name == "QueryPairs") != (records is not None):
        held, take = ("pairs", "QueryPairs") if records is not None else ("no pairs", "MPerClass")
        raise ValueError(f"config: the data hold {held}, and batches is {config.batches.name}; take --batches {take}.")
    if records is not None:
        given["records"] = records
    return kind(labels, **{**given, **shape_of_batch(config, len(set(labels.tolist())))})


def shape_of_batch(config: Config, classes: int) -> dict[str, Any]:
    """The options of the sampler, with defaults for this number of training classes."""
    given = {**DEFAULTS[config.batches.name], **config.batches.options}
    if config.batches.name == "MPerClass" and given["classes"] is None:
        given["classes"] = min(CLASSES, classes)
    if config.batches.name == "QueryPairs" and given["batch_size"] is None:
        given["batch_size"] = min(PAIRS, classes)
    return given


def _kind(place: str, part: Part, catalog: Catalog) -> Callable[..., Any]:
    if part.name not in catalog:
        raise ValueError(f"config: {place}.name is {part.name!r}; {right_class(part.name, catalog)}")
    return catalog[part.name]


def _check(place: str, part: Part, catalog: Catalog) -> None:
    known = inspect.signature(_kind(place, part, catalog)).parameters
    for key, value in part.options.items():
        if key not in known or key in ("labels", "records", "rank", "world"):
            raise ValueError(f"config: {part.name} has no {place}.{key}; {right_name(part.name, key, known)}")
        if _is_part(key, value):
            _check(f"{place}.{key}", _inner(f"{place}.{key}", value), INNER[key])


def _is_part(key: str, value: Any) -> bool:
    """Whether an option describes an object; a whole number under `anneal` does not."""
    return key in INNER and value is not None and not (key == "anneal" and isinstance(value, int))


def _inner(place: str, value: Any) -> Part:
    if isinstance(value, str):
        return Part(value)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return Part(value["name"], {key: item for key, item in value.items() if key != "name"})
    raise ValueError(f"config: {place} must be a name, or a mapping with a name, but came as {value!r}.")


def _make(place: str, part: Part, catalog: Catalog, given: Mapping[str, Any]) -> Any:
    """Build a part; `given` holds arguments that losses take if they know them, also a loss inside another one."""
    kind = _kind(place, part, catalog)
    known = inspect.signature(kind).parameters if given else {}
    options = {key: value for key, value in given.items() if key in known}
    for key, value in part.options.items():
        here, inside = f"{place}.{key}", given if key == "loss" else {}
        options[key] = _make(here, _inner(here, value), INNER[key], inside) if _is_part(key, value) else value
    try:
        return kind(**options)
    except TypeError as error:  # a required argument is missing, or a value is of the wrong kind
        raise ValueError(f"config: {place} {part.name}: {error}; give it under `{place}:`.") from None

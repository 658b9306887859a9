"""Errors for unknown names, with a suggestion: our name for a name of pytorch-metric-learning (PML), else the nearest.

Contrastive(margin=1)      TypeError: Contrastive: there is no margin=; write pos_margin= and neg_margin=.
Triplet(margn=1)           TypeError: Triplet: there is no margn=; did you mean 'margin'?
nf.losses.SupConLoss       AttributeError: module 'nearfar.losses' has no attribute 'SupConLoss'; write SupCon.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Never, Self

import torch

from nearfar._utils.checks import nearest

FROM_PML: dict[str, dict[str, str]] = {
    "": {
        "num_classes": "classes",
        "embedding_size": "dim",
        "num_proxies": "classes",
        "distance": "similarity",
        "reducer": "reduction",
        "softmax_scale": "scale",
        "mining_func": "miner",
        "indices_tuple": "indices",
        "memory_size": "size",
    },
    "Angular": {"alpha": "degrees"},
    "Circle": {"m": "margin", "gamma": "scale"},
    "Contrastive": {"margin": "pos_margin= and neg_margin"},
    "DistanceWeighted": {"nonzero_loss_cutoff": "upper"},
    "FastAP": {"num_bins": "bins"},
    "GeneralizedLifted": {"neg_margin": "margin"},
    "LiftedStructure": {"neg_margin": "margin"},
    "MPerClass": {"m": "samples", "batch_size": "classes= and samples"},
    "Margin": {"learn_beta": "learn"},
    "MultiSimilarity": {"base": "threshold"},
    "ProxyAnchor": {"alpha": "scale"},
    "SoftTriple": {"centers_per_class": "centers", "la": "scale"},
    "SubCenterArcFace": {"sub_centers": "centers"},
    "Triplet": {"smooth_loss": "smooth", "type_of_triplets": "mining"},
}
"""For each PML class, its arguments and ours; under "" those that several classes share."""
CLASSES = {
    "BatchHardMiner": "Hard",
    "GeneralizedLiftedStructureLoss": "GeneralizedLifted",
    "NPairsLoss": "NPair",
    "TripletMarginLoss": "Triplet",
}
"""PML classes whose name here is not PML's without its last word."""


def right_name(owner: str, name: str, known: Iterable[str]) -> str:
    """The correction to suggest for an unknown argument of a class."""
    words = [x for x in known if not x.startswith("_")]
    new = FROM_PML.get(owner, {}).get(name) or FROM_PML[""].get(name)
    if new is not None and all(part in words for part in new.split("= and ")):
        return f"write {new}=."
    return nearest(name, words) if words else "it takes none."


@cache
def _parameters(kind: type) -> tuple[str, ...] | None:
    """The names of a constructor's arguments; None if it takes any."""
    found = inspect.signature(kind).parameters.values()
    return None if any(x.kind is x.VAR_KEYWORD for x in found) else tuple(x.name for x in found)


class Keywords:
    """Base class whose constructor answers an unknown keyword with the right one."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Check the keywords, then create the object as usual."""
        known = None if torch.compiler.is_compiling() else _parameters(cls)  # type: ignore[arg-type] # a compiler cannot trace the question
        unknown = [] if known is None else [name for name in given if name not in known]
        if unknown and known is not None:
            said = right_name(cls.__name__, unknown[0], known)
            raise TypeError(f"{cls.__name__}: there is no {unknown[0]}=; {said}")
        return super().__new__(cls)


def right_class(name: str, known: Iterable[str]) -> str:
    """The correction to suggest for an unknown class."""
    words = [x for x in known if not x.startswith("_")]
    ours = CLASSES.get(name, name.removesuffix("Loss").removesuffix("Miner").removesuffix("Sampler"))
    return f"write {ours}." if ours in words else nearest(name, words)


def suggest_names(module: str, known: Iterable[str]) -> Callable[[str], Never]:
    """A module's `__getattr__`: an AttributeError for an unknown name, with a suggestion."""

    def fail(name: str) -> Never:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {right_class(name, known)}")

    return fail

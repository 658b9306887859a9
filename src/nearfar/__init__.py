"""nearfar: deep metric learning for PyTorch. A loss is a worst case over a set of pair weights.

>>> import torch, nearfar as nf
>>> loss = nf.losses.DroTopK(k=2)
>>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
>>> value = loss(embeddings, torch.tensor([0, 0, 1, 1]))
>>> value.backward()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearfar import groups, links, losses, miners, pairs, sets, similarity
from nearfar._utils.checks import DegenerateBatchWarning
from nearfar._utils.keywords import suggest_names
from nearfar.losses.explanation import Explanation
from nearfar.losses.nested import Nested
from nearfar.losses.robust import RobustLoss
from nearfar.relations.relation import Relation

if TYPE_CHECKING:
    from nearfar import (
        batches,
        data,
        distributed,
        doctor,
        evaluation,
        geometry,
        inspection,
        linear,
        models,
        plot,
        pml,
        report,
        runs,
        studies,
        train,
        tune,
    )
    from nearfar.batches import Proximal
    from nearfar.distributed import CrossBatchMemory, Distributed, cached_step
    from nearfar.doctor import diagnose
    from nearfar.evaluation import calibrate, compare, evaluate, evaluate_pairs, evaluate_retrieval, mine
    from nearfar.inspection import inspect
    from nearfar.linear._learning_rate import suggest_step

__version__ = "0.2.0"
__all__ = [
    "CrossBatchMemory",
    "DegenerateBatchWarning",
    "Distributed",
    "Explanation",
    "Nested",
    "Proximal",
    "Relation",
    "RobustLoss",
    "batches",
    "cached_step",
    "calibrate",
    "compare",
    "data",
    "diagnose",
    "distributed",
    "doctor",
    "evaluate",
    "evaluate_pairs",
    "evaluate_retrieval",
    "evaluation",
    "geometry",
    "groups",
    "inspect",
    "inspection",
    "linear",
    "links",
    "losses",
    "mine",
    "miners",
    "models",
    "pairs",
    "plot",
    "pml",
    "report",
    "runs",
    "sets",
    "similarity",
    "studies",
    "suggest_step",
    "train",
    "tune",
]

# Everything except the losses is imported on first access, so that a script imports only what it uses.
_HOMES = {
    "CrossBatchMemory": "nearfar.distributed",
    "Distributed": "nearfar.distributed",
    "Proximal": "nearfar.batches",
    "cached_step": "nearfar.distributed",
    "calibrate": "nearfar.evaluation",
    "compare": "nearfar.evaluation",
    "diagnose": "nearfar.doctor",
    "evaluate": "nearfar.evaluation",
    "evaluate_pairs": "nearfar.evaluation",
    "evaluate_retrieval": "nearfar.evaluation",
    "inspect": "nearfar.inspection",
    "mine": "nearfar.evaluation",
    "suggest_step": "nearfar.linear._learning_rate",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name in _HOMES:
        globals()[name] = getattr(import_module(_HOMES[name]), name)
        return globals()[name]
    if name in __all__:
        return import_module(f"nearfar.{name}")
    return suggest_names("nearfar", __all__)(name)


def __dir__() -> list[str]:
    """The public names, including those that are not imported yet."""
    return ["__version__", *__all__]

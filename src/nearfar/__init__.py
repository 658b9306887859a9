"""nearfar: deep metric learning for PyTorch. A loss is a worst case over a set of pair weights.

>>> import torch, nearfar as nf
>>> loss = nf.losses.DroTopK(k=2)
>>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
>>> value = loss(embeddings, torch.tensor([0, 0, 1, 1]))
>>> value.backward()
"""

from importlib import import_module
from typing import Any

from nearfar import batches, data, geometry, groups, links, losses, miners, pairs, report, sets, similarity
from nearfar._utils.checks import DegenerateBatchWarning
from nearfar._utils.renamed import no_such_name
from nearfar.batches import Proximal
from nearfar.distributed import CrossBatchMemory, Distributed, cached_step
from nearfar.evaluation import compare, evaluate
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import RobustLoss
from nearfar.relations.relation import Relation

__version__ = "0.1.0"
__all__ = [
    "CrossBatchMemory",
    "DegenerateBatchWarning",
    "Distributed",
    "Explanation",
    "Proximal",
    "Relation",
    "RobustLoss",
    "batches",
    "cached_step",
    "compare",
    "data",
    "evaluate",
    "geometry",
    "groups",
    "links",
    "losses",
    "miners",
    "pairs",
    "report",
    "sets",
    "similarity",
]


def __getattr__(name: str) -> Any:
    """Parts that need accelerate or scikit-learn, or that few need, are imported when they are first asked for."""
    if name in ("doctor", "linear", "models", "pml", "studies", "train"):
        return import_module(f"nearfar.{name}")
    if name == "diagnose":
        return import_module("nearfar.doctor").diagnose
    if name == "suggest_step":
        return import_module("nearfar.linear.suggest").suggest_step
    raise no_such_name("nearfar", name)

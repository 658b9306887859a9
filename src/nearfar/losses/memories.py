"""The memories of `nf.sets.Remembered` inside a loss."""

from dataclasses import replace
from typing import Any

import torch

from nearfar.groups._groupings import Product
from nearfar.losses.factors import CachedProduct
from nearfar.relations.relation import Relation
from nearfar.sets.remembered import DualMemory

__all__ = ["bind", "hold"]

SCOPES = {"batch": 1, "anchor": 1, "sign": 2, "anchor_sign": 2}
"""Groupings whose sets may be remembered, and how many sets they have."""
NAMES = {"memory_positive": "over_positive", "memory_negative": "over_negative"}


def hold(loss: Any, found: CachedProduct) -> CachedProduct:
    """Register a memory for each remembered set of the product, which is returned; one of the same size is kept."""
    product, groups = found.product, found.product.groups
    for name, place in list(NAMES.items())[: SCOPES.get(groups.scope or "", 2)]:
        over, old = getattr(product, place), loss._modules.pop(name, None)
        if not over.remembers:
            continue
        if groups.scope not in SCOPES or product.wants_columns:
            raise ValueError(
                f"{loss.owner}: Remembered serves groups of {', '.join(SCOPES)}, without a link that reads columns; "
                "use one of these, or the set itself."
            )
        new = over.memory(loss.owner, groups.per_anchor)
        same = isinstance(old, DualMemory) and old.numbers.shape == new.numbers.shape
        loss._modules[name] = old if same else new
    return found


def bind(loss: Any, product: Product, relation: Relation, call: Any, stores: bool) -> Product:
    """The product of one call: remembered sets with their memories and the samples of their groups."""
    memories = {place: loss._modules[name] for name, place in NAMES.items() if name in loss._modules}
    ids = relation._given.ids if call.ids is None else call.ids
    found = {}
    for place, memory in memories.items():
        at = torch.zeros(1, dtype=torch.int64, device=memory.seen.device)
        if product.groups.per_anchor:
            at = memory.check(loss.owner, ids, relation.shape[0])
        found[place] = getattr(product, place).bind(memory, at, stores)
    return replace(product, **found)

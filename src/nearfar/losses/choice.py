"""Which engine serves a call of a loss where the dense one was not asked for, and the call of it.

`RobustLoss` imports this module, so that a loss and its `Call` are of no type here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import capturing
from nearfar._utils.process_group import ALONE
from nearfar._utils.tensors import readable
from nearfar.engines import (
    Tiling,
    distance_rows,
    fused_value,
    fused_way,
    fused_with_again,
    has_triton,
    lift,
    listed_value,
    plain_parts,
    takes_lists,
    tiled_value,
    untiled,
    widen,
    worth_fusing,
    worth_tiling,
)
from nearfar.groups.groupings import Product
from nearfar.relations.relation import Relation

__all__ = ["by_list", "by_other_engine"]

Rows = tuple[Tensor, Tensor]
"""Prepared queries and references."""
Raw = tuple[Tensor, Tensor | None]
"""The same before; None where the queries are their own references."""
SMALL = 2**12
"""Pairs below which no other engine is faster than dense."""
Found = tuple[Tensor, Tensor, Tensor]
"""The loss, and which rows [n] had a positive and a negative pair."""


def by_list(loss: Any, call: Any, relation: Relation, product: Product, raw: Raw) -> Tensor | None:
    """The loss of an index tuple that is evaluated as a list, from raw rows; None where it is not."""
    if call.indices is None or call.ranks is not None:
        return None
    if not takes_lists(product, call.indices, relation, asked=loss.engine == "tiled"):
        return None
    apart, wide = loss.owner if loss.listed_apart else None, widen(product.similarity, *raw)
    value = listed_value(product, *wide, relation, call.indices, once=loss.listed_once, apart=apart)
    return value.to(raw[0].dtype)


def by_other_engine(loss: Any, call: Any, relation: Relation, product: Product, raw: Raw, rows: Rows) -> Found | None:
    """The loss by the fused or the tiled engine, float64 if near rows need it; None where the dense one is to serve."""
    compiling = torch.compiler.is_compiling()
    small = loss.engine == "auto" and len(rows[0]) * len(rows[1]) < SMALL  # dense serves anyway
    lifted = None if compiling or small or call.indices is not None else lift(product)
    similarity = product.similarity
    product = product if lifted is None else lifted.product

    def wide(*, look: bool, ranks: Any = None) -> Rows:
        found = distance_rows(similarity, relation, raw, rows, look=look, ranks=ranks)
        return found if lifted is None else lifted.rows(*found)

    found = _by_other_engine(loss, call, relation, product, wide, readable(raw[0]))
    return found if found is None or lifted is None else (lifted.value(found[0]), *found[1:])


def _by_other_engine(
    loss: Any, call: Any, relation: Relation, product: Product, wide: Callable[..., Rows], look: bool
) -> Found | None:
    found, alone = None, call.indices is None and call.ranks is None
    if alone and loss.engine == "fused":
        plain = loss._plain() if torch.compiler.is_compiling() else plain_parts(product)
        found = fused_value(loss.owner, product, relation, *wide(look=look), _low_type(call), plain=plain)
    elif alone and fuses(loss, call, relation, product):
        found = fused_with_again(_tiling(loss, call, relation, product), *wide(look=look), _low_type(call))
    if found is not None:
        return found
    if capturing() or not _tiles(loss, call, relation, product):
        return None
    return tiled_value(_tiling(loss, call, relation, product), *wide(look=True, ranks=call.ranks))


def fuses(loss: Any, call: Any, relation: Relation, product: Product) -> bool:
    """Whether the kernels of the fused engine serve a call: they can, and are asked for or measured to be the best."""
    if torch.compiler.is_compiling() or _low_type(call) == torch.float64:
        return False
    if loss.engine == "fused":
        return has_triton(relation.device) and fused_way(product, relation)
    return loss.engine == "auto" and worth_fusing(product, relation)


def _tiling(loss: Any, call: Any, relation: Relation, product: Product) -> Tiling:
    twice = loss.engine == "auto" and call.ranks is None
    return Tiling(loss.owner, product, relation, loss.tile, twice, call.ranks or ALONE)


def _low_type(call: Any) -> torch.dtype:
    """The type in which kernels take products: half precision if rows and references came in it."""
    if call.low is not None:
        found: torch.dtype = call.low
        return found
    return torch.promote_types(call.embeddings.dtype, call.reference.dtype)


def _tiles(loss: Any, call: Any, relation: Relation, product: Product) -> bool:
    """Whether this call goes to the tiled engine."""
    if call.indices is not None:
        return False
    if loss.engine == "tiled":
        return _dealt(call, product)
    if torch.compiler.is_compiling():
        return False
    worth = loss.engine == "fused" or worth_tiling(product, relation, call.ranks or ALONE)
    return worth and _dealt(call, product) and untiled(product) is None


def _dealt(call: Any, product: Product) -> bool:
    """Whether strips can be dealt out: each rank gets some, and no draw depends on who sweeps which."""
    return call.ranks is None or (not product.draws and len(call.embeddings) >= call.ranks.world)

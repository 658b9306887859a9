"""The fused engine as `auto` takes it: from the measured number of pairs on, and with second derivatives by dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfar.engines import thresholds
from nearfar.engines.fused import fused_way, has_triton
from nearfar.engines.fused_finish import Found, fold_and_finish
from nearfar.engines.launch import LOW
from nearfar.engines.tiled import Tiling, again
from nearfar.groups.groupings import Product
from nearfar.relations.relation import Relation

__all__ = ["fused_with_again", "worth_fusing"]


def worth_fusing(product: Product, relation: Relation) -> bool:
    """Whether the fused engine is the fastest, by the measured thresholds, and can serve; without kernels it is not."""
    pairs = relation.shape[0] * relation.shape[1]
    known = thresholds.TABLE.get(relation.device.type)
    if known is None or pairs < known.least["fused"]:
        return False
    enough = pairs >= known.pairs(thresholds.scope_of(product), "fused")
    return enough and has_triton(relation.device) and fused_way(product, relation)


class _Value(torch.autograd.Function):
    """A value whose gradient is known already; under create_graph=True it is computed again by the dense engine."""

    @staticmethod
    def forward(ctx: Any, tiling: Tiling, value: Tensor, slopes: tuple[Tensor | None, ...], *inputs: Tensor) -> Tensor:
        ctx.tiling, ctx.slopes = tiling, slopes
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, None, None, *again(ctx.tiling, ctx.saved_tensors, grad_output[0])
        return None, None, None, *(None if slope is None else slope * grad_output[0] for slope in ctx.slopes)


def fused_with_again(tiling: Tiling, rows: Tensor, cols: Tensor, low: torch.dtype) -> Found | None:
    """The loss by the fused kernels, its gradient made at once; None where another engine must serve."""
    product, relation = tiling.product, tiling.relation
    if low not in LOW:
        return None
    params = tiling.params()
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (rows, cols, *params)):
        return fold_and_finish(product, relation, rows.detach(), cols.detach(), low)
    with torch.enable_grad():
        x = rows.detach().requires_grad_()
        y = x if relation.square else cols.detach().requires_grad_()
        found = fold_and_finish(product, relation, x, y, low)
        if found is None:
            return None
        leaves = (x, *params) if relation.square else (x, y, *params)
        first, *more = torch.autograd.grad(found[0], leaves, allow_unused=True, materialize_grads=True)
    slopes = (first, None, *more) if relation.square else (first, *more)
    value: Tensor = _Value.apply(tiling, found[0].detach(), slopes, rows, cols, *params)  # type: ignore[no-untyped-call]
    return value, found[1], found[2]

"""The tiled engine: the loss in strips of rows, with O(m · tile) memory instead of n x m matrices.

The gradient is computed in the forward pass, strip by strip, and scaled in `backward`; unreduced values are swept again
there. Values are read from the device: on a CPU where this saves work (see the sets' streams), on a GPU after each
sweep of the chi-square and KL-ball sets and for the width of triplets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.shortcuts import learned_tensors, nested, swift, touched
from nearfar.engines import thresholds
from nearfar.engines.columns import by_columns
from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.halves import by_halves, halves
from nearfar.engines.lean import by_runs, leans
from nearfar.engines.lean_angular import by_angles, leans_on_angles
from nearfar.engines.lean_drawn import by_draws, leans_on_draws
from nearfar.engines.lean_lifted import by_ends, leans_on_ends
from nearfar.engines.lean_ranked import by_ranks, leans_on_ranks
from nearfar.engines.lean_triplets import by_triplets, leans_on_triplets
from nearfar.engines.strips import ENTRIES, LEAN, Slopes, Strips
from nearfar.engines.sweeps import Ask, Made, by_rows, by_streams
from nearfar.groups.groupings import Product
from nearfar.relations.layout import Layout
from nearfar.relations.relation import Relation

__all__ = [
    "Tiling",
    "Way",
    "again",
    "bounded",
    "check_tiled",
    "lean_way",
    "tiled_value",
    "too_large",
    "untiled",
    "worth_tiling",
]

Way = Callable[[Strips, Ask], Made | None]
LEAN_WAYS: tuple[tuple[Callable[[Product, Layout], bool], Way], ...] = (
    (leans, by_runs),
    (halves, by_halves),
    (leans_on_triplets, by_triplets),
    (leans_on_ranks, by_ranks),
    (leans_on_angles, by_angles),
    (leans_on_ends, by_ends),
    (leans_on_draws, by_draws),
)
"""Fast paths, each with the function that checks whether it supports a loss; at most one supports any loss."""


@dataclass(frozen=True, eq=False)
class Tiling:
    """Arguments of one call of the tiled engine.

    Args:
        owner: name of the loss in error messages.
        product: the factors of the loss.
        relation: which pairs are positive and which are negative.
        tile: rows per strip, or None to choose by cache size.
        twice: compute second derivatives by the dense engine instead of raising an error.
        ranks: the processes that share the strips.
    """

    owner: str
    product: Product
    relation: Relation
    tile: int | None = None
    twice: bool = False
    ranks: ProcessGroup = ALONE

    def params(self) -> tuple[Tensor, ...]:
        """What the parts of the loss learn."""
        return learned_tensors(self.product.parts)

    def made(
        self, rows: Tensor, cols: Tensor, wants: tuple[bool, ...], grad_output: Tensor | None
    ) -> tuple[Made, Strips]:
        """Value and gradient of the loss over all processes, and the strips that were swept.

        Args:
            rows: [n, d] prepared queries.
            cols: [m, d] prepared references.
            wants: which gradients are needed: of the rows, of the columns, and of each parameter.
            grad_output: [n] gradient of unreduced values; None in the forward pass.
        """
        (value, slopes), strips = self._swept(rows, cols, wants, grad_output)
        if self.ranks.world > 1:
            strips.had_positive, strips.had_negative = self.ranks.any(
                torch.stack([strips.had_positive, strips.had_negative])
            )
            if self.relation.square and slopes[0] is not None and slopes[1] is not None:
                slopes = [slopes[0] + slopes[1], None, *slopes[2:]]  # rows and columns are one tensor: communicate once
            slopes = [None if slope is None else self.ranks.sum(slope) for slope in slopes]
        return (value, slopes), strips

    def _swept(
        self, rows: Tensor, cols: Tensor, wants: tuple[bool, ...], grad_output: Tensor | None
    ) -> tuple[Made, Strips]:
        """Like `made`, with the gradient of this process's strips only (the value is that of all)."""
        found = lean_way(self.product, self.relation)
        made = None if found is None or not bounded(rows, cols) else self._lean(*found, rows, cols, wants)
        if made is not None:
            return made
        strips, params = Strips(self.product, rows, cols, self.relation, self.tile, ENTRIES, self.ranks), self.params()

        def new_slopes() -> Slopes:
            return Slopes(strips, params, wants)

        if not self.product.groups.per_anchor:
            return by_streams(strips, new_slopes), strips
        if self.product.groups.scope == "anchor_sign" and self.product.wants_columns:
            return by_columns(strips, new_slopes, grad_output), strips
        return by_rows(strips, new_slopes, grad_output), strips

    def _lean(
        self, way: Way, layout: Layout, rows: Tensor, cols: Tensor, wants: tuple[bool, ...]
    ) -> tuple[Made, Strips] | None:
        """Like `_swept`, by a fast path, on the rows and columns that form pairs; None if it gives up."""
        params, n, m = self.params(), len(rows), len(cols)
        left, right = layout.taken(rows, 0), layout.taken(cols, 1)
        strips = Strips(self.product, left, right, self.relation, self.tile, LEAN, self.ranks, layout)
        made = way(strips, lambda: Slopes(strips, params, wants))
        if made is None:
            return None
        value, (by_row, by_col, *rest) = made
        strips.had_positive, strips.had_negative = (
            layout.back(had, 0, n) for had in (strips.had_positive, strips.had_negative)
        )
        by_row = None if by_row is None else layout.back(by_row, 0, n)
        by_col = None if by_col is None else layout.back(by_col, 1, m)
        return (value, [by_row, by_col, *rest]), strips


class _Value(torch.autograd.Function):
    """Autograd function of the tiled engine: the gradient is computed in `forward` and scaled in `backward`."""

    @staticmethod
    def forward(ctx: Any, tiling: Tiling, found: list[Tensor], rows: Tensor, cols: Tensor, *params: Tensor) -> Tensor:
        wants = ctx.needs_input_grad[2:]
        (value, slopes), strips = tiling.made(rows, cols, wants, None)
        found += [strips.had_positive, strips.had_negative]
        ctx.tiling, ctx.slopes = tiling, slopes
        ctx.save_for_backward(rows, cols, *params)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        tiling: Tiling = ctx.tiling
        rows, cols, *params = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *again(tiling, (rows, cols, *params), grad_output[0])
        if grad_output[0].ndim == 0:
            return None, None, *(None if slope is None else slope * grad_output[0] for slope in ctx.slopes)
        with torch.autocast(device_type=rows.device.type, enabled=False):
            made, _ = tiling.made(rows, cols, ctx.needs_input_grad[2:], grad_output[0])
        return None, None, *made[1]


def again(tiling: Tiling, inputs: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient by the dense engine, with an autograd graph, for second derivatives."""
    if not tiling.twice:
        raise RuntimeError(
            f'{tiling.owner}: engine="tiled" has no second derivative, which create_graph=True asks for; '
            'use engine="dense".'
        )
    # views: rows and columns may be the same tensor, but need separate gradients
    inputs = tuple(x.view_as(x) for x in inputs[:2]) + inputs[2:]
    rows, cols = inputs[:2]
    value = dense_value(tiling.product, dense_pairs(tiling.product, rows, cols, tiling.relation, None))
    leaves = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(value, leaves, grad_output, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def tiled_value(tiling: Tiling, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of prepared rows [n, d] and cols [m, d], and which rows [n] have a positive and a negative pair."""
    check_tiled(tiling.owner, tiling.product)
    found: list[Tensor] = []
    params = tiling.params()
    if not torch.is_grad_enabled():  # no gradients are needed, not of the parameters either
        rows, cols, params = rows.detach(), cols.detach(), tuple(p.detach() for p in params)
    value: Tensor = _Value.apply(tiling, found, rows, cols, *params)  # type: ignore[no-untyped-call]
    return value, found[0], found[1]


def check_tiled(owner: str, product: Product) -> None:
    """Raise ValueError if a loss cannot be evaluated in strips."""
    why = untiled(product)
    if why is not None:
        raise ValueError(f'{owner}: engine="tiled" cannot serve this loss, because {why}; use engine="dense".')


def untiled(product: Product) -> str | None:
    """The reason why a loss cannot be evaluated in strips, or None if it can."""
    done = touched(product.parts)
    if done is not None:
        return done
    for part in (*nested(product.groups), product.link):
        if part is not None and not getattr(part, "strips", part.swift):
            return f"{type(part).__name__} does not say (strips = True) that it may be met strip by strip"
    columns = product.wants_columns and product.groups.scope == "anchor_sign"
    if product.wants_columns and not columns and not product.groups.swift:
        return f"{type(product.groups).__name__} has no columns to give to {type(product.link).__name__}"
    if product.groups.per_anchor and not columns:
        return None
    like = torch.zeros(1)
    for over in (product.over_positive, product.over_negative):
        if learned_tensors((over,)):
            return f"{type(over).__name__} has a number that is learned, and groups that reach over the batch"
        if over.stream(1, like) is None:
            return f"{type(over).__name__} has no stream for groups that reach over the batch"
    return None


SHARED = 2**18
"""Number of pairs from which several processes share the strips, rather than compute the dense matrix each."""


def lean_way(product: Product, relation: Relation) -> tuple[Way, Layout] | None:
    """The fast path for a loss and the layout it needs, or None if there is none or a factor does not allow one."""
    layout = relation.layout() if swift(product.parts) else None
    if layout is None or layout.empty:
        return None
    return next(((way, layout) for can, way in LEAN_WAYS if can(product, layout)), None)


def bounded(rows: Tensor, cols: Tensor) -> bool:
    """Whether no score of prepared rows and columns, nor a power of one, can overflow or be NaN; synchronizes.

    Fast paths assume finite numbers; the general path runs the code of the dense engine, which propagates NaN and inf.
    """
    both = (rows,) if cols is rows else (rows, cols)
    reach = torch.stack([torch.linalg.vector_norm(x, dim=1).amax() for x in both]).amax()
    return bool(4 * reach * reach < torch.finfo(rows.dtype).max ** 0.25)


BYTES = 64
"""Memory that the dense engine needs for a pair, on a GPU (measured: 29 to 49)."""
MOST = 2**28
"""Number of triplets from which the dense engine is not taken: it holds about four tensors of that size."""


def too_large(product: Product, relation: Relation) -> bool:
    """Whether the dense engine would hold more than `MOST` triplets, n x P x m, or half of a GPU's memory."""
    depth = getattr(product.groups, "depth", None)
    n, m = relation.shape
    if relation.device.type == "cuda" and n * m * BYTES > memory_of(relation.device) // 2:
        return True
    return depth is not None and n * m * m >= MOST and n * m * depth(relation) >= MOST


def memory_of(device: torch.device) -> int:
    """The bytes of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def worth_tiling(product: Product, relation: Relation, ranks: ProcessGroup = ALONE) -> bool:
    """Whether the tiled engine is faster than the dense one, by the number of pairs and the measured thresholds.

    So do calls for which the dense engine might run out of memory, measured or not (see `too_large`).
    Several processes share the strips, while each would compute the whole dense matrix. Devices that are not in the
    table were not measured: the answer is False, and `engine="tiled"` must be set explicitly.
    """
    pairs = relation.shape[0] * relation.shape[1]
    if ranks.world > 1:
        return pairs >= SHARED
    known = thresholds.TABLE.get(relation.device.type)
    if known is not None and pairs >= known.least["tiled"]:
        scope = thresholds.GENERAL if lean_way(product, relation) is None else thresholds.scope_of(product)
        if pairs >= known.pairs(scope, "tiled"):
            return True
    return too_large(product, relation)  # last: it may count the positives of every row

"""Choose the engine of a call, and run it.

    lists       an index tuple of a miner, pair by pair
    operators   tiles of a matrix product, reduced as they are computed: in Triton on a GPU, in PyTorch elsewhere
    generic     strips of rows, by the plain definitions
    dense       the whole score matrix and autograd

Losses and their `Call` have no types here, because the modules of losses import this one.
"""

import importlib.util
import os
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfar._utils.checks import RECENT, capturing
from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.shortcuts import learned_tensors, touched
from nearfar._utils.tensors import readable
from nearfar.engines import generic
from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.distances import distance_rows, widen_near
from nearfar.engines.finish import finish
from nearfar.engines.learned import lift
from nearfar.engines.lists import listed_value, takes_lists
from nearfar.engines.plan import Plan, make_plan
from nearfar.engines.rows import Found
from nearfar.engines.spec import LOW
from nearfar.groups._groupings import Product
from nearfar.relations.layout import Layout
from nearfar.relations.relation import Relation

__all__ = ["LEAST", "Least", "by_list", "by_other_engine", "check_strips", "fuses", "has_triton"]

Raw = tuple[Tensor, Tensor | None]
"""Queries and references before preparation; None if the queries are their own references."""


class Least(NamedTuple):
    """Numbers of pairs from which the operators, and the generic strips, are faster than the dense engine."""

    operators: int
    generic: int


LEAST = {"cpu": Least(2**18, 2**24), "cuda": Least(2**24, 2**32)}
"""Measured on two cores and on an H200; on a device without an entry, "auto" is dense while that fits in memory."""
DEAR = {"triplets": 64, "positive": 64}
"""The cost of a pair relative to other losses, in the dense engine on a GPU, which holds it once per positive."""
SHARED = 2**18  # number of pairs from which processes split the rows, instead of each computing the dense matrix
BYTES = 64  # memory per pair of the dense engine on a GPU, in bytes (measured: 29 to 49)
MOST = 2**28  # number of triplets above which the dense engine is not used: it holds about four tensors of that size

INSTALLED = RECENT and importlib.util.find_spec("triton") is not None
"""Whether kernels are available: they need Triton, and a recent PyTorch."""


def has_triton(device: torch.device) -> bool:
    """Whether kernels can run on a device: CUDA with Triton, or a CPU under Triton's interpreter."""
    if not INSTALLED:
        return False
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def by_list(loss: Any, call: Any, relation: Relation, product: Product, raw: Raw) -> Tensor | None:
    """The loss of an index tuple evaluated as lists, from raw rows; None if another engine must evaluate it."""
    if call.indices is None or call.ranks is not None:
        return None
    if not takes_lists(product, call.indices, relation, asked=loss.engine == "tiled"):
        return None
    apart, wide = loss.owner if loss.listed_apart else None, widen_near(product.similarity, *raw)
    value = listed_value(product, *wide, relation, call.indices, once=loss.listed_once, apart=apart)
    return value.to(raw[0].dtype)


@dataclass(frozen=True, eq=False)
class Way:
    """How a call is computed."""

    owner: str  # name of the loss in error messages
    product: Product  # the factors of the loss; without learned parameters on the wide side, if they can be lifted out
    relation: Relation  # which pairs are positive and which are negative
    layout: Layout | None  # the relation for the operators; None for generic strips
    low: torch.dtype | None  # dtype of the kernels' matrix products; None for PyTorch
    tile: int | None  # rows per strip, or None
    ranks: ProcessGroup  # the processes that share the rows
    twice: bool  # compute second derivatives by the dense engine; otherwise they raise an error

    def found(self, rows: Tensor, cols: Tensor) -> Found | None:
        """The loss by the operators, in the autograd graph of rows and columns; None if they refuse this batch."""
        if self.layout is None or (self.low is None and not _bounded(rows, cols)):
            return None
        return finish(self.product, self.layout, rows, cols, low=self.low, tile=self.tile, ranks=self.ranks)

    def made(
        self, rows: Tensor, cols: Tensor, wants: tuple[bool, ...], grad_output: Tensor | None
    ) -> generic.Made | None:
        """Value and gradients for detached rows and columns; of unreduced values only with `grad_output`."""
        params, single = learned_tensors(self.product.parts), self.product.reduction == "none"
        learns = any(wants) and (not single or grad_output is not None)
        square = self.relation.square
        with torch.set_grad_enabled(learns):
            x = rows.detach().requires_grad_(learns and (wants[0] or (square and wants[1])))
            y = x if square else cols.detach().requires_grad_(learns and wants[1])
            found = self.found(x, y)
            if found is None:
                return self._strips(rows, cols, wants, grad_output)
            leaves = [z for z in (x, *(() if square else (y,)), *params) if z.requires_grad]
            slopes: list[Tensor | None] = [None] * (2 + len(params))
            if learns and found[0].requires_grad:
                by = iter(torch.autograd.grad(found[0], leaves, grad_output, allow_unused=True, materialize_grads=True))
                order = [x, None if square else y, *params]
                slopes = [next(by) if z is not None and z.requires_grad else None for z in order]
                slopes = [None if z is None else self.ranks.sum(z) for z in slopes]
        return found[0].detach(), slopes, *found[1:]

    def _strips(
        self, rows: Tensor, cols: Tensor, wants: tuple[bool, ...], grad_output: Tensor | None
    ) -> generic.Made | None:
        if self.low is not None:
            return None
        strips = generic.PlainStrips(
            self.product, self.relation, rows.detach(), cols.detach(), wants, self.tile, self.ranks
        )
        return generic.evaluate(strips, grad_output)


class _Value(torch.autograd.Function):
    """Compute the gradient in `forward` and scale it in `backward`; for unreduced values, compute it in `backward`."""

    @staticmethod
    def forward(ctx: Any, way: Way, had: list[Tensor], rows: Tensor, cols: Tensor, *params: Tensor) -> Tensor:
        made = way.made(rows, cols, ctx.needs_input_grad[2:], None)
        if made is None:
            raise UnservedError
        value, ctx.slopes, *found = made
        had += found
        ctx.way = way
        ctx.save_for_backward(rows, cols, *params)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        rows, cols, *params = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *_again(ctx.way, (rows, cols, *params), grad_output[0])
        if grad_output[0].ndim == 0:
            return None, None, *(None if slope is None else slope * grad_output[0] for slope in ctx.slopes)
        with torch.autocast(device_type=rows.device.type, enabled=False):
            made = ctx.way.made(rows, cols, ctx.needs_input_grad[2:], grad_output[0])
        return None, None, *made[1]


class UnservedError(Exception):
    """The kernels refuse this batch."""


def _again(way: Way, inputs: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient by the dense engine, with an autograd graph, for second derivatives."""
    if not way.twice:
        raise RuntimeError(
            f'{way.owner}: engine="tiled" has no second derivative, which create_graph=True asks for; '
            'use engine="dense".'
        )
    # views: rows and columns may be the same tensor, but need separate gradients
    inputs = tuple(x.view_as(x) for x in inputs[:2]) + inputs[2:]
    rows, cols = inputs[:2]
    value = dense_value(way.product, dense_pairs(way.product, rows, cols, way.relation, None))
    leaves = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(value, leaves, grad_output, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def by_other_engine(
    loss: Any, call: Any, relation: Relation, product: Product, plan: Plan, raw: Raw, rows: tuple[Tensor, Tensor]
) -> Found | None:
    """The loss by operators or strips, from raw and prepared rows; None if the dense engine must compute it."""
    if call.indices is not None or not _worth(loss.engine, call, relation, product):
        return None
    lifted = None if torch.compiler.is_compiling() or plan.refused is None else lift(product)
    if lifted is not None:
        product, plan = lifted.product, make_plan(lifted.product)
    way = _choose(loss, call, relation, product, plan)
    if way is None:
        return None
    look = readable(raw[0]) or way.low is None
    x, y = distance_rows(
        (product if lifted is None else loss.product).similarity, relation, raw, rows, look=look, ranks=call.ranks
    )
    x, y = (x, y) if lifted is None else lifted.rows(x, y)
    if torch.compiler.is_compiling() or (way.low is not None and not way.twice):
        found = way.found(x, y)
        if found is None and not torch.compiler.is_compiling() and not capturing():
            found = _apply(_choose(loss, call, relation, product, plan, kernels=False), x, y)
    else:
        found = _apply(way, x, y)
    return found if found is None or lifted is None else (lifted.value(found[0]), *found[1:])


def _apply(way: Way | None, rows: Tensor, cols: Tensor) -> Found | None:
    if way is None:
        return None
    params, had = learned_tensors(way.product.parts), list[Tensor]()
    if not torch.is_grad_enabled():  # no gradients are needed, not even of parameters
        rows, cols, params = rows.detach(), cols.detach(), tuple(p.detach() for p in params)
    try:
        value: Tensor = _Value.apply(way, had, rows, cols, *params)  # type: ignore[no-untyped-call]
    except UnservedError:
        return None
    return value, had[0], had[1]


def _worth(engine: str, call: Any, relation: Relation, product: Product) -> bool:
    """Whether an engine other than dense is requested, or may be faster for this number of pairs."""
    if engine != "auto":
        return True
    if torch.compiler.is_compiling():
        return False
    n, m = relation.shape
    if call.ranks is not None and call.ranks.world > 1:
        return n * m >= SHARED
    least = LEAST.get(relation.device.type)
    return (least is not None and _pairs(relation, product) >= least.operators) or _too_large(product, relation)


def _pairs(relation: Relation, product: Product) -> int:
    """The number of pairs, scaled by what they cost the dense engine relative to the operators."""
    n, m = relation.shape
    if relation.device.type != "cuda":
        return n * m
    return n * m * DEAR.get(product.groups.scope or "", 4 if product.wants_columns else 1)


def _too_large(product: Product, relation: Relation) -> bool:
    """Whether the dense engine would hold more than `MOST` triplets (n·P·m) or fill more than half a GPU's memory."""
    depth = getattr(product.groups, "depth", None)
    n, m = relation.shape
    if relation.device.type == "cuda":
        memory = torch.cuda.get_device_properties(relation.device).total_memory
        if n * m * BYTES > memory // 2:
            return True
    return depth is not None and n * m * m >= MOST and n * m * depth(relation) >= MOST


def _choose(
    loss: Any, call: Any, relation: Relation, product: Product, plan: Plan, *, kernels: bool = True
) -> Way | None:
    """Choose the way to compute a call; None for the dense engine."""
    ranks, device, engine = call.ranks or ALONE, relation.device, loss.engine
    changed = None if torch.compiler.is_compiling() else touched(product.parts)
    low = torch.promote_types(call.embeddings.dtype, call.reference.dtype) if call.low is None else call.low
    twice = engine == "auto" and call.ranks is None

    def way(layout: Layout | None, low: torch.dtype | None) -> Way:
        return Way(loss.owner, product, relation, layout, low, loss.tile, ranks, twice)

    if kernels and changed is None and plan.refused_kernels is None and ranks.world == 1 and call.ranks is None:
        layout = _for_kernels(loss, relation, product, low)
        if layout is not None:
            return way(layout, low)
    # rows are split over ranks only if each rank gets some, and no random draw depends on the split
    few = call.ranks is not None and (product.draws or relation.shape[0] < ranks.world)
    if few or torch.compiler.is_compiling() or capturing():
        return None
    strips = changed or plan.refused_strips
    if engine == "tiled" and strips is not None and (changed or plan.refused):
        why = f'because {strips}; use engine="dense".'
        raise ValueError(f'{loss.owner}: engine="tiled" cannot serve this loss, {why}')
    layout = None if changed or plan.refused or _swaps(product, relation) else relation.sorted_layout()
    asked, least = engine != "auto" or ranks.world > 1, LEAST.get(device.type)
    if layout is not None and min(relation.shape) and (asked or _large(product, relation, least and least.operators)):
        return way(layout, None)
    if (plan.refused is None and product.draws) or strips is not None:
        return None  # strips would draw pairs other than those of the dense engine
    return way(None, None) if asked or _large(product, relation, least and least.generic) else None


def _swaps(product: Product, relation: Relation) -> bool:
    """Whether triplets need scores between rows that are not representatives: the plain definition refuses them."""
    rule = getattr(product.groups, "rule", None)
    return relation.anchors == "representatives" and getattr(rule, "wants_reference", False)


def _large(product: Product, relation: Relation, least: int | None) -> bool:
    """Whether PyTorch strips are faster than the dense engine (from `least` pairs on), or it needs too much memory."""
    # on a GPU, PyTorch strips pay off later than kernels
    pairs = _pairs(relation, product) // (4 if relation.device.type == "cuda" else 1)
    return (least is not None and pairs >= least) or _too_large(product, relation)


def _for_kernels(loss: Any, relation: Relation, product: Product, low: torch.dtype) -> Layout | None:
    """The layout of a call that kernels can serve, else None; warns if they are requested but unavailable."""
    engine, device = loss.engine, relation.device
    if engine not in ("auto", "fused") or low not in LOW:
        return None
    if _swaps(product, relation):
        return None
    if not has_triton(device):
        if engine == "fused" and not torch.compiler.is_compiling():
            _warn(loss.owner, device)
        return None
    if engine == "auto" and device.type != "cuda":
        return None
    return relation.layout()


def check_strips(owner: str, product: Product) -> None:
    """Raise ValueError if neither operators nor strips can compute a loss."""
    lifted = lift(product)
    plan = make_plan((product if lifted is None else lifted.product).at(1))
    why = touched(product.parts) or (plan.refused and plan.refused_strips)
    if why is not None:
        raise ValueError(f'{owner}: engine="tiled" cannot serve this loss, because {why}; use engine="dense".')


def fuses(loss: Any, call: Any, relation: Relation, product: Product, plan: Plan) -> bool:
    """Whether kernels serve a call: they support it, and are requested or measured to be fastest."""
    if not _worth(loss.engine, call, relation, product) or touched(product.parts) is not None:
        return False
    low = torch.promote_types(call.embeddings.dtype, call.reference.dtype) if call.low is None else call.low
    return plan.refused_kernels is None and _for_kernels(loss, relation, product, low) is not None


def _bounded(rows: Tensor, cols: Tensor) -> bool:
    """Whether no score of prepared rows and columns, nor its powers, can overflow or be NaN; synchronizes.

    Tiles assume finite numbers; the plain definitions propagate NaN and infinity.
    """
    both = (rows,) if cols is rows else (rows, cols)
    reach = torch.stack([torch.linalg.vector_norm(x.detach(), dim=1).amax() for x in both]).amax()
    return bool(4 * reach * reach < torch.finfo(rows.dtype).max ** 0.25)


def _warn(owner: str, device: torch.device) -> None:
    """Warn that Triton cannot be used, and why; Python shows the warning once per line of code."""
    why = "Triton is not installed" if RECENT else f"this is PyTorch {torch.__version__}"
    why = why if device.type == "cuda" else f"the embeddings are on {device.type}"
    warnings.warn(
        f'{owner}: engine="fused" needs a CUDA device, Triton and PyTorch 2.11 or newer, but {why}; '
        'engine="tiled" serves instead.',
        UserWarning,
        stacklevel=10,  # the caller of the module
    )

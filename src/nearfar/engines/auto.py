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
from nearfar.engines.distances import Raw, distance_rows, widen_near
from nearfar.engines.finish import finish
from nearfar.engines.known_gradient import KnownGradient, gradient
from nearfar.engines.learned import lift
from nearfar.engines.lists import listed_value, takes_lists
from nearfar.engines.plan import Plan, make_plan
from nearfar.engines.rows import Found
from nearfar.engines.spec import LOW
from nearfar.groups._groupings import Product
from nearfar.relations.layout import Layout
from nearfar.relations.relation import Relation

__all__ = ["LEAST", "Least", "by_list", "by_other_engine", "check_strips", "choose", "has_triton"]


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
    """How a call is computed, unless by the dense engine."""

    owner: str  # name of the loss in error messages
    product: Product  # the factors of the loss; without learned parameters on the wide side, if they can be lifted out
    relation: Relation  # which pairs are positive and which are negative
    layout: Layout | None  # the relation for the operators; None for generic strips
    low: torch.dtype | None  # dtype of the kernels' matrix products; None for PyTorch
    tile: int | None  # rows per strip, or None
    ranks: ProcessGroup  # the processes that share the rows
    twice: bool  # compute second derivatives by the dense engine; otherwise they raise an error

    def run(self, rows: Tensor, cols: Tensor) -> Found | None:
        """The loss and which rows had pairs; None if this way cannot compute this batch."""
        if torch.compiler.is_compiling() or (self.low is not None and not self.twice):
            return self.found(rows, cols)
        inputs = (rows, cols, *learned_tensors(self.product.parts))
        if not torch.is_grad_enabled():  # no gradients are needed, not even of parameters
            inputs = tuple(x.detach() for x in inputs)
        made = self.made(inputs, None)
        if made is None:
            return None
        value, gradients, *had = made
        known = value, None if self.product.reduction == "none" else gradients
        value = KnownGradient.apply(known, self.again, *inputs)  # type: ignore[no-untyped-call]
        return value, had[0], had[1]

    def found(self, rows: Tensor, cols: Tensor) -> Found | None:
        """The loss by the operators, in the autograd graph of rows and columns; None if they refuse this batch."""
        if self.layout is None or (self.low is None and not _bounded(rows, cols)):
            return None
        return finish(self.product, self.layout, rows, cols, low=self.low, tile=self.tile, ranks=self.ranks)

    def made(self, inputs: tuple[Tensor, ...], grad_output: Tensor | None) -> generic.Made | None:
        """Value and gradients for rows, columns and parameters; of unreduced values only with `grad_output`."""
        (rows, cols, *params), square = inputs, self.relation.square
        wants = tuple(x.requires_grad for x in inputs)
        learns = any(wants) and (self.product.reduction != "none" or grad_output is not None)
        with torch.set_grad_enabled(learns):
            x = rows.detach().requires_grad_(learns and wants[0])
            y = x if square else cols.detach().requires_grad_(learns and wants[1])
            found = self.found(x, y)
            if found is None:
                if self.low is not None:
                    return None
                given = self.product, self.relation, rows.detach(), cols.detach(), wants, self.tile, self.ranks
                return generic.evaluate(generic.PlainStrips(*given), grad_output)
            value, *had = found
            leaves = (x, None if square else y, *params) if learns else ()
            gradients = gradient(value, leaves, grad_output, materialize_grads=True)
            gradients = [z if z is None else self.ranks.sum(z) for z in gradients]
        return value.detach(), gradients or [None] * len(inputs), had[0], had[1]

    def again(self, inputs: tuple[Tensor, ...], grad_output: Tensor) -> list[Tensor | None]:
        """The gradients of unreduced values; for second derivatives by the dense engine, with an autograd graph."""
        if not torch.is_grad_enabled():
            made = self.made(inputs, grad_output)
            assert made is not None  # noqa: S101 - the value was computed in the same way
            return made[1]
        if not self.twice:
            raise RuntimeError(
                f'{self.owner}: engine="tiled" has no second derivative, which create_graph=True asks for; '
                'use engine="dense".'
            )
        # views: rows and columns may be the same tensor, but need separate gradients
        rows, cols = (x.view_as(x) for x in inputs[:2])
        value = dense_value(self.product, dense_pairs(self.product, rows, cols, self.relation, None))
        return gradient(value, (rows, cols, *inputs[2:]), grad_output, create_graph=True)


def by_other_engine(
    loss: Any, call: Any, relation: Relation, product: Product, plan: Plan, raw: Raw, rows: tuple[Tensor, Tensor]
) -> Found | None:
    """The loss by operators or strips, from raw and prepared rows; None if the dense engine must compute it."""
    similarity = product.similarity
    if call.indices is not None or not _worth(loss.engine, call, relation, product):
        return None
    lifted = None if torch.compiler.is_compiling() or plan.refused is None else lift(product)
    if lifted is not None:
        product, plan = lifted.product, make_plan(lifted.product)
    way = choose(loss, call, relation, product, plan)
    if way is None:
        return None
    look = readable(raw[0]) or way.low is None
    x, y = distance_rows(similarity, relation, raw, rows, look=look, ranks=call.ranks)
    x, y = (x, y) if lifted is None else lifted.rows(x, y)
    found = way.run(x, y)
    if found is None and way.low is not None:
        way = choose(loss, call, relation, product, plan, kernels=False)
        found = None if way is None else way.run(x, y)
    return found if found is None or lifted is None else (lifted.value(found[0]), *found[1:])


def choose(
    loss: Any, call: Any, relation: Relation, product: Product, plan: Plan, *, kernels: bool = True
) -> Way | None:
    """Choose the way to compute a call; None for the dense engine."""
    engine, compiling, ranks = loss.engine, torch.compiler.is_compiling(), call.ranks or ALONE
    changed = None if compiling else touched(product.parts)
    low = torch.promote_types(call.embeddings.dtype, call.reference.dtype) if call.low is None else call.low
    rule = getattr(product.groups, "rule", None)
    # with representatives, triplets that compare a positive with a negative are refused by their plain definition
    swaps = relation.anchors == "representatives" and getattr(rule, "wants_reference", False)
    folds = changed is None and plan.refused is None and not swaps

    def way(layout: Layout | None, low: torch.dtype | None) -> Way:
        twice = engine == "auto" and call.ranks is None
        return Way(loss.owner, product, relation, layout, low, loss.tile, ranks, twice)

    if kernels and folds and plan.refused_kernels is None and call.ranks is None:
        layout = _for_kernels(loss, relation, low) if _worth(engine, call, relation, product) else None
        if layout is not None:
            return way(layout, low)
    # rows are split over ranks only if each rank gets some, and no random draw depends on the split
    few = call.ranks is not None and (product.draws or relation.shape[0] < ranks.world)
    if few or compiling or capturing():
        return None
    if engine == "tiled":
        _check(loss.owner, plan, changed)
    layout = relation.sorted_layout() if folds else None
    if layout is not None and min(relation.shape) and _worth(engine, call, relation, product, kernels=False):
        return way(layout, None)
    if changed or plan.refused_strips or (plan.refused is None and product.draws):
        return None  # strips would draw pairs other than those of the dense engine
    return way(None, None) if _worth(engine, call, relation, product, kernels=False, strips=True) else None


def check_strips(owner: str, product: Product) -> None:
    """Raise ValueError if neither operators nor strips can compute a loss."""
    lifted = lift(product)
    _check(owner, make_plan((product if lifted is None else lifted.product).at(1)), touched(product.parts))


def _check(owner: str, plan: Plan, changed: str | None) -> None:
    why = changed or (plan.refused and plan.refused_strips)
    if why is not None:
        raise ValueError(f'{owner}: engine="tiled" cannot serve this loss, because {why}; use engine="dense".')


def _worth(
    engine: str, call: Any, relation: Relation, product: Product, *, kernels: bool = True, strips: bool = False
) -> bool:
    """Whether operators (or generic strips) are requested, needed for memory, or faster than the dense engine."""
    if engine != "auto":
        return True
    if torch.compiler.is_compiling():
        return False
    n, m = relation.shape
    if call.ranks is not None and call.ranks.world > 1:
        return n * m >= SHARED
    pairs, least = n * m, LEAST.get(relation.device.type)
    if relation.device.type == "cuda":  # PyTorch pays off later than kernels
        pairs *= DEAR.get(product.groups.scope or "", 4 if product.wants_columns else 1)
        pairs //= 1 if kernels else 4
    return (least is not None and pairs >= (least.generic if strips else least.operators)) or _too_large(
        product, relation
    )


def _too_large(product: Product, relation: Relation) -> bool:
    """Whether the dense engine would hold more than `MOST` triplets (n·P·m) or fill more than half a GPU's memory."""
    depth = getattr(product.groups, "depth", None)
    n, m = relation.shape
    if relation.device.type == "cuda":
        memory = torch.cuda.get_device_properties(relation.device).total_memory
        if n * m * BYTES > memory // 2:
            return True
    return depth is not None and n * m * m >= MOST and n * m * depth(relation) >= MOST


def _for_kernels(loss: Any, relation: Relation, low: torch.dtype) -> Layout | None:
    """The layout of a call that kernels can serve, else None; warns if they are requested but unavailable."""
    if loss.engine not in ("auto", "fused") or low not in LOW:
        return None
    if not has_triton(relation.device):
        if loss.engine == "fused" and not torch.compiler.is_compiling():
            _warn(loss.owner, relation.device)
        return None
    return relation.layout() if loss.engine == "fused" or relation.device.type == "cuda" else None


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

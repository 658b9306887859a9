"""Compute the loss from folded rows and gathered positive pairs, in plain autograd, the same way on every device.

There is one function per scope of groups, which takes an `OperatorCall`; for triplets see finish_triplets.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import over
from nearfar.engines.finish_triplets import (
    balanced_triplets,
    finish_angles,
    finish_drawn,
    finish_triplets,
    hardest_triplet,
)
from nearfar.engines.operator_call import OperatorCall, fold_of, group_value, kind_of
from nearfar.engines.rows import Found, RefusalError
from nearfar.engines.spec import MOMENTS
from nearfar.engines.tiles import FAR
from nearfar.groups._groupings import Problem, Product
from nearfar.links import Sides, Terms
from nearfar.miners import present
from nearfar.relations.layout import NEGATIVE, Layout
from nearfar.sets.base import Fold, UncertaintySet

__all__ = ["finish"]


def finish(
    product: Product,
    layout: Layout,
    rows: Tensor,
    cols: Tensor,
    *,
    low: torch.dtype | None = None,
    tile: int | None = None,
    ranks: ProcessGroup = ALONE,
) -> Found | None:
    """The loss by the operators; None where another engine must serve.

    Rows and columns are prepared, in float64 where distances of near rows need it; where the layout is square, the
    columns are the rows. `low` is the dtype of the kernels' matrix products, None for strips in PyTorch, of `tile` rows
    each; the processes `ranks` share the rows.
    """
    try:
        call = OperatorCall(product, layout, rows, cols, low, tile, ranks)
        value = call.restore(_finisher(product)(call)).to(rows.dtype)
    except RefusalError:
        return None
    had_negative = call.had["negative"] if "negative" in call.had else call.has_negative()
    return value, call.mark(call.had["positive"]), call.mark(had_negative)


def _finisher(product: Product) -> Callable[[OperatorCall], Tensor]:
    if product.draws:
        return finish_drawn
    rule: Any = getattr(product.groups, "rule", None)
    if product.groups.scope == "triplets" and (rule.balanced or kind_of(product.over_negative) == "max"):
        return balanced_triplets if rule.balanced else hardest_triplet
    return FINISH[product.groups.scope or ""]


# ---------------------------------------------------------------- groups of a row, or of the batch


def _joint(call: OperatorCall) -> Tensor:
    """One value of all pairs of each row, or of the batch."""
    product, of = call.product, call.product.over_positive
    fold, by_row = fold_of(of), product.groups.per_anchor
    if fold.kind == "max" and (by_row or call.floor is not None or not call.strips or call.given & 4):
        both = zip(_near(call), map(call.grouped, _hardest(call, "negative")), strict=True)
        value = of.value(*(torch.cat(pair, dim=1) for pair in both))
    elif fold.kind in ("top", "max"):
        value = _top(call, of, replace(fold, most=max(fold.most, 1.0)))
    elif fold.kind == "moments":
        value = _moments(call, of, *_near(call))
    else:
        value = _fold_both(call, of, fold, sign=+1)
    if by_row:
        return call.reduce(Terms(value, call.had["positive"] | call.had["negative"]))
    return product.groups.merge((value,), ())


def _apart(call: OperatorCall) -> Tensor:
    """Two values, of the positive and of the negative (or all) pairs of each row, or of the batch."""
    product, measure, kind = call.product, call.measure, kind_of(call.product.over_negative)
    by_row = product.groups.per_anchor
    side = "all" if by_row and product.everyone else "negative"
    if kind == "top":
        return _top_apart(call)
    if measure is None:
        positive, has_positive = _fold_side(call, "positive", product.over_positive)
        losses = positive.new_zeros(len(positive), 0)
        measure = torch.zeros_like(losses, dtype=torch.bool)
    else:
        (losses, there), has_positive = _near(call), present(measure)
        positive = product.over_positive.value(losses, there, orders=1 if by_row else call.orders)
    if kind == "max":
        score, there = _hardest(call, side)
        negative = product.over_negative.value(call.grouped(score), call.grouped(there))
        has_negative = there > 0 if side == "negative" else call.has_negative()
    elif kind == "moments":
        none = call.rows.new_zeros(1, 0)
        negative, has_negative = _moments(call, product.over_negative, none, none > 0), none
    else:
        negative, has_negative = _fold_side(call, side, product.over_negative)
    if not by_row:
        return product.groups.merge((positive, negative), ())
    columns, has_columns = _columns(call, negative, has_negative) if product.wants_columns else (None, None)
    anchors = call.had["positive"] | call.had["negative"]
    return call.reduce(
        *product.joined(
            Sides(positive, negative, has_positive, has_negative, anchors, losses, measure, columns, has_columns)
        )
    )


def _near(call: OperatorCall, sign: int = +1) -> tuple[Tensor, Tensor]:
    """Losses of one sign, and measure, of the positive pairs of each group, [g, k]."""
    assert call.measure is not None  # noqa: S101 - they are not folded
    pair = call.product.positive if sign > 0 else call.product.negative
    return call.grouped(pair(call.near, sign)), call.grouped(call.measure)


def _hardest(call: OperatorCall, side: str) -> tuple[Tensor, Tensor]:
    """Loss [n, 1] and measure [n] of each row's hardest pair of one side."""
    score, there = call.hardest(side)
    if call.weights is not None:
        rows, cols = call.weights
        there = (rows * cols[call.hardest_place] * there).to(score.dtype)
    return call.product.negative(score, -1), there


def _fold_side(call: OperatorCall, side: str, of: UncertaintySet, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Value [g] of one side of each group, and which rows have a member on it."""
    fold = fold_of(of)
    apart = call.rest or (call.strips and call.similarity and call.rows.dtype == torch.float64)
    if side == "all" and apart and not (turned or fold.held or call.product.wants_columns):
        return _fold_both(call, of, fold, sign=-1).to(call.rows.dtype), call.has_negative()
    t, size, seen, _, _, held = call.fold(side, of, fold, turned=turned)
    value = group_value(of, fold, None, None, call.grouped(t), call.grouped(size))
    if fold.held:
        value = value + (held - value).detach()
    return value.to(call.rows.dtype), seen > 0


def _fold_both(call: OperatorCall, of: UncertaintySet, fold: Fold, *, sign: int) -> Tensor:
    """Value [g] of all pairs of each group; folds negative pairs, and reads the losses of positive ones, of one sign.

    Near rows need it too: a fold of all pairs would compute the distances of positive pairs from products.
    """
    t, size = map(call.grouped, call.fold("negative", of, fold)[:2])
    if call.measure is not None:
        return group_value(of, fold, *_near(call, sign), t, size)
    more, sizes = map(call.grouped, call.fold("positive", of, fold, sign=sign)[:2])
    return group_value(of, fold, None, None, torch.cat([t, more], dim=1), torch.cat([size, sizes], dim=1))


def _columns(call: OperatorCall, negative: Tensor, has_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Negative values [n, P] of the columns of the positive pairs, and a mask of those with negatives."""
    everyone = call.product.everyone
    if not call.symmetric:
        if call.ranks.world > 1:
            raise RefusalError  # a process only has the pairs of its own rows
        side = "all" if everyone else "negative"
        negative, has_negative = _fold_side(call, side, call.product.over_negative, turned=True)
    # with all pairs, the column's group includes the positive pair itself
    return negative[call.positives.place], has_negative[call.positives.place] | everyone


# ---------------------------------------------------------------- sets that need more than sums


def _negatives(call: OperatorCall) -> Tensor:
    """The number of negative pairs of all rows."""
    if not call.strips:
        return call.layout.count(NEGATIVE).sum()
    return call.gather((call.sorted.size - (call.sorted.end - call.sorted.start)).double()).sum()


def _top(call: OperatorCall, of: UncertaintySet, fold: Fold) -> Tensor:
    """Value [1] of the K hardest pairs of the batch, positive or negative."""
    near, measure = _near(call)
    members = _negatives(call) + measure.sum()
    losses, there = call.top(fold, members)
    return _top_problem(call, of, torch.cat([near, losses], dim=1), torch.cat([measure, there], dim=1), members).value()


def _top_apart(call: OperatorCall) -> Tensor:
    """Two values: of the K hardest positive pairs and of the K hardest negative ones."""
    product, fold, number = call.product, fold_of(call.product.over_negative), _negatives(call)
    near, measure = _near(call)
    first = _top_problem(call, product.over_positive, near, measure, measure.sum())
    cap = first.taken() if product.groups.scope == "balanced" else None
    second = _top_problem(call, product.over_negative, *call.top(fold, number), number, cap)
    return product.groups.merge((first.value(), second.value()), (first, second))


def _top_problem(
    call: OperatorCall, of: UncertaintySet, losses: Tensor, there: Tensor, members: Tensor, cap: Tensor | None = None
) -> Problem:
    """The problem of a group, given its largest members [1, c] and the number of all its members."""
    if fold_of(of).fraction:  # all other members count as one, with a loss below all
        rest = (members - there.sum()).clamp_min(0.0).reshape(1, 1)
        losses = torch.cat([losses, losses.new_full((1, 1), -FAR)], dim=1)
        there = torch.cat([there.to(rest.dtype), rest], dim=1).to(losses.dtype)
    return Problem(of, losses, there, tuple(losses.shape), call.orders, cap)


def _moments(call: OperatorCall, of: UncertaintySet, losses: Tensor, measure: Tensor) -> Tensor:
    """Value [1] of a set whose weights rise linearly above a level, for folded members and single members [1, k].

    Each sweep measures the members above the level (measure, mean, energy), from which the set finds a higher level,
    until no member has a negative weight.
    """
    if torch.compiler.is_compiling():
        raise RefusalError  # reads values
    fold, every = fold_of(of), losses.detach().double()
    weight = measure.double() * ~(every <= 0) if of.zero == "drop" else measure.double()
    level, about, centered, whole = 0.0 if of.zero == "drop" else -math.inf, 0.0, False, None
    more: Any = of

    def round_to(x: float) -> float:
        """A number of the type of the losses: their distances from it are exact where they are equal."""
        return float(torch.tensor(x, dtype=call.rows.dtype, device=call.rows.device))

    with torch.no_grad():
        while True:
            found = call.fold("negative", of, fold, one_group=False, sums=MOMENTS, level=max(level, -FAR), about=about)
            total, size, second = (call.gather(found[place]).sum() for place in (4, 1, 5))
            least = call.ranks.largest(-found[3].amin()).neg()
            inside = weight * (every > level)
            gap = torch.where(inside > 0, every - about, 0.0)
            total, second = total + (inside * gap).sum(), second + (inside * gap * gap).sum()
            size = size + inside.sum()
            least = torch.minimum(least, torch.where(inside > 0, every, torch.inf).amin() if every.numel() else least)
            shift = over(total, size)
            energy = (second - total * shift).clamp_min(0.0)
            whole = size if whole is None else whole
            if not centered and float(energy) < 1e-3 * float(second):
                about, centered = round_to(about + float(shift)), True  # sums of squares would cancel
                continue
            mean = about + shift
            grain = 16 * torch.finfo(call.rows.dtype).eps * torch.maximum(mean.abs(), (mean - least).abs())
            energy = torch.where(energy <= size * grain**2, 0.0, energy)
            numbers = (size, whole, torch.zeros_like(mean), energy, least - mean)
            value, eta, slope = (x[0] for x in more.solve_moments(*(x[None] for x in numbers)))
            if not float(eta) > float(least - mean):
                break
            level, about, centered = float(mean + eta), round_to(float(mean)), False
    if not float(size):  # no member has a loss
        return torch.zeros_like(value)[None]
    value, tilt = mean + value, float(slope)
    first = float(over(torch.ones_like(size), size) + slope * (about - mean))
    weights: dict[str, Any] = {"level": max(level, -FAR), "about": about, "first": first, "second": tilt}
    t = call.gather(call.fold("negative", of, fold, sums=MOMENTS, **weights)[0])
    p = (inside * (first + tilt * gap)).to(losses.dtype)
    through = t.sum() + (p * torch.where(measure > 0, losses, 0.0)).sum().to(t.dtype)
    result: Tensor = value + (through - through.detach())
    return result[None]


FINISH: dict[str, Callable[[OperatorCall], Tensor]] = {  # the function that finishes each scope
    "batch": _joint,
    "anchor": _joint,
    "sign": _apart,
    "anchor_sign": _apart,
    "balanced": _top_apart,
    "triplets": finish_triplets,
    "positive": finish_angles,
}

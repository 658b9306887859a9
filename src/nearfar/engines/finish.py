"""Compute the loss from folded rows and gathered positive pairs, in plain autograd, the same way on every device.

There is one function per scope of groups, which takes an `OperatorCall`; for triplets see finish_triplets.py.
"""

from __future__ import annotations

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
from nearfar.relations.layout import Layout
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
    dual: Callable[[Tensor], Tensor] | None = None,
) -> Found | None:
    """The loss by the operators; None where another engine must serve.

    Args:
        product: the factors of the loss.
        layout: which pairs are positive and which are negative.
        rows: [n, d] prepared queries, float64 where distances of near rows need it.
        cols: [m, d] prepared references; the rows themselves where the layout is square.
        low: dtype of the kernels' matrix products; None for strips in PyTorch.
        tile: rows per strip; None for a height that suits the device.
        ranks: the processes that share the rows.
        dual: replaces the folded number t [n] of each row, for instance by one that is kept between batches
            (`Layout.groups` names its sample); weights are then e^{(l - t)/γ} with the new t.
    """
    try:
        call = OperatorCall(product, layout, rows, cols, low, tile, ranks, dual=dual)
        value, had_positive, had_negative = _finisher(product)(call)
    except RefusalError:
        return None
    dtype = rows.dtype
    return call.restore(value).to(dtype), call.mark(had_positive), call.mark(had_negative)


def _finisher(product: Product) -> Callable[[OperatorCall], Found]:
    if product.draws:
        return finish_drawn
    rule: Any = getattr(product.groups, "rule", None)
    if product.groups.scope == "triplets" and (rule.balanced or kind_of(product.over_negative) == "max"):
        return balanced_triplets if rule.balanced else hardest_triplet
    return FINISH[product.groups.scope or ""]


# ---------------------------------------------------------------- groups of a row


def _anchor_sign(call: OperatorCall) -> Found:
    """Two values per row, of its positive and of its negative pairs, combined by the link."""
    product, measure, side = call.product, call.measure, "all" if call.product.everyone else "negative"
    if measure is None:
        positive, has_positive = _fold_side(call, "positive", product.over_positive)
        had_positive = has_positive
        losses = positive.new_zeros(len(positive), 0)
        measure = torch.zeros_like(losses, dtype=torch.bool)
    else:
        losses, had_positive, has_positive = product.positive(call.near, +1), call.had_positive, present(measure)
        positive = product.over_positive.value(losses, measure)
    if kind_of(product.over_negative) == "max":
        score, there = call.hardest(side)
        has_negative = there if side == "negative" else call.has_negative()
        there = has_negative | (had_positive & product.everyone)
        negative = product.over_negative.value(product.negative(score, -1), there[:, None])
    else:
        negative, has_negative = _fold_side(call, side, product.over_negative)
    had_negative = has_negative if call.had_negative is None else call.had_negative
    columns, has_columns = _columns(call, negative, has_negative) if product.wants_columns else (None, None)
    anchors = had_positive | had_negative
    sides = Sides(positive, negative, has_positive, has_negative, anchors, losses, measure, columns, has_columns)
    return call.reduce(*product.joined(sides)), had_positive, had_negative


def _fold_side(call: OperatorCall, side: str, of: UncertaintySet, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Value [n] of one side of each row, and which rows have a member on it."""
    fold = fold_of(of)
    apart = call.rest or (call.strips and call.similarity and call.rows.dtype == torch.float64)
    if side == "all" and apart and not (turned or fold.held or call.product.wants_columns):
        return _fold_apart(call, of, fold)
    t, size, seen, _, _, held = call.fold(side, of, fold, turned=turned)
    value = group_value(of, fold, None, None, t[:, None], size[:, None])
    if call.dual is not None and side != "positive" and fold.kind == "exp":
        kept = call.dual(value.detach())
        value = kept + fold.gamma * torch.expm1((value - kept) / fold.gamma)
    if fold.held:
        value = value + (held - value).detach()
    return value.to(call.rows.dtype), seen > 0


def _fold_apart(call: OperatorCall, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor]:
    """Like `_fold_side` for all pairs of each row if some are near: folds only the negative pairs."""
    t, size, seen, *_ = call.fold("negative", of, fold)
    t, size, losses = t[:, None], size[:, None], None
    if call.measure is None:
        more, sizes, *_ = call.fold("positive", of, fold, sign=-1)
        t, size = torch.cat([t, more[:, None]], dim=1), torch.cat([size, sizes[:, None]], dim=1)
    else:
        losses = call.product.negative(call.near, -1)
    return group_value(of, fold, losses, call.measure, t, size).to(call.rows.dtype), seen > 0


def _columns(call: OperatorCall, negative: Tensor, has_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Negative values [n, P] of the columns of the positive pairs, and a mask of those with negatives."""
    assert call.narrow is not None  # noqa: S101 - such links read pairs
    everyone = call.product.everyone
    if not call.symmetric:
        if call.ranks.world > 1:
            raise RefusalError  # a process only has the pairs of its own rows
        side = "all" if everyone else "negative"
        negative, has_negative = _fold_side(call, side, call.product.over_negative, turned=True)
    # with all pairs, the column's group includes the positive pair itself
    return negative[call.narrow.place], has_negative[call.narrow.place] | everyone


def _anchor(call: OperatorCall) -> Found:
    """One value per row, of all its pairs."""
    product, of = call.product, call.product.over_positive
    fold = fold_of(of)
    if fold.kind == "max":
        losses, measure, had_positive, had_negative = _with_hardest(call)
        values = of.value(losses, measure)
    else:
        t, size, seen, *_ = call.fold("negative", of, fold)
        had_negative = seen > 0 if call.had_negative is None else call.had_negative
        if call.measure is None:
            more, sizes, others, *_ = call.fold("positive", of, fold)
            t, size = torch.stack([t, more], dim=1), torch.stack([size, sizes], dim=1)
            values, had_positive = group_value(of, fold, None, None, t, size), others > 0
        else:
            losses, had_positive = product.positive(call.near, +1), call.had_positive
            values = group_value(of, fold, losses, call.measure, t[:, None], size[:, None])
    return call.reduce(Terms(values, had_positive | had_negative)), had_positive, had_negative


def _with_hardest(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and mask [n, P+1] of positive pairs and hardest negative of each row; rows with either of them."""
    assert call.measure is not None  # noqa: S101 - a maximum over positive pairs is not folded
    negative, measure, had_negative = _hardest(call)
    losses = torch.cat([call.product.positive(call.near, +1), negative], dim=1)
    return losses, torch.cat([call.measure, measure[:, None]], dim=1), call.had_positive, had_negative


def _hardest(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n, 1] and measure [n] of each row's hardest negative pair, and which rows had one before mining."""
    score, there = call.hardest("negative")
    had_negative, weights = there if call.had_negative is None else call.had_negative, call.weights
    if weights is None:
        return call.product.negative(score, -1), there, had_negative
    measure = (weights[0] * weights[1][call.hardest_place] * there).to(score.dtype)
    return call.product.negative(score, -1), measure, had_negative


def _gather_measure(call: OperatorCall, measure: Tensor) -> Tensor:
    """A measure of the rows of all processes, from that of this one's: a mask, or weights."""
    found = call.whole(measure.to(call.rows.dtype))
    return found > 0 if measure.dtype == torch.bool else found


# ---------------------------------------------------------------- groups of the batch


def _fold_whole(call: OperatorCall, side: str, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor, Tensor]:
    """Folded t and Σ w [1, n] of all pairs of one side, and which rows had such a pair before mining."""
    t, size, seen, *_ = call.fold(side, of, fold, whole=True)
    return call.whole(t)[None], call.whole(size)[None], seen > 0 if call.had_negative is None else call.had_negative


def _near_whole(call: OperatorCall) -> tuple[Tensor, Tensor]:
    """Losses and measure [1, n·P] of the positive pairs of all rows."""
    assert call.measure is not None  # noqa: S101 - they are not folded
    measure = call.measure if call.ranks.world == 1 else _gather_measure(call, call.measure)
    return call.whole(call.product.positive(call.near, +1)).reshape(1, -1), measure.reshape(1, -1)


def _batch(call: OperatorCall) -> Found:
    """One value of all pairs of the batch."""
    product, of = call.product, call.product.over_positive
    fold = fold_of(of)
    if fold.kind == "max" and (call.floor is not None or not call.strips or call.given & 4):
        losses, measure, had_positive, had_negative = _with_hardest(call)
        value = of.value(call.whole(losses).reshape(1, -1), _gather_measure(call, measure).reshape(1, -1))
        return product.groups.merge((value,), ()), had_positive, had_negative
    if fold.kind in ("top", "max"):
        return _top(call, of, replace(fold, most=max(fold.most, 1.0)))
    if fold.kind == "moments":
        value, had_negative = _moments(call, of, *_near_whole(call))
        return product.groups.merge((value,), ()), call.had_positive, had_negative
    t, size, had_negative = _fold_whole(call, "negative", of, fold)
    if call.measure is None:
        more, sizes, had_positive = _fold_whole(call, "positive", of, fold)
        value = group_value(of, fold, None, None, torch.cat([t, more], dim=1), torch.cat([size, sizes], dim=1))
    else:
        had_positive = call.had_positive
        value = group_value(of, fold, *_near_whole(call), t, size)
    return product.groups.merge((value,), ()), had_positive, had_negative


def _sign(call: OperatorCall) -> Found:
    """Two values: of all positive pairs and of all negative pairs of the batch."""
    product = call.product
    fold, first = product.over_negative.fold(), product.over_positive.fold()
    assert fold is not None  # noqa: S101 - see plan.py
    if fold.kind == "top":
        return _top_apart(call)
    if call.measure is not None:
        had_positive = call.had_positive
        positive = product.over_positive.value(*_near_whole(call), orders=call.orders)
    else:
        assert first is not None  # noqa: S101 - `foldable`
        t, size, had_positive = _fold_whole(call, "positive", product.over_positive, first)
        positive = group_value(product.over_positive, first, None, None, t, size)
    if fold.kind == "max":
        losses, measure, had_negative = _hardest(call)
        negative = product.over_negative.value(call.whole(losses).T, _gather_measure(call, measure)[None])
    elif fold.kind == "moments":
        none = call.rows.new_zeros(1, 0)
        negative, had_negative = _moments(call, product.over_negative, none, none > 0)
    else:
        t, size, had_negative = _fold_whole(call, "negative", product.over_negative, fold)
        negative = group_value(product.over_negative, fold, None, None, t, size)
    return product.groups.merge((positive, negative), ()), had_positive, had_negative


def _negatives(call: OperatorCall) -> tuple[Tensor, Tensor]:
    """The number of negative pairs of all rows, and which rows [n] have one."""
    if not call.strips:
        return call.layout.count(2).sum(), call.has_negative()
    number = (call.sorted.size - (call.sorted.end - call.sorted.start)).double()
    return call.whole(number).sum(), number > 0


def _top(call: OperatorCall, of: UncertaintySet, fold: Fold) -> Found:
    """One value: of the K hardest pairs of the batch, positive or negative."""
    near, measure = _near_whole(call)
    number, has_negative = _negatives(call)
    losses, there = call.top(fold, number + measure.sum())
    losses, measure = torch.cat([near, losses], dim=1), torch.cat([measure, there], dim=1)
    value = _top_problem(call, of, losses, measure, number + measure[:, : near.shape[1]].sum()).value()
    return call.product.groups.merge((value,), ()), call.had_positive, has_negative


def _top_apart(call: OperatorCall) -> Found:
    """Two values: of the K hardest positive pairs and of the K hardest negative ones."""
    product, fold = call.product, fold_of(call.product.over_negative)
    number, has_negative = _negatives(call)
    near, measure = _near_whole(call)
    first = _top_problem(call, product.over_positive, near, measure, measure.sum())
    cap = first.taken() if product.groups.scope == "balanced" else None
    second = _top_problem(call, product.over_negative, *call.top(fold, number), number, cap)
    value = product.groups.merge((first.value(), second.value()), (first, second))
    return value, call.had_positive, has_negative


def _top_problem(
    call: OperatorCall, of: UncertaintySet, losses: Tensor, there: Tensor, members: Tensor, cap: Tensor | None = None
) -> Problem:
    """The problem of a group, given its largest members [1, c] and the number of all its members."""
    if fold_of(of).fraction:  # all other members count as one, with a loss below all
        rest = (members - there.sum()).clamp_min(0.0).reshape(1, 1)
        losses = torch.cat([losses, losses.new_full((1, 1), -FAR)], dim=1)
        there = torch.cat([there.to(rest.dtype), rest], dim=1).to(losses.dtype)
    return Problem(of, losses, there, tuple(losses.shape), call.orders, cap)


def _moments(call: OperatorCall, of: UncertaintySet, losses: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
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
            found = call.fold("negative", of, fold, sums=MOMENTS, level=max(level, -FAR), about=about)
            total, size, second = (call.whole(found[place]).sum() for place in (4, 1, 5))
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
    had_negative = found[2] > 0 if call.had_negative is None else call.had_negative
    if not float(size):  # no member has a loss
        return torch.zeros_like(value)[None], had_negative
    value, tilt = mean + value, float(slope)
    first = float(over(torch.ones_like(size), size) + slope * (about - mean))
    weights: dict[str, Any] = {"level": max(level, -FAR), "about": about, "first": first, "second": tilt}
    t = call.whole(call.fold("negative", of, fold, whole=True, sums=MOMENTS, **weights)[0])
    p = (inside * (first + tilt * gap)).to(losses.dtype)
    through = t.sum() + (p * torch.where(measure > 0, losses, 0.0)).sum().to(t.dtype)
    return (value + (through - through.detach()))[None], had_negative


FINISH: dict[str, Callable[[OperatorCall], Found]] = {
    "batch": _batch,
    "sign": _sign,
    "balanced": _top_apart,
    "anchor": _anchor,
    "anchor_sign": _anchor_sign,
    "triplets": finish_triplets,
    "positive": finish_angles,
}
"""The function that finishes each scope."""

"""The fused engine's finish: from folded rows and gathered positive pairs to the loss, in plain autograd.

One function for each scope of groups. A group over the batch is finished from the numbers of all rows.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from nearfar._utils.checks import RECENT
from nearfar._utils.tensors import over
from nearfar.engines.fused import Fused, has_triton, unfused
from nearfar.engines.fused_top import top_pairs, top_problem
from nearfar.engines.launch import LOW, Spec
from nearfar.engines.pair_vectors import ID, NOWHERE
from nearfar.groups.groupings import Product, reduce
from nearfar.links import Sides, Terms
from nearfar.relations.relation import Relation
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.entropic import KL

__all__ = ["fold_and_finish", "fused_value", "group_value"]


SUMS = 2**29
"""Most numbers of the rows x_a + x_p that the angular loss makes."""
Found = tuple[Tensor, Tensor, Tensor]
"""The loss, and which rows [n] had a positive and a negative pair."""


def fused_value(
    owner: str, product: Product, relation: Relation, rows: Tensor, cols: Tensor, low: torch.dtype, *, plain: bool
) -> Found | None:
    """The loss by the fused kernels; None where another engine must serve.

    Warns where the device has no kernels; says nothing where this loss, relation or type of rows has none.

    Args:
        owner: name of the loss in the warning.
        product: the factors of the loss.
        relation: which pairs are positive and which are negative.
        rows: [n, d] prepared queries.
        cols: [m, d] prepared references.
        low: type in which products are taken.
        plain: the answer of `plain_parts`.
    """
    if not has_triton(rows.device):
        if not torch.compiler.is_compiling():
            _say(owner, rows.device)
        return None
    if low not in LOW or unfused(product, relation, plain) is not None:
        return None
    return fold_and_finish(product, relation, rows, cols, low)


def _say(owner: str, device: torch.device) -> None:
    """Name what is missing; Python shows the same warning of a line once."""
    why = "Triton is not installed" if RECENT else f"this is PyTorch {torch.__version__}"
    why = why if device.type == "cuda" else f"the embeddings are on {device.type}"
    warnings.warn(
        f'{owner}: engine="fused" needs a CUDA device, Triton and PyTorch 2.11 or newer, but {why}; '
        'engine="tiled" serves instead.',
        UserWarning,
        stacklevel=10,  # the caller of the module
    )


def fold_and_finish(
    product: Product, relation: Relation, rows: Tensor, cols: Tensor, low: torch.dtype = torch.float32
) -> Found | None:
    """The loss; None where positive pairs can be neither gathered nor folded, or the top K cannot be told apart."""
    call = Fused(product, relation, rows, cols, low)
    if call.narrow is None and not call.foldable:
        return None
    hard = product.over_negative.fold()
    if call.rest and product.everyone and (product.wants_columns or hard is None or hard.kind == "max" or hard.held):
        return None  # the near pairs of a row cannot be taken out of all of its pairs
    found = FINISH[product.groups.scope or ""](call)
    return None if found is None else (found[0].to(rows.dtype), *found[1:])


def group_value(
    of: UncertaintySet, fold: Fold, losses: Tensor | None, measure: Tensor | None, t: Tensor, size: Tensor
) -> Tensor:
    """Values [g] of groups made of single members [g, k] and of folded ones: t and Σ w [g, v]; float64.

    Folded members of an exponential fold are one member of the loss t and the weight Σ w. `KL` then gives exactly 0
    where all losses are 0, so that `reduction="nonzero"` leaves such a group out.
    """
    l, w = [over(t, size) if fold.kind == "sum" else t], [size]
    if losses is not None and measure is not None:
        weight = measure.to(t.dtype)
        weight = weight * ~(losses.detach() <= 0) if of.zero == "drop" else weight
        l, w = [*l, torch.where(weight > 0, losses.to(t.dtype), 0.0)], [*w, weight]
    if of.zero_member:
        l, w = [*l, torch.zeros_like(t[:, :1])], [*w, torch.ones_like(t[:, :1])]
    members, weights = torch.cat(l, dim=1), torch.cat(w, dim=1)
    if fold.kind == "sum":
        return over((weights * members).sum(dim=1), weights.sum(dim=1))
    return KL(fold.gamma, normalized=fold.normalized).value(members, weights)


def _folded(call: Fused, side: str, of: UncertaintySet, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Value [n] of one side of each row, and which rows have a member."""
    fold = of.fold()
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    if side == "all" and call.rest:
        return _apart(call, of, fold)
    rows = call.fold(side, of, fold, turned=turned)
    value = group_value(of, fold, None, None, rows.t[:, None], rows.size[:, None])
    if fold.held:
        value = value + (rows.held - value).detach()
    return value.to(call.rows.dtype), rows.seen > 0


def _apart(call: Fused, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor]:
    """Like `_folded` for all pairs of each row, some of them near: the kernels fold the negative pairs alone."""
    rows = call.fold("negative", of, fold)
    t, size, losses = rows.t[:, None], rows.size[:, None], None
    if call.measure is None:
        more = call.fold("positive", of, fold, sign=-1)
        t, size = torch.stack([rows.t, more.t], dim=1), torch.stack([rows.size, more.size], dim=1)
    else:
        losses = call.product.negative(call.near, -1)
    return group_value(of, fold, losses, call.measure, t, size).to(call.rows.dtype), rows.seen > 0


def _anchor_sign(call: Fused) -> Found:
    """Two values of each row, joined by the link."""
    product, measure, side = call.product, call.measure, "all" if call.product.everyone else "negative"
    if measure is None:
        positive, has_positive = _folded(call, "positive", product.over_positive)
        had_positive = has_positive
        losses = positive.new_zeros(len(positive), 0)
        measure = torch.zeros_like(losses, dtype=torch.bool)
    else:
        losses, had_positive, has_positive = product.positive(call.near, +1), call.had_positive, _any(measure)
        positive = product.over_positive.value(losses, measure)
    if _kind(product.over_negative) == "max":
        score, there = call.hardest(side)
        has_negative = there if side == "negative" else call.vectors.has_negative()
        there = has_negative | (had_positive & product.everyone)
        negative = product.over_negative.value(product.negative(score, -1), there[:, None])
    else:
        negative, has_negative = _folded(call, side, product.over_negative)
    had_negative = has_negative if call.had_negative is None else call.had_negative
    columns, has_columns = _columns(call, negative, has_negative) if product.wants_columns else (None, None)
    anchors = had_positive | had_negative
    sides = Sides(positive, negative, has_positive, has_negative, anchors, losses, measure, columns, has_columns)
    parts = [reduce(terms, product.reduction) for terms in product.joined(sides)]
    return torch.stack(parts).sum(dim=0), had_positive, had_negative


def _any(measure: Tensor) -> Tensor:
    return (measure > 0).any(dim=1)


def _columns(call: Fused, negative: Tensor, has_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Negative values [n, P] of the columns of the positive pairs, and which have any."""
    assert call.narrow is not None  # noqa: S101 - such links read pairs
    everyone = call.product.everyone
    if not call.vectors.symmetric:
        side = "all" if everyone else "negative"
        negative, has_negative = _folded(call, side, call.product.over_negative, turned=True)
    # of all pairs of a column, the positive pair itself is one
    return negative[call.narrow.place], has_negative[call.narrow.place] | everyone


def _kind(of: UncertaintySet) -> str | None:
    fold = of.fold()
    return None if fold is None else fold.kind


def _whole(call: Fused, side: str, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor, Tensor]:
    """Folded numbers t and Σ w [1, n] of all pairs of one side, and which rows had one before any mining."""
    rows = call.fold(side, of, fold)
    return rows.t[None], rows.size[None], rows.seen > 0 if call.had_negative is None else call.had_negative


def _hardest(call: Fused) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n, 1] of the hardest negative pair of each row, which rows have one, and which had one before mining."""
    score, there = call.hardest("negative")
    return call.product.negative(score, -1), there, there if call.had_negative is None else call.had_negative


def _with_hardest(call: Fused) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and mask [n, P+1] of the positive pairs and the hardest negative one of each row; rows that had either."""
    assert call.measure is not None  # noqa: S101 - a maximum is not folded for positive pairs
    negative, has_negative, had_negative = _hardest(call)
    losses = torch.cat([call.product.positive(call.near, +1), negative], dim=1)
    there = torch.cat([call.measure > 0, has_negative[:, None]], dim=1)
    return losses, there, call.had_positive, had_negative


def _batch(call: Fused) -> Found | None:
    """One value of all pairs."""
    product, of = call.product, call.product.over_positive
    fold = of.fold()
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    if fold.kind == "max":
        losses, there, had_positive, had_negative = _with_hardest(call)
        value = of.value(losses.reshape(1, -1), there.reshape(1, -1))
        return product.groups.merge((value,), ()), had_positive, had_negative
    if fold.kind == "top":
        return _top(call, of, fold)
    t, size, had_negative = _whole(call, "negative", of, fold)
    if call.measure is None:
        more, sizes, had_positive = _whole(call, "positive", of, fold)
        value = group_value(of, fold, None, None, torch.cat([t, more], dim=1), torch.cat([size, sizes], dim=1))
    else:
        losses, had_positive = product.positive(call.near, +1), call.had_positive
        value = group_value(of, fold, losses.reshape(1, -1), call.measure.reshape(1, -1), t, size)
    return product.groups.merge((value,), ()), had_positive, had_negative


def _top(call: Fused, of: UncertaintySet, fold: Fold) -> Found | None:
    """One value of the K hardest pairs, positive and negative."""
    assert call.measure is not None  # noqa: S101 - they are not folded
    found = top_pairs(call, fold.most or 0.0)
    if found is None:
        return None
    losses, there = found
    losses = torch.cat([call.product.positive(call.near, +1).reshape(1, -1), losses], dim=1)
    measure = torch.cat([call.measure.reshape(1, -1), there], dim=1)
    value = top_problem(call, of, losses, measure).value()
    return call.product.groups.merge((value,), ()), call.had_positive, call.vectors.has_negative()


def _top_apart(call: Fused) -> Found | None:
    """Two values of the K hardest pairs, of the positive and of the negative ones."""
    product, fold = call.product, call.product.over_negative.fold()
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    assert call.measure is not None  # noqa: S101 - they are not folded
    found = top_pairs(call, fold.most or 0.0)
    if found is None:
        return None
    near, measure = product.positive(call.near, +1).reshape(1, -1), call.measure.reshape(1, -1)
    first = top_problem(call, product.over_positive, near, measure)
    cap = first.taken() if product.groups.scope == "balanced" else None
    second = top_problem(call, product.over_negative, *found, cap)
    value = product.groups.merge((first.value(), second.value()), (first, second))
    return value, call.had_positive, call.vectors.has_negative()


def _sign(call: Fused) -> Found | None:
    """One value of all positive pairs, and one of all negative pairs."""
    if _kind(call.product.over_negative) == "top":
        return _top_apart(call)
    product = call.product
    fold, first = product.over_negative.fold(), product.over_positive.fold()
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    if call.measure is not None:
        losses, had_positive = product.positive(call.near, +1).reshape(1, -1), call.had_positive
        positive = product.over_positive.value(losses, call.measure.reshape(1, -1), orders=call.orders)
    else:
        assert first is not None  # noqa: S101 - `foldable`
        t, size, had_positive = _whole(call, "positive", product.over_positive, first)
        positive = group_value(product.over_positive, first, None, None, t, size)
    if fold.kind == "max":
        losses, there, had_negative = _hardest(call)
        negative = product.over_negative.value(losses.T, there[None])
    else:
        t, size, had_negative = _whole(call, "negative", product.over_negative, fold)
        negative = group_value(product.over_negative, fold, None, None, t, size)
    return product.groups.merge((positive, negative), ()), had_positive, had_negative


def _anchor(call: Fused) -> Found:
    """One value of all pairs of each row."""
    product, of = call.product, call.product.over_positive
    fold = of.fold()
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    if fold.kind == "max":
        losses, there, had_positive, had_negative = _with_hardest(call)
        values = of.value(losses, there)
    else:
        rows = call.fold("negative", of, fold)
        had_negative = rows.seen > 0 if call.had_negative is None else call.had_negative
        if call.measure is None:
            more = call.fold("positive", of, fold)
            t, size = torch.stack([rows.t, more.t], dim=1), torch.stack([rows.size, more.size], dim=1)
            values, had_positive = group_value(of, fold, None, None, t, size), more.seen > 0
        else:
            losses, had_positive = product.positive(call.near, +1), call.had_positive
            values = group_value(of, fold, losses, call.measure, rows.t[:, None], rows.size[:, None])
    return reduce(Terms(values, had_positive | had_negative), product.reduction), had_positive, had_negative


def _triplets(call: Fused) -> Found:
    """The mean over all triplets."""
    from nearfar.engines.fused_ops import triplets

    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    of, cols = call.product.over_negative, None if call.vectors.square else call.cols
    keep = call.product.groups.rule.keep  # type: ignore[attr-defined]  # of this scope
    band = {} if keep is None else {"band": 1, "low": -keep.margin, "high": 0.0}
    spec, form = call._spec(call.product.negative, "negative", drop=int(of.zero == "drop"), **band)
    measure = call.narrow.measure.to(torch.float32)
    pairs = call.vectors.tensors()
    total, size, seen, _ = triplets(call.rows, cols, pairs, form.offset, call.near, measure, *spec.said())
    value = over(total.sum(), size.sum() + float(of.zero_member))
    return value, call.had_positive, seen > 0


def _angles(call: Fused) -> Found | None:
    """The angular loss: a positive pair (a, p) is one row x_a + x_p, whose negatives are folded.

    l_n = slope·(4t⟨x_a + x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩) + zero            n·P rows of m products
    """
    from nearfar.engines.fused_ops import fold as folded

    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    place, real = call.narrow.place, call.narrow.measure
    if place.numel() * call.rows.shape[1] > SUMS:
        return None
    of, tan2 = call.product.over_negative, call.product.groups.rule.angle  # type: ignore[attr-defined]  # of this scope
    fold, form = of.fold(), call.product.negative.form(-1)
    assert fold is not None  # noqa: S101 - checked by `fused_way`
    assert form is not None  # noqa: S101
    rows = (call.rows[:, None] + call.cols[place]).flatten(0, 1)
    sums = replace(form, a=4 * tan2 * form.a, b=0.0)
    told = {"dtype": call.dtype, "given": call.vectors.given, "itself": ID if call.vectors.itself == ID else NOWHERE}
    spec = Spec.of(sums, gamma=fold.gamma, exp=2, flat=int(fold.normalized), **told)
    pairs = [x if at % 2 else x.repeat_interleave(place.shape[1]) for at, x in enumerate(call.vectors.tensors())]
    t, size, seen, *_ = folded(rows, call.cols, pairs, None, None, *spec.said())
    shift = form.scale * (form.b - 2 * (1 + tan2) * form.a * call.near.flatten())
    t = torch.where(size > 0, t + shift, t)
    values = group_value(of, fold, None, None, t[:, None], size[:, None])
    found = reduce(Terms(values, real.flatten()), call.product.reduction)
    return found, call.had_positive, seen.view(place.shape).amax(dim=1) > 0


FINISH = {
    "batch": _batch,
    "sign": _sign,
    "balanced": _top_apart,
    "anchor": _anchor,
    "anchor_sign": _anchor_sign,
    "triplets": _triplets,
    "positive": _angles,
}
"""How each scope is finished."""

"""Fast path for groups of the whole batch: weights and gradient in place, in one or two sweeps of a half matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.forms import form_of, plain_hinge, slope_at_zero, write_slopes
from nearfar.engines.half_strips import Half, Start, Strip, Sums
from nearfar.engines.solvers import Few, Named, Solver, solver
from nearfar.engines.strips import Strips
from nearfar.engines.sweeps import Ask, Made, few
from nearfar.engines.windows import windowed
from nearfar.groups.groupings import Product
from nearfar.pairs import PairLoss
from nearfar.relations.layout import Layout
from nearfar.sets.online import Online, Variance

__all__ = ["by_halves", "halves"]


def halves(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.groups.scope not in ("batch", "sign", "balanced") or not windowed(product, layout):
        return False
    if form_of(product.similarity) is None or (
        product.link is not None and any(True for _ in product.link.parameters())
    ):
        return False
    if product.positive is not product.negative and any(True for pair in _both(product) for _ in pair.parameters()):
        return False  # the gradient of a threshold is one sum over both signs
    sides = ((product.positive, product.over_positive), (product.negative, product.over_negative))
    like, weighted = torch.zeros(1), layout.weights is not None
    return all(
        _flat(pair, sign) and solver(of, like, 1, weighted=weighted) is not None
        for (pair, of), sign in zip(sides, (+1, -1), strict=True)
    )


def _flat(pair: PairLoss, sign: int) -> bool:
    """Whether a pair loss is nonnegative, with slope 0 where it is 0."""
    form = pair.form(sign)
    known = form is not None and form.shape in ("power", "softplus") and form.scale > 0
    return known and isinstance(slope_at_zero(pair, sign)[0], Tensor)


def _both(product: Product) -> tuple[PairLoss, PairLoss]:
    """The pair losses of positive and negative pairs."""
    return product.positive, product.negative


def by_halves(strips: Strips, new_slopes: Ask) -> Made | None:
    """Value and gradient of the loss; None if ties or a boundary solution need the general path."""
    slopes = new_slopes()
    half = Half(strips, slopes)
    value = _together(half, strips) if strips.product.groups.scope == "batch" else _apart(half, strips)
    return None if value is None else (value.to(strips.rows.dtype), slopes.sums)


def _wide(half: Half, strip: Strip, absent: float, *, together: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses [t, u] of the negative (`together`: all) pairs of a strip, `absent` elsewhere, and their measure.

    The measure is the sum of it, and their weights [t, u] (None if each counts once).
    """
    positive, negative = half.members(strip)
    near = half.product.positive(strip.near, +1) if together else torch.full_like(strip.near, absent)
    weights = strip.weights
    if weights is not None and together and strip.near_weights is not None:
        weights = half.fill_(weights, strip, strip.near_weights, 0.0)
    losses = strip.losses
    if strip.fence is not None:
        losses = losses.mul_(strip.fence == 0) if absent == 0 else losses.add_(strip.fence)
    return half.fill_(losses, strip, near, absent), positive + negative if together else negative, weights


def _weigh(half: Half, strip: Strip, found: Online | Variance, sums: Sums, *, together: bool) -> None:
    """Turn the losses of a strip into weights by a solver, and add their gradient to `sums`."""
    pairs = half.product
    # weights vanish where a hinge is 0, so that its slope may be taken as 1 everywhere
    flat = found.vanishes and plain_hinge(pairs.negative)
    dl_ds = None
    if half.slopes.any and not flat:
        dl_ds = write_slopes(pairs.negative, strip.scores, strip.losses, strip.free)
    losses, members, weights = _wide(half, strip, found.absent, together=together)
    sums.shrink(found.absorb_(losses, members, None if dl_ds is not None else strip.free, weights))
    if not half.slopes.any:
        return
    near = pairs.positive.slope(strip.near, +1) if together else torch.zeros_like(strip.near)
    assert isinstance(near, Tensor)  # noqa: S101 - of the kinds in FLAT
    if dl_ds is not None:
        if strip.fence is not None:
            dl_ds.mul_(strip.fence == 0)
        half.fill_(dl_ds, strip, near, 0.0)
        if found.even:
            half.pull(strip, dl_ds if weights is None else dl_ds.mul_(weights), sums)
        else:
            half.pull(strip, losses.mul_(dl_ds), sums)
        return
    raw = losses.gather(1, strip.place)
    raw = torch.where(strip.positive, raw * near, torch.where(strip.absent, 0.0, raw))
    half.pull(strip, losses.scatter_(1, strip.place, raw), sums)


def _weigh_near(half: Half, strip: Strip, found: Online | Variance, sums: Sums) -> None:
    """Like `_weigh`, for a group of positive pairs only."""
    losses = torch.where(strip.positive, half.product.positive(strip.near, +1), found.absent)
    weights = strip.near_weights
    members = strip.positive.sum() if weights is None else weights.sum()
    sums.shrink(found.absorb_(losses, members, None, weights))
    dl_ds = half.product.positive.slope(strip.near, +1)
    assert isinstance(dl_ds, Tensor)  # noqa: S101 - of the kinds in FLAT
    if half.slopes.any:
        dl_ds = torch.where(strip.positive, dl_ds, 0.0)
        raw = losses if not found.even else torch.ones_like(losses) if weights is None else weights
        half.pull_near(strip, dl_ds * raw, sums)


def _together(half: Half, strips: Strips) -> Tensor | None:
    """Value of one group of all pairs, and its gradient; None if the general path is needed."""
    found = half.solver(half.product.over_positive, strips.rows)
    assert found is not None  # noqa: S101 - checked by `halves`
    if isinstance(found, Few | Variance):
        starts = list[Start]()
        for strip in half:
            starts.append((found.seen, strip.rows, strip.first))
            found.look(*_wide(half, strip, found.absent, together=True))
        half.merge(found, None)
        if isinstance(found, Few):
            solved = found.solved(None)
            return None if solved is None else _named(half, strips, solved, starts, near=False)
        if not found.ready():
            return None
    sums = Sums(half.rows, half.form.cols)
    for strip in half:
        _weigh(half, strip, found, sums, together=True)
    half.merge(found, sums)
    value, scale = found.finish()
    half.gather(sums, scale)
    return value


def _named(
    half: Half, strips: Strips, solved: Named, starts: list[Start], *, near: bool, share: Tensor | None = None
) -> Tensor:
    """Value of a group in which few pairs carry the weight; adds its gradient times `share`."""
    value, place, weights = solved
    if half.slopes.any:
        share = torch.ones_like(value[0]) if share is None else share
        few(strips, half.slopes, half.support(starts, place, weights, near=near), share.to(weights.dtype))
    return value[0]


def _apart(half: Half, strips: Strips) -> Tensor | None:
    """Value of a group of positive pairs and one of negative pairs; None if the general path is needed."""
    product = half.product
    near, wide = half.solver(product.over_positive, strips.rows), half.solver(product.over_negative, strips.rows)
    assert near is not None  # noqa: S101 - checked by `halves`
    assert wide is not None  # noqa: S101
    starts = _first_look(half, near, wide)
    balanced = product.groups.scope == "balanced"
    if (isinstance(near, Variance) and not near.ready()) or (isinstance(wide, Variance) and not wide.ready()):
        return None
    few_near = near.solved(None) if isinstance(near, Few) else None
    cap = near.taken() if balanced and isinstance(near, Few) else None
    few_wide = wide.solved(cap) if isinstance(wide, Few) else None
    if (isinstance(near, Few) and few_near is None) or (isinstance(wide, Few) and few_wide is None):
        return None
    value_near, value_wide = _second_look(half, near, wide)
    share_near = share_wide = torch.ones_like(half.rows[0, 0], dtype=torch.float64)
    if cap is not None and isinstance(wide, Few):
        a, b = cap[0], torch.minimum(wide.taken(), cap)[0]
        share_near, share_wide = over(a, a + b), over(b, a + b)
    if few_near is not None:
        value_near = _named(half, strips, few_near, starts[0], near=True, share=share_near)
    if few_wide is not None:
        value_wide = _named(half, strips, few_wide, starts[1], near=False, share=share_wide)
    return value_near * share_near + value_wide * share_wide


def _first_look(half: Half, near: Solver, wide: Solver) -> tuple[list[Start], list[Start]]:
    """First sweep of the solvers that need all losses before they can compute weights."""
    starts: tuple[list[Start], list[Start]] = [], []
    if not isinstance(near, Few | Variance) and not isinstance(wide, Few | Variance):
        return starts
    for strip in half:
        if isinstance(near, Few | Variance):
            starts[0].append((near.seen, strip.rows, strip.first))
            losses, weights = half.product.positive(strip.near, +1), strip.near_weights
            members = strip.positive.sum() if weights is None else weights.sum()
            near.look(torch.where(strip.positive, losses, near.absent), members, weights)
        if isinstance(wide, Few | Variance):
            starts[1].append((wide.seen, strip.rows, strip.first))
            wide.look(*_wide(half, strip, wide.absent, together=False))
    half.merge(near, None)
    half.merge(wide, None)
    return starts


def _second_look(half: Half, near: Solver, wide: Solver) -> tuple[Tensor, Tensor]:
    """The sweep that computes weights and gradients; solvers that select few pairs skip it."""
    values = [half.rows.new_zeros((), dtype=torch.float64) for _ in range(2)]
    sums = [Sums(half.rows, half.form.cols) for _ in range(2)]
    if isinstance(near, Few) and isinstance(wide, Few):
        return values[0], values[1]
    for strip in half:
        if not isinstance(near, Few):
            _weigh_near(half, strip, near, sums[0])
        if not isinstance(wide, Few):
            _weigh(half, strip, wide, sums[1], together=False)
    for k, found in enumerate((near, wide)):
        if not isinstance(found, Few):
            half.merge(found, sums[k])
            values[k], scale = found.finish()
            half.gather(sums[k], scale)
    return values[0], values[1]

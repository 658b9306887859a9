"""Fast path for groups of an anchor (`AnchorSign`, `Anchor`): no masks, weights and gradient in place, one sweep.

The negative (or all) pairs of the rows are a strip [t, m] in a buffer, called the wide side. The positive pairs are
gathered into [t, P], the narrow side, where pair loss, set and link use autograd. This takes about ten passes over a
strip; the general path (sweeps.py) takes forty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.shortcuts import learned_tensors
from nearfar.engines.forms import Plain, form_of, plain_hinge, slope_at_zero, write_losses
from nearfar.engines.runs import Narrow, Sorted, place_
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Made, shared
from nearfar.engines.windows import FAR, half_open, windowed
from nearfar.engines.windows import fence as fenced
from nearfar.groups.groupings import Product, tally
from nearfar.links import Sides, Terms
from nearfar.relations.layout import Layout
from nearfar.sets.base import Solved

__all__ = ["by_runs", "leans", "line_of"]

FEW = 16
"""Largest number of columns per row whose gradients are computed one by one instead of by a matrix product."""


def leans(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    link, scope = product.link, product.groups.scope
    if scope not in ("anchor_sign", "anchor") or product.reduction == "none":
        return False
    if link is not None and (link.wants_columns or link.apart):
        return False
    if form_of(product.similarity) is None or learned_tensors((product.negative,)):
        return False
    if line_of(product) is None and not isinstance(slope_at_zero(product.negative, -1)[0], Tensor):
        return False
    return windowed(product, layout) and product.over_wide.solves()


def line_of(product: Product) -> tuple[float, float] | None:
    """Slope and intercept of the negative pair loss if it is linear and increasing, else None."""
    slope, zero = slope_at_zero(product.negative, -1)
    if not isinstance(slope, float | int) or slope <= 0:
        return None
    return float(slope), float(product.negative(zero, -1))


def by_runs(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient of the loss, in one sweep."""
    work = _Lean(strips, Sorted(strips, new_slopes()))
    value, share = shared(strips, [work.strip(here) for here in strips])
    return value.to(strips.rows.dtype), work.sorted.finished(share)


@dataclass(frozen=True, eq=False)
class Wide:
    """The wide side of a strip.

    Args:
        scores: [t, m].
        losses: [t, m], -inf for pairs that do not belong to it; later its unscaled weights.
        size: [t] measure of its pairs.
        has_negative: [t] whether one of them is negative.
        weights: [t, m] weights of its pairs, or None if each counts once.
        dl_ds: slopes of the losses, a number if they are all the same; None if `PairLoss.slope` tells them later.
    """

    scores: Tensor
    losses: Tensor
    size: Tensor
    has_negative: Tensor
    weights: Tensor | None
    dl_ds: Tensor | float | None


class _Lean:
    """State of one call: buffers, and properties of the factors."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        self.rows, self.product, self.sorted, self.slopes = strips.rows, strips.product, sorted, sorted.slopes
        self.form, self.over = sorted.form, strips.product.over_wide
        self.together = strips.product.groups.scope == "anchor"
        fold = self.over.fold()
        self._counts = fold is None or fold.kind != "exp" or fold.normalized  # others ask only who has a pair
        self.line = line_of(strips.product)
        self.hinge = plain_hinge(strips.product.negative)
        apart = not self.together and not strips.product.everyone
        self.half_open = apart and self.line is not None and half_open(strips.product.miner)
        weighted, mined = sorted.runs.weights is not None, strips.product.miner is not None and not self.half_open
        buffers = [strips.rows.new_empty(sorted.shape) if wanted else None for wanted in (
            True, self.hinge or mined or (self.line is not None and not isinstance(self.form, Plain)), weighted, mined
        )]  # fmt: skip
        self.buffer, self.spare, self.weights, self.fence = buffers
        self.anchors = strips.had_positive | strips.had_negative

    def strip(self, here: slice) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the terms of a strip; adds their gradient."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        assert self.buffer is not None  # noqa: S101
        scores = self.form.scores(rows, self.buffer[: len(rows)])
        near = scores.gather(1, narrow.place)
        wide, measure = self._wide(here, scores, near, narrow)
        solved = self.over.solved_(wide.losses, wide.size, wide.weights)
        with torch.enable_grad():
            near, value = near.requires_grad_(), solved.value.requires_grad_()
            terms = self._terms(here, near, value, measure, wide.has_negative)
            top, bottom = tally(terms, self.product.reduction)
            found = gradient(top, (near, value, *self.slopes.params))
        if self.slopes.any:
            by_pair = torch.zeros_like(near) if found[0] is None else found[0]
            by_wide = torch.zeros_like(value) if found[1] is None else found[1]
            self.slopes.add((here, here), (None, None, *found[2:]))
            if self.together:
                solved, by_pair = self._from_wide(wide, solved, near, narrow, measure, by_wide)
            self._pull(here, wide, solved, (narrow.place, near.detach(), by_pair), by_wide)
        return top.detach(), bottom

    def _wide(self, here: slice, scores: Tensor, near: Tensor, narrow: Narrow) -> tuple[Wide, Tensor]:
        """The wide side of a strip, and the measure [t, P] of its positive pairs, both after mining."""
        measure = narrow.positive if narrow.weight is None else narrow.weight
        if self.half_open:
            return self._above(here, scores, near, narrow, measure)
        fence = None
        if self.product.miner is not None and self.fence is not None:
            fence, window = fenced(self.product.miner, scores, near, narrow, measure, self.fence[: len(scores)])
            measure = measure * window.positive
        inside = measure if self.together or self.product.everyone else torch.zeros_like(measure)
        losses = self._losses(scores)
        mine = self.product.positive(near, +1) if self.together else losses.gather(1, narrow.place)
        losses = losses if fence is None else losses.add_(fence)
        place_(losses, narrow, torch.where(inside > 0, mine, -math.inf))
        dl_ds = self._dl_ds(losses)
        negative = self._negatives(narrow, scores.shape[1], fence)
        if self.weights is None:
            size = negative.to(scores.dtype) + inside.sum(dim=1)
            return Wide(scores, losses, size, negative > 0, None, dl_ds), measure
        weights = self.weights[: len(inside)]
        self.sorted.runs.weigh_wide_(weights, here, narrow, inside.to(weights.dtype), fence)
        return Wide(scores, losses, weights.sum(dim=1), negative > 0, weights, dl_ds), measure

    def _above(self, here: slice, scores: Tensor, near: Tensor, narrow: Narrow, measure: Tensor) -> tuple[Wide, Tensor]:
        """Like `_wide`, where the miner keeps what is above a score and losses are linear: no fence is needed."""
        assert self.line is not None  # noqa: S101 - checked by the caller
        assert self.product.miner is not None  # noqa: S101
        slope, start = self.line
        losses = place_(self._losses(scores), narrow, -math.inf)
        top = losses.amax(dim=1)
        window = self.product.miner.window(near, measure, (top - start) / slope)
        assert window is not None  # noqa: S101 - checked by `leans`
        low = torch.as_tensor(window.low, dtype=losses.dtype, device=losses.device)
        floor = (slope * low + start).clamp(-FAR, FAR).expand(len(top))
        torch.threshold_(losses.sub_(floor[:, None]), 0.0, -math.inf).add_(floor[:, None])
        measure = measure * window.positive
        has_negative = top > floor
        weights = None if self.weights is None else self.weights[: len(losses)]
        if weights is not None:
            self.sorted.runs.weigh_(weights, here).mul_(losses > -math.inf)
        size = has_negative if weights is None else weights.sum(dim=1)
        if weights is None and self._counts:
            size = (losses > -math.inf).to(torch.uint8).sum(dim=1, dtype=torch.int64)
        return Wide(scores, losses, size.to(losses.dtype), has_negative, weights, slope), measure

    def _losses(self, scores: Tensor) -> Tensor:
        """Negative pair losses [t, m] of all scores."""
        if self.hinge and self.spare is not None:
            return write_losses(self.product.negative, scores, self.spare[: len(scores)])
        if self.line is None:
            found: Tensor = self.product.negative(scores, -1)
            return found
        slope, start = self.line
        losses = scores if self.spare is None else self.spare[: len(scores)].copy_(scores)
        losses = losses if slope == 1 else losses.mul_(slope)
        return losses if start == 0 else losses.add_(start)

    def _dl_ds(self, losses: Tensor) -> Tensor | float | None:
        """Slope dl/ds of a linear pair loss or a hinge, from its losses; None for other pair losses."""
        if self.line is not None:
            return self.line[0]
        if not self.hinge or not self.slopes.any:
            return None
        if self.over.zero == "drop":
            return 1.0  # pairs with slope 0 have weight 0
        return torch.sign(losses).clamp_min_(0.0)

    def _negatives(self, narrow: Narrow, columns: int, fence: Tensor | None) -> Tensor:
        """Number [t] of negative pairs of the wide side (only whether there is one, if the set does not count)."""
        if fence is None:
            return columns - narrow.run.sum(dim=1)
        if not self._counts:
            return (fence.amax(dim=1) == 0).to(torch.int64)
        return (fence == 0).to(torch.uint8).sum(dim=1, dtype=torch.int64)

    def _terms(self, here: slice, near: Tensor, wide: Tensor, measure: Tensor, has_negative: Tensor) -> Terms:
        """The terms of a strip, from positive scores [t, P] and values [t] of the wide side."""
        product = self.product
        if self.together:
            return Terms(wide, self.anchors[here])
        losses = product.positive(near, +1)
        sides = Sides(
            positive=product.over_positive.value(losses, measure),
            negative=wide,
            has_positive=(measure > 0).any(dim=1),
            has_negative=has_negative,
            anchors=self.anchors[here],
            losses=losses,
            measure=measure,
        )
        (terms,) = product.joined(sides)
        return terms

    def _from_wide(
        self, wide: Wide, solved: Solved, near: Tensor, narrow: Narrow, inside: Tensor, by_wide: Tensor
    ) -> tuple[Solved, Tensor]:
        """Take the positive pairs out of a wide side that holds both signs; gives dF/ds [t, P] of them."""
        raw = wide.losses
        if solved.place is not None:
            raw.zero_().scatter_(1, solved.place[:, None], 1.0)
            solved = Solved(solved.value, solved.scale)
        share = raw.gather(1, narrow.place) * (by_wide * solved.scale)[:, None] * (inside > 0)
        with torch.enable_grad():
            found = gradient((share * self.product.positive(near, +1)).sum(), (near, *self.slopes.params))
        self.slopes.add((slice(0), slice(0)), (None, None, *found[1:]))
        place_(raw, narrow, 0.0)
        return solved, torch.zeros_like(near) if found[0] is None else found[0]

    def _pull(
        self, here: slice, wide: Wide, solved: Solved, near: tuple[Tensor, Tensor, Tensor], by_wide: Tensor
    ) -> None:
        """Add the gradient of a strip.

        Args:
            here: rows of the strip.
            wide: its wide side, with unscaled weights in place of the losses.
            solved: its values, and the scale of its weights.
            near: columns, scores and dF/ds of the positive pairs, [t, P] each.
            by_wide: [t] dF / d value of the wide side.
        """
        scores, losses, dl_ds, (place, at, by_pair) = wide.scores, wide.losses, wide.dl_ds, near
        factor = (by_wide * solved.scale)[:, None]
        if solved.place is not None:
            chosen = solved.place[:, None]
            there = losses.gather(1, chosen) if scores is losses else scores.gather(1, chosen)
            if scores is losses and self.line is not None:
                there = (there - self.line[1]) / self.line[0]
            dl_ds = self.line[0] if self.line is not None else self.product.negative.slope(there, -1)
            assert dl_ds is not None  # noqa: S101 - checked by `leans`
            place, at = torch.cat([place, chosen], dim=1), torch.cat([at, there], dim=1)
            by_pair = torch.cat([by_pair, factor * dl_ds], dim=1)
            slope = losses.zero_() if place.shape[1] > FEW else None
        elif isinstance(dl_ds, float):
            slope = self.form.descend_(losses.mul_(factor * dl_ds), scores)
        else:
            dl_ds = self.product.negative.slope(scores, -1) if dl_ds is None else dl_ds
            assert isinstance(dl_ds, Tensor)  # noqa: S101 - decreasing linear losses are not supported
            slope = self.form.descend_(losses.mul_(factor).mul_(dl_ds), scores)
        by_pair = self.form.descend_(by_pair, at)
        if slope is None:
            self.sorted.few(here, place, by_pair)
        else:
            self.sorted.many(here, slope.scatter_add_(1, place, by_pair))

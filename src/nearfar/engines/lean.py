"""Fast path for per-anchor groups (`AnchorSign`) with plain labels: no masks, weights and gradient in place.

The negative (or all) pairs of the rows are a strip [t, m] in a buffer, called the wide side. The positive pairs are
gathered into [t, P], the narrow side, where pair loss, set and link use autograd. This takes about ten passes over a
strip; the general path (sweeps.py) takes forty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.shortcuts import exactly
from nearfar.engines.forms import Plain, form_of, plain_hinge, write_losses
from nearfar.engines.runs import Narrow, Sorted
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Made, shared
from nearfar.groups.groupings import AnchorSign, Product, tally
from nearfar.links import Add, Sides
from nearfar.miners import MultiSimilarity
from nearfar.relations.layout import Layout
from nearfar.sets.base import Solved
from nearfar.sets.entropic import KL

__all__ = ["by_runs", "leans", "line_of"]

FEW = 16
"""Largest number of columns per row whose gradients are computed one by one instead of by a matrix product."""


def leans(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    link, over = product.link, product.over_negative
    if not exactly(product.groups, AnchorSign):
        return False
    if product.wants_columns or product.reduction == "none" or (exactly(link, Add) and link.apart):
        return False
    if form_of(product.similarity) is None or any(p.requires_grad for p in product.negative.parameters()):
        return False
    line = line_of(product)
    if line is None and not isinstance(product.negative.slope(torch.zeros(1, 1), -1), Tensor):
        return False
    if product.miner is not None:
        # needs an increasing linear pair loss, so that the miner selects an interval of losses, and no normalization
        mined = exactly(product.miner, MultiSimilarity) and line is not None and not product.everyone
        if not mined or not exactly(over, KL) or over.normalized or over.zero == "drop":
            return False
    return over.solve_(torch.zeros(1, 1), torch.ones(1)) is not None


def line_of(product: Product) -> tuple[float, float] | None:
    """Slope and intercept of the negative pair loss if it is linear and increasing, else None."""
    slope = product.negative.slope(torch.zeros(1, 1), -1)
    if not isinstance(slope, float | int) or slope <= 0:
        return None
    return float(slope), float(product.negative(torch.zeros((), dtype=torch.float64), -1))


def by_runs(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient of the loss, in one sweep."""
    work = _Lean(strips, Sorted(strips, new_slopes()))
    value, share = shared(strips, [work.strip(here) for here in strips])
    return value.to(strips.rows.dtype), work.sorted.finished(share)


class _Lean:
    """State of one call: buffers, and properties of the factors."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        self.rows, self.product, self.sorted, self.slopes = strips.rows, strips.product, sorted, sorted.slopes
        self.form = sorted.form
        self.line = line_of(strips.product)
        self.hinge = plain_hinge(strips.product.negative)
        self.buffer = strips.rows.new_empty(sorted.shape)
        apart = self.hinge or (self.line is not None and not isinstance(self.form, Plain))
        self.spare = strips.rows.new_empty(sorted.shape) if apart else None
        self.anchors = strips.had_positive | strips.had_negative

    def strip(self, here: slice) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the terms of a strip; adds their gradient."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        scores = self.form.scores(rows, self.buffer[: len(rows)])
        near = scores.gather(1, narrow.place)
        losses = self._losses(scores, narrow)
        positive, size, has_negative = self._mined(losses, near, narrow)
        dl_ds = self._dl_ds(losses)
        solved = self.product.over_negative.solve_(losses, size)
        assert solved is not None  # noqa: S101 - checked by `leans`
        with torch.enable_grad():
            near, wide = near.requires_grad_(), solved.value.requires_grad_()
            top, bottom = self._linked(here, near, wide, positive, has_negative)
            found = gradient(top, (near, wide, *self.slopes.params))
        if self.slopes.any:
            self.slopes.add((here, here), (None, None, *found[2:]))
            by_pair = torch.zeros_like(near) if found[0] is None else found[0]
            by_wide = torch.zeros_like(wide) if found[1] is None else found[1]
            self._pull(here, (scores, losses, dl_ds), solved, (narrow.place, near.detach(), by_pair), by_wide)
        return top.detach(), bottom

    def _losses(self, scores: Tensor, narrow: Narrow) -> Tensor:
        """Losses [t, m] of the wide side, -inf for pairs that do not belong to it."""
        if self.hinge and self.spare is not None:
            losses: Tensor = write_losses(self.product.negative, scores, self.spare[: len(scores)])
        elif self.line is None:
            losses = self.product.negative(scores, -1)
        else:
            slope, start = self.line
            losses = scores if self.spare is None else self.spare[: len(scores)].copy_(scores)
            losses = losses if slope == 1 else losses.mul_(slope)
            losses = losses if start == 0 else losses.add_(start)
        absent = narrow.run & ~narrow.positive if self.product.everyone else narrow.run
        return losses.scatter_(1, narrow.place, torch.where(absent, -math.inf, losses.gather(1, narrow.place)))

    def _dl_ds(self, losses: Tensor) -> Tensor | float | None:
        """Slope dl/ds of a linear pair loss or a hinge, from its losses; None for other pair losses."""
        if self.line is not None:
            return self.line[0]
        if not self.hinge or not self.slopes.any:
            return None
        if self.product.over_negative.zero == "drop":
            return 1.0  # pairs with slope 0 have weight 0
        return torch.sign(losses).clamp_min_(0.0)

    def _mined(self, losses: Tensor, near: Tensor, narrow: Narrow) -> tuple[Tensor, Tensor, Tensor]:
        """Positive pairs [t, P] after mining, number of pairs on the wide side [t], and whether one is negative [t]."""
        negative = losses.shape[1] - narrow.run.sum(dim=1)
        size = negative + narrow.positive.sum(dim=1) if self.product.everyone else negative
        miner = self.product.miner
        if not exactly(miner, MultiSimilarity) or self.line is None:
            return narrow.positive, size.to(losses.dtype), negative > 0
        slope, start = self.line
        top = losses.amax(dim=1)
        positive = narrow.positive & (near - miner.epsilon < ((top - start) / slope)[:, None])
        positive = positive | (narrow.positive & torch.isnan(near))
        worst = torch.where(narrow.positive, near, math.inf).amin(dim=1)
        able = narrow.positive.any(dim=1)
        floor = torch.where(able, slope * (worst - miner.epsilon) + start, 1e30)
        # sets losses below the floor to -inf; a comparison and a masked fill would take thirty times as long
        torch.threshold_(losses.sub_(floor[:, None]), 0.0, -math.inf).add_(floor[:, None])
        some = able & (negative > 0) & ~(top <= floor)
        return positive, torch.where(some, size, 0).to(losses.dtype), some

    def _linked(
        self, here: slice, near: Tensor, wide: Tensor, positive: Tensor, has_negative: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of a strip's terms, from positive scores [t, P] and wide values [t]."""
        product = self.product
        losses = product.positive(near, +1)
        sides = Sides(
            positive=product.over_positive.value(losses, positive),
            negative=wide,
            has_positive=positive.any(dim=1),
            has_negative=has_negative,
            anchors=self.anchors[here],
            losses=losses,
            measure=positive,
        )
        (terms,) = product.joined(sides)
        return tally(terms, product.reduction)

    def _pull(
        self,
        here: slice,
        wide: tuple[Tensor, Tensor, Tensor | float | None],
        solved: Solved,
        near: tuple[Tensor, Tensor, Tensor],
        by_wide: Tensor,
    ) -> None:
        """Add the gradient of a strip.

        Args:
            here: rows of the strip.
            wide: scores, unscaled weights and dl/ds of the wide side, [t, m] each.
            solved: its values, and the scale of its weights.
            near: columns, scores and dF/ds of the positive pairs, [t, P] each.
            by_wide: [t] dF / d value of the wide side.
        """
        (scores, losses, dl_ds), (place, at, by_pair) = wide, near
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

"""Fast path for the angular loss with plain labels: each positive pair (a, p) is treated as one row x_a + x_p.

l_n = 4t⟨x_a + x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩          n·P rows of m products; memory of a strip
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.shortcuts import learned_tensors
from nearfar.engines.forms import Plain, form_of
from nearfar.engines.lean import line_of
from nearfar.engines.lean_triplets import rule_of
from nearfar.engines.runs import Sorted, place_
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Counted, Made, shared
from nearfar.groups.groupings import Product, tally
from nearfar.links import Terms
from nearfar.relations.layout import Layout

__all__ = ["by_angles", "leans_on_angles"]


def leans_on_angles(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.groups.scope != "positive" or product.miner is not None:
        return False
    rule = rule_of(product)
    if rule.angle is None or rule.keep is not None or rule.balanced:
        return False
    if product.reduction == "none" or form_of(product.similarity) is not Plain:
        return False
    if learned_tensors((product.negative,)) or line_of(product) is None:
        return False
    return product.over_negative.solves()


def by_angles(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient of the loss, in one sweep."""
    work = _Angles(strips, Sorted(strips, new_slopes()))
    parts = Counted()
    for here in strips:
        narrow = work.sorted.runs.narrow(here)
        anchor, which = narrow.positive.nonzero(as_tuple=True)
        for first in range(0, max(1, len(anchor)), work.tall):
            at = anchor[first : first + work.tall], which[first : first + work.tall]
            counts = None if narrow.weight is None else narrow.weight[at]
            parts.append(work.pairs(at[0] + here.start, narrow.place[at], counts))
    value, share = shared(strips, parts)
    return value.to(strips.rows.dtype), work.sorted.finished(share)


class _Angles:
    """State of one call: buffers, and the coefficients of the score."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        line, tan2 = line_of(strips.product), rule_of(strips.product).angle
        assert line is not None  # noqa: S101 - checked by `leans_on_angles`
        assert tan2 is not None  # noqa: S101
        self.sorted, self.product, self.rows, self.tall = sorted, strips.product, strips.rows, strips.tall
        self.sides, self.base, self.start = line[0] * 4 * tan2, line[0] * -2 * (1 + tan2), line[1]
        self.buffer = strips.rows.new_empty(strips.tall, len(strips.cols))
        self.weights = None if sorted.runs.weights is None else torch.empty_like(self.buffer)

    def pairs(self, anchor: Tensor, positive: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of some positive pairs; adds their gradient.

        Args:
            anchor: [k] their rows.
            positive: [k] their sorted columns.
            counts: [k] their weights, which count in the reduction and not within a group; None for 1.
        """
        x, y, cols = self.rows[anchor], self.sorted.form.cols[positive], self.sorted.form.cols
        rows = self.sides * (x + y)
        losses = torch.mm(rows, cols.T, out=self.buffer[: len(rows)])
        losses.add_(self.base * (x * y).sum(dim=1, keepdim=True) + self.start)
        size, weights = self._hide(losses, anchor)
        solved = self.product.over_negative.solved_(losses, size, weights)
        with torch.enable_grad():
            value = solved.value.requires_grad_()
            top, bottom = tally(
                Terms(value, torch.ones_like(value) if counts is None else counts), self.product.reduction
            )
            (by_value,) = gradient(top, (value,))
        if self.sorted.slopes.any and by_value is not None:
            factor = by_value * solved.scale
            if solved.place is not None:
                losses.zero_().scatter_(1, solved.place[:, None], 1.0)
            slope = losses.mul_(factor[:, None])
            by_row, by_base = self.sides * (slope @ cols), self.base * slope.sum(dim=1, keepdim=True)
            self._add(0, anchor, by_row + by_base * y)
            self._add(1, positive, by_row + by_base * x)
            if self.sorted.cols is not None:
                self.sorted.cols.addmm_(slope.T, rows)
        return top.detach(), bottom

    def _hide(self, losses: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Set all entries but the negatives of each anchor to -inf, in place; gives their measure [k], and weights."""
        narrow = self.sorted.runs.narrow(anchor)
        place_(losses, narrow, -math.inf)
        if self.weights is None:
            return (losses.shape[1] - narrow.run.sum(dim=1)).to(losses.dtype), None
        weights = self.sorted.runs.weigh_wide_(self.weights[: len(losses)], anchor, narrow)
        return weights.sum(dim=1), weights

    def _add(self, side: int, place: Tensor, part: Tensor) -> None:
        """Add gradients `part` [k, d] to the rows (side 0) or sorted columns (side 1) at `place` [k]."""
        total = self.sorted.cols if side else self.sorted.slopes.sums[0]
        if total is not None:
            total.index_add_(0, place, part)

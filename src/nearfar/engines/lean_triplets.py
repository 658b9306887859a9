"""Fast path for all or semi-hard triplets with plain labels: O(n·m·P) time, memory of one strip.

Each pass over a strip compares all negatives with one positive per row: l = [s_an - s_ap + m]₊. The gradient in s_ap
is minus the sum of the gradients in s_an. A triplet weighs w_ap·w_an, of which w_an is applied to sums over a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.forms import form_of
from nearfar.engines.runs import Narrow, Sorted, place_
from nearfar.engines.strips import Strips
from nearfar.engines.sweeps import Ask, Made
from nearfar.groups.groupings import Product
from nearfar.groups.triplets import Rule, difference
from nearfar.relations.layout import Layout

__all__ = ["by_triplets", "leans_on_triplets", "rule_of"]


def leans_on_triplets(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.groups.scope != "triplets" or product.miner is not None:
        return False
    hinge, fold, rule = hinge_of(product), product.over_negative.fold(), rule_of(product)
    if hinge is None or fold is None or fold.kind != "sum" or product.over_negative.zero_member:
        return False
    if rule.compare is not difference or rule.balanced or form_of(product.similarity) is None:
        return False
    return rule.keep is None or hinge == (rule.band, 0.0)


def hinge_of(product: Product) -> tuple[float, float] | None:
    """Margin m and smoothing μ of a negative pair loss [s + m]₊ or μ·softplus((s + m)/μ); None for any other."""
    form = product.negative.form(-1)
    if form is None or form.offset is not None:
        return None
    if form.shape == "softplus" and math.isclose(form.a * form.scale, 1.0, rel_tol=1e-12):
        return form.b * form.scale, form.scale
    return (form.b, 0.0) if form.shape == "power" and (form.a, form.scale, form.power) == (1, 1, 1) else None


def rule_of(product: Product) -> Rule:
    """How triplets are scored, of a grouping that has such a rule."""
    rule: Rule = getattr(product.groups, "rule")  # noqa: B009 - of its scope
    return rule


def by_triplets(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient of the loss, in one sweep."""
    work = _Triplets(strips, Sorted(strips, new_slopes()))
    parts = [work.strip(here) for here in strips]
    mine = torch.stack([torch.stack(x).sum(dtype=torch.float64) for x in zip(*parts, strict=True)])
    total, count = strips.ranks.sum(mine).unbind()
    found = work.sorted.finished(over(torch.ones_like(count), count))
    return over(total, count).to(strips.rows.dtype), found


class _Triplets:
    """State of one call: buffers, and parameters of the hinge."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        product = strips.product
        hinge = hinge_of(product)
        assert hinge is not None  # noqa: S101 - checked by `leans_on_triplets`
        self.sorted, self.rows = sorted, strips.rows
        self.margin, self.smooth = hinge
        self.band = rule_of(product).keep is not None
        # whether all triplets count; else those with a loss do, which are those with a slope
        self.every = product.over_negative.zero == "keep" and not self.band
        self.scores, self.losses, self.slope = (strips.rows.new_empty(sorted.shape) for _ in range(3))

    def strip(self, here: slice) -> tuple[Tensor, Tensor]:
        """Sum of the losses of a strip's triplets, and number of triplets that count; adds their gradient."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        t = len(rows)
        scores = self.sorted.form.scores(rows, self.scores[:t])
        near = scores.gather(1, narrow.place)
        place_(scores, narrow, -math.inf)
        # padding has score inf, so that no triplet with it has a loss; it is sorted last
        heights, order = torch.where(narrow.positive, near, math.inf).sort(dim=1)
        slope, by_pair = self.slope[:t].zero_(), torch.zeros_like(near)
        counts = torch.ones_like(near) if narrow.weight is None else narrow.weight.gather(1, order)
        total, count = rows.new_zeros((), dtype=torch.float64), rows.new_zeros((), dtype=torch.float64)
        for p in range(max(1, near.shape[1] - self.sorted.runs.least)):
            part = slice(p, p + 1)
            losses, dl_ds = self._judge(here, scores, heights[:, part], self.losses[:t])
            total += (losses * counts[:, p]).sum(dtype=torch.float64)
            pulled = self._sums(here, dl_ds) * counts[:, p]
            by_pair.scatter_(1, order[:, part], -pulled[:, None])
            slope.add_(dl_ds) if narrow.weight is None else slope.addcmul_(dl_ds, counts[:, part])
            if not self.every:
                active = self._sums(here, torch.sign(dl_ds)) * counts[:, p] if self.smooth else pulled
                count += active.sum(dtype=torch.float64)
        if self.every:
            count += self._number(here, scores, narrow)
        if self.sorted.slopes.any:
            if narrow.weight is not None:
                slope.mul_(self.sorted.runs.weigh_(self.losses[:t], here))
            slope = self.sorted.form.descend_(slope, scores)
            slope.scatter_add_(1, narrow.place, self.sorted.form.descend_(by_pair, near))
            self.sorted.many(here, slope)
        return total, count

    def _sums(self, here: slice, x: Tensor) -> Tensor:
        """Sums Σ_n w_an x_an [t] over the rows of x [t, m]."""
        return self.sorted.runs.sums(x, here)

    def _number(self, here: slice, scores: Tensor, narrow: Narrow) -> Tensor:
        """Measure of all triplets of a strip."""
        if narrow.weight is None:
            return (narrow.positive.sum(dim=1) * (scores.shape[1] - narrow.run.sum(dim=1))).sum()
        negative = self._sums(here, torch.gt(scores, -math.inf, out=self.losses[: len(scores)]))
        return (narrow.weight.sum(dim=1, dtype=torch.float64) * negative).sum()

    def _judge(self, here: slice, scores: Tensor, height: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [t] of the losses of all negatives with one positive per row, and their slopes [t, m] in `out`."""
        if self.smooth:
            torch.add(scores, self.margin - height, out=out).mul_(1 / self.smooth)
            losses = self._sums(here, torch.nn.functional.softplus(out, threshold=40.0))
            return self.smooth * losses, out.sigmoid_()
        if self.band:
            # 0 < s_ap - s_an < m, decided by the difference itself, so that ties are exact
            torch.threshold_(torch.sub(height, scores, out=out), 0.0, self.margin)
            out.neg_().add_(self.margin).relu_()
        else:
            torch.sub(scores, height - self.margin, out=out).relu_()
        return self._sums(here, out), out.sign_()

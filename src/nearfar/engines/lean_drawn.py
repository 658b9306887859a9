"""Fast path for miners that draw as many negative pairs as an anchor has positive ones.

What is drawn is a narrow matrix [n, P + K] of positive and negative pairs, which sets, groups and links take as they
take the matrix of all pairs. One product of all pairs is enough: the gradient is that of the pairs which were drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.process_group import cuts
from nearfar.engines.dense import dense_value
from nearfar.engines.forms import form_of
from nearfar.engines.runs import Columns, columns
from nearfar.engines.strips import ENTRIES, Strips, gradient, height
from nearfar.engines.sweeps import Ask, Made
from nearfar.groups.groupings import Product
from nearfar.miners import ScoredPairs
from nearfar.relations.layout import Layout

__all__ = ["by_draws", "leans_on_draws"]


def leans_on_draws(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.miner is None or product.miner.log_odds(torch.ones(1, 1), 3) is None:
        return False
    if product.groups.scope not in ("batch", "sign", "balanced", "anchor", "anchor_sign") or product.wants_columns:
        return False
    return product.reduction != "none" and form_of(product.similarity) is not None


def by_draws(strips: Strips, new_slopes: Ask) -> Made | None:
    """Value and gradient of the loss, in one sweep; None if an anchor has many positive pairs."""
    layout, product, slopes = strips.layout, strips.product, new_slopes()
    assert layout is not None  # noqa: S101 - checked by the caller
    runs = columns(layout, strips.rows.dtype)
    if not runs.few:
        return None
    strips.had_positive, strips.had_negative = runs.has_positive(), runs.has_negative()
    work = _Draws(strips, runs, layout)
    scores, place, positive, negative = work.all()
    pairs = ScoredPairs(
        scores.requires_grad_(),
        positive,
        negative,
        strips.had_positive,
        strips.had_negative,
        strips.relation,
        product.similarity,
        strips.rows,
        strips.cols,
        strip=True,
        mined=True,
    )
    with torch.set_grad_enabled(slopes.any):
        value = dense_value(product, pairs)
    by_pair, *rest = gradient(value, (scores, *slopes.params))
    slopes.add((slice(0), slice(0)), (None, None, *rest))
    if by_pair is not None:
        slope, (by_row, by_col, *_) = work.form.descend_(by_pair.clone(), scores.detach().clone()), slopes.sums
        for here in work.cuts:
            totals = None if by_row is None else by_row[here], by_col
            work.form.pull_few_(totals, slope[here], strips.rows[here], place[here])
    return value.detach(), slopes.sums


class _Draws:
    """State of one call: buffers, and where the draws fall."""

    def __init__(self, strips: Strips, runs: Columns, layout: Layout) -> None:
        form = form_of(strips.product.similarity)
        assert form is not None  # noqa: S101 - checked by `leans_on_draws`
        self.strips, self.runs, self.layout, self.form = strips, runs, layout, form(strips.cols)
        self.narrow = runs.narrow(slice(0, len(strips.rows)))
        self.measure = self.narrow.positive if self.narrow.weight is None else self.narrow.weight
        self.wanted = self.measure.to(strips.rows.dtype).sum(dim=1, keepdim=True)
        most = min(strips.relation.shape[1], max(1, math.ceil(float(self.wanted.amax()))))
        # one draw for every row of the relation, as the dense engine draws
        spots = torch.rand(strips.relation.shape[0], most, dtype=torch.float64, device=strips.rows.device)
        self.spots = layout.taken(spots, 0)
        self.place = runs.order[self.narrow.place]
        # operations allocate: low strips
        tall = strips.tall if strips.given else height(len(strips.cols), None, ENTRIES, strips.rows.device)
        self.cuts = cuts(len(strips.rows), tall, strips.ranks)
        self.buffer = strips.rows.new_empty(tall, len(strips.cols))

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores, columns, and measures of the positive and of the negative pairs, [n, P + K] each."""
        near, far, hits, counted = (torch.cat(x) for x in zip(*map(self._strip, self.cuts), strict=True))
        none = torch.zeros_like(counted, dtype=self.measure.dtype)
        positive = torch.cat([self.measure, none], dim=1)
        negative = torch.cat([torch.zeros_like(near), counted.to(near.dtype)], dim=1)
        return torch.cat([near, far], dim=1), torch.cat([self.place, hits], dim=1), positive, negative

    def _strip(self, here: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores of the positive and of the drawn pairs of a strip, the columns of these, and which of them count."""
        rows, place, spots = self.strips.rows[here], self.place[here], self.spots[here]
        scores = self.form.scores(rows, self.buffer[: len(rows)])
        near = scores.gather(1, place)
        heights = self._chance(here, scores).to(torch.float64).cumsum(dim=1)
        end = heights[:, -1:]
        hit = torch.searchsorted(heights, spots * end, right=True).clamp(max=scores.shape[1] - 1)
        order = torch.arange(spots.shape[1], device=spots.device)
        return near, scores.gather(1, hit), hit, (order < self.wanted[here]) & (end > 0)

    def _chance(self, here: slice, scores: Tensor) -> Tensor:
        """The chance [t, m] of each negative pair of a strip, summing to 1 or 0 over a row."""
        miner, similarity = self.strips.product.miner, self.strips.product.similarity
        assert miner is not None  # noqa: S101 - checked by `leans_on_draws`
        odds = miner.log_odds(similarity.distance(scores), self.strips.rows.shape[1])
        assert odds is not None  # noqa: S101 - likewise
        place, run = self.place[here], self.narrow.run[here]
        odds.scatter_(1, place, torch.where(run, -math.inf, odds.gather(1, place)))
        top = odds.amax(dim=1, keepdim=True)
        chance = odds.sub_(torch.where(top > -math.inf, top, 0.0)).exp_()
        weights = self.layout.weights
        if weights is not None:
            chance.mul_(weights[here] if isinstance(weights, Tensor) else torch.outer(weights[0][here], weights[1]))
        norm = chance.sum(dim=1, keepdim=True)
        return chance.div_(torch.where(norm > 0, norm, 1.0))

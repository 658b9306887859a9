"""Fast path for triplets of few negatives: each positive with the negative of its rank, or the one worst of the batch.

    balanced      the i-th positive of an anchor with its i-th hardest negative: P triplets a row
    hardest       max over anchors of  max over n of s_an - min over p of s_ap: one triplet a row, and then one in all

Negatives that are equally hard are ranked by their order in the batch; triplets that are equally bad are left to the
general path, which shares the weight among them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar.engines.forms import form_of
from nearfar.engines.lean_triplets import rule_of
from nearfar.engines.runs import Sorted, place_
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Counted, Made, shared
from nearfar.groups.groupings import Product
from nearfar.groups.triplets import difference
from nearfar.relations.layout import Layout

__all__ = ["by_ranks", "leans_on_ranks"]


def leans_on_ranks(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.groups.scope != "triplets" or product.miner is not None or layout.weights is not None:
        return False
    fold, of, rule = product.over_negative.fold(), product.over_negative, rule_of(product)
    if rule.compare is not difference or rule.keep is not None or form_of(product.similarity) is None:
        return False
    if fold is None or of.zero_member:
        return False
    if rule.balanced:
        return fold.kind == "sum"
    form = product.negative.form(-1)  # the worst triplet has the largest score where the loss never falls
    rises = form is not None and form.shape in ("line", "power", "softplus") and form.a > 0 and form.scale > 0
    return fold.kind == "max" and of.zero == "keep" and rises


def by_ranks(strips: Strips, new_slopes: Ask) -> Made | None:
    """Value and gradient of the loss, in one sweep; None if several triplets are the worst."""
    work = _Ranked(strips, Sorted(strips, new_slopes()))
    if rule_of(strips.product).balanced:
        value, share = shared(strips, Counted([work.balanced(here) for here in strips]))
        return value.to(strips.rows.dtype), work.sorted.finished(share)
    return work.hardest()


class _Ranked:
    """State of one call: a buffer, and where each column is among the sorted ones."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        self.strips, self.sorted, self.product, self.rows = strips, sorted, strips.product, strips.rows
        self.buffer = strips.rows.new_empty(sorted.shape)
        self.sorted_at = sorted.runs.order.argsort()

    def _ranked(self, here: slice, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores and columns of the `count` hardest negatives, columns and scores of the own label, of a strip."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        scores = self.sorted.form.scores(rows, self.buffer[: len(rows)])
        near = scores.gather(1, narrow.place)
        place_(scores, narrow, -math.inf)
        values, columns = scores.topk(min(count, scores.shape[1]), dim=1)
        tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(dim=1).nonzero()[:, 0]
        if len(tied):  # few rows: ranked anew, in the order of the batch
            order = scores[tied][:, self.sorted_at].sort(dim=1, descending=True, stable=True).indices
            columns[tied] = self.sorted_at[order[:, : columns.shape[1]]]
        return values, columns, narrow.place, torch.where(narrow.positive, near, math.inf)

    def balanced(self, here: slice) -> tuple[Tensor, Tensor]:
        """Sum of the losses of a strip's triplets, and number of triplets that count; adds their gradient."""
        ranked, columns, place, near = self._ranked(here, self.sorted.runs.width + 1)
        positive = torch.isfinite(near)
        rank = positive.cumsum(dim=1) - 1
        at = rank.clamp(0, ranked.shape[1] - 1)
        far, column = ranked.gather(1, at), columns.gather(1, at)
        real = positive & (rank < ranked.shape[1]) & (far > -math.inf)
        near, far = torch.where(real, near, 0.0), torch.where(real, far, 0.0)
        slopes, form = self.sorted.slopes, self.sorted.form
        with torch.enable_grad():
            near, far = near.requires_grad_(), far.requires_grad_()
            losses = self.product.negative(far - near, -1)
            counted = real & ~(losses.detach() <= 0) if self.product.over_negative.zero == "drop" else real
            top = torch.where(counted, losses, 0.0).sum()
            by_near, by_far, *rest = gradient(top, (near, far, *slopes.params))
        if slopes.any and by_near is not None and by_far is not None:
            slopes.add((here, here), (None, None, *rest))
            pulled = (form.descend_(by_near.clone(), near.detach()), form.descend_(by_far.clone(), far.detach()))
            self.sorted.few(here, torch.cat([place, column], dim=1), torch.cat(pulled, dim=1))
        return top.detach(), counted.sum().to(top.dtype)

    def hardest(self) -> Made | None:
        """Value and gradient of the one worst triplet; None if several are equally bad."""
        n = len(self.rows)
        score = self.rows.new_full((n,), -math.inf)
        ends, alone = (
            torch.zeros(2, n, dtype=torch.int64, device=score.device),
            torch.zeros_like(score, dtype=torch.bool),
        )
        for here in self.strips:
            ranked, columns, place, near = self._ranked(here, 2)
            least, which = near.sort(dim=1)
            twice = (ranked[:, -1] == ranked[:, 0]) & (ranked.shape[1] > 1)
            twice |= (least[:, min(1, least.shape[1] - 1)] == least[:, 0]) & (least.shape[1] > 1)
            score[here], alone[here] = ranked[:, 0] - least[:, 0], ~twice
            ends[0, here], ends[1, here] = place.gather(1, which)[:, 0], columns[:, 0]
        ranks = self.strips.ranks
        score, ends, alone = ranks.largest(score), ranks.sum(ends), ranks.any(alone)
        best, row = score.max(dim=0)
        if bool(best == -math.inf):  # no triplet
            return torch.zeros_like(best), self.sorted.finished(torch.ones_like(best))
        value = self.product.negative(best, -1)
        idle = float(value) == 0 and self._idle
        if not idle and not bool(alone[row] & ((score == best).sum() == 1)):
            return None
        if not idle and self.sorted.slopes.any and ranks.rank == 0:
            self._pull(row, *ends[:, row])
        return value, self.sorted.finished(torch.ones_like(best))

    @property
    def _idle(self) -> bool:
        """Whether a triplet without loss has no gradient either."""
        form = self.product.negative.form(-1)
        return form is not None and form.shape == "power"

    def _pull(self, row: Tensor, positive: Tensor, negative: Tensor) -> None:
        """Add the gradient of one triplet, given as a row and two sorted columns."""
        slopes, cols = self.sorted.slopes, self.sorted.form.cols
        place = torch.stack([positive, negative])
        with torch.enable_grad():
            x, y = self.rows[row].requires_grad_(), cols[place].requires_grad_()
            s = self.product.similarity.finish(y @ x, (x * x).sum(), (y * y).sum(dim=1))
            by_row, by_col, *rest = gradient(self.product.negative(s[1] - s[0], -1), (x, y, *slopes.params))
        slopes.add((row[None], row[None]), (None if by_row is None else by_row[None], None, *rest))
        if self.sorted.cols is not None and by_col is not None:
            self.sorted.cols.index_add_(0, place, by_col)

"""Fast path for lifted structure: both samples of a positive pair bring the negative pairs of their own.

E_ik = w_ik e^{l_ik/γ},  v_i = γ log Σ_k E_ik,  u_k = γ log Σ_i E_ik     first sweep
a_i = dF/dv_i,  b_k = dF/du_k, from the link on positive pairs [t, P]    then, strip by strip
dF/dl_ik = E_ik (a_i/Σ_k E_ik + b_k/Σ_i E_ik)                            second sweep

If columns are rows and nothing tells a pair from its mirror image, u = v, b = a, and the last is symmetric: one product
is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.shortcuts import learned_tensors
from nearfar._utils.tensors import over
from nearfar.engines.forms import form_of
from nearfar.engines.lean import line_of
from nearfar.engines.runs import Narrow, Sorted, place_
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Made, shared
from nearfar.engines.windows import fence, windowed
from nearfar.groups.groupings import Product, tally
from nearfar.links import Sides
from nearfar.relations.layout import Layout

__all__ = ["by_ends", "leans_on_ends"]


def leans_on_ends(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    over, fold, link = product.over_negative, product.over_negative.fold(), product.link
    if product.groups.scope != "anchor_sign" or not product.wants_columns or not windowed(product, layout):
        return False
    if product.reduction == "none" or product.everyone or learned_tensors((product.negative,)):
        return False
    if fold is None or fold.kind != "exp" or fold.normalized or fold.held or over.zero_member or over.zero == "drop":
        return False
    line, similarity = line_of(product), product.similarity
    if link is None or form_of(similarity) is None or line is None:
        return False
    # bounds the exponents, so that their sums can neither overflow nor vanish
    return similarity.normalize and line[0] <= 10 * fold.gamma


def by_ends(strips: Strips, new_slopes: Ask) -> Made | None:
    """Value and gradient of the loss, in two sweeps; None if a miner meets an anchor with many positive pairs."""
    work = _Ends(strips, Sorted(strips, new_slopes()))
    if strips.product.miner is not None and not work.sorted.runs.few:
        return None  # what it keeps of them is held for all rows
    work.look()
    value, share = shared(strips, [work.link(here) for here in strips])
    if work.sorted.slopes.any:
        work.pull()
    return value.to(strips.rows.dtype), work.sorted.finished(share)


class _Ends:
    """State of one call: buffers, the sums of E over rows and over columns, and the gradients in their logarithms.

    Columns are in their sorted order.
    """

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        product, line, fold, layout = (
            strips.product,
            line_of(strips.product),
            strips.product.over_negative.fold(),
            strips.layout,
        )
        assert fold is not None and line is not None and layout is not None  # noqa: S101, PT018 - by `leans_on_ends`
        assert product.link is not None  # noqa: S101
        self.strips, self.sorted, self.rows, self.product, self.line = strips, sorted, strips.rows, product, line
        self.gamma = fold.gamma
        self.mirrored = layout.square and product.miner is None and product.link.symmetric
        wanted = (True, True, True, product.miner is not None, sorted.runs.weights is not None)
        self.buffers = [strips.rows.new_empty(sorted.shape if each else (0, 0)) for each in wanted]
        self.anchors = strips.had_positive | strips.had_negative
        self.sums = [strips.rows.new_zeros(len(x)) for x in (strips.rows, strips.cols)]
        self.pulls = [torch.zeros_like(x) for x in self.sums]
        self.measures = dict[int, Tensor]()

    def _wide(self, here: slice) -> tuple[Tensor, Tensor]:
        """Scores [t, m] of a strip, and E, 0 for pairs that are not negative."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        scores, e, _, ring, weights = (buffer[: len(rows)] for buffer in self.buffers)
        self.sorted.form.scores(rows, scores)
        torch.mul(scores, self.line[0] / self.gamma, out=e)
        if self.product.miner is not None:
            near, measure = scores.gather(1, narrow.place), self._measure(narrow)
            _, window = fence(self.product.miner, scores, near, narrow, measure, ring)
            self.measures[here.start] = measure * window.positive
            e.add_(ring)
        e.exp_()
        if len(weights):
            e.mul_(self.sorted.runs.weigh_(weights, here))
        return scores, place_(e, narrow, 0.0)

    def _measure(self, narrow: Narrow) -> Tensor:
        return narrow.positive if narrow.weight is None else narrow.weight

    def look(self) -> None:
        """First sweep: the sums of E."""
        for here in self.strips:
            e = self._wide(here)[1]
            self.sums[0][here] = e.sum(dim=1)
            if not self.mirrored:
                self.sums[1] += e.sum(dim=0)
        ranks = self.strips.ranks
        self.sums[0] = ranks.sum(self.sums[0])
        self.sums[1] = self.sums[0][self.sorted.runs.order] if self.mirrored else ranks.sum(self.sums[1])
        self.values = [self.line[1] + self.gamma * torch.where(x > 0, x, 1.0).log() for x in self.sums]

    def link(self, here: slice) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of a strip's terms; adds the gradients of positive pairs and of negative values."""
        rows, narrow, form = self.rows[here], self.sorted.runs.narrow(here), self.sorted.form
        place, measure = narrow.place, self.measures.get(here.start, self._measure(narrow))
        cols = form.cols[place]
        dot, norms = torch.bmm(cols, rows[:, :, None])[:, :, 0], (rows * rows).sum(dim=1, keepdim=True)
        with torch.enable_grad():
            near = self.product.similarity.finish(dot, norms, (cols * cols).sum(dim=2)).requires_grad_()
            mine, theirs = self.values[0][here].requires_grad_(), self.values[1][place].requires_grad_()
            losses = self.product.positive(near, +1)
            sides = Sides(
                positive=self.product.over_positive.value(losses, measure),
                negative=mine,
                has_positive=(measure > 0).any(dim=1),
                has_negative=self.sums[0][here] > 0,
                anchors=self.anchors[here],
                losses=losses,
                measure=measure,
                columns=theirs,
                has_columns=self.sums[1][place] > 0,
            )
            (terms,) = self.product.joined(sides)
            top, bottom = tally(terms, self.product.reduction)
            found = gradient(top, (near, mine, theirs, *self.sorted.slopes.params))
        if self.sorted.slopes.any and found[0] is not None and found[1] is not None and found[2] is not None:
            self.sorted.slopes.add((here, here), (None, None, *found[3:]))
            self.sorted.few(here, place, form.descend_(found[0].clone(), near.detach()))
            self.pulls[0][here] += found[1]
            self.pulls[1].index_add_(0, place.reshape(-1), found[2].reshape(-1))
        return top.detach(), bottom

    def pull(self) -> None:
        """Second sweep: add the gradient of the negative pairs; where mirrored, to rows only but doubled."""
        ranks, order, total = self.strips.ranks, self.sorted.runs.order, self.sorted.slopes.sums[0]
        mine = ranks.sum(self.pulls[0]) if self.mirrored else self.pulls[0]
        theirs = mine[order] if self.mirrored else ranks.sum(self.pulls[1])
        by_row, by_col = over(mine, self.sums[0]), over(theirs, self.sums[1])
        for here in self.strips:
            scores, e = self._wide(here)
            both = torch.add(by_row[here, None], by_col[None, :], out=self.buffers[2][: len(e)])
            slope = self.sorted.form.descend_(e.mul_(both.mul_(self.line[0] * (2 if self.mirrored else 1))), scores)
            if not self.mirrored:
                self.sorted.many(here, slope)
            elif total is not None:
                self.sorted.form.pull_(total[here], slope, self.rows[here], self.sorted.form.cols)

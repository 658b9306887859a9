"""Fast path for lifted structure with plain labels and no reference: both samples of a pair are rows.

v_i = γ log Σ_k e^{l_ik/γ}                                     first sweep
a_i = dF/dv_i, from the link on positive pairs [t, P]          then, strip by strip
dF/dl_ik = a_i e^{(l_ik - v_i)/γ} + a_k e^{(l_ik - v_k)/γ}     second sweep; symmetric, so one product is enough
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar.engines.forms import form_of
from nearfar.engines.lean import line_of
from nearfar.engines.runs import Narrow, Sorted
from nearfar.engines.strips import Strips, gradient
from nearfar.engines.sweeps import Ask, Made, shared
from nearfar.groups.groupings import Product, tally
from nearfar.links import Sides
from nearfar.relations.layout import Layout
from nearfar.sets.entropic import LOWEST

__all__ = ["by_ends", "leans_on_ends"]


def leans_on_ends(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    over, fold, link = product.over_negative, product.over_negative.fold(), product.link
    if (
        product.groups.scope != "anchor_sign"
        or not product.wants_columns
        or product.miner is not None
        or layout.weights is not None
    ):
        return False
    if not layout.square or product.reduction == "none" or product.everyone:
        return False
    if fold is None or fold.kind != "exp" or fold.normalized or fold.held or over.zero_member or over.zero == "drop":
        return False
    line, similarity = line_of(product), product.similarity
    if link is None or not link.symmetric or form_of(similarity) is None or line is None:
        return False
    # bounds v_i - v_k, so that the exponential of the difference cannot overflow
    return similarity.normalize and line[0] <= 10 * fold.gamma


def by_ends(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient of the loss, in two sweeps."""
    work = _Ends(strips, Sorted(strips, new_slopes()))
    for here in strips:
        work.look(here)
    work.values = strips.ranks.sum(work.values)
    value, share = shared(strips, [work.link(here) for here in strips])
    if work.sorted.slopes.any:
        work.pulls = strips.ranks.sum(work.pulls)
        for here in strips:
            work.pull(here)
    return value.to(strips.rows.dtype), work.sorted.finished(share)


class _Ends:
    """State of one call: buffers, the negative value v of each row, and the gradient a in it."""

    def __init__(self, strips: Strips, sorted: Sorted) -> None:
        over, line = strips.product.over_negative, line_of(strips.product)
        fold = over.fold()
        assert fold is not None  # noqa: S101 - checked by `leans_on_ends`
        assert line is not None  # noqa: S101
        self.sorted, self.rows, self.product, self.over, self.line = sorted, strips.rows, strips.product, over, line
        self.gamma = fold.gamma
        self.scores, self.losses, self.both = (strips.rows.new_empty(sorted.shape) for _ in range(3))
        self.has = strips.had_negative
        self.anchors = strips.had_positive | strips.had_negative
        self.values = strips.rows.new_zeros(len(strips.rows))
        self.pulls = torch.zeros_like(self.values)

    def _wide(self, here: slice) -> tuple[Tensor, Tensor, Narrow]:
        """Scores and losses [t, m] of a strip, -inf for pairs that are not negative, and its positive columns."""
        rows, narrow = self.rows[here], self.sorted.runs.narrow(here)
        scores = self.sorted.form.scores(rows, self.scores[: len(rows)])
        losses = torch.mul(scores, self.line[0], out=self.losses[: len(rows)]).add_(self.line[1])
        near = losses.gather(1, narrow.place)
        return scores, losses.scatter_(1, narrow.place, torch.where(narrow.run, -math.inf, near)), narrow

    def look(self, here: slice) -> None:
        """First sweep: negative values of the rows of a strip."""
        losses = self._wide(here)[1]
        self.values[here] = self.over.solved_(losses, self.has[here].to(losses.dtype)).value

    def link(self, here: slice) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of a strip's terms; adds the gradients of positive pairs and of negative values."""
        rows, narrow, form = self.rows[here], self.sorted.runs.narrow(here), self.sorted.form
        other = self.sorted.runs.order[narrow.place]
        cols = form.cols[narrow.place]
        dot, norms = torch.bmm(cols, rows[:, :, None])[:, :, 0], (rows * rows).sum(dim=1, keepdim=True)
        with torch.enable_grad():
            near = self.product.similarity.finish(dot, norms, (cols * cols).sum(dim=2)).requires_grad_()
            mine, theirs = self.values[here].requires_grad_(), self.values[other].requires_grad_()
            losses = self.product.positive(near, +1)
            sides = Sides(
                positive=self.product.over_positive.value(losses, narrow.positive),
                negative=mine,
                has_positive=narrow.positive.any(dim=1),
                has_negative=self.has[here],
                anchors=self.anchors[here],
                losses=losses,
                measure=narrow.positive,
                columns=theirs,
                has_columns=self.has[other],
            )
            (terms,) = self.product.joined(sides)
            top, bottom = tally(terms, self.product.reduction)
            found = gradient(top, (near, mine, theirs, *self.sorted.slopes.params))
        if self.sorted.slopes.any and found[0] is not None and found[1] is not None:
            self.sorted.slopes.add((here, here), (None, None, *found[3:]))
            self.sorted.few(here, narrow.place, form.descend_(found[0].clone(), near.detach()))
            self.pulls[here] += found[1]
        return top.detach(), bottom

    def pull(self, here: slice) -> None:
        """Second sweep: add the gradient of a strip's negative pairs, to its rows only but doubled, by symmetry."""
        total = self.sorted.slopes.sums[0]
        if total is None:
            return
        scores, losses, _ = self._wide(here)
        gamma, order = self.gamma, self.sorted.runs.order
        mine, pulls = self.values[here, None], self.pulls[here, None]
        losses.sub_(mine).mul_(1 / gamma).clamp_min_(LOWEST[losses.dtype]).exp_()
        top = self.values.amax()
        rise, fall = torch.exp((mine - top) / gamma), self.pulls[order] * torch.exp((top - self.values[order]) / gamma)
        both = torch.mul(rise, fall[None, :], out=self.both[: len(losses)]).add_(pulls)
        slope = self.sorted.form.descend_(losses.mul_(both).mul_(2 * self.line[0]), scores)
        self.sorted.form.pull_(total[here], slope, self.rows[here], self.sorted.form.cols)

"""Fast path for groups of the whole batch: losses and weights in place, in sweeps of a half matrix."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.shortcuts import learned_tensors
from nearfar.engines.forms import form_of, plain_hinge, slope_at_zero, write_slopes
from nearfar.engines.half_strips import Half, Start, Strip, Sums
from nearfar.engines.strips import Slopes, Strips
from nearfar.engines.sweeps import Ask, Made, Source, solved
from nearfar.engines.windows import windowed
from nearfar.groups.groupings import Problem, Product
from nearfar.pairs import PairLoss
from nearfar.relations.layout import Layout
from nearfar.sets.stream import Stream, Support

__all__ = ["by_halves", "halves"]


def halves(product: Product, layout: Layout) -> bool:
    """Whether this fast path supports a loss: checks each factor."""
    if product.groups.scope not in ("batch", "sign", "balanced") or not windowed(product, layout):
        return False
    if form_of(product.similarity) is None or (product.link is not None and learned_tensors((product.link,))):
        return False
    if product.positive is not product.negative and learned_tensors(_both(product)):
        return False  # the gradient of a threshold is one sum over both signs
    streams = (of.stream(1, torch.zeros(1)) for of in (product.over_positive, product.over_negative))
    # of half a matrix each pair counts twice, and a zero member once
    known = all(stream is not None and not stream.over.zero_member for stream in streams)
    return known and _flat(product.positive, +1) and _flat(product.negative, -1)


def _flat(pair: PairLoss, sign: int) -> bool:
    """Whether a pair loss is nonnegative, with slope 0 where it is 0."""
    form = pair.form(sign)
    known = form is not None and form.shape in ("power", "softplus") and form.scale > 0
    return known and isinstance(slope_at_zero(pair, sign)[0], Tensor)


def _both(product: Product) -> tuple[PairLoss, PairLoss]:
    """The pair losses of positive and negative pairs."""
    return product.positive, product.negative


def by_halves(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient for groups of the whole batch."""
    return solved(_Halves(strips, new_slopes()))


class _Halves(Source):
    """The pairs of a half matrix: one group of all pairs, or one of positive and one of negative pairs."""

    rescales = True

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        super().__init__(strips, slopes)
        self.half, product = Half(strips, slopes), strips.product
        sets = {"all": product.over_positive}
        if self.groups.scope != "batch":
            sets = {"near": product.over_positive, "wide": product.over_negative}
        nothing = strips.rows.new_zeros(1, 0)
        problems = tuple(Problem(over, nothing, nothing > 0, (1, 0), self.half.per) for over in sets.values())
        self.streams = tuple(stream for stream in self.groups.streams(problems) if stream is not None)
        for stream in self.streams:
            stream.ranks, stream.times, stream.floor = strips.ranks, 2 if self.half.square else 1, 0.0
        self.sides = [_Side(self.half, *each) for each in zip(sets, self.streams, strict=True)]

    def look(self, wanted: list[int]) -> None:
        for strip in self.half:
            for k in wanted:
                self.sides[k].look(strip)

    def support(self, which: int) -> Support | None:
        found, side = self.streams[which].support(), self.sides[which]
        return None if found is None else self.half.support(side.starts, found, near=side.name == "near")

    def weigh(self, which: list[int], factors: tuple[Tensor, ...]) -> dict[int, Tensor]:
        for strip in self.half:
            for k in which:
                self.sides[k].weigh(strip)
        values = dict[int, Tensor]()
        for k in which:
            values[k], scale = self.sides[k].finish()
            self.half.gather(self.sides[k].sums, (scale * factors[k])[0])
        return values


class _Side:
    """One group of a call: the stream that reduces it, and the gradient of what was weighed.

    Args:
        half: the strips of the call.
        name: "near" for positive pairs, "wide" for negative pairs, "all" for both.
        stream: reduces the group.
    """

    def __init__(self, half: Half, name: str, stream: Stream) -> None:
        self.half, self.name, self.stream = half, name, stream
        self.starts, self.seen = list[Start](), 0

    @cached_property
    def sums(self) -> Sums:
        """The gradient of what was weighed, up to a factor."""
        return Sums(self.half.rows, self.half.form.cols)

    def look(self, strip: Strip) -> None:
        """Add the losses of a strip to the stream."""
        losses, size, weights = self._losses(strip)
        if not self.stream.sweep:
            self.starts.append((self.seen, strip.rows, strip.first))
            self.seen += losses.numel()
        free = None if self.name == "near" else _flat_view(strip.free)
        self.stream.look(_flat_view(losses), size, _flat_view(weights), free)

    def weigh(self, strip: Strip) -> None:
        """Turn the losses of a strip into weights, and add their gradient."""
        pairs, wanted, near = self.half.product, self.half.slopes.any, self.name == "near"
        dl_ds = None
        if wanted and not near and not (self.stream.vanishes and plain_hinge(pairs.negative)):
            # else weights vanish where a hinge is 0, so that its slope may be taken as 1 everywhere
            dl_ds = write_slopes(pairs.negative, strip.scores, strip.losses, strip.free)
        losses, size, weights = self._losses(strip)
        free = None if near or dl_ds is not None else _flat_view(strip.free)
        self.sums.shrink(self.stream.weigh_(_flat_view(losses), size, _flat_view(weights), free))
        if not wanted:
            return
        by_near = torch.zeros_like(strip.near) if self.name == "wide" else pairs.positive.slope(strip.near, +1)
        assert isinstance(by_near, Tensor)  # noqa: S101 - checked by `halves`
        if near:
            raw = losses if not self.stream.even else torch.ones_like(losses) if weights is None else weights
            self.half.pull_near(strip, torch.where(strip.positive, by_near, 0.0) * raw, self.sums)
        elif dl_ds is None:
            raw = losses.gather(1, strip.place)
            raw = torch.where(strip.positive, raw * by_near, torch.where(strip.absent, 0.0, raw))
            self.half.pull(strip, losses.scatter_(1, strip.place, raw), self.sums)
        else:
            if strip.fence is not None:
                dl_ds.mul_(strip.fence == 0)
            self.half.fill_(dl_ds, strip, by_near, 0.0)
            if self.stream.even:
                self.half.pull(strip, dl_ds if weights is None else dl_ds.mul_(weights), self.sums)
            else:
                self.half.pull(strip, losses.mul_(dl_ds), self.sums)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Value [1] of the group, and the factor [1] of the gradient."""
        if self.stream.single:
            self.stream.turn()
            self.sums.shrink(self.stream.merged)
        return self.stream.finish()

    def _losses(self, strip: Strip) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """Losses of the group's pairs in a strip, marked elsewhere; their measure, and weights (None: each once)."""
        absent, product = self.stream.absent, self.half.product
        if self.name == "near":
            weights = strip.near_weights
            losses = torch.where(strip.positive, product.positive(strip.near, +1), absent)
            return losses, strip.positive.sum() if weights is None else weights.sum(), weights
        together = self.name == "all"
        positive, negative = self.half.members(strip)
        near = product.positive(strip.near, +1) if together else torch.full_like(strip.near, absent)
        weights = strip.weights
        if weights is not None and together and strip.near_weights is not None:
            weights = self.half.fill_(weights, strip, strip.near_weights, 0.0)
        losses = strip.losses
        if strip.fence is not None:
            losses = losses.mul_(strip.fence == 0) if absent == 0 else losses.add_(strip.fence)
        losses = self.half.fill_(losses, strip, near, absent)
        return losses, positive + negative if together else negative, weights


def _flat_view(x: Tensor | None) -> Any:
    """The entries of a strip as one group [1, t·u], in the same memory."""
    return None if x is None else x.view(1, -1)

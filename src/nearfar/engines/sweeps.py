"""General path of the tiled engine: per-anchor groups in one sweep, groups of the whole batch by streams.

`by_rows` and `by_streams` return the value and, if needed, the gradient, which is computed strip by strip. Fast paths
for groups of the whole batch are sources of `solved`, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.forms import form_of
from nearfar.engines.listed_scores import ListedScores
from nearfar.engines.strips import Slopes, Strips, cut, gradient
from nearfar.groups.groupings import Problems, Product, tally
from nearfar.miners import ScoredPairs
from nearfar.relations.relation import EVERYTHING
from nearfar.sets.stream import Stream, Support

__all__ = ["Ask", "Counted", "Gradient", "Made", "Source", "by_rows", "by_streams", "running", "shared", "solved"]

Gradient = list[Tensor | None]
"""Gradients of rows, columns and parameters; None for those that are not needed."""
Made = tuple[Tensor, Gradient]
"""Value and gradient of a loss."""
Ask = Callable[[], Slopes]
"""Creates an empty gradient, to which strips are added."""
Counted = list[tuple[Tensor, Tensor]]
"""Numerator and denominator of each term of a loss."""


def by_rows(strips: Strips, new_slopes: Ask, grad_output: Tensor | None = None) -> Made:
    """Value and gradient for groups within one row, in one sweep.

    Args:
        strips: the strips of the call.
        new_slopes: creates an empty gradient.
        grad_output: [n] gradient of unreduced values; without it, they get no gradient.
    """
    product, slopes = strips.product, list[Slopes]()
    single, values, so_far = product.reduction == "none", list[Tensor](), Counted()
    for here in strips:
        first = slopes[0] if slopes else new_slopes()
        with torch.set_grad_enabled(first.any and (not single or grad_output is not None)):
            pairs = first.pairs(here)
            leaf = cut(pairs) if torch.is_grad_enabled() else pairs
            share = None if grad_output is None else over(grad_output[here], _bottom(product, pairs, strips.most))
            counted = Counted()
            for part in _parts(product, leaf, strips.most):
                slopes = slopes or [first, *(new_slopes() for _ in part[1:])]
                counted = _sum(counted, [(top.detach(), bottom) for top, bottom in part])
                if torch.is_grad_enabled():
                    for slope, (top, _) in zip(slopes, part, strict=True):
                        slope.note(top if share is None else (top * share).sum(), leaf)
            for slope in slopes:
                slope.through(here, pairs)
        if single:
            values.append(torch.stack([over(*x) for x in counted]).sum(dim=0))
        else:
            so_far = running(so_far, counted)
    if single:
        return strips.whole(values), slopes[0].sums if len(slopes) == 1 else _added([slope.sums for slope in slopes])
    whole = [shared(strips, [term]) for term in so_far]
    found = [slope.scaled(share) for slope, (_, share) in zip(slopes, whole, strict=True)]
    return torch.stack([value for value, _ in whole]).sum(dim=0).to(strips.rows.dtype), _added(found)


def shared(strips: Strips, parts: Counted) -> tuple[Tensor, Tensor]:
    """Value of the whole batch from the numerators and denominators of its parts, and its derivative in a numerator."""
    mine = torch.stack([torch.stack(x).sum(dim=0, dtype=torch.float64) for x in zip(*parts, strict=True)])
    top, bottom = strips.ranks.sum(mine).unbind()
    share = torch.ones_like(top) if strips.product.reduction == "sum" else over(torch.ones_like(top), bottom)
    return top * share, share


def _parts(product: Product, pairs: ScoredPairs, most: int) -> Iterator[Counted]:
    """Numerators and denominators of the terms of a strip, in parts of at most `most` entries."""
    for problems in product.groups.blocks(product, pairs, most):
        values = tuple(problem.value() for problem in problems)
        yield [tally(term, product.reduction) for term in product.groups.terms(product, pairs, problems, values)]


def _bottom(product: Product, pairs: ScoredPairs, most: int) -> Tensor:
    """Denominators [t] of unreduced values, which their gradient needs in advance."""
    with torch.no_grad():
        counted = Counted()
        for part in _parts(product, pairs, most):
            counted = _sum(counted, part)
    return counted[0][1]


def running(so_far: Counted, part: Counted) -> Counted:
    """Running sums of numerators and denominators over strips, in float64.

    Keeping a list of small tensors instead would fragment the memory, as large ones are freed around them.
    """
    return _sum(so_far, [(top.double(), bottom.double()) for top, bottom in part])


def _sum(so_far: Counted, part: Counted) -> Counted:
    """Add numerators and denominators, term by term."""
    if not so_far:
        return part
    return [(a + c, b + d) for (a, b), (c, d) in zip(so_far, part, strict=True)]


def _added(found: list[Gradient]) -> Gradient:
    """Sum of several gradients."""
    return [None if parts[0] is None else torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]
            for parts in zip(*found, strict=True)]  # fmt: skip


class Source(ABC):
    """Where the members of groups that span the batch come from, sweep by sweep.

    Attributes:
        strips: the strips of the call.
        slopes: the gradient to add to.
        streams: one for each group.
        rescales: whether `weigh` can be the only sweep of a stream that knows its weights up to a factor.
    """

    streams: tuple[Stream, ...]
    rescales = False

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        self.strips, self.slopes, self.groups = strips, slopes, strips.product.groups

    @abstractmethod
    def look(self, wanted: list[int]) -> None:
        """Sweep once, adding the members of these groups to their streams."""

    @abstractmethod
    def support(self, which: int) -> Support | None:
        """The few pairs that carry all the weight of a group, with flat indices i·m + j; None if they are many."""

    @abstractmethod
    def weigh(self, which: list[int], factors: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Sweep once and add the gradient of these groups, each times its factor; gives their values [1]."""


def solved(source: Source) -> Made:
    """Value and gradient: sweeps until every stream has converged, and one that applies the weights.

    If a stream knows the few pairs that carry all the weight, the last sweep is skipped for it.
    """
    streams, slopes = source.streams, source.slopes
    late = [source.rescales and stream.single for stream in streams]
    wanted = [k for k, waits in enumerate(late) if not waits]
    while wanted:
        source.look(wanted)
        wanted = [k for k in wanted if streams[k].turn()]
    supports = [None if waits else source.support(k) for k, waits in enumerate(late)]
    # merging is linear: its derivatives are its values at units
    units = torch.eye(len(streams), dtype=source.strips.rows.dtype, device=source.strips.rows.device)
    factors = tuple(source.groups.merge(unit.split(1), streams)[None] for unit in units)
    again = [k for k, found in enumerate(supports) if found is None and (slopes.any or late[k] or streams[k].constant)]
    values = source.weigh(again, factors) if again else {}
    for support, factor in zip(supports, factors, strict=True):
        if support is not None and slopes.any:
            _few(source.strips, slopes, support, factor)
    found = tuple(values[k] if k in values else stream.value() for k, stream in enumerate(streams))
    return source.groups.merge(found, streams).to(source.strips.rows.dtype), slopes.sums


def by_streams(strips: Strips, new_slopes: Ask) -> Made:
    """Value and gradient for groups of the whole batch."""
    return solved(_Problems(strips, new_slopes()))


class _Problems(Source):
    """The problems that a grouping makes of each strip."""

    def __init__(self, strips: Strips, slopes: Slopes) -> None:
        super().__init__(strips, slopes)
        next(iter(strips))  # keeps the state of the generators, which every sweep begins with
        problems = next(iter(self._blocks(strips.plain(slice(0, 1)))))
        self.streams = tuple(stream for stream in self.groups.streams(problems) if stream is not None)
        for stream in self.streams:
            stream.ranks = strips.ranks
        # whether each member is one pair, whose score can be computed alone
        self._alone = problems[0].positive is not None and form_of(strips.product.similarity) is not None

    def _blocks(self, pairs: ScoredPairs) -> Iterator[Problems]:
        return self.groups.blocks(self.strips.product, pairs, self.strips.most)

    def look(self, wanted: list[int]) -> None:
        for here in self.strips:
            for problems in self._blocks(self.strips.plain(here)):
                for k in wanted:
                    losses, positive = problems[k].losses, problems[k].positive
                    tag = None if positive is None else positive.expand(losses.shape)
                    self.streams[k].add(losses, problems[k].measure, tag)

    def support(self, which: int) -> Support | None:
        found = self.streams[which].support() if self._alone else None
        return None if found is None else replace(found, place=self.strips.swept(found.place))

    def weigh(self, which: list[int], factors: tuple[Tensor, ...]) -> dict[int, Tensor]:
        strips, slopes = self.strips, self.slopes
        sums = {k: torch.zeros(1, dtype=torch.float64, device=strips.rows.device) for k in which}
        for here in strips:
            with torch.set_grad_enabled(slopes.any):
                pairs = slopes.pairs(here)
                leaf = cut(pairs) if slopes.any else pairs
                for problems in self._blocks(leaf):
                    parts = {k: self.streams[k].held(problems[k].losses, problems[k].measure) for k in which}
                    for k, part in parts.items():
                        sums[k] += part.detach()
                    if slopes.any:
                        slopes.note(torch.stack([parts[k] * factors[k] for k in which]).sum(), leaf)
                slopes.through(here, pairs)
        return {k: strips.ranks.sum(sums[k]).to(strips.rows.dtype) for k in which if self.streams[k].constant}


def _few(strips: Strips, slopes: Slopes, support: Support, factor: Tensor) -> None:
    """Add the gradient of a few pairs, computed pair by pair, without the score matrix."""
    product, width = strips.product, len(strips.cols)
    with torch.enable_grad():
        rows, cols = strips.rows.detach().requires_grad_(), strips.cols.detach().requires_grad_()
        scores = ListedScores(product.similarity, rows, cols, "rows")[support.place // width, support.place % width]
        losses = torch.where(support.tag, product.positive(scores, +1), product.negative(scores, -1))
        value = (support.weights * losses).sum() * factor
        found = gradient(value, (rows, cols, *slopes.params))
    slopes.add((EVERYTHING, EVERYTHING), found)

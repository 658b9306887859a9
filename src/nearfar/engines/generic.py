"""Losses in strips of rows, by the plain definitions of their parts: supports custom parts and any relation.

A strip holds all pairs of its anchors, so that miners and groups of an anchor work within one strip. Groups that span
the batch are solved by the stream of their set, or by `Collected`. Autograd computes the gradient strip by strip.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup, cuts
from nearfar._utils.rng import State, set_states, states
from nearfar._utils.shortcuts import learned_tensors
from nearfar._utils.tensors import over
from nearfar.engines.dense import keep, score
from nearfar.groups._groupings import Problem, Product, halves, sides_of, tally
from nearfar.miners import ScoredPairs, present
from nearfar.relations.relation import EVERYTHING, Relation
from nearfar.sets.stream import Stream

__all__ = ["PlainStrips", "evaluate"]

ENTRIES = 2**18  # entries of a strip: 1 MB of float32, of which about forty exist at a time
WIDER = 2**4  # factor by which strips are larger on a GPU, where launching kernels would dominate otherwise

Made = tuple[Tensor, list[Tensor | None], Tensor, Tensor]
"""Value; gradients of rows, columns and parameters; which rows [n] had a positive and a negative pair."""
Counted = list[tuple[Tensor, Tensor]]  # numerator and denominator of each term of a loss


@dataclass
class PlainStrips:
    """The strips of one call; iterating over it is one sweep."""

    product: Product  # the factors of the loss
    relation: Relation  # which pairs are positive and which are negative
    rows: Tensor  # [n, d] prepared queries, detached
    cols: Tensor  # [m, d] prepared references, detached
    wants: tuple[bool, ...]  # which gradients are needed: of rows, of columns, and of each parameter
    tile: int | None = None  # rows per strip, or None for a height that suits the device
    ranks: ProcessGroup = ALONE  # the processes that share the strips

    def __post_init__(self) -> None:
        self.params = learned_tensors(self.product.parts)
        wide = ENTRIES * (WIDER if self.rows.is_cuda else 1)
        tall = self.tile or min(512, max(16, wide // max(1, len(self.cols))))
        self.cuts, self.all_cuts = (cuts(len(self.rows), tall, ranks) for ranks in (self.ranks, ALONE))
        self.most = tall * len(self.cols)
        self.had = torch.zeros(2, len(self.rows), dtype=torch.bool, device=self.rows.device)
        inputs = (self.rows, self.cols, *self.params)
        self.sums = [torch.zeros_like(x) if wanted else None for x, wanted in zip(inputs, self.wants, strict=True)]
        self._state: State | None = None

        self.learns = any(self.wants)

    def __iter__(self) -> Iterator[slice]:
        """The row slices of one sweep over this process's rows."""
        return self.sweep(self.cuts)

    def sweep(self, cuts: list[slice]) -> Iterator[slice]:
        """Iterate over row slices; resets the random state first, so that a miner draws the same in every sweep."""
        if self.product.miner is not None:
            self._state = self._state or states(self.rows.device)
            set_states(self._state, self.rows.device)
        return iter(cuts)

    def pairs(self, here: slice, *, leaf: bool = False) -> ScoredPairs:
        """The pairs of a strip after mining; with `leaf`, in an autograd graph that starts at rows and columns."""
        rows, cols = self.rows[here], self.cols
        if leaf:
            rows, cols = rows.detach().requires_grad_(self.wants[0]), cols.detach().requires_grad_(self.wants[1])
        pairs = score(self.product, rows, cols, self.relation, self.relation.tile(here, EVERYTHING), strip=True)
        self.had[0, here], self.had[1, here] = pairs.had_positive, pairs.had_negative
        return keep(self.product, pairs)

    def gather(self, parts: list[Tensor]) -> Tensor:
        """Values [n] of all rows, given those of this process's strips."""
        if self.ranks.world == 1:
            return torch.cat(parts)
        found = parts[0].new_zeros(len(self.rows))
        for here, part in zip(self.cuts, parts, strict=True):
            found[here] = part
        return self.ranks.sum(found)


@torch.no_grad()
def evaluate(strips: PlainStrips, grad_output: Tensor | None = None) -> Made:
    """Value and gradient of a loss; of unreduced values only with their `grad_output` [n]."""
    groups, columns = strips.product.groups, strips.product.wants_columns
    if not groups.per_anchor:
        value = _by_streams(strips)
    elif columns and groups.scope == "anchor_sign":
        value = _by_columns(strips, grad_output)
    else:
        value = _by_rows(strips, grad_output)
    ranks, slopes = strips.ranks, strips.sums
    if ranks.world > 1:
        strips.had = ranks.any(strips.had)
        if strips.relation.square and slopes[0] is not None and slopes[1] is not None:
            slopes = [slopes[0] + slopes[1], None, *slopes[2:]]  # rows and columns are one tensor: communicate once
        slopes = [None if slope is None else ranks.sum(slope) for slope in slopes]
    return value, slopes, *strips.had


# ---------------------------------------------------------------- groups of a row


def _by_rows(strips: PlainStrips, grad_output: Tensor | None) -> Tensor:
    """Groups within one row, in one sweep: sums numerators with their gradients, and divides at the end."""
    single, values = strips.product.reduction == "none", list[Tensor]()
    so_far, slopes = Counted(), list[list[Tensor | None]]()
    for here in strips:
        with torch.set_grad_enabled(strips.learns and (not single or grad_output is not None)):
            counted, found = _strip_terms(strips, here, grad_output)
        slopes = slopes or [[None if x is None else torch.zeros_like(x) for x in strips.sums] for _ in counted]
        for total, part in zip(slopes, found, strict=False):
            _add(total, here, part)
        if single:
            values.append(torch.stack([over(*x) for x in counted]).sum(dim=0))
        else:
            so_far = _sum(so_far, [(top.double(), bottom.double()) for top, bottom in counted])
    whole = [(torch.zeros(()), torch.ones(()))] * len(slopes) if single else [_share(strips, *x) for x in so_far]
    for slope, (_, share) in zip(slopes, whole, strict=True):
        _add(strips.sums, EVERYTHING, tuple(x if x is None else x * share.to(x.dtype) for x in slope))
    if single:
        return strips.gather(values)
    return torch.stack([value for value, _ in whole]).sum(dim=0).to(strips.rows.dtype)


def _strip_terms(
    strips: PlainStrips, here: slice, grad_output: Tensor | None
) -> tuple[Counted, list[tuple[Tensor | None, ...]]]:
    """Numerator and denominator of each term of a strip, and gradients of rows, columns and parameters.

    The gradients are those of the numerators, or of unreduced values weighted by `grad_output`.
    """
    pairs = strips.pairs(here, leaf=True)
    if not torch.is_grad_enabled():
        return reduce(_sum, _parts(strips, pairs), Counted()), []
    leaf, counted, share = _cut(pairs), Counted(), None
    if grad_output is not None:
        with torch.no_grad():
            share = over(grad_output[here], reduce(_sum, _parts(strips, pairs), Counted())[0][1])
    found = list[list[Tensor | None]]()  # of scores, columns and parameters
    for part in _parts(strips, leaf):
        counted = _sum(counted, [(top.detach(), bottom) for top, bottom in part])
        aims = [top if share is None else (top * share).sum() for top, _ in part]
        inputs = leaf.scores, leaf.cols, *strips.params
        slopes = [list(_gradient(aim, inputs, retain=True)) for aim in aims]
        if found:
            slopes = [[_plus(x, y) for x, y in zip(*both, strict=True)] for both in zip(found, slopes, strict=True)]
        found = slopes
    gradients = list[tuple[Tensor | None, ...]]()
    for by_score, *rest in found:
        through: tuple[Tensor | None, ...] = (None,) * (2 + len(strips.params))
        if by_score is not None:
            through = _gradient(pairs.scores, (pairs.rows, pairs.cols, *strips.params), by_score, retain=True)
        gradients.append((through[0], *(_plus(x, y) for x, y in zip(through[1:], rest, strict=True))))
    return counted, gradients


def _add(sums: list[Tensor | None], here: slice, found: tuple[Tensor | None, ...]) -> None:
    """Add gradients of the rows `here`, of all columns and of the parameters."""
    for place, (total, part) in enumerate(zip(sums, found, strict=True)):
        if total is not None and part is not None:
            (total[here] if place == 0 else total).add_(part)


def _plus(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x + y


def _share(strips: PlainStrips, top: Tensor, bottom: Tensor) -> tuple[Tensor, Tensor]:
    """Value of the whole batch from this process's numerator and denominator, and its derivative in the numerator."""
    top, bottom = strips.ranks.sum(torch.stack([top.sum(), bottom.sum()]).double()).unbind()
    share = torch.ones_like(top) if strips.product.reduction == "sum" else over(torch.ones_like(top), bottom)
    return top * share, share


def _parts(strips: PlainStrips, pairs: ScoredPairs) -> Iterator[Counted]:
    """Numerators and denominators of a strip's terms, in parts that fit in memory."""
    product = strips.product
    for problems in product.groups.blocks(product, pairs, strips.most):
        values = tuple(problem.value() for problem in problems)
        yield [tally(term, product.reduction) for term in product.groups.terms(product, pairs, problems, values)]


def _sum(so_far: Counted, part: Counted) -> Counted:
    """Add numerators and denominators, term by term."""
    return [(a + c, b + d) for (a, b), (c, d) in zip(so_far, part, strict=True)] if so_far else part


# ---------------------------------------------------------------- groups of the batch


def _by_streams(strips: PlainStrips) -> Tensor:
    """Groups of the whole batch: sweep until every stream has converged, then once more to apply the weights."""
    product, groups = strips.product, strips.product.groups
    next(iter(strips))  # saves the state of the random generators, with which every sweep begins
    first = next(iter(groups.blocks(product, strips.pairs(slice(0, 1)), strips.most)))
    streams = groups.streams(first)
    for stream in streams:
        stream.ranks = strips.ranks
    wanted = list(range(len(streams)))
    while wanted:
        for here in strips:
            for problems in groups.blocks(product, strips.pairs(here), strips.most):
                for k in wanted:
                    streams[k].add(problems[k].losses, problems[k].measure)
        wanted = [k for k in wanted if streams[k].turn()]
    # `merge` is linear: its derivatives are its values at unit vectors
    units = torch.eye(len(streams), dtype=strips.rows.dtype, device=strips.rows.device)
    factors = [groups.merge(unit.split(1), streams)[None] for unit in units]
    held = [k for k, stream in enumerate(streams) if stream.constant]
    sums = _weigh(strips, streams, factors) if strips.learns or held else []
    found = tuple(
        strips.ranks.sum(sums[k]).to(strips.rows.dtype) if k in held else stream.value()
        for k, stream in enumerate(streams)
    )
    return groups.merge(found, streams).to(strips.rows.dtype)


def _weigh(strips: PlainStrips, streams: tuple[Stream, ...], factors: list[Tensor]) -> list[Tensor]:
    """Sweep once, adding the gradient of each group times its factor; returns Σ p·l of each group."""
    product = strips.product
    sums = [torch.zeros(1, dtype=torch.float64, device=strips.rows.device) for _ in streams]
    for here in strips:
        with torch.set_grad_enabled(strips.learns):
            pairs = strips.pairs(here, leaf=True)
            leaf, by_score = _cut(pairs) if strips.learns else pairs, None
            for problems in product.groups.blocks(product, leaf, strips.most):
                parts = [stream.held(x.losses, x.measure) for stream, x in zip(streams, problems, strict=True)]
                for total, part in zip(sums, parts, strict=True):
                    total += part.detach()
                if strips.learns:
                    aim = torch.stack([part * by for part, by in zip(parts, factors, strict=True)]).sum()
                    slope, *rest = _gradient(aim, (leaf.scores, leaf.cols, *strips.params), retain=True)
                    by_score = _plus(by_score, slope)
                    _add(strips.sums, here, (None, *rest))
            if by_score is not None:
                _add(strips.sums, here, _gradient(pairs.scores, (pairs.rows, pairs.cols, *strips.params), by_score))
    return sums


# ---------------------------------------------------------------- links that read columns


def _by_columns(strips: PlainStrips, grad_output: Tensor | None) -> Tensor:
    """A link that also reads the negative value of each column: values of columns, then rows and link, then gradients.

    Columns are swept like rows, in strips of columns with all rows. The link must give one term.
    """
    product, single = strips.product, strips.product.reduction == "none"
    learns = strips.learns and (not single or grad_output is not None)
    cols = torch.zeros(2, len(strips.cols), dtype=strips.rows.dtype, device=strips.rows.device)
    with torch.no_grad():
        for here in _column_cuts(strips):
            wide = _column_problem(strips, here, False)[0]
            cols[0, here], cols[1, here] = wide.value(), present(wide.measure)
    cols, has_cols = strips.ranks.sum(cols)
    has_cols = has_cols > 0
    at_cols, counted = torch.zeros_like(cols), Counted()
    for here in strips:
        with torch.set_grad_enabled(learns):
            theirs, pairs = cols.clone().requires_grad_(learns), strips.pairs(here, leaf=learns)
            positive, wide = halves(product, pairs)
            (terms,) = product.joined(sides_of(pairs, positive, (positive.value(), wide.value(), theirs), has_cols))
            top, bottom = tally(terms, product.reduction)
            if learns:
                aim = top if grad_output is None else (over(top, bottom) * grad_output[here]).sum()
                *slopes, by_col = _gradient(aim, (pairs.rows, pairs.cols, *strips.params, theirs))
                _add(strips.sums, here, tuple(slopes))
                at_cols += 0.0 if by_col is None else by_col
        counted.append((top.detach(), bottom))
    if single:
        value, share = strips.gather([over(*x) for x in counted]), torch.ones(())
    else:
        sums = (torch.stack([x.double().sum() for x in side]) for side in zip(*counted, strict=True))
        value, share = _share(strips, *sums)
    if learns:
        _pull_columns(strips, strips.ranks.sum(at_cols))
        for total in strips.sums:
            if total is not None:
                total *= share.to(total.dtype)
    return value.to(strips.rows.dtype)


def _column_cuts(strips: PlainStrips) -> list[slice]:
    """The strips of columns of this process."""
    tall = strips.tile or min(512, max(16, ENTRIES // max(1, len(strips.rows))))
    return cuts(len(strips.cols), tall, strips.ranks)


def _column_problem(strips: PlainStrips, here: slice, leaf: bool) -> tuple[Problem, Tensor, Tensor]:
    """The problem of the negative pairs of some columns, one group per column; and the leaves of its autograd graph."""
    rows, cols = strips.rows.detach().requires_grad_(leaf), strips.cols[here].detach().requires_grad_(leaf)
    tile = strips.relation.tile(EVERYTHING, here)
    pairs = score(strips.product, rows, cols, strips.relation, tile, strip=True)
    if strips.product.miner is not None:  # miners look at whole rows, and a column has pairs with all rows
        mined = [(x.positive[:, here], x.negative[:, here]) for x in map(strips.pairs, strips.sweep(strips.all_cuts))]
        positive, negative = (torch.cat(side) for side in zip(*mined, strict=True))
        pairs = replace(pairs, positive=positive, negative=negative)
    wide = halves(strips.product, pairs)[1]
    turned = Problem(wide.over, wide.losses.T, wide.measure.T, (wide.losses.shape[1], wide.losses.shape[0]))
    return turned, rows, cols


def _pull_columns(strips: PlainStrips, at_cols: Tensor) -> None:
    """Add the gradient of the embeddings through the negative values of columns."""
    for here in _column_cuts(strips):
        with torch.enable_grad():
            problem, rows, cols = _column_problem(strips, here, True)
            by_row, by_col, *rest = _gradient((problem.value() * at_cols[here]).sum(), (rows, cols, *strips.params))
            _add(strips.sums, EVERYTHING, (by_row, None, *rest))
            if strips.sums[1] is not None and by_col is not None:
                strips.sums[1][here] += by_col


# ---------------------------------------------------------------- autograd


def _gradient(
    value: Tensor, inputs: tuple[Tensor, ...], cotangent: Tensor | None = None, *, retain: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradient of `value` with respect to the inputs that require one; None for the others."""
    leaves = [x for x in inputs if x.requires_grad]
    if not leaves or not value.requires_grad:
        return (None,) * len(inputs)
    found = iter(torch.autograd.grad(value, leaves, cotangent, retain_graph=retain, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def _cut(pairs: ScoredPairs) -> ScoredPairs:
    """The same pairs with detached scores that require a gradient, so that back-propagation stops there."""
    return replace(pairs, scores=pairs.scores.detach().requires_grad_())

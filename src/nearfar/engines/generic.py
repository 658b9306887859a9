"""Losses in strips of rows, by the plain definitions of their parts: supports custom parts and any relation.

A strip holds all pairs of its anchors, so that miners and groups of an anchor work within one strip. Groups that span
the batch are solved by the stream of their set, or by `Collected`. Autograd computes the gradient strip by strip.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup, cuts
from nearfar._utils.rng import State, set_states, states
from nearfar._utils.shortcuts import learned_tensors
from nearfar._utils.tensors import over
from nearfar.engines.dense import keep, score
from nearfar.engines.known_gradient import gradient
from nearfar.groups._groupings import Problem, Product, halves, sides_of, tally, turned
from nearfar.miners import ScoredPairs, present
from nearfar.relations.relation import EVERYTHING, Relation
from nearfar.sets.stream import Stream

__all__ = ["PlainStrips", "evaluate"]

ENTRIES = 2**18  # entries of a strip: 1 MB of float32, of which about forty exist at a time
DEEP = 2**21  # most entries of a strip whose groupings hold each pair several times, as triplets do
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
        depth, m = getattr(self.product.groups, "depth", None), max(1, len(self.cols))
        deep = m if depth is None else m * max(1, depth(self.relation))
        most = DEEP if self.tile is None else self.tile * m
        self.tall = max(1, min(self.tile or min(512, max(16, wide // m)), most // deep))
        self.cuts, self.all_cuts = (cuts(len(self.rows), self.tall, ranks) for ranks in (self.ranks, ALONE))
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
    product, single = strips.product, strips.product.reduction == "none"
    learns = strips.learns and (not single or grad_output is not None)
    values, so_far, slopes = list[Tensor](), Counted(), list[list[Tensor | None]]()
    for here in strips:
        with torch.set_grad_enabled(learns):
            pairs = strips.pairs(here, leaf=True)
            problems = product.groups.split(product, pairs)
            solved = tuple(problem.value() for problem in problems)
            terms = product.groups.terms(product, pairs, problems, solved)
            counted = [tally(term, product.reduction) for term in terms]
            aims = [top if grad_output is None else over(top, bottom) @ grad_output[here] for top, bottom in counted]
        slopes = slopes or [[None if x is None else torch.zeros_like(x) for x in strips.sums] for _ in counted]
        for total, aim in zip(slopes, aims if learns else (), strict=False):
            _add(total, here, gradient(aim, (pairs.rows, pairs.cols, *strips.params), retain_graph=True))
        if single:
            values.append(torch.stack([over(*x).detach() for x in counted]).sum(dim=0))
        else:
            part = [(top.detach().double(), bottom.double()) for top, bottom in counted]
            so_far = [(a + c, b + d) for (a, b), (c, d) in zip(so_far, part, strict=True)] if so_far else part
    whole = [(torch.zeros(()), torch.ones(()))] * len(slopes) if single else [_share(strips, *x) for x in so_far]
    for slope, (_, share) in zip(slopes, whole, strict=True):
        _add(strips.sums, EVERYTHING, [x if x is None else x * share.to(x.dtype) for x in slope])
    if single:
        return strips.gather(values)
    return torch.stack([value for value, _ in whole]).sum(dim=0).to(strips.rows.dtype)


def _add(sums: list[Tensor | None], here: slice, found: list[Tensor | None]) -> None:
    """Add gradients of the rows `here`, of all columns and of the parameters."""
    for place, (total, part) in enumerate(zip(sums, found, strict=True)):
        if total is not None and part is not None:
            (total[here] if place == 0 else total).add_(part)


def _share(strips: PlainStrips, top: Tensor, bottom: Tensor) -> tuple[Tensor, Tensor]:
    """Value of the whole batch from this process's numerator and denominator, and its derivative in the numerator."""
    top, bottom = strips.ranks.sum(torch.stack([top.sum(), bottom.sum()]).double()).unbind()
    share = torch.ones_like(top) if strips.product.reduction == "sum" else over(torch.ones_like(top), bottom)
    return top * share, share


# ---------------------------------------------------------------- groups of the batch


def _by_streams(strips: PlainStrips) -> Tensor:
    """Groups of the whole batch: sweep until every stream has converged, then once more to apply the weights."""
    product, groups = strips.product, strips.product.groups
    next(iter(strips))  # saves the state of the random generators, with which every sweep begins
    streams = groups.streams(groups.split(product, strips.pairs(slice(0, 1))))
    for stream in streams:
        stream.ranks = strips.ranks
    wanted = list(range(len(streams)))
    while wanted:
        for here in strips:
            problems = groups.split(product, strips.pairs(here))
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
            problems = product.groups.split(product, pairs)
            parts = [stream.held(x.losses, x.measure) for stream, x in zip(streams, problems, strict=True)]
            aim = torch.stack([part * by for part, by in zip(parts, factors, strict=True)]).sum()
        for total, part in zip(sums, parts, strict=True):
            total += part.detach()
        _add(strips.sums, here, gradient(aim, (pairs.rows, pairs.cols, *strips.params)))
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
            theirs, pairs = cols.clone().requires_grad_(learns), strips.pairs(here, leaf=True)
            positive, wide = halves(product, pairs)
            (terms,) = product.joined(sides_of(pairs, positive, (positive.value(), wide.value(), theirs), has_cols))
            top, bottom = tally(terms, product.reduction)
            if learns:
                aim = top if grad_output is None else (over(top, bottom) * grad_output[here]).sum()
                *slopes, by_col = gradient(aim, (pairs.rows, pairs.cols, *strips.params, theirs))
                _add(strips.sums, here, slopes)
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
    return turned(halves(strips.product, pairs)[1]), rows, cols


def _pull_columns(strips: PlainStrips, at_cols: Tensor) -> None:
    """Add the gradient of the embeddings through the negative values of columns."""
    for here in _column_cuts(strips):
        with torch.enable_grad():
            problem, rows, cols = _column_problem(strips, here, True)
            by_row, by_col, *rest = gradient((problem.value() * at_cols[here]).sum(), (rows, cols, *strips.params))
            _add(strips.sums, EVERYTHING, [by_row, None, *rest])
            if strips.sums[1] is not None and by_col is not None:
                strips.sums[1][here] += by_col

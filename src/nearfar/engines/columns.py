"""Sweeps for links that use the negative values of both samples of a pair, row and column (lifted structure)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.strips import Slopes, Strips, cut, gradient
from nearfar.engines.sweeps import Ask, Counted, Made, running, shared
from nearfar.groups.groupings import Problem, halves, sides_of, tally, turned
from nearfar.miners import ScoredPairs, present
from nearfar.sets.stream import Stream

__all__ = ["Ends", "by_columns"]


@dataclass(frozen=True, eq=False)
class Ends:
    """Negative values of rows and columns.

    Args:
        rows: [n] negative value of each row.
        cols: [m] negative value of each column.
        has_cols: [m] whether a column has a negative pair.
        stream: computes the weights within the columns.
    """

    rows: Tensor
    cols: Tensor
    has_cols: Tensor
    stream: Stream


def by_columns(strips: Strips, new_slopes: Ask, grad_output: Tensor | None = None) -> Made:
    """Value and gradient of the loss, in three sweeps.

    The first computes the negative values of rows and columns, the second the link and its gradient in these values,
    the third the gradient in the embeddings. The link must give one term.

    Args:
        strips: the strips of the call.
        new_slopes: creates an empty gradient.
        grad_output: [n] gradient of the values if they are not reduced, else None.
    """
    ends, slopes = _ends(strips), new_slopes()
    at_rows, at_cols = torch.zeros_like(ends.rows), torch.zeros_like(ends.cols)
    counted, single = Counted(), strips.product.reduction == "none"
    for here in strips:
        with torch.enable_grad():
            rows, cols = ends.rows[here].requires_grad_(), ends.cols.detach().requires_grad_()
            pairs = strips.plain(here)
            top, bottom = _linked(strips, pairs, ends, rows, cols)
            found = gradient(_aimed(top, bottom, grad_output, here), (rows, cols))
        at_rows[here] = 0.0 if found[0] is None else found[0]
        at_cols += 0.0 if found[1] is None else found[1]
        part = [(top.detach(), bottom)]
        counted = counted + part if single else running(counted, part)
    if single:
        value, share = strips.whole([over(*x) for x in counted]), torch.ones_like(at_rows[:1])
    else:
        value, share = shared(strips, counted)
        value = value.to(strips.rows.dtype)
    if slopes.any and (grad_output is not None or value.ndim == 0):
        _gradients(strips, slopes, ends, (at_rows, strips.ranks.sum(at_cols)), grad_output)
    return value, slopes.scaled(share)


def _ends(strips: Strips) -> Ends:
    """First sweep (or sweeps, as the set needs): negative values of all rows and columns."""
    values, has_cols = list[Tensor](), torch.zeros(len(strips.cols), dtype=torch.bool, device=strips.cols.device)
    next(iter(strips))  # keeps the state of the generators, which every sweep begins with
    stream = turned(_wide(strips, slice(0, 1))).stream()
    assert stream is not None  # noqa: S101 - checked by `untiled`
    stream.ranks, wanted = strips.ranks, True
    while wanted:
        for here in strips:
            wide = _wide(strips, here)
            seen = turned(wide)
            if not stream.sweep:
                values.append(wide.value())
                has_cols |= present(seen.measure)
            stream.add(seen.losses, seen.measure)
        wanted = stream.turn()
    if stream.constant:  # weights are held constant: one more sweep
        held = torch.zeros_like(stream.size)
        for here in strips:
            seen = turned(_wide(strips, here))
            held += stream.held(seen.losses, seen.measure)
        columns = strips.ranks.sum(held).to(strips.rows.dtype)
    else:
        columns = stream.value()
    return Ends(strips.whole(values), columns, strips.ranks.any(has_cols), stream)


def _wide(strips: Strips, here: slice) -> Problem:
    """The problem of the negative pairs of each row of a strip."""
    return halves(strips.product, strips.plain(here))[1]


def _linked(strips: Strips, pairs: ScoredPairs, ends: Ends, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a strip's terms, from the negative values of its rows [t] and all columns [m]."""
    positive, _ = halves(strips.product, pairs)
    (terms,) = strips.product.joined(sides_of(pairs, positive, (positive.value(), rows, cols), ends.has_cols))
    return tally(terms, strips.product.reduction)


def _aimed(top: Tensor, bottom: Tensor, grad_output: Tensor | None, here: slice) -> Tensor:
    """The scalar to differentiate: the numerator, or the unreduced values times `grad_output`."""
    return top.sum() if grad_output is None else (over(top, bottom) * grad_output[here]).sum()


def _gradients(
    strips: Strips, slopes: Slopes, ends: Ends, at: tuple[Tensor, Tensor], grad_output: Tensor | None
) -> None:
    """Last sweep: add the gradient in the embeddings; `at` is dF in the negative values of rows and columns."""
    at_rows, at_cols = at
    for here in strips:
        with torch.enable_grad():
            pairs = slopes.pairs(here)
            leaf = cut(pairs)
            wide = halves(strips.product, leaf)[1]
            seen = turned(wide)
            mine, theirs = wide.value() * at_rows[here], ends.stream.held(seen.losses, seen.measure) * at_cols
            top, bottom = _linked(strips, leaf, ends, ends.rows[here], ends.cols)
            slopes.note(_aimed(top, bottom, grad_output, here) + mine.sum() + theirs.sum(), leaf)
            slopes.through(here, pairs)

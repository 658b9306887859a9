"""The fused engine's top K: the K hardest negative pairs of the batch, found in two sweeps.

The first sweep names the largest loss of each row in each tile; the K-th largest of these is a level that K losses
reach. The second sweep writes down the places of all losses above it, and of K that equal it, without computing again
the tiles that lie below. Their losses are finished by the set itself in plain autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engines.fused import Fused
from nearfar.engines.launch import Spec, Work
from nearfar.engines.listed_scores import ListedScores
from nearfar.groups.groupings import Problem
from nearfar.sets.base import UncertaintySet

__all__ = ["candidates", "top_pairs", "top_problem"]

MANY = 8
"""Room for so many times the K pairs that are asked for; where more lie above the level, another engine serves."""


@torch.library.custom_op("nearfar::candidates", mutates_args=())
def candidates(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
    count: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Places row·m + col [most + count] of the negative pairs whose losses reach a level that `count` of them reach.

    -1 where there is none; first those above the level, then some that equal it. With them how many of each there are,
    of which only the first `most` and `count` were kept.
    """
    work = Work(Spec.read(numbers, codes), rows, cols, pairs, None, offset)
    best = work.empty(0)
    tops = []
    for strip, top, *_ in work.maxima():
        every = torch.cat([best, top.reshape(-1)])
        best = every.topk(min(count, len(every))).values
        tops.append((strip, top.view(strip.wide, strip.tall, -1).amax(dim=2).T.contiguous()))
    # with fewer of them than pairs are asked for, the level is below everything
    level = best.amin() if len(best) == count else best.new_full((), -torch.inf)
    level = level.clamp_min(torch.finfo(level.dtype).min)
    number = work.empty(2, dtype=torch.int32).zero_()
    places = work.empty(most + count, dtype=torch.int64).fill_(-1)
    for strip, top in tops:
        work.collect(strip, level, top, (number, places[:most], places[most:]), (most, count))
    return places.sort(descending=True).values, number  # the order of writing is not that of the pairs


@candidates.register_fake
def _(
    rows: Tensor, cols: Any, pairs: Any, offset: Any, numbers: Any, codes: Any, count: int, most: int
) -> tuple[Tensor, Tensor]:
    place = torch.empty(most + count, dtype=torch.int64, device=rows.device)
    return place, torch.empty(2, dtype=torch.int32, device=rows.device)


def top_pairs(call: Fused, k: float) -> tuple[Tensor, Tensor] | None:
    """Losses [1, c] of the hardest negative pairs of the batch, and which of them there are: at least the 2k first.

    None where too many lie close together, which is read from the device, or where nothing can be read.
    """
    once = call.vectors.symmetric
    spec, form = call._spec(call.product.negative, "negative", half=2 * int(once))
    rows, cols = call.rows.detach(), None if call.vectors.square else call.cols.detach()
    m = len(call.cols)
    count = min(math.ceil(k if once else 2 * k), len(rows) * m)
    most = min(MANY * count, len(rows) * m)
    offset = None if form.offset is None else form.offset.detach()
    if torch.compiler.is_compiling():
        return None
    place, number = candidates(rows, cols, call.vectors.tensors(), offset, *spec.said(), count, most)
    above, equal = (min(int(x), size) for x, size in zip(number.tolist(), (most + 1, count), strict=True))
    if above > most:
        return None
    place = place[: above + equal]
    row, col = place // m, place % m
    product = call.product
    scores = ListedScores(product.similarity, call.rows, call.cols, "rows")[row, col]
    losses = product.negative(scores, -1)[None].repeat(1, 2 if once else 1)
    return losses, torch.ones_like(losses, dtype=torch.bool)


def top_problem(call: Fused, of: UncertaintySet, losses: Tensor, there: Tensor, cap: Tensor | None = None) -> Problem:
    """The problem of one group of these members [1, c]."""
    return Problem(of, losses, there, tuple(losses.shape), call.orders, cap)

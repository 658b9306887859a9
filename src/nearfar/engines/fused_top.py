"""The fused engine's top K: candidates among which the K hardest negative pairs of the batch surely are.

A row is cut into chunks, and the kernel names the largest loss of each. The K chunks with the largest of these hold
every loss above the least of them, and K losses at least as large as it: the K largest of the batch are there. Their
losses are computed again, K chunks instead of n rows, and finished by the set itself in plain autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engines.fused import Fused
from nearfar.engines.launch import SHAPES, SIMILARITIES, Spec, Work
from nearfar.engines.pair_vectors import NEGATIVE, POSITION, POSITION_THEN_ID
from nearfar.groups.groupings import Problem
from nearfar.pairs import PairForm
from nearfar.sets.base import UncertaintySet
from nearfar.similarity import root

__all__ = ["candidates", "top_pairs", "top_problem"]

ENTRIES = 2**24
"""Losses that are computed at once."""


@torch.library.custom_op("nearfar::candidates", mutates_args=())
def candidates(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and presence [count] of the `count` negative pairs with the largest losses, in any order."""
    spec = Spec.read(numbers, codes)
    work = Work(spec, rows, cols, pairs, None, offset)
    top, place, _ = work.hardest()
    chunks, n = top.shape
    rank = torch.where(place < 0, -torch.inf, top.clamp_min(torch.finfo(top.dtype).min)).reshape(-1)
    chosen = rank.topk(min(count, len(rank))).indices
    chosen = chosen[rank[chosen] > -torch.inf]
    best = _Best(count, rows)
    wide = work.blocks["BN"] * work._chunks()[1]
    for chunk in range(chunks):
        mine = chosen[chosen // n == chunk] % n
        for part in torch.split(mine, max(1, ENTRIES // wide)):
            best.add(*_losses(work, part, slice(chunk * wide, min(work.m, (chunk + 1) * wide)), rows, cols))
    return best.row, best.col, best.loss > -torch.inf


@candidates.register_fake
def _(
    rows: Tensor, cols: Any, pairs: Any, offset: Any, numbers: Any, codes: Any, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    place = torch.empty(count, dtype=torch.int64, device=rows.device)
    return place, torch.empty_like(place), torch.empty_like(place, dtype=torch.bool)


class _Best:
    """The pairs with the largest losses so far."""

    def __init__(self, count: int, like: Tensor) -> None:
        self.loss = torch.full((count,), -torch.inf, device=like.device)
        self.row = torch.zeros(count, dtype=torch.int64, device=like.device)
        self.col = torch.zeros_like(self.row)

    def add(self, losses: Tensor, row: Tensor, first: int) -> None:
        """Losses [r, c], -inf where there is no pair, of rows [r] and the columns from `first` on."""
        found, spot = losses.reshape(-1).topk(min(len(self.loss), losses.numel()))
        every = torch.cat([self.loss, found])
        self.loss, kept = every.topk(len(self.loss))
        self.row = torch.cat([self.row, row[spot // losses.shape[1]]])[kept]
        self.col = torch.cat([self.col, first + spot % losses.shape[1]])[kept]


def _losses(work: Work, row: Tensor, here: slice, rows: Tensor, cols: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Losses of some rows and a slice of columns, in float32; -inf where no negative pair is, inf where it is NaN."""
    spec, x, y = work.spec, rows[row], (rows if cols is None else cols)[here]
    s = x @ y.T
    if spec.similarity:
        square = (x * x).sum(dim=1)[:, None] + (y * y).sum(dim=1) - 2 * s
        s = -root(square) if SIMILARITIES[spec.similarity] == "distance" else -square
    shape: Any = SHAPES[spec.shape]
    form = PairForm(shape, spec.a, spec.b, spec.scale, spec.power, spec.center, work.offset, spec.by_offset)
    losses = form.value(s)
    return torch.where(_negative(work, row, here), losses.nan_to_num(nan=torch.inf), -torch.inf), row, here.start


def _negative(work: Work, row: Tensor, here: slice) -> Tensor:
    """Which of these pairs are negative; see `_pairs` of _kernels.py."""
    spec = work.spec
    labels, ref_labels, flags, ref_flags, ids, ref_ids, *_ = work.pairs  # weights are not served
    assert labels is not None  # noqa: S101 - they always came
    assert ref_labels is not None  # noqa: S101
    col = torch.arange(here.start, here.stop, device=row.device)[None, :]
    found, at = labels[row][:, None] != ref_labels[here], row[:, None] == col
    if spec.itself == POSITION:
        found = found & ~at
    elif ids is not None and ref_ids is not None:
        same = ids[row][:, None] == ref_ids[here]
        found = found & ~(torch.where(col < work.n, at, same) if spec.itself == POSITION_THEN_ID else same)
    if spec.upper:
        found = found & (row[:, None] < col)
    if flags is not None and ref_flags is not None:
        found = found & ((flags[row][:, None] & ref_flags[here] & NEGATIVE) != 0)
    return found


def top_pairs(call: Fused, k: float) -> tuple[Tensor, Tensor]:
    """Losses [1, c] of the hardest negative pairs of the batch, and which of them there are: at least the 2k first."""
    once = call.vectors.symmetric
    spec, form = call._spec(call.product.negative, "negative", upper=int(once))
    rows, cols = call.rows.detach(), None if call.vectors.square else call.cols.detach()
    count = min(math.ceil(k if once else 2 * k), len(call.rows) * len(call.cols))
    offset = None if form.offset is None else form.offset.detach()
    row, col, there = candidates(rows, cols, call.vectors.tensors(), offset, *spec.said(), count)
    x, y = call.rows[row], call.cols[col]
    scores = call.product.similarity.finish((x * y).sum(dim=1), (x * x).sum(dim=1), (y * y).sum(dim=1))
    losses = call.product.negative(scores, -1)[None]
    times = 2 if once else 1
    return losses.repeat(1, times), there[None].repeat(1, times)


def top_problem(call: Fused, of: UncertaintySet, losses: Tensor, there: Tensor, cap: Tensor | None = None) -> Problem:
    """The problem of one group of these members [1, c]."""
    return Problem(of, losses, there, tuple(losses.shape), call.orders, cap)

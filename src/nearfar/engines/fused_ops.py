"""The operators of the fused engine, registered with torch.library: kernels behind them, tensors and numbers before.

    fold      t [n]: Σ w·l of each row, or γ·log (Σ w·e^{l/γ} / Σ w)      its backward is `weigh`
    hardest   the column of each row's largest loss
    triplets  Σ l over the triplets of each row                          its backward is `weigh_triplets`
    near      products of each row with P columns of its own, or squares of their distances; [n, P, d] is never held

`torch.compile` sees each as one node. Gradients of rows are float32 also where products are taken in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engines import fused_weigh
from nearfar.engines.fused_states import totals
from nearfar.engines.launch import Spec, Work, on_device

__all__ = ["fold", "hardest", "near", "triplets"]

PAIRS = {"BM": 16, "BK": 64}
"""Rows and entries of a program that computes single pairs."""


def _like(rows: Tensor, *kinds: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(len(rows), dtype=kind, device=rows.device) for kind in kinds)


@torch.library.custom_op("nearfar::fold", mutates_args=())
def fold(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """t, Σ w and the number of members of each row; then level, Σ w·e^{(l - level)/γ} and Σ p·l."""
    return totals(Work(Spec.read(numbers, codes), rows, cols, pairs, floor, offset))


@fold.register_fake
def _(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _like(rows, *(torch.float64,) * 6)


@torch.library.custom_op("nearfar::weigh", mutates_args=())
def weigh(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    level: Tensor,
    norm: Tensor,
    pull: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, columns (empty where they are the rows) and offset, from dF/dt."""
    return fused_weigh.weigh(Work(Spec.read(numbers, codes), rows, cols, pairs, floor, offset), level, norm, pull)


@weigh.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rows), rows.new_empty(0) if cols is None else torch.empty_like(cols), rows.new_empty(())


def _keep_fold(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, cols, pairs, floor, offset, ctx.numbers, ctx.codes = inputs
    ctx.save_for_backward(rows, cols, floor, offset, output[3], output[4], *pairs)
    ctx.mark_non_differentiable(*output[1:])


def _check_once() -> None:
    """Refuse second derivatives, which would be wrong without a word."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            'engine="fused" has no second derivative, which create_graph=True asks for; use engine="dense".'
        )


def _pull_fold(ctx: Any, grad_t: Tensor, *rest: Any) -> tuple[Any, ...]:
    _check_once()
    rows, cols, floor, offset, level, norm, *pairs = ctx.saved_tensors
    by_row, by_col, learned = weigh(rows, cols, pairs, floor, offset, level, norm, grad_t, ctx.numbers, ctx.codes)
    by_offset = None if offset is None else learned.to(offset.dtype)
    return by_row, None if cols is None else by_col, [None] * len(pairs), None, by_offset, None, None


fold.register_autograd(_pull_fold, setup_context=_keep_fold)


@torch.library.custom_op("nearfar::hardest", mutates_args=())
def hardest(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Column of the largest loss of each row (0 where there is none), and whether it has a member."""
    top, place = Work(Spec.read(numbers, codes), rows, cols, pairs, floor, offset).hardest()
    return place, top > -torch.inf


@hardest.register_fake
def _(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _like(rows, torch.int64, torch.bool)


@torch.library.custom_op("nearfar::triplets", mutates_args=())
def triplets(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    scores: Tensor,
    real: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ l, Σ w and the number of negatives of each row, and Σ dl/ds [n, P] of each positive; scores, real: [n, P]."""
    found = Work(Spec.read(numbers, codes), rows, cols, pairs, None, offset).fold_triplets(scores, real)
    return found[0].clone(), found[1].clone(), found[2].clone(), found[3:].T.to(torch.float32).contiguous()


@triplets.register_fake
def _(rows: Tensor, cols: Any, pairs: Any, offset: Any, scores: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_like(rows, *(torch.float64,) * 3), torch.empty_like(scores, dtype=torch.float32)


@torch.library.custom_op("nearfar::weigh_triplets", mutates_args=())
def weigh_triplets(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    scores: Tensor,
    real: Tensor,
    coef: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns through the scores of the negatives."""
    work = Work(Spec.read(numbers, codes), rows, cols, pairs, None, offset)
    return fused_weigh.weigh_triplets(work, scores, real, coef)


@weigh_triplets.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rows), rows.new_empty(0) if cols is None else torch.empty_like(cols)


def _keep_triplets(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, cols, pairs, offset, scores, real, ctx.numbers, ctx.codes = inputs
    ctx.save_for_backward(rows, cols, offset, scores, real, output[3], *pairs)
    ctx.mark_non_differentiable(*output[1:])


def _pull_triplets(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    _check_once()
    rows, cols, offset, scores, real, pull, *pairs = ctx.saved_tensors
    by_row, by_col = weigh_triplets(rows, cols, pairs, offset, scores, real, grad, ctx.numbers, ctx.codes)
    by_score = -grad[:, None].to(pull.dtype) * pull
    spec = Spec.read(ctx.numbers, ctx.codes)
    learned = None if offset is None else (-by_score.sum() * spec.by_offset / spec.a).to(offset.dtype)
    none = [None] * len(pairs)
    return by_row, None if cols is None else by_col, none, learned, by_score.to(scores.dtype), None, None, None


triplets.register_autograd(_pull_triplets, setup_context=_keep_triplets)


@torch.library.custom_op("nearfar::near", mutates_args=())
def near(rows: Tensor, cols: Tensor | None, place: Tensor, rest: Sequence[Tensor], far: bool) -> Tensor:
    """Products [n, P] of rows [n, d] with the columns `place` [n, P] of cols [m, d] (None: the rows).

    With `far` the squares of their distances, made of differences; `rest` is to be added to rows and columns first.
    """
    from nearfar.engines._kernels_pairs import near as kernel

    found, given, more = rows.new_empty(place.shape), *_pairs(rows, cols, rest)
    with on_device(rows):
        kernel[(-(-len(rows) // 16),)](
            *given, place.contiguous(), found, len(rows), place.shape[1], rows.shape[1], FAR=int(far), **more
        )
    return found


def _pairs(rows: Tensor, cols: Tensor | None, rest: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, int]]:
    """Rows and columns, what they lack, and what chooses code."""
    both = [rows.contiguous(), (rows if cols is None else cols).contiguous()]
    lost = [x.contiguous() for x in (rest[0], rest[-1])] if rest else both
    return [*both, *lost], {"REST": int(bool(rest)), **PAIRS}


@near.register_fake
def _(rows: Tensor, cols: Tensor | None, place: Tensor, rest: Sequence[Tensor], far: bool) -> Tensor:
    return rows.new_empty(place.shape)


@torch.library.custom_op("nearfar::near_back", mutates_args=())
def near_back(
    rows: Tensor, cols: Tensor | None, place: Tensor, slope: Tensor, rest: Sequence[Tensor], far: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns (empty where they are the rows) from those of what `near` gave."""
    from nearfar.engines._kernels_pairs import near_back as kernel

    given, more = _pairs(rows, cols, rest)
    by_row = rows.new_zeros(rows.shape)
    by_col = by_row if cols is None else cols.new_zeros(cols.shape)
    (n, width), grid = rows.shape, (-(-len(rows) // 16), -(-rows.shape[1] // 64))
    with on_device(rows):
        kernel[grid](
            *given, place.contiguous(), slope.contiguous(), by_row, by_col, n, place.shape[1], width, FAR=int(far),
            **more,
        )  # fmt: skip
    return by_row, rows.new_empty(0) if cols is None else by_col


@near_back.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(0) if cols is None else torch.empty_like(cols)


def _keep_near(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, cols, place, rest, ctx.far = inputs
    ctx.save_for_backward(rows, cols, place, *rest)


def _pull_near(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
    _check_once()
    rows, cols, place, *rest = ctx.saved_tensors
    by_row, by_col = near_back(rows, cols, place, slope, rest, ctx.far)
    return by_row, None if cols is None else by_col, None, [None] * len(rest), None


near.register_autograd(_pull_near, setup_context=_keep_near)

"""The operators of the engine, registered with torch.library and implemented by strips.py and cuda.py.

    fold      t [n]: Σ w·l of each row, or γ·log (Σ w·e^{l/γ} / Σ w)      its backward is `weigh`
    hardest   the column of each row's largest loss
    top       the positions of the K largest losses of all rows
    triplets  Σ l over the triplets of each row                          its backward is `weigh_triplets`
    near      scores of each row and P columns of its own

`torch.compile` sees each as one node. The last two arguments of each operator are the lists of a `Spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engines import cuda
from nearfar.engines.spec import LOSSES, MOMENTS, Spec
from nearfar.engines.strips import Strips

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

STRIPS = Spec.place("strips")

__all__ = ["draw", "fold", "hardest", "near", "rank", "top", "triplets"]


def _work(
    numbers: Sequence[float],
    codes: Sequence[int],
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None = None,
    offset: Tensor | None = None,
) -> Any:
    spec = Spec.read(numbers, codes)
    return (Strips if spec.strips else cuda.Kernels)(spec, rows, cols, list(pairs), floor, offset)


class Operator:
    """A registered operator; for strips it is called without torch.library, whose overhead is about 100 us a call.

    Args:
        registered: the result of `torch.library.custom_op`.
        keep: saves tensors for `pull`, like `setup_context` of `register_autograd`; None without a gradient.
        pull: computes the gradients of the inputs from those of the outputs.
    """

    def __init__(self, registered: Any, keep: Any = None, pull: Any = None) -> None:
        self.registered, self.plain = registered, registered._init_fn
        if pull is None:
            return
        registered.register_autograd(pull, setup_context=keep)

        class Function(torch.autograd.Function):
            forward, setup_context = staticmethod(self.plain), staticmethod(keep)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
                return tuple(None if isinstance(x, list) else x for x in pull(ctx, *grads))

        self.plain = Function.apply

    def __call__(self, *given: Any) -> Any:
        """Apply the operator; the last two arguments are the lists of a `Spec`."""
        codes = next(x for x in reversed(given) if isinstance(x, list))
        return (self.plain if codes[STRIPS] and not torch.compiler.is_compiling() else self.registered)(*given)


def _apart(found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make outputs that share no memory, as an operator must; copies the small ones."""
    return tuple(x.clone() if x.ndim == 1 else x for x in found)


def _like(rows: Tensor, *kinds: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(len(rows), dtype=kind, device=rows.device) for kind in kinds)


def _no_gradients(rows: Tensor, cols: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(0) if cols is None else torch.empty_like(cols)


@torch.library.custom_op("nearfar::fold", mutates_args=())
def _fold(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> Nine:
    """Fold each row to numbers [n]; if all rows are one group (`Spec.whole`), also compute gradients up to a factor.

    Returns:
        t; Σ w; number of members; level; Σ w·e^{(l - level)/γ}; Σ p·l; gradients of rows, columns and offset, or one
        saved tensor and two empty ones for `weigh`. With moments: Σ w·∫p dl; Σ w and number of members above the level;
        their least loss; Σ w(l - about) and Σ w(l - about)²; gradients.
    """
    return _apart(_work(numbers, codes, rows, cols, pairs, floor, offset).fold())  # type: ignore[return-value]


@_fold.register_fake
def _(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (*_like(rows, *(torch.float64,) * 6), *(rows.new_empty(0) for _ in range(3)))


@torch.library.custom_op("nearfar::weigh", mutates_args=())
def _weigh(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    level: Tensor,
    norm: Tensor,
    kept: Tensor,
    pull: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, columns (empty if they are the rows) and offset, given dF/dt and what `fold` saved."""
    work = _work(numbers, codes, rows, cols, pairs, floor, offset)
    found: tuple[Tensor, Tensor, Tensor] = work.weigh(level, norm, pull, kept)
    return found


@_weigh.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return *_no_gradients(rows, cols), rows.new_empty(())


weigh = Operator(_weigh)


def _keep_fold(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, cols, pairs, floor, offset, ctx.numbers, ctx.codes = inputs
    ctx.whole = bool(Spec.read(ctx.numbers, ctx.codes).whole)
    kept = output[6:] if ctx.whole else (output[6], *pairs)
    ctx.save_for_backward(rows, cols, floor, offset, output[3], output[4], *kept)
    ctx.mark_non_differentiable(*output[1:])


def _check_once() -> None:
    """Raise an error for second derivatives, which would be silently wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            'engine="fused" has no second derivative, which create_graph=True asks for; use engine="dense".'
        )


def _pull_fold(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    _check_once()
    rows, cols, floor, offset, level, norm, *more = ctx.saved_tensors
    if ctx.whole:  # dF/dt divided by the norm is the same for all rows with members
        spec = Spec.read(ctx.numbers, ctx.codes)
        pull = grads[0] if spec.sums in (LOSSES, MOMENTS) else torch.where(norm > 0, grads[0] / norm, 0.0)
        found = [x * pull[pull.abs().argmax()].to(x.dtype) for x in more]
        pairs = (4 if spec.given & 8 else 2) + 2 * (spec.given & 7).bit_count()
    else:
        kept, *more = more
        found = weigh(rows, cols, more, floor, offset, level, norm, kept, grads[0], ctx.numbers, ctx.codes)
        pairs = len(more)
    by_row, by_col, learned = found
    by_offset = None if offset is None else learned.to(offset.dtype)
    return by_row, None if cols is None else by_col, [None] * pairs, None, by_offset, None, None


fold = Operator(_fold, _keep_fold, _pull_fold)


@torch.library.custom_op("nearfar::hardest", mutates_args=())
def _hardest(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    floor: Tensor | None,
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest loss of each row (-inf without members), its column, and the number of members tied at it.

    With `Spec.whole`, only the largest loss.
    """
    found: tuple[Tensor, Tensor, Tensor] = _work(numbers, codes, rows, cols, pairs, floor, offset).hardest()
    return found


@_hardest.register_fake
def _(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _like(rows, rows.dtype, torch.int64, torch.int64)


hardest = Operator(_hardest)


def top(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    numbers: Sequence[float],
    codes: Sequence[int],
    count: int,
) -> Tensor:
    """Positions row·m + col of the largest losses of all rows, at least `count` if there are so many; reads values."""
    found: Tensor = _work(numbers, codes, rows, cols, pairs, None, offset).candidates(count)
    return found


def rank(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
    count: int,
) -> tuple[Tensor, Tensor]:
    """The `count` largest losses of each row, padded with -inf, and their columns; strips only."""
    columns = None if cols is None else cols.detach()
    found: tuple[Tensor, Tensor] = _work(numbers, codes, rows.detach(), columns, pairs).ranks(count)
    return found


def draw(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
    chance: Callable[[Tensor], Tensor],
    spots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw columns for each row by the log-odds of their scores, see `Strips.draw`; strips only."""
    found: tuple[Tensor, Tensor] = _work(numbers, codes, rows, cols, pairs).draw(chance, spots)
    return found


@torch.library.custom_op("nearfar::triplets", mutates_args=())
def _triplets(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    scores: Tensor,
    place: Tensor,
    real: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> Six:
    """Σ l, Σ w and number of negatives of each row; Σ dl/ds of each positive [n, P]; gradients.

    Positive pairs are given by their scores, columns `place` and measure `real` [n, P]. Strips take the scores from
    the tile instead, so that equal scores are equal to the last bit.
    """
    return _apart(_work(numbers, codes, rows, cols, pairs, None, offset).triplets(scores, place, real))  # type: ignore[return-value]


@_triplets.register_fake
def _(rows: Tensor, cols: Any, pairs: Any, offset: Any, scores: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    found = _like(rows, *(torch.float64,) * 3)
    return (*found, torch.empty_like(scores, dtype=rows.dtype), *(rows.new_empty(0) for _ in range(2)))


@torch.library.custom_op("nearfar::weigh_triplets", mutates_args=())
def _weigh_triplets(
    rows: Tensor,
    cols: Tensor | None,
    pairs: Sequence[Tensor],
    offset: Tensor | None,
    scores: Tensor,
    place: Tensor,
    real: Tensor,
    coef: Tensor,
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns with respect to the scores of negatives."""
    work = _work(numbers, codes, rows, cols, pairs, None, offset)
    found: tuple[Tensor, Tensor] = work.weigh_triplets(scores, place, real, coef)
    return found


@_weigh_triplets.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _no_gradients(rows, cols)


weigh_triplets = Operator(_weigh_triplets)


def _keep_triplets(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, cols, pairs, offset, scores, place, real, ctx.numbers, ctx.codes = inputs
    ctx.whole = bool(Spec.read(ctx.numbers, ctx.codes).whole)
    kept = output[4:] if ctx.whole else ()
    ctx.save_for_backward(rows, cols, offset, scores, place, real, output[3], *(kept or pairs))
    ctx.mark_non_differentiable(*output[1:])


def _pull_triplets(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    _check_once()
    rows, cols, offset, scores, place, real, pull, *more = ctx.saved_tensors
    spec, grad = Spec.read(ctx.numbers, ctx.codes), grads[0]
    if ctx.whole:
        by_row, by_col = (x * grad[0].to(x.dtype) for x in more)
        pairs = (4 if spec.given & 8 else 2) + 2 * (spec.given & 7).bit_count()
    else:
        by_row, by_col = weigh_triplets(rows, cols, more, offset, scores, place, real, grad, ctx.numbers, ctx.codes)
        pairs = len(more)
    by_score = -grad[:, None].to(pull.dtype) * pull
    learned = None if offset is None else (-by_score.sum() * spec.by_offset / spec.a).to(offset.dtype)
    none = [None] * pairs
    return by_row, None if cols is None else by_col, none, learned, by_score.to(scores.dtype), None, None, None, None


triplets = Operator(_triplets, _keep_triplets, _pull_triplets)


@torch.library.custom_op("nearfar::near", mutates_args=())
def _near(
    rows: Tensor,
    cols: Tensor | None,
    place: Tensor,
    rest: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
) -> Tensor:
    """Scores [n, P] of rows [n, d] and columns `place` [n, P] of cols [m, d] (None: of the rows).

    Kernels give products, or squared distances computed from differences after adding `rest` to rows and columns.
    """
    spec = Spec.read(numbers, codes)
    if spec.strips:
        return Strips(spec, rows, cols, [place, place]).near(place)
    return cuda.near(rows, cols, place, rest, bool(spec.similarity))


@_near.register_fake
def _(rows: Tensor, cols: Tensor | None, place: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(place.shape)


@torch.library.custom_op("nearfar::near_back", mutates_args=())
def _near_back(
    rows: Tensor,
    cols: Tensor | None,
    place: Tensor,
    found: Tensor,
    slope: Tensor,
    rest: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns (empty if the columns are the rows), given those of the outputs of `near`."""
    spec = Spec.read(numbers, codes)
    if spec.strips:
        return Strips(spec, rows, cols, [place, place]).near_back(place, found, slope)
    return cuda.near_back(rows, cols, place, slope, rest, bool(spec.similarity))


@_near_back.register_fake
def _(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return _no_gradients(rows, cols)


near_back = Operator(_near_back)


def _keep_near(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, cols, place, rest, ctx.numbers, ctx.codes = inputs
    ctx.save_for_backward(rows, cols, place, output, *rest)


def _pull_near(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
    _check_once()
    rows, cols, place, found, *rest = ctx.saved_tensors
    by_row, by_col = near_back(rows, cols, place, found, slope, rest, ctx.numbers, ctx.codes)
    return by_row, None if cols is None else by_col, None, [None] * len(rest), None, None


near = Operator(_near, _keep_near, _pull_near)

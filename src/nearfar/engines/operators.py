"""The operators of the engine, registered with torch.library and implemented by strips.py and cuda.py.

    fold      t [n]: Σ w·l of each row, or γ·log (Σ w·e^{l/γ} / Σ w); of triplets where scores of positives are given
    weigh     the backward of `fold`: gradients of rows, columns and offset
    hardest   the largest loss of each row, and its column
    near      scores of each row and P columns of its own; its backward is `weigh_near`

`torch.compile` sees each as one node. All take the same arguments, see `Operator`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engines.cuda import Kernels
from nearfar.engines.spec import LOSSES, MOMENTS, Spec
from nearfar.engines.strips import Strips

__all__ = ["fold", "hardest", "near", "work_of"]

SCHEMA = (
    "(Tensor rows, Tensor? cols, Tensor? offset, Tensor? score, Tensor? floor, Tensor[] vectors, "
    "float[] numbers, int[] codes) -> "
)


def work_of(spec: Spec, *given: Any) -> Any:
    """One call of an operator, on a CPU or in Triton; its methods are the operators, and some for strips alone."""
    return (Strips if spec.strips else Kernels)(spec, *given)


class Operator:
    """An operator with a method of its name in `Strips` and `Kernels`.

    For strips it is called without torch.library, whose overhead is about 100 us a call. `fake` computes empty outputs
    for torch.compile, and `pull` the gradients of rows, columns, offset and score; None if there are none.
    """

    def __init__(
        self, name: str, outputs: int, fake: Callable[..., Any], pull: Callable[..., tuple[Any, ...]] | None = None
    ) -> None:
        def run(*given: Any) -> Any:
            *tensors, numbers, codes = given
            found = getattr(work_of(_read(numbers, codes), *tensors), name)()
            return found if outputs == 1 else tuple(found)

        schema = SCHEMA + ("Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})")
        self.plain: Callable[..., Any] = run
        self.registered = torch.library.custom_op(f"nearfar::{name}", run, mutates_args=(), schema=schema)
        self.registered.register_fake(fake)
        if pull is None:
            return

        def back(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    'engine="fused" has no second derivative, which create_graph=True asks for; use engine="dense".'
                )
            count, (*inputs, floor), more = ctx.count, ctx.saved_tensors[:5], ctx.saved_tensors[5:]
            given = *inputs, floor, list(more[:count])
            found = pull(_read(ctx.numbers, ctx.codes), given, more[count:], grads[0])
            found = tuple(None if x is None else y for x, y in zip(inputs, found, strict=True))
            return *found, None, [None] * count, None, None

        self.registered.register_autograd(back, setup_context=_keep)

        class Function(torch.autograd.Function):
            forward, setup_context = staticmethod(run), staticmethod(_keep)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
                return tuple(None if isinstance(x, list) else x for x in back(ctx, *grads))

        self.plain = Function.apply

    def __call__(self, spec: Spec, *given: Any) -> Any:
        """Apply the operator to rows [n, d] and cols [m, d], None if the columns are the rows.

        Then come, each or None, the learned number `offset` of the pair loss, `score` [n, P] of the positive pairs, to
        fold triplets, and `floor` [n], above which a miner keeps scores; and the list `vectors` of the layout and then
        of the operator.
        """
        plain = spec.strips and not torch.compiler.is_compiling()
        return self.plain(*given, spec, None) if plain else self.registered(*given, *spec.lists())


def _read(numbers: Any, codes: Any) -> Spec:
    """The numeric arguments: as they are, or from the lists that torch.library takes."""
    return numbers if codes is None else Spec.read(numbers, codes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the backward needs; only the first output has a gradient."""
    *tensors, vectors, ctx.numbers, ctx.codes = inputs
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.count = len(vectors)
    ctx.save_for_backward(*tensors, *vectors, *outputs)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)  # zeros for the saved tensor of `fold` would take as long as a sweep


def _gradients(rows: Tensor, cols: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rows), rows.new_empty(0) if cols is None else torch.empty_like(cols), rows.new_empty(())


def _folded(rows: Tensor, cols: Tensor | None, offset: Tensor | None, score: Tensor | None, *rest: Any) -> Any:
    by_score = rows.new_empty(0) if score is None else torch.empty_like(score, dtype=rows.dtype)
    return (
        *(rows.new_empty(len(rows), dtype=torch.float64) for _ in range(6)),
        by_score,
        *(rows.new_empty(0) for _ in range(3)),
    )


def _tops(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(rows.new_empty(len(rows), dtype=kind) for kind in (rows.dtype, torch.int64, torch.int64))


def _weigh(spec: Spec, given: tuple[Any, ...], found: Sequence[Tensor], grad: Tensor) -> tuple[Any, ...]:
    """The gradients of `fold`, from its outputs and dF/dt."""
    *inputs, vectors = given
    _, _, _, level, norm, _, by_score, *kept = found
    if spec.one_group:  # dF/dt divided by the norm is the same for all rows with members
        pull = grad if spec.sums in (LOSSES, MOMENTS) else torch.where(norm > 0, grad / norm, 0.0)
        by_row, by_col, learned = (x * pull[pull.abs().argmax()].to(x.dtype) for x in kept)
    else:
        by_row, by_col, learned = weigh(spec, *inputs, [*vectors, level, norm, kept[0], grad])
    offset, score = inputs[2:4]
    if score is not None:
        by_score = -grad[:, None].to(by_score.dtype) * by_score
        learned = -by_score.sum() * (spec.by_offset / spec.a)
        by_score = by_score.to(score.dtype)
    return by_row, by_col, learned if offset is None else learned.to(offset.dtype), by_score


def _weigh_near(spec: Spec, given: tuple[Any, ...], found: Sequence[Tensor], grad: Tensor) -> tuple[Any, ...]:
    *inputs, vectors = given
    return *weigh_near(spec, *inputs, [*vectors, found[0], grad]), None, None


weigh = Operator("weigh", 3, _gradients)
fold = Operator("fold", 10, _folded, _weigh)
"""t; Σ w; number of members; level; Σ w·e^{(l - level)/γ}; Σ p·l, each [n] in float64; gradients of `score` up to
their factor; gradients of rows, columns and offset up to a factor (`Spec.one_group`), or one saved tensor for `weigh`
and two empty ones. With moments: Σ w·∫p dl; Σ w and number of members above the level; their least loss; Σ w(l - about)
and Σ w(l - about)². Triplets: Σ l, Σ w and number of negatives; strips take the scores of positives from their tiles,
so that equal scores are equal to the last bit."""
hardest = Operator("hardest", 3, _tops)
"""The largest loss of each row (-inf without members), its column, and the number of members tied at it; with
`Spec.keep` only the largest loss."""
weigh_near = Operator("weigh_near", 2, lambda *given: _gradients(*given)[:2])
near = Operator("near", 1, lambda rows, *given: rows.new_empty(given[4][2].shape), _weigh_near)
"""Scores [n, P] of rows and columns `place` [n, P]; vectors: two of the layout, `place`, and for kernels the remainders
of rows and columns. Kernels give products, or squared distances computed from differences."""

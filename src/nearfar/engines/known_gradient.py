"""`KnownGradient`: an autograd node for a value whose gradient was computed with it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KnownGradient", "gradient"]

Gradients = Sequence[Tensor | None]
"""One gradient for each input; None for an input that needs none."""


class KnownGradient(torch.autograd.Function):
    """Returns a value, and scales its gradient in backward.

    If the gradient is not known yet, or create_graph=True asks for second derivatives, `again(inputs, grad_output)`
    computes it from the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        found: tuple[Tensor, Gradients | None],
        again: Callable[[tuple[Any, ...], Tensor], Gradients],
        *inputs: Tensor | None,
    ) -> Tensor:
        """`found` is the value with its gradients, or None to compute them in backward."""
        value, ctx.known = found
        ctx.again = again
        # labels and ids are stored separately: plain autograd lets them change before the gradient is computed
        floating = [x is not None and x.is_floating_point() for x in inputs]
        ctx.save_for_backward(*(x if kept else None for x, kept in zip(inputs, floating, strict=True)))
        ctx.others = [None if kept or x is None else (x, _version(x)) for x, kept in zip(inputs, floating, strict=True)]
        return value

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:  # noqa: D102
        saved, (grad,) = ctx.saved_tensors, grad_output
        found: Gradients
        if ctx.known is None or torch.is_grad_enabled():
            if any(other is not None and other[1] != _version(other[0]) for other in ctx.others):
                raise RuntimeError(
                    "a second derivative needs the labels or ids of the call, but they were changed in place."
                )
            inputs = tuple(x if other is None else other[0] for x, other in zip(saved, ctx.others, strict=True))
            with torch.autocast(grad.device.type, enabled=False):
                found = ctx.again(inputs, grad)
        else:
            found = [None if x is None else x * grad for x in ctx.known]
        return None, None, *(y if y is None else y.to(x.dtype) for x, y in zip(saved, found, strict=True))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def gradient(
    value: Tensor, inputs: Sequence[Tensor | None], cotangent: Tensor | None = None, **more: Any
) -> list[Tensor | None]:
    """Gradient of `value` with respect to the inputs that require one; None for the others."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    if not leaves or not value.requires_grad:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(value, leaves, cotangent, allow_unused=True, **more))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]

"""Operations on rows whose gradients take fewer steps than autograd's: unit rows, square roots, products, distances.

Launching steps dominates small batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["products", "quick_unit", "root", "squares", "unit"]


def unit(x: Tensor) -> Tensor:
    """Divide each row by its norm; a zero row stays zero and gets no gradient (a quotient would give it about 1e12).

    The largest entry is divided out first, so that squares neither overflow nor underflow.
    """
    top = x.detach().abs().amax(dim=1, keepdim=True) if x.shape[1] else x.detach().new_zeros(len(x), 1)
    scaled = x / torch.where(top > 0, top, torch.ones_like(top))
    square = (scaled * scaled).sum(dim=1, keepdim=True)
    zero = square == 0
    return torch.where(zero, 0.0, scaled * torch.rsqrt(torch.where(zero, 1.0, square)))


class _Unit(torch.autograd.Function):
    """`unit` in a third of the steps, forward and backward, because launching steps dominates small batches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        tiny = torch.finfo(x.dtype).tiny
        top = x.abs().amax(dim=1, keepdim=True).clamp_min_(tiny)  # torch's norm of order inf is ten times slower
        scaled = x / top
        norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        least = norm.clamp_min(tiny)
        found: Tensor = scaled / least
        ctx.save_for_backward(x, found, (norm / least).div_(least).div_(top))  # 1/|x|, and 0 for a zero row
        return found

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Tensor:
        found: Tensor
        (g,), (x, y, inverse) = grad_output, ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is requested
            (found,) = torch.autograd.grad(unit(x), x, g, create_graph=True)
        else:
            found = torch.addcmul(g, y, (g * y).sum(dim=1, keepdim=True), value=-1).mul_(inverse)
        return found


def quick_unit(x: Tensor) -> Tensor:
    """What `unit` gives, in fewer steps."""
    if torch.compiler.is_compiling() or not x.shape[1]:
        return unit(x)
    found: Tensor = _Unit.apply(x)  # type: ignore[no-untyped-call]
    return found


def root(square: Tensor) -> Tensor:
    """√max(x, 0), with gradient 0 instead of infinity at 0; NaN stays NaN."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _plain_root(square)
    found: Tensor = _Root.apply(square)  # type: ignore[no-untyped-call]
    return found


def _plain_root(square: Tensor) -> Tensor:
    zero = square <= 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, square)))


class _Root(torch.autograd.Function):
    """Autograd function of `root`, in a third of the steps of plain autograd."""

    @staticmethod
    def forward(ctx: Any, square: Tensor) -> Tensor:
        found = square.clamp_min(0.0).sqrt_()
        ctx.save_for_backward(square, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Tensor:
        found: Tensor
        (g,), (square, y) = grad_output, ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is requested
            (found,) = torch.autograd.grad(_plain_root(square), square, g, create_graph=True)
        else:
            # the sign is 0 at 0, and the clamp keeps the quotient finite there
            found = (g * y.sign()).div_((2 * y).clamp_min_(torch.finfo(y.dtype).tiny))
        return found


class _Products(torch.autograd.Function):
    """Products of rows x [n, d] and y [m, d]; without y, of x with itself, whose gradient takes a single product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ (x if y is None else y).T

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,), (x, y), wants = grad_output, ctx.saved_tensors, ctx.needs_input_grad
        if y is None:
            return (g + g.T) @ x, None
        return g @ y if wants[0] else None, g.T @ x if wants[1] else None


class _Squares(torch.autograd.Function):
    """Squared distances of rows x [n, d] and y [m, d] (None: the rows themselves), with few steps in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, y)
        return _plain_squares(x, x if y is None else y)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,), (x, y), wants = grad_output, ctx.saved_tensors, ctx.needs_input_grad
        if y is None:
            return _slope(g + g.T, x, x), None
        return _slope(g, x, y) if wants[0] else None, _slope(g.T, y, x) if wants[1] else None


def _slope(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of x, given that of all squared distances to y."""
    return torch.addmm(x * g.sum(dim=1, keepdim=True), g, y, beta=2, alpha=-2)


def _plain_squares(x: Tensor, y: Tensor) -> Tensor:
    rows = (x * x).sum(dim=1)
    cols = rows if y is x else (y * y).sum(dim=1)
    return torch.addmm(rows[:, None] + cols, x, y.T, alpha=-2)


def _alone() -> bool:
    """Whether only autograd follows the operators: functions with a gradient of their own may be used."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def products(x: Tensor, y: Tensor) -> Tensor:
    """All products [n, m] of rows x [n, d] and y [m, d]."""
    if not (x.requires_grad or y.requires_grad) or not _alone():
        return x @ y.T
    found: Tensor = _Products.apply(x, None if y is x else y)  # type: ignore[no-untyped-call]
    return found


def squares(x: Tensor, y: Tensor) -> Tensor:
    """All squared distances [n, m] of rows x [n, d] and y [m, d]; may be below 0 by rounding."""
    if not (x.requires_grad or y.requires_grad) or not _alone():
        return _plain_squares(x, y)
    found: Tensor = _Squares.apply(x, None if y is x else y)  # type: ignore[no-untyped-call]
    return found

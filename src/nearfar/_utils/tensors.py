"""Helpers for tensors: checks of arguments, and sums over the present members of groups.

A group is a row of losses x [g, n] with a measure w [g, n]: a boolean mask, or weights; members with w = 0 are absent.
Sets, groups, links, miners and engines share these few lines, so that an empty group and an infinite loss mean the same
everywhere.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LEAST_NORM = 1e-12
"""The smallest norm that rows are divided by as it is; `torch.nn.functional.normalize` takes this one instead below."""


def readable(tensor: Tensor) -> bool:
    """Whether reading the values of `tensor` is free: it is on the CPU and outside a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def uses_tf32() -> bool:
    """Whether float32 matrix products on a GPU may use TF32, by torch's old or new setting."""
    matmul = torch.backends.cuda.matmul
    found = getattr(matmul, "fp32_precision", None)  # since torch 2.9; once it is set, allow_tf32 cannot be read
    return bool(matmul.allow_tf32 if found is None else found == "tf32")


def check_embeddings(owner: str, name: str, x: Tensor, *, finite: bool = True) -> None:
    """Require a floating-point matrix [n, d]; with `finite`, finite values too where reading them is free."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: {name} must be a torch.Tensor of shape [n, d], but came as {type(x).__name__}.")
    if x.ndim != 2:
        raise ValueError(
            f"{owner}: {name} must have shape [n, d], but came with shape {list(x.shape)}; "
            "flatten or pool each sample to one vector first."
        )
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must be floating point, but came as {x.dtype}; call .float() on it.")
    if finite and readable(x) and not math.isfinite(x.detach().sum().item()):
        check_finite(owner, name, x)


def check_finite(owner: str, name: str, x: Tensor) -> None:
    """Require finite values where reading them is free."""
    if not readable(x):
        return
    whole = x.detach().sum()
    if bool(whole - whole == 0):  # the answer is read, not the sum: a recording cannot read what always differs
        return  # no NaN or infinity vanishes in a sum; a sum that overflows is examined further
    # in parts, because one mask would take a quarter of the embeddings' memory, and temporaries more
    finite = torch.cat([torch.isfinite(rows).all(dim=1) for rows in torch.split(x.detach(), 8192)])
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"{owner}: {name} must be finite, but {len(rows)} of {len(x)} rows hold NaN or infinity (rows {shown}); "
            "look at the network or lower the learning rate."
        )


def check_placed(owner: str, loss: nn.Module, device: torch.device) -> None:
    """Require parameters and buffers of a loss on the device of the embeddings, except buffers that it moves."""
    for path, one in () if torch.compiler.is_compiling() else loss.named_modules():
        for held in (one._parameters, {} if getattr(one, "moves_buffers", False) else one._buffers):
            for name, x in held.items():
                if x is not None and x.device != device:
                    raise ValueError(
                        f"{owner}: its {path + '.' if path else ''}{name} is on {x.device} but the embeddings are on "
                        f"{device}; move the loss with .to(device)."
                    )


def check_labels(owner: str, name: str, labels: Tensor, rows: int, device: torch.device) -> None:
    """Require one integer label per row, on the device of the embeddings."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{owner}: {name} must be a 1-D integer tensor or an nf.Relation, but came as {type(labels).__name__}; "
            "wrap it with torch.as_tensor."
        )
    if labels.dtype not in INTEGERS:
        raise TypeError(
            f"{owner}: {name} must be integers, but came as {labels.dtype}; call .long() on class indices, "
            "or use nf.Relation.from_multilabel for multi-hot rows."
        )
    if labels.ndim != 1:
        raise ValueError(
            f"{owner}: {name} must have shape [{rows}], but came with shape {list(labels.shape)}; "
            "for several labels a sample use nf.Relation.from_multilabel."
        )
    if len(labels) != rows:
        raise ValueError(f"{owner}: {name} must have one entry per row, but {len(labels)} came for {rows} rows.")
    if labels.device != device:
        raise ValueError(f"{owner}: {name} is on {labels.device} but the embeddings are on {device}; move one of them.")


def check_tensor(owner: str, name: str, value: object) -> None:
    """Require a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{owner}: {name} must be a torch.Tensor, but came as {type(value).__name__}; wrap it with torch.as_tensor."
        )


def check_reference(owner: str, embeddings: Tensor, ref_emb: Tensor | None, ref_labels: object) -> None:
    """Require reference rows that fit the embeddings, and labels for them."""
    if (ref_emb is None) != (ref_labels is None):
        raise ValueError(f"{owner}: ref_emb and ref_labels belong together, but only one of them came.")
    if ref_emb is not None:
        check_reference_rows(owner, embeddings, ref_emb)


def check_reference_rows(owner: str, embeddings: Tensor, ref_emb: Tensor) -> None:
    """Require reference rows [m, d] of the dimension of the embeddings and on their device."""
    check_embeddings(owner, "ref_emb", ref_emb, finite=False)
    check_finite(owner, "ref_emb", ref_emb)
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"{owner}: ref_emb must be as wide as embeddings ({embeddings.shape[1]}), but is {ref_emb.shape[1]} wide."
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(
            f"{owner}: ref_emb is on {ref_emb.device} but the embeddings are on {embeddings.device}; move one of them."
        )


def check_class_numbers(owner: str, name: str, labels: Tensor) -> None:
    """Require a 1-D integer tensor of any length."""
    check_tensor(owner, name, labels)
    if labels.dtype not in INTEGERS or labels.ndim != 1:
        raise ValueError(
            f"{owner}: {name} must be a 1-D integer tensor, but came as {labels.dtype} {list(labels.shape)}; "
            "for multi-hot rows use nf.Relation.from_multilabel."
        )


def widen(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows and references in their common dtype, at least float32: half precision is too coarse for sums."""
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    if y is not None:
        dtype = torch.promote_types(dtype, y.dtype)
    return x.to(dtype), None if y is None else y.to(dtype)


def total(w: Tensor, like: Tensor) -> Tensor:
    """The sum Σ w of each group [g], in the floating-point type of the losses."""
    # torch would first widen a mask to eight bytes per entry
    return as_bytes(w).sum(dim=1, dtype=like.dtype)


def as_bytes(w: Tensor) -> Tensor:
    """A mask as bytes, which torch reduces faster; weights as they are."""
    if w.dtype != torch.bool:
        return w
    # the compiler of PyTorch 2.11 cannot view a mask as bytes
    return w.to(torch.uint8) if torch.compiler.is_compiling() else w.view(torch.uint8)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """The product x·w, exactly zero where a member is absent, even if x is -inf or NaN there."""
    kept = hidden(x, w, 0.0)
    return kept if w.dtype == torch.bool else kept * w


def over(x: Tensor, amount: Tensor) -> Tensor:
    """The quotient x / amount, or 0 if the amount is 0, which defines the value of an empty group."""
    return x / (amount + (amount == 0))


def hidden(l: Tensor, w: Tensor, fill: float = -torch.inf) -> Tensor:
    """Replace the losses of absent members by `fill`."""
    return torch.where(mask_of(w), l, fill)


def mask_of(w: Tensor) -> Tensor:
    """Which members of a measure are present."""
    return w if w.dtype == torch.bool else w > 0


def log_of(size: Tensor) -> Tensor:
    """The logarithm of a group's measure; 0 for an empty group."""
    return torch.where(size == 0, 1.0, size).log()


def centered(l: Tensor, w: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The largest loss of each group [g], detached, and the losses minus it; `size` [g] is the group's measure."""
    top = hidden(l.detach(), w).amax(dim=1)
    top = torch.where(size == 0, 0.0, top)
    return top, l - top[:, None]


# ---------------------------------------------------------------- rows, with gradients in few steps: launching steps
# dominates small batches


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
        found: Tensor
        if (norm := safe_norms(x)) is not None:
            found, inverse = x / norm, norm.reciprocal()
        else:
            tiny = torch.finfo(x.dtype).tiny
            top = x.abs().amax(dim=1, keepdim=True).clamp_min_(tiny)  # torch's norm of order inf is ten times slower
            scaled = x / top
            norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
            least = norm.clamp_min(tiny)
            found, inverse = scaled / least, (norm / least).div_(least).div_(top)  # 1/|x|, and 0 for a zero row
        ctx.save_for_backward(x, found, inverse)
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


def safe_norms(x: Tensor) -> Tensor | None:
    """The norms [n, 1] of rows; None if squares of entries may overflow or underflow, or if they cannot be read."""
    if not readable(x):
        return None
    norm: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return norm if torch.equal(norm, norm.clamp(LEAST_NORM, torch.finfo(x.dtype).max)) else None


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
            twice = 2 * y
            found = (g / twice).masked_fill_(twice == 0, 0.0)
        return found


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp of each row by a softmax; on a CPU, exp of large negative numbers takes ten times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        weights, top = torch.softmax(x, dim=1), x.amax(dim=1)
        ctx.save_for_backward(x, weights)
        return torch.where(top < torch.inf, top - weights.amax(dim=1).log_(), top)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Tensor:
        found: Tensor
        (g,), (x, weights) = grad_output, ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is requested
            (found,) = torch.autograd.grad(torch.logsumexp(x, dim=1), x, g, create_graph=True)
        else:
            found = g[:, None] * weights
        return found


def log_sum_exp(x: Tensor) -> Tensor:
    """Log-sum-exp of each row [g, n]; numbers must be above -infinity."""
    # a softmax adds up long rows less accurately
    if x.device.type != "cpu" or not _alone() or x.shape[1] > 1024:
        return torch.logsumexp(x, dim=1)
    found: Tensor = _LogSumExp.apply(x)  # type: ignore[no-untyped-call]
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

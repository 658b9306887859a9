"""Sums, shares and logarithms over the present members of each group: x [g, n] with a measure w [g, n].

A measure is a boolean mask, or weights; members with w = 0 are absent. Sets, groups, links, miners and engines share
these few lines, so that an empty group and an infinite loss mean the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total(w: Tensor, like: Tensor) -> Tensor:
    """The sum Σ w of each group [g], in the floating-point type of the losses."""
    # a mask is summed as bytes: torch would widen it to eight bytes an entry first
    return (w.to(torch.uint8) if w.dtype == torch.bool else w).sum(dim=1, dtype=like.dtype)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """The product x·w, exactly zero where a member is absent, even if x is -inf or NaN there."""
    kept = hidden(x, w, 0.0)
    return kept if w.dtype == torch.bool else kept * w


def over(x: Tensor, amount: Tensor) -> Tensor:
    """The quotient x / amount, and 0 where the amount is 0: this defines the value of an empty group."""
    empty = amount == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, amount))


def hidden(l: Tensor, w: Tensor, fill: float = -torch.inf) -> Tensor:
    """Replace the losses of absent members by `fill`."""
    return torch.where(w if w.dtype == torch.bool else w > 0, l, fill)


def log_of(size: Tensor) -> Tensor:
    """The logarithm of a group's measure; 0 for an empty group."""
    return torch.where(size == 0, 1.0, size).log()


def centered(l: Tensor, w: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The largest loss of each group [g], detached, and the losses minus it; `size` [g] is the group's measure."""
    top = hidden(l.detach(), w).amax(dim=1)
    top = torch.where(size == 0, 0.0, top)
    return top, l - top[:, None]

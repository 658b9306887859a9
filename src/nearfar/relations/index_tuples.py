"""Index tuples: the lists of pairs or triplets that pytorch-metric-learning's miners return, as base measures."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.tensors import INTEGERS, readable

__all__ = ["check_indices", "indexed"]


def indexed(indices: tuple[Tensor, ...], shape: tuple[int, int], *, once: bool = False) -> tuple[Tensor, Tensor]:
    """Count how often an index tuple lists each positive and each negative pair, [n, m] and [n, m].

    Args:
        indices: (anchor, positive, negative), or (anchor, positive, anchor, negative).
        shape: (n, m).
        once: count a pair once even if it is listed several times.
    """
    a1, p, a2, n = indices if len(indices) == 4 else (indices[0], indices[1], indices[0], indices[2])

    def listed(rows: Tensor, cols: Tensor) -> Tensor:
        """Number of times [n, m] that each pair is listed."""
        each = torch.ones(len(rows), device=rows.device)
        flat = torch.zeros(shape[0] * shape[1], device=rows.device)
        flat = flat.index_add(0, rows.long() * shape[1] + cols.long(), each).reshape(shape)
        return flat.clamp_max(1.0) if once else flat

    return listed(a1, p), listed(a2, n)


def check_indices(owner: str, indices: tuple[Tensor, ...], shape: tuple[int, int]) -> None:
    """Raise ValueError unless `indices` are 3 or 4 1-D integer tensors of matching lengths, inside the batch."""
    if not isinstance(indices, tuple | list) or len(indices) not in (3, 4):
        raise ValueError(
            f"{owner}: the third argument takes a miner's index tuple, (anchor, positive, negative) or "
            f"(anchor, positive, anchor, negative), but came as {type(indices).__name__}."
        )
    couples = ((0, 1), (0, 2)) if len(indices) == 3 else ((0, 1), (2, 3))
    for i, j in couples:
        rows, cols = indices[i], indices[j]
        if rows.ndim != 1 or rows.shape != cols.shape or rows.dtype not in INTEGERS or cols.dtype not in INTEGERS:
            raise ValueError(
                f"{owner}: index tensors {i} and {j} must be 1-D integers of one length, but came as "
                f"{rows.dtype} {list(rows.shape)} and {cols.dtype} {list(cols.shape)}."
            )
        if readable(rows) and len(rows) and not _inside(rows, cols, shape):
            raise ValueError(
                f"{owner}: index tensors {i} and {j} must point inside {shape[0]} rows and {shape[1]} columns, "
                f"but reach {int(rows.max())} and {int(cols.max())}."
            )


def _inside(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> bool:
    """Whether all indices are in range; synchronizes with the device."""
    low = min(int(rows.min()), int(cols.min()))
    return low >= 0 and int(rows.max()) < shape[0] and int(cols.max()) < shape[1]

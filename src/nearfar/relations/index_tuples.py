"""Index tuples: the lists of pairs or triplets that pytorch-metric-learning's miners return.

`indexed` converts one to base measures [n, m], `listed_pairs` to a short list of its distinct pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import INTEGERS, readable

__all__ = ["Listing", "as_pairs", "check_apart", "check_indices", "indexed", "listed_pairs", "spread"]


def as_pairs(indices: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convert an index tuple to pairs: anchors and positives, anchors and negatives."""
    a1, p, a2, n = indices if len(indices) == 4 else (indices[0], indices[1], indices[0], indices[2])
    return a1.long(), p.long(), a2.long(), n.long()


def indexed(indices: tuple[Tensor, ...], shape: tuple[int, int], *, once: bool = False) -> tuple[Tensor, Tensor]:
    """Count how often an index tuple lists each positive and each negative pair, [n, m] and [n, m].

    With `once` a pair counts once even if it is listed several times, and the measures are masks.
    """
    a1, p, a2, n = as_pairs(indices)

    def listed(rows: Tensor, cols: Tensor) -> Tensor:
        """Number of times [n, m] that each pair is listed."""
        flat = torch.zeros(shape[0] * shape[1], device=rows.device)
        each = torch.ones(1, device=rows.device).expand(len(rows))
        flat = flat.scatter_add_(0, torch.add(cols, rows, alpha=shape[1]), each).reshape(shape)
        return flat > 0 if once else flat

    return listed(a1, p), listed(a2, n)


@dataclass(frozen=True, eq=False)
class Listing:
    """The u distinct pairs of an index tuple, sorted by anchor and column, with positions in a matrix [n, width]."""

    rows: Tensor  # [u] anchors
    cols: Tensor  # [u] columns
    positive: Tensor  # [u] how often each is listed as a positive pair: counts, or a mask if each counts once
    negative: Tensor  # [u] likewise as a negative pair
    place: Tensor  # [u] positions in the flattened matrix [n, width]: a row holds the pairs of its anchor, then nothing
    shape: tuple[int, int]  # (n, width), with width the largest number of pairs of an anchor, at least 1

    def padded(self, entries: Tensor) -> Tensor:
        """A matrix [n, width] of the pairs' entries [u]; 0 in empty places."""
        if len(entries) == self.shape[0] * self.shape[1]:
            return entries.reshape(self.shape)
        return entries.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.place, entries).reshape(self.shape)


def listed_pairs(indices: tuple[Tensor, ...], shape: tuple[int, int], *, once: bool = False) -> Listing:
    """The distinct pairs of an index tuple, without an n x m matrix; arguments as in `indexed`."""
    a1, p, a2, n = as_pairs(indices)
    keys = torch.cat([torch.add(cols, rows, alpha=shape[1]) for rows, cols in ((a1, p), (a2, n))])
    found, which = torch.unique(keys, return_inverse=True)
    once = once or len(found) == len(which)

    def listed(entries: Tensor) -> Tensor:
        """How often [u] each pair is listed, or whether it is listed at all."""
        if once:
            return torch.zeros(len(found), dtype=torch.bool, device=found.device).index_fill_(0, entries, True)
        return torch.bincount(entries, minlength=len(found))

    rows = torch.div(found, shape[1], rounding_mode="floor")
    place, width = spread(rows, shape[0])
    positive = listed(which[: len(a1)])
    negative = ~positive if len(found) == len(which) else listed(which[len(a1) :])
    return Listing(rows, found - rows * shape[1], positive, negative, place, (shape[0], width))


def spread(rows: Tensor, groups: int) -> tuple[Tensor, int]:
    """Positions [u] of the members of sorted groups `rows` [u] in a flattened matrix [groups, width], and its width."""
    counts = torch.bincount(rows, minlength=groups)
    width = max(1, int(counts.max())) if len(rows) else 1
    if len(rows) == groups * width:  # all groups have the same size
        return torch.arange(len(rows), device=rows.device), width
    # members of earlier groups leave (groups before) * width - (members before) places empty
    empty = torch.arange(groups, device=rows.device) * width - counts.cumsum(dim=0) + counts
    return torch.arange(len(rows), device=rows.device) + empty.index_select(0, rows), width


def check_indices(owner: str, indices: tuple[Tensor, ...], shape: tuple[int, int]) -> None:
    """Raise ValueError unless `indices` are 3 or 4 1-D integer tensors of matching lengths, inside the batch."""
    if not isinstance(indices, tuple | list) or len(indices) not in (3, 4):
        raise ValueError(
            f"{owner}: the third argument takes a miner's index tuple, (anchor, positive, negative) or "
            f"(anchor, positive, anchor, negative), but came as {type(indices).__name__}."
        )
    reach: dict[int, tuple[int, int]] = {}
    for i, j in ((0, 1), (0, 2)) if len(indices) == 3 else ((0, 1), (2, 3)):
        rows, cols = indices[i], indices[j]
        if rows.ndim != 1 or rows.shape != cols.shape or rows.dtype not in INTEGERS or cols.dtype not in INTEGERS:
            raise ValueError(
                f"{owner}: index tensors {i} and {j} must be 1-D integers of one length, but came as "
                f"{rows.dtype} {list(rows.shape)} and {cols.dtype} {list(cols.shape)}."
            )
        if not readable(rows) or not len(rows):
            continue
        for place in (i, j):  # each distinct tensor is read once
            if place not in reach:
                reach[place] = _reach(indices[place])
        (low, high), (left, right) = reach[i], reach[j]
        if min(low, left) < 0 or high >= shape[0] or right >= shape[1]:
            raise ValueError(
                f"{owner}: index tensors {i} and {j} must point inside {shape[0]} rows and {shape[1]} columns, "
                f"but reach {high} and {right}."
            )


def _reach(index: Tensor) -> tuple[int, int]:
    """Least and largest entry; synchronizes with the device."""
    low, high = index.aminmax()
    return int(low), int(high)


def check_apart(owner: str, positive: Tensor, negative: Tensor) -> None:
    """Raise ValueError if a pair is listed both as positive and as negative; takes counts or masks of one shape."""
    if readable(positive) and bool(((positive > 0) & (negative > 0)).any()):
        raise ValueError(f"{owner}: the index tuple lists a pair both as positive and as negative; it can be only one.")

"""`ShortList`: a list of the pairs of a relation that are not negative, if they are few; all other pairs are negative.

Multi-hot labels, matrices and pair weights cannot be written as vectors (see `Layout`). If most of their pairs are
negative, a short list of the others serves the same engines, and no mask of all pairs is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["ShortList", "Weights", "consistent", "entries", "list_pairs", "meetings", "own_pairs", "ranges", "together"]

Kind = TypeVar("Kind")
Weights = tuple[Tensor, Tensor] | Tensor
"""Weights of rows [n] and columns [m], whose product is the weight of a pair, or weights of pairs [n, m]."""
SHARE = 8  # a list holds at most one in `SHARE` of all pairs; longer lists are slower than masks
FEW = 64  # a row may always list this many columns, or else two in `SHARE` of them


@dataclass(frozen=True, eq=False)
class ShortList:
    """A list of the pairs of n rows and m columns that are not negative."""

    keys: Tensor  # [k] flat indices i·m + j, increasing
    positive: Tensor  # [k] which of these pairs are positive; the others are absent
    symmetric: bool  # whether the pairs (i, j) and (j, i) are alike, for all i and j


def consistent(ids: Tensor | None, ref_ids: Tensor | None, labels: tuple[Tensor, Tensor]) -> bool:
    """Whether rows with equal ids always have equal labels; reads from the device."""
    if ids is None or ref_ids is None:
        return True
    ids, order = torch.cat([ids, ref_ids]).sort(stable=True)
    found = torch.cat(labels)[order]
    return not bool(((ids[1:] == ids[:-1]) & (found[1:] != found[:-1])).any())


def together(rows: Tensor | None, cols: Tensor | None) -> Weights | None:
    """Combine weights of rows [n] and columns [m] in a pair; weights of pairs [n, m] stay as they are."""
    return rows if rows is None or cols is None else (rows, cols)


def most_listed(shape: tuple[int, int]) -> int:
    """The largest number of pairs that a list of a relation may have."""
    return max(shape[0] * shape[1] // SHARE, FEW * shape[0])


def meetings(rows: tuple[Tensor, ...], cols: tuple[Tensor, ...], shape: tuple[int, int]) -> Tensor | None:
    """Flat indices i·m + j of the pairs with a common label, once per common label; None if there are too many.

    Rows and columns are given as indices [a] and a label [a] of each; a row occurs once per label.
    """
    (row, mine), (col, theirs) = rows, cols
    theirs, order = theirs.sort()
    start, end = (torch.searchsorted(theirs, mine.contiguous(), right=right) for right in (False, True))
    if int((end - start).sum()) > most_listed(shape):
        return None
    which, place = ranges(start, end)
    return row[which] * shape[1] + col[order[place]]


def ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The i [k] of all integers from start[i] to end[i] - 1, and these integers [k], one i after the other."""
    count = end - start
    which = torch.repeat_interleave(torch.arange(len(start), device=start.device), count)
    return which, torch.arange(len(which), device=start.device) - (count.cumsum(0) - count - start)[which]


def entries(mask: Tensor) -> Tensor | None:
    """Flat indices of the true entries of a mask [n, m]; None if there are too many."""
    if int(torch.count_nonzero(mask)) > most_listed((mask.shape[0], mask.shape[1])):
        return None
    return mask.reshape(-1).nonzero()[:, 0]


def own_pairs(
    shape: tuple[int, int],
    device: torch.device,
    ids: tuple[Tensor | None, Tensor | None],
    positions: bool,
    itself: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | None:
    """Flat indices of the pairs of a sample with itself; None if there are too many.

    Candidates are column i of row i (with `positions`) and equal ids; `itself` decides exactly, given their indices.
    """
    (n, m), (mine, theirs) = shape, ids
    row, col = torch.arange(n, device=device), torch.arange(m, device=device)
    found = [row * m + row] if positions else [row[:0]]
    if mine is not None and theirs is not None:
        met = meetings((row, mine), (col, theirs), shape)
        if met is None:
            return None
        found.append(met)
    keys = torch.cat(found)
    return keys[itself(keys // m, keys % m)]


def list_pairs(
    shape: tuple[int, int], same: Tensor | None, own: Tensor | None, known: Tensor | None, weights: Weights | None
) -> ShortList | None:
    """List the pairs that are not negative; None if there are too many in total or in a row.

    `same` and `own` are flat indices of the pairs that share a label and of those of a sample with itself, in any
    order, also several times. Pairs that are not `known` [n, m], or have weight 0, do not count.
    """
    n, m = shape
    if same is None:  # checked before anything is computed for all pairs
        return None
    found = [own] if known is None else [own, entries(~known)]
    if isinstance(weights, Tensor):
        if weights.numel() and not bool(weights.amin() > 0):
            found.append(entries(weights <= 0))
    elif weights is not None and any(bool((x <= 0).any()) for x in weights):
        return None  # a whole row or column is absent
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    absent = torch.cat(parts)
    keys = torch.cat([same, absent]).sort().values
    keys = keys[torch.cat([torch.ones_like(keys[:1], dtype=torch.bool), keys[1:] != keys[:-1]])]
    row, col = keys // m, keys % m
    if len(keys) and int(torch.bincount(row).amax()) > max(2 * m // SHARE, FEW):
        return None
    positive = torch.ones_like(keys, dtype=torch.bool)
    positive[torch.searchsorted(keys, absent)] = False
    turned, order = (col * m + row).sort()
    symmetric = n == m and torch.equal(turned, keys) and torch.equal(positive[order], positive)
    return ShortList(keys, positive, symmetric)

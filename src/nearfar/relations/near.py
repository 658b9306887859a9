"""`Near`: a list of the pairs of a relation that are not negative, if they are few; all other pairs are negative.

Multi-hot labels, matrices and pair weights cannot be written as vectors (see `Layout`). If most of their pairs are
negative, a short list of the others serves the same engines, and no mask of all pairs is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Near", "Weights", "consistent", "entries", "listed", "meetings", "own_pairs", "together"]

Kind = TypeVar("Kind")
Weights = tuple[Tensor, Tensor] | Tensor
"""Weights of rows [n] and columns [m], whose product is the weight of a pair, or weights of pairs [n, m]."""
SHARE = 8
"""A list holds at most one in `SHARE` of all pairs; longer lists are slower than masks."""
FEW = 64
"""A row may always list this many columns, or else two in `SHARE` of them."""


@dataclass(frozen=True, eq=False)
class Near:
    """A list of the pairs of n rows and m columns that are not negative.

    Args:
        keys: [k] flat indices i·m + j, increasing.
        positive: [k] which of these pairs are positive; the others are absent.
        symmetric: whether the pairs (i, j) and (j, i) are alike, for all i and j.
    """

    keys: Tensor
    positive: Tensor
    symmetric: bool


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

    Args:
        rows: row indices [a] and a label [a] of each; a row occurs once per label.
        cols: column indices [b] and a label [b] of each.
        shape: (n, m).
    """
    (row, mine), (col, theirs) = rows, cols
    theirs, order = theirs.sort()
    start, end = (
        torch.searchsorted(theirs, mine.contiguous()),
        torch.searchsorted(theirs, mine.contiguous(), right=True),
    )
    count = end - start
    total = int(count.sum())
    if total > most_listed(shape):
        return None
    which = torch.repeat_interleave(torch.arange(len(row), device=row.device), count, output_size=total)
    within = torch.arange(total, device=row.device) - (count.cumsum(dim=0) - count)[which]
    return row[which] * shape[1] + col[order[start[which] + within]]


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

    Args:
        shape: (n, m).
        device: the device of the relation.
        ids: ids of the rows [n] and of the columns [m], or None.
        positions: whether column i is row i.
        itself: recognizes a row's own sample exactly, given indices of rows and columns.
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


def listed(
    shape: tuple[int, int], same: Tensor | None, own: Tensor | None, known: Tensor | None, weights: Weights | None
) -> Near | None:
    """List the pairs that are not negative; None if there are too many in total or in a row.

    Args:
        shape: (n, m).
        same: [a] flat indices of the pairs that share a label, in any order; a pair may occur several times.
        own: [b] flat indices of the pairs of a sample with itself, likewise.
        known: [n, m] which pairs count; None for all.
        weights: the weights of the relation; pairs of weight 0 do not count.
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
    return Near(keys, positive, symmetric)

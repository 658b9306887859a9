"""Graded relevance (ladder constraints): a row that is more relevant to an anchor must be nearer to it.

    rel(x, a) > rel(x, b)   ⟹   d(x, a) + α ≤ d(x, b)

Class labels are a ladder of two rungs, positive and negative. Xu et al. 2022 mentions Ladder Loss as an extension.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.tensors import check_labels, check_tensor
from nearfar.geometry.spaces import Space

__all__ = ["check_relevance", "hardest_step", "ladder", "nested_groups", "order_rows", "steps"]

CELLS = 2**20  # pairs computed at a time


def ladder(*labels: Tensor) -> Tensor:
    """Relevance [n, n] from nested labels, the coarsest first: the number of leading labels that two rows share.

    >>> ladder(torch.tensor([0, 0, 0, 1]), torch.tensor([5, 5, 6, 7]))
    tensor([[2, 2, 1, 0],
            [2, 2, 1, 0],
            [1, 1, 2, 0],
            [0, 0, 0, 2]])
    """
    if not labels:
        raise ValueError("ladder: labels are missing; pass one integer tensor [n] a rung, the coarsest first.")
    check_tensor("ladder", "labels", labels[0])
    relevance = torch.zeros(len(labels[0]), len(labels[0]), dtype=torch.int64, device=labels[0].device)
    so_far = torch.ones_like(relevance, dtype=torch.bool)
    for each in labels:
        check_labels("ladder", "labels", each, len(labels[0]), labels[0].device)
        so_far = so_far & (each[:, None] == each[None, :])
        relevance += so_far
    return relevance


def check_relevance(owner: str, relevance: Tensor, rows: int, device: torch.device) -> None:
    """Require a finite matrix [n, n] of numbers, on the device of the embeddings."""
    if relevance.shape != (rows, rows):
        raise ValueError(
            f"{owner}: labels of two dimensions are the relevance of rows to each other, of shape [{rows}, {rows}], "
            f"but came with shape {list(relevance.shape)}; pass one label a row, or geometry.ladder(coarse, fine)."
        )
    if relevance.device != device:
        raise ValueError(f"{owner}: labels are on {relevance.device}, the embeddings on {device}; move one of them.")
    if relevance.is_floating_point() and not bool(torch.isfinite(relevance).all()):
        raise ValueError(f"{owner}: relevance must be finite, but holds NaN or infinity.")


def hardest_step(x: Tensor, relevance: Tensor, space: Space) -> tuple[int, int, int, float]:
    """The hardest triplet: anchor, the more and the less relevant row, and the gap; -inf if there is none.

    For each anchor and rung, the farthest row at or above the rung is compared with the nearest below it: rows are
    sorted by relevance, with a running maximum from one end and a running minimum from the other. O(n² log n), in
    strips of rows.
    """
    best = (0, 0, 0, -math.inf)
    tall = max(1, CELLS // max(1, len(x)))
    for first in range(0, len(x), tall):
        rows = torch.arange(first, min(first + tall, len(x)), device=x.device)
        rung = relevance[rows].double()
        rung[torch.arange(len(rows)), rows] = math.inf  # sorts the anchor first in its own row, where it is skipped
        rung, order = rung.sort(dim=1, descending=True)
        apart = space.distances(x[rows], x).gather(1, order)
        far, at_far = apart[:, 1:].cummax(dim=1)
        near, at_near = apart[:, 1:].flip(1).cummin(dim=1)
        near, at_near = near.flip(1), at_near.flip(1)
        gap = torch.where(rung[:, 1:-1] > rung[:, 2:], far[:, :-1] - near[:, 1:], -math.inf)
        if not gap.numel() or float(gap.max()) <= best[3]:
            continue
        row, place = divmod(int(gap.argmax()), gap.shape[1])
        last = order.shape[1] - 1
        positive = order[row, 1 + at_far[row, place]]
        negative = order[row, last - at_near[row, place + 1]]
        best = (int(rows[row]), int(positive), int(negative), float(gap[row, place]))
    return best


def nested_groups(relevance: Tensor) -> list[Tensor] | None:
    """Groups [n] of each rung but the lowest, finest first; None if some rung does not partition the rows."""
    off = ~torch.eye(len(relevance), dtype=torch.bool, device=relevance.device)
    rungs = torch.unique(relevance[off]).flip(0)
    found = []
    for rung in rungs[:-1]:
        same = (relevance >= rung) | ~off
        group = same.to(torch.int8).argmax(dim=1)  # the first row of the group
        if not bool((same == (group[:, None] == group[None, :])).all()):
            return None
        found.append(torch.unique(group, return_inverse=True)[1])
    return found


def steps(y: Any) -> Any:
    """The rung [N, N] of each row for each anchor, 0 the nearest and -1 for itself, as a NumPy array.

    From labels [N] or a relevance [N, N].
    """
    import numpy as np

    relevance = (y[:, None] == y[None, :]).astype(float) if y.ndim == 1 else np.asarray(y, dtype=float)
    found = np.full(relevance.shape, -1)
    for i, row in enumerate(relevance):
        others = np.arange(len(row)) != i
        rungs, place = np.unique(-row[others], return_inverse=True)
        found[i, others] = place if len(rungs) else -1
    return found


def order_rows(x: Tensor, relevance: Tensor, space: Space, margin: float, *, slack: float = 0.05) -> Tensor:
    """Move few rows until they satisfy the ladder, by L-BFGS on the squared violations, starting from x.

    This may fail: on a line, the only solution of some relevances is one point for all rows.
    """
    more = relevance[:, :, None] > relevance[:, None, :]
    each = torch.arange(len(x))
    more[each, each, :] = more[each, :, each] = False
    g = x.clone().requires_grad_()
    search = torch.optim.LBFGS([g], max_iter=200, line_search_fn="strong_wolfe")
    off = ~torch.eye(len(x), dtype=torch.bool)

    def violation() -> Tensor:
        search.zero_grad()
        u = space.place(g)
        square = ((u[:, None] - u[None]) ** 2).sum(dim=2)
        chord = torch.where(off, (square + 1e-18).sqrt(), 0.0)
        apart = space.of_chord(chord * (1 - 1e-12))
        excess = (apart[:, :, None] - apart[:, None, :] + margin + slack).clamp(min=0)
        value = (excess[more] ** 2).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        search.step(violation)  # type: ignore[no-untyped-call]
    moved = space.place(g.detach())
    return moved if bool(torch.isfinite(moved).all()) else x

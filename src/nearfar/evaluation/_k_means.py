"""k-means: Lloyd's algorithm from k-means++ starts (Arthur & Vassilvitskii), for many clusters.

Two exact shortcuts make 12,000 clusters of 60,000 rows a matter of minutes:

- Starts are drawn in batches by rejection sampling. A row is proposed with probability ∝ its squared distance D² to the
  starts before the batch, and accepted with probability (D² now) / (D² then), so that the distribution is that of
  drawing one by one. One matrix product then measures all rows against the whole batch.
- A step compares only what may have changed: rows of clusters that moved with all centers, other rows with the centers
  that moved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nearfar._utils.checks import check_seed
from nearfar._utils.progress import Watch
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation.parallel import current_group, merge_rows, pace, share

BATCH = 256


@dataclass(frozen=True, eq=False)
class Clusters:
    """One k-means solution: the cluster of each row [n], the centers [k, d] and the sum of squared distances."""

    assignment: Tensor
    centers: Tensor
    inertia: float


def k_means(
    x: Tensor, k: int, *, seed: int = 0, restarts: int = 3, steps: int = 50, watch: Watch | None = None
) -> Clusters:
    """Cluster by k-means: the best of `restarts` runs of Lloyd's algorithm with k-means++ initialization.

    Args:
        x: [n, d].
        k: number of clusters, 1..n.
        seed: seed of the initialization.
        restarts: number of runs.
        steps: most steps of each run; it stops earlier if no row changes its cluster.
        watch: called as watch(what, done, total) during the work.

    >>> k_means(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), 2).assignment.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    True
    """
    return min(runs(x, k, seed=seed, restarts=restarts, steps=steps, watch=watch), key=lambda run: run.inertia)


def runs(
    x: Tensor, k: int, *, seed: int = 0, restarts: int = 3, steps: int = 50, watch: Watch | None = None
) -> Iterator[Clusters]:
    """Yield every run of `k_means`."""
    check_embeddings("k_means", "x", x)
    check_seed("k_means", seed)
    if not 1 <= k <= len(x):
        raise ValueError(f"k_means: k must lie in 1..{len(x)}, the number of rows, but came as {k!r}.")
    if restarts < 1 or steps < 1:
        raise ValueError(f"k_means: restarts and steps must be 1 or more, but came as {restarts!r} and {steps!r}.")
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    middle = x.mean(dim=0)
    x = x - middle  # centering avoids cancellation in distances computed from products
    generator = torch.Generator().manual_seed(seed)
    for run in range(restarts):
        name = f"k-means run {run + 1} of {restarts}"
        found = _lloyd(x, _starts(x, k, generator, name, watch), steps, name, watch)
        yield Clusters(found.assignment, found.centers + middle, found.inertia)


def _starts(x: Tensor, k: int, generator: torch.Generator, name: str, watch: Watch | None) -> Tensor:
    """k-means++: draw starts with probability ∝ squared distance to the nearest start so far."""
    square = x.square().sum(dim=1)
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    nearest = torch.full_like(square, torch.inf)
    fresh = chosen
    while len(chosen) < k:
        if fresh:
            added = torch.tensor(fresh, device=x.device)
            nearest = torch.minimum(nearest, _distances(x, square, added).amin(dim=1))
        if not bool(nearest.any()):  # every row lies on a start already: fill up with other rows
            taken = set(chosen)
            chosen += [row for row in range(len(x)) if row not in taken][: k - len(chosen)]
            break
        fresh = _draw(x, square, nearest, min(BATCH, len(chosen), k - len(chosen)), generator)
        chosen = chosen + fresh
        if watch is not None:
            watch(f"{name}: starts", len(chosen), k)
    starts = current_group().copy_from(0, torch.tensor(chosen, device=x.device))
    return x[starts].clone()


def _distances(x: Tensor, square: Tensor, chosen: Tensor) -> Tensor:
    """Squared distances [n, c] of all rows to chosen rows; distances within rounding errors are set to 0."""
    both = square[:, None] + square[chosen]
    found = torch.addmm(both, x, x[chosen].T, alpha=-2)
    return torch.where(found <= 1e-6 * both, 0.0, found)


def _draw(x: Tensor, square: Tensor, before: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw at most `count` starts, from proposals with probability ∝ `before`."""
    heights = before.double().cumsum(dim=0)
    spots = torch.rand(count, 2, dtype=torch.float64, generator=generator).to(x.device)
    proposed = torch.searchsorted(heights, spots[:, 0] * heights[-1], right=True).clamp(max=len(x) - 1)
    among = _distances(x[proposed], square[proposed], torch.arange(count, device=x.device)).tolist()
    then, level, rows = before[proposed].tolist(), spots[:, 1].tolist(), proposed.tolist()
    accepted: list[int] = []
    for i in range(count):
        now = min([then[i]] + [0.0 if rows[i] == rows[j] else among[i][j] for j in accepted])
        if level[i] * then[i] < now:
            accepted.append(i)
    return [rows[i] for i in accepted]


def _lloyd(x: Tensor, centers: Tensor, steps: int, name: str, watch: Watch | None) -> Clusters:
    square = x.square().sum(dim=1)
    assignment, gain = _nearest(x, centers)
    touched = torch.ones(len(centers), dtype=torch.bool, device=x.device)
    for step in range(steps):
        distance = square - 2 * gain
        moved = _move(x, centers, assignment, torch.where(distance <= 1e-6 * square, 0.0, distance), touched)
        if watch is not None:
            watch(f"{name}: steps (at most)", step + 1, steps)
        if not bool(moved.any()):
            break
        before = assignment.clone()
        _follow(x, centers, moved, assignment, gain)
        left, joined = before[before != assignment], assignment[before != assignment]
        touched = torch.zeros_like(touched).index_fill_(0, torch.cat([left, joined]), True)
    rows = zip(torch.split(x, 8192), torch.split(assignment, 8192), strict=True)
    inertia = sum(float((part - centers[own]).square().sum(dtype=torch.float64)) for part, own in rows)
    return Clusters(assignment, centers, inertia)


def _follow(x: Tensor, centers: Tensor, moved: Tensor, assignment: Tensor, gain: Tensor) -> None:
    """Update nearest centers and gains in place after some centers moved; a row changes only to a nearer center."""
    free = moved[assignment]  # the row's own center moved, so any other may be nearest now
    rows, rest, some = free.nonzero().flatten(), (~free).nonzero().flatten(), moved.nonzero().flatten()
    assignment[rows], gain[rows] = _nearest(x, centers, rows)
    place, better = _nearest(x, centers[some], rest)
    switch = better > gain[rest]
    assignment[rest] = torch.where(switch, some[place], assignment[rest])
    gain[rest] = torch.where(switch, better, gain[rest])


def _nearest(x: Tensor, centers: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The nearest center of each row and its gain ⟨x, c⟩ - |c|²/2, so that |x - c|² = |x|² - 2 gain."""
    half, group = centers.square().sum(dim=1) / 2, current_group()
    chosen = torch.arange(len(x), device=x.device) if rows is None else rows
    best, place = x.new_empty(len(chosen)), torch.empty_like(chosen)
    tall = max(1, 2**22 // len(centers))
    parts = -(-len(chosen) // tall)
    mine, work = share(parts, group.rank, group.world), tall * centers.numel()
    found: list[tuple[slice | Tensor, Tensor, Tensor]] = []
    for number in pace(mine, -(-parts // group.world), work, partial(group.beat, x.device)):
        part = slice(number * tall, min((number + 1) * tall, len(chosen)))
        gain = torch.addmm(half, x[chosen[part]], centers.T, beta=-1).max(dim=1)
        found.append((part, gain.indices, gain.values))
    return (
        merge_rows(group, place, [(part, places) for part, places, _ in found]),
        merge_rows(group, best, [(part, gains) for part, _, gains in found]),
    )


def _move(x: Tensor, centers: Tensor, assignment: Tensor, distance: Tensor, touched: Tensor) -> Tensor:
    """Move the center of each touched cluster to the mean of its rows, in place; return which ones moved.

    An empty cluster restarts at one of the rows farthest from their centers.
    """
    counts = torch.bincount(assignment, minlength=len(centers))
    means = torch.zeros_like(centers).index_add_(0, assignment, x) / counts.clamp(min=1)[:, None]
    means = torch.where((touched & (counts > 0))[:, None], means, centers)
    empty = (counts == 0).nonzero().flatten()
    if len(empty):
        far = distance.topk(len(empty))
        means[empty] = torch.where((far.values > 0)[:, None], x[far.indices], centers[empty])
    means = current_group().copy_from(0, means.contiguous())  # sums on a GPU may differ from rank to rank
    moved = (means != centers).any(dim=1)
    centers.copy_(means)
    return moved

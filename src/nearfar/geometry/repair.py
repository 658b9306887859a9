"""`repair`: the smallest shrink of classes toward their means that separates all triplets.

    g(x) = c + t (c_y - c) + (1 - s)(x - c_y),     s* = the smallest s with H(g) = 0;  t = 1 unless a margin needs more

s* is an index of collapse: 0 if f is separated already, 1 if only the complete collapse of each class separates it.
With nested labels the finer groups shrink faster, by (1 - s)², (1 - s)³, ...; on the sphere g is scaled back to unit
length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.geometry.ladder import nested_groups
from nearfar.geometry.separation import check_inputs, hardest_triplet, hardness
from nearfar.geometry.spaces import Flat, Metric, distances, space_of

__all__ = ["Repair", "class_means", "groups_of", "repair"]

HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Repair:
    """A separated map near f, found by shrinking classes.

    Attributes:
        map: [n, d], double precision: H is exactly 0, also in floating point.
        shrink: s*, from 0 (nothing changed) to 1 (each class became a point).
        moved: the farthest that a row was moved: an upper bound of d_haus.
    """

    map: Tensor
    shrink: float
    moved: float

    def __repr__(self) -> str:
        return f"Repair(shrink={self.shrink:.6g}, moved={self.moved:.6g})"


@torch.no_grad()
def repair(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.0, metric: Metric = "euclidean", halvings: int = HALVINGS
) -> Repair:
    """Shrink every class toward its mean by the smallest amount that separates all triplets (bisection on s).

    Proved: s = 1 separates, so a solution exists, and `map` is separated for the s that is returned. Observed only (no
    exception in 8,760 trials): a separated map stays separated under more shrinking, which makes s* the smallest. With
    a margin the class means may have to be pushed apart first (t above); s* is then for that t.

    With a ladder of nested labels, s = 1 sends each group of the coarsest rung to a point; with a relevance that is not
    nested it sends all rows to one point. With a margin neither is separated: a nested map is then scaled up as a
    whole, and a ValueError is raised where that is impossible (not nested, or on the sphere).

    Each halving costs one `hardness`.

    Args:
        embeddings: [n, d].
        labels: [n] integers, or a relevance [n, n]; see `hardness`.
        margin: α.
        metric: "euclidean" or "angle"; with "angle" `map` holds unit rows and `moved` is an angle.
        halvings: the number of bisection steps.

    >>> round(repair(torch.tensor([[-1.0], [1.0], [0.5]]), torch.tensor([0, 0, 1])).shrink, 6)
    0.833333
    """
    space = space_of("repair", metric)
    x, y = check_inputs("repair", embeddings, labels, space)
    if not len(x):
        return Repair(x, 0.0, 0.0)
    middle = embeddings.detach().double().mean(dim=0) if isinstance(space, Flat) else torch.zeros_like(x[0])
    groups = groups_of(y)
    chain = [x, *(class_means(x, group)[group] for group in groups)]
    base = _part_means(class_means(x, y), margin)[y] if y.ndim == 1 and isinstance(space, Flat) else chain[-1]
    pushed = bool((base != chain[-1]).any())

    def at(s: float) -> Tensor:
        g = base.clone()
        for k in range(len(groups)):
            g += (1 - s) ** (len(groups) - k) * (chain[k] - chain[k + 1])
        return space.place(g)

    def hard(g: Tensor) -> float:
        return hardness(g, y, margin=margin, metric=metric)

    start = at(0.0) if pushed else x
    low, high, best = 0.0, 1.0, at(1.0)
    if hard(start) == 0:
        high, best = 0.0, start
    elif margin and hard(best) > 0:
        high, best = _stretch(at, y, margin, metric)
        low = high
    while high > low and halvings > 0:
        s, halvings = (low + high) / 2, halvings - 1
        if s in (low, high):
            break
        trial = at(s)
        if hard(trial) == 0:
            high, best = s, trial
        else:
            low = s
    return Repair(best + middle, high, float(space.displacement(best, x).max()))


def groups_of(y: Tensor) -> list[Tensor]:
    """Groups [n] that may shrink to points, finest first: classes, the rungs of a nested ladder, or all rows."""
    if y.ndim == 1:
        return [y]
    return nested_groups(y) or [torch.zeros(len(y), dtype=torch.int64, device=y.device)]


def _stretch(at: Callable[[float], Tensor], y: Tensor, margin: float, metric: Metric) -> tuple[float, Tensor]:
    """Scale shrunk maps up until every triplet has the margin; return the one that moves rows least, and its s."""
    found: list[tuple[float, float, Tensor]] = []
    for s in (0.1, 0.25, 0.5, 0.75, 0.9, 0.97):
        g = at(s)
        worst = hardest_triplet(g, y)
        if metric == "euclidean" and worst is not None and worst.value < 0:
            g = g * max(1.0, margin / -worst.value) * (1 + 1e-9)
            found.append((float((g - at(0.0)).norm(dim=1).max()), s, g))
    if not found:
        raise ValueError(
            f"repair: no map that keeps a margin of {margin:g} is known for this relevance and metric={metric!r}; "
            "use a smaller margin, or 0."
        )
    _, s, g = min(found, key=lambda each: each[0])
    return s, g


def class_means(x: Tensor, y: Tensor) -> Tensor:
    """The mean of each class, [c, d]; labels are 0 ... c - 1."""
    count = int(y.max()) + 1
    sums = x.new_zeros(count, x.shape[1]).index_add_(0, y, x)
    return sums / torch.bincount(y, minlength=count)[:, None]


def _part_means(means: Tensor, margin: float) -> Tensor:
    """Scale the class means around their center until the nearest two are a margin apart."""
    if margin == 0 or len(means) < 2:
        return means
    for attempt in range(8):
        nearest = float((distances(means, means) + torch.diag(means.new_full((len(means),), torch.inf))).min())
        if nearest >= margin:
            return means
        if nearest > 1e-3 * margin:
            middle = means.mean(dim=0)
            means = middle + (means - middle) * (margin / nearest) * (1 + 1e-9)
        else:  # coinciding means have no direction in which to part: add noise
            noise = torch.Generator().manual_seed(attempt)
            means = means + margin * torch.randn(means.shape, generator=noise, dtype=means.dtype).to(means.device)
    return means

"""Classes that look like two, and pairs of classes that look like one; both are tested, with a false-discovery rate."""

import torch
from torch import Tensor

from nearfar.evaluation import Neighbors, k_means, neighbors
from nearfar.similarity import unit

SMALLEST = 12  # rows of a class that is tested for two parts
ROWS = 1000  # rows of a class that are read at most
DRAWS = 2000  # draws from the null distribution of a class size
PARTNERS = 3  # classes with which each class is compared
MIXED = 0.5  # two classes look like one if their rows mix by more than this share of what chance gives


def classes_like_two(
    z: Tensor, y: Tensor, *, cut: float = 1.0, rate: float = 0.05, seed: int = 0
) -> list[tuple[int, float, Tensor]]:
    """Find classes whose rows form two groups: (class, score, side of each of its rows), best score first.

    Half of a class is split by 2-means, and the other half is projected on the line through the two means: so the
    split cannot profit from chance. The share of the variance that two intervals of that line explain is compared with
    that of evenly spread values, the widest distribution with one hill. The score is the distance of the two parts,
    2 sqrt(b (1 - b)) times that of their means for shares b and 1 - b, as a multiple of the median distance of a class
    mean to the nearest other one. Listed are classes that pass the test of Benjamini and Hochberg and score `cut` or
    more.
    """
    members = _members(y, seed)
    means = torch.stack([z[rows].mean(dim=0) for rows in members])
    if len(means) < 2:
        return []
    apart = float((2 * -neighbors(means, k=1, similarity="euclidean").scores).median()) / 2
    tested, found, nulls = [], [], dict[int, Tensor]()
    for label, rows in enumerate(members):
        if len(rows) < SMALLEST:
            continue
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        one, other = (_split(z[a], z[b], seed) for a, b in (halves, halves[::-1]))
        share, gap = (one[0] + other[0]) / 2, (one[1] + other[1]) / 2
        null = nulls.setdefault(len(rows) // 2, _null(len(rows) // 2, seed))
        tested.append((1 + float((null >= share).sum())) / (1 + DRAWS))
        whole = (y == label).nonzero().flatten()
        found.append((label, gap / max(apart, 1e-12), whole))
    passed = [each for each, good in zip(found, _discoveries(tested, rate), strict=True) if good and each[1] >= cut]
    shown = sorted(passed, key=lambda each: -each[1])
    return [(label, score, _sides(z[rows], seed)) for label, score, rows in shown]


def _members(y: Tensor, seed: int) -> list[Tensor]:
    """The rows of each class in random order, at most `ROWS`."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    order = order[y[order].argsort(stable=True)]
    return [part[:ROWS] for part in torch.split(order, torch.bincount(y).tolist())]


def _split(train: Tensor, test: Tensor, seed: int) -> tuple[float, float]:
    """Split `train` in two; the share of variance that two parts of `test` explain on that line, and their distance."""
    centers = k_means(train, 2, seed=seed).centers
    line = unit(centers[1:] - centers[:1])[0]
    values = ((test - centers.mean(dim=0)) @ line).double()
    share = float(_explained(values[None])[0])
    right = values > 0
    b = float(right.double().mean())
    if b in (0.0, 1.0):
        return share, 0.0
    return share, 2 * (b * (1 - b)) ** 0.5 * float(values[right].mean() - values[~right].mean())


def _explained(values: Tensor) -> Tensor:
    """The largest share of the variance of each row of values [t, m] that two intervals explain."""
    ordered = values.sort(dim=1).values
    ordered = ordered - ordered.mean(dim=1, keepdim=True)
    m = ordered.shape[1]
    left = torch.arange(1, m, dtype=ordered.dtype)
    between = ordered.cumsum(dim=1)[:, :-1].square() * m / (left * (m - left))
    return between.amax(dim=1) / ordered.square().sum(dim=1).clamp_min(1e-30)


def _null(m: int, seed: int) -> Tensor:
    """The mean share of two rows of m evenly spread values, in `DRAWS` draws."""
    generator = torch.Generator().manual_seed(seed)
    return _explained(torch.rand(2 * DRAWS, m, generator=generator, dtype=torch.float64)).reshape(2, DRAWS).mean(dim=0)


def _sides(z: Tensor, seed: int) -> Tensor:
    return k_means(z, 2, seed=seed).assignment


def pairs_like_one(
    z: Tensor, y: Tensor, near: Neighbors, *, rate: float = 0.05, seed: int = 0
) -> list[tuple[int, int, float]]:
    """Find pairs of classes whose rows mix: (class, class, score), best score first.

    Among the rows of the two classes alone, the nearest neighbor is of the other class in some share of the rows. The
    score is that share, as a multiple of its expectation if labels were shuffled: 0 apart, 1 mixed as by chance. Pairs
    are listed whose score is above `MIXED` by a binomial test, with the false-discovery rate of Benjamini and Hochberg.
    Two rows may be each other's neighbors, so that the test counts half of the rows.
    """
    members, tested, found = _members(y, seed), [], []
    for a, b in _partners(y, near):
        rows = torch.cat([members[a], members[b]])
        n, m = len(members[a]), len(members[b])
        if min(n, m) < 2:
            continue
        labels = y[rows]
        crossed = float((labels[neighbors(z[rows], k=1).places[:, 0]] != labels).sum())
        chance = 2 * n * m / (n + m - 1) / (n + m)
        score = crossed / (n + m) / chance
        tested.append(_binomial_tail(crossed / 2, (n + m) / 2, MIXED * chance))
        found.append((a, b, score))
    passed = [each for each, good in zip(found, _discoveries(tested, rate), strict=True) if good]
    return sorted(passed, key=lambda each: -each[2])


def _partners(y: Tensor, near: Neighbors) -> list[tuple[int, int]]:
    """Pairs of classes a < b that are often among each other's neighbors."""
    classes = int(y.max()) + 1
    theirs = y[near.places]
    crossed = theirs != y[:, None]
    keys, counts = torch.unique((y[:, None] * classes + theirs)[crossed], return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    met: dict[int, int] = {}
    pairs = set()
    for key in keys[order].tolist():
        a, b = divmod(key, classes)
        if met.get(a, 0) < PARTNERS:
            met[a] = met.get(a, 0) + 1
            pairs.add((min(a, b), max(a, b)))
    return sorted(pairs)


def _binomial_tail(hits: float, trials: float, share: float) -> float:
    """P(at least `hits` of `trials`), by the incomplete beta function, which needs no whole numbers."""
    from scipy.special import betainc

    return float(betainc(hits, trials - hits + 1, min(share, 1.0))) if hits > 0 else 1.0


def _discoveries(p: list[float], rate: float) -> list[bool]:
    """Which hypotheses are rejected at this false-discovery rate (Benjamini and Hochberg 1995)."""
    ordered = sorted(p)
    good = [value for rank, value in enumerate(ordered, start=1) if value <= rate * rank / len(p)]
    limit = max(good, default=-1.0)
    return [value <= limit for value in p]

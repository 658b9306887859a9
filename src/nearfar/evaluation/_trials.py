"""Trials of a calibration: the largest scores of negative pairs with their classes, and histograms of all scores.

All pairs are scored in tiles. What is kept does not grow with their number, except for the share of the negative pairs
that a threshold may accept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.progress import Watch
from nearfar.evaluation._ranking_keys import Metric, keys, scores, spaces

BINS = 2**14  # bins of a histogram, evenly wide from the lowest to the highest score that is possible
TILE = 2**22  # scores computed at a time
HELD = 2**24  # maximum number of negative pairs that are held, with 2 GB at the peak
# first rows of the histograms: pairs across the two halves of classes, in the first, and in the second half
NEGATIVE, POSITIVE = 0, 3


@dataclass(frozen=True, eq=False)
class Trials:
    """Scored pairs; in searches, the best wrong and the best right answer of each query."""

    top: np.ndarray  # [k] the largest scores of negative pairs, descending
    classes: np.ndarray  # [k, 2] the classes of each, 0..m-1
    negatives: int
    # [m] negative pairs with each class; their sum is twice `negatives`. Empty if classes are not known
    touched: np.ndarray
    bins: np.ndarray  # [6, BINS] counts of scores, rows as of `NEGATIVE` and `POSITIVE`
    low: float  # lower end of the first bin
    high: float  # upper end of the last bin
    mutual: bool  # whether alike classes are wrong answers of each other, as in searches
    # maps t thresholds to the accepted positive pairs [m, t] of each class and to all of them [m]
    accepted: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

    def histogram(self, kind: int) -> np.ndarray:
        """Histogram [BINS] of all pairs of a kind."""
        return np.asarray(self.bins[kind : kind + 3].sum(axis=0))

    def edges(self) -> np.ndarray:
        """The upper ends [BINS] of the bins."""
        return self.low + (self.high - self.low) * np.arange(1, BINS + 1) / BINS


class _Sides:
    """Queries and gallery with classes numbered 0..m-1; without a gallery the queries are both."""

    def __init__(self, x: Tensor, y: Tensor, ref: Tensor | None, ref_y: Tensor | None, similarity: Metric) -> None:
        self.similarity, self.itself = similarity, ref is None or ref_y is None
        self.x, self.ref = spaces(x, ref, similarity)
        both = y if ref_y is None else torch.cat([y, ref_y])
        place = torch.unique(both, return_inverse=True)[1]
        self.y, self.ref_y = place[: len(y)], place if ref_y is None else place[len(y) :]
        self.classes = int(place.max()) + 1
        self.n, self.m = (
            np.bincount(side.cpu().numpy(), minlength=self.classes).astype(float) for side in (self.y, self.ref_y)
        )

    def tiles(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Iterator[tuple[slice, int, Tensor]]:
        """Yield strips of queries as (rows, first column, scores); pairs of a side with itself once, others NaN."""
        x = self.x if rows is None else self.x[rows]
        ref = x if self.itself else self.ref if columns is None else self.ref[columns]
        tall = max(1, TILE // max(1, len(ref)))
        for top in range(0, len(x), tall):
            strip = slice(top, min(top + tall, len(x)))
            left = top if self.itself else 0
            found = scores(keys(x[strip], ref[left:]), self.similarity)
            if self.itself:
                wide = strip.stop - strip.start
                found[:, :wide].masked_fill_(torch.ones_like(found[:, :wide], dtype=torch.bool).tril(), torch.nan)
            yield strip, left, found

    def accepted(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Count accepted positive pairs of each class."""
        counts, levels = np.zeros((self.classes, len(thresholds))), torch.as_tensor(thresholds)
        rows, columns = (torch.split(y.argsort(stable=True), n.astype(int).tolist())
                         for y, n in ((self.y, self.n), (self.ref_y, self.m)))  # fmt: skip
        for label in range(self.classes):
            for _, _, found in self.tiles(rows[label], columns[label]):
                counts[label] += [int((found > level).sum()) for level in levels.to(found)]
        return counts, self.n * (self.n - 1) / 2 if self.itself else self.n * self.m

    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest score that are possible."""
        if self.similarity == "cosine":
            return -1.0, 1.0
        longest = [max(float(torch.linalg.vector_norm(part.float(), dim=1).max()) for part in torch.split(s.x, 8192))
                   for s in (self.x, self.ref)]  # fmt: skip
        ends = (-sum(longest), 0.0) if self.similarity == "euclidean" else (-longest[0] * longest[1],) * 2
        return ends[0], max(ends[1], -ends[0]) if self.similarity == "dot" else 0.0


def halves_of(classes: int) -> np.ndarray:
    """Divide classes into two halves at random: 0 or 1 for each."""
    return np.random.default_rng(0).permutation(classes) % 2


def code(same: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The row of the histograms to which a pair belongs, given the halves of its two classes."""
    return same * POSITIVE + torch.where(first == second, first + 1, 0)


def pairs_of_rows(
    x: Tensor,
    y: Tensor,
    ref: Tensor | None,
    ref_y: Tensor | None,
    similarity: Metric,
    share: float,
    watch: Watch | None = None,
) -> Trials:
    """All pairs of rows, or of queries and gallery, and the largest `share` of the negative ones."""
    sides = _Sides(x, y, ref, ref_y, similarity)
    n, m = sides.n, sides.m
    touched = n * (n.sum() - n) if sides.itself else n * (m.sum() - m) + m * (n.sum() - n)
    negatives = int(touched.sum() / 2)
    low, high = sides.bounds()
    half = torch.as_tensor(halves_of(sides.classes), device=x.device)
    bins, largest = torch.zeros(6 * BINS + 1, dtype=torch.int64), _Largest(int(share * negatives + 1e-9) + 1)
    for strip, left, found in sides.tiles():
        ours, theirs = sides.y[strip], sides.ref_y[left:]
        same = ours[:, None] == theirs
        place = ((found - low) * (BINS / max(high - low, 1e-30))).clamp_(0, BINS - 1)
        place = place.nan_to_num_(6 * BINS).long() + BINS * code(same, half[ours][:, None], half[theirs])
        bins += torch.bincount(place.clamp_(max=6 * BINS).ravel(), minlength=6 * BINS + 1).cpu()
        row, column = ((found > largest.floor) & ~same).nonzero(as_tuple=True)
        largest.add(found[row, column], ours[row], theirs[column])
        if watch is not None:
            watch("scoring pairs", strip.stop, len(x))
    return Trials(
        *largest.sorted(), negatives, touched, bins[:-1].view(6, BINS).numpy(), low, high, False, sides.accepted
    )


class _Largest:
    """The k largest scores that have been added, with the two classes of each."""

    def __init__(self, k: int) -> None:
        self.k, self.floor = k, -torch.inf
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, found: Tensor, first: Tensor, second: Tensor) -> None:
        """Add scores and classes; drop the smallest when about twice as many are held."""
        classes = torch.stack([first, second], dim=1).int()
        self.parts.append((found.cpu().numpy(), classes.cpu().numpy()))
        if sum(len(part[0]) for part in self.parts) > 2 * self.k + TILE // 4:
            self.parts = [self.sorted()]
            self.floor = float(self.parts[0][0][-1])

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The k largest scores, descending, and their classes."""
        found, classes = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        order = np.argsort(-found, kind="stable")[: self.k]
        return found[order], classes[order]


def answers_of_queries(
    x: Tensor, y: Tensor, ref: Tensor | None, ref_y: Tensor | None, similarity: Metric, watch: Watch | None = None
) -> Trials:
    """The best wrong and the best right answer of each query in a search of the gallery, or of the other rows."""
    sides = _Sides(x, y, ref, ref_y, similarity)
    itself, sides.itself = sides.itself, False
    answers = torch.empty(4, len(x), dtype=torch.float64)  # tensors kept from each tile would fragment the memory
    for strip, _, found in sides.tiles():
        ours = sides.y[strip]
        same = ours[:, None] == sides.ref_y
        wrong, place = found.masked_fill(same, -torch.inf).max(dim=1)
        if itself:
            found[:, strip].fill_diagonal_(-torch.inf)
        right = found.masked_fill_(~same, -torch.inf).amax(dim=1)
        for row, column in enumerate((wrong, right, ours, sides.ref_y[place])):
            answers[row, strip] = column.to(answers)
        if watch is not None:
            watch("searching for wrong and right answers", strip.stop, len(x))
    best, right, label, other = answers.numpy()
    return searched(best, right, label, other, sides.n, sides.m)


def searched(
    wrong: np.ndarray, right: np.ndarray, label: np.ndarray, other: np.ndarray, n: np.ndarray, m: np.ndarray
) -> Trials:
    """The trials of queries, given the scores of the best wrong and right answer, -inf if there is none.

    `label` is the class of each query, `other` that of its best wrong answer; n [c] queries and m [c] rows of the
    gallery of each class.
    """
    room = m.sum() - m  # rows of the gallery that are wrong for a query of each class
    chance = np.divide(n, room, out=np.zeros_like(room), where=room > 0)
    keep, lone = np.isfinite(wrong), ~np.isfinite(right)
    touched = n * (room > 0) + m * (chance.sum() - chance)
    return listed(
        np.concatenate([wrong[keep], right[~lone]]),
        np.repeat([False, True], [keep.sum(), (~lone).sum()]),
        np.stack([np.r_[label[keep], label[~lone]], np.r_[other[keep], label[~lone]]], axis=1).astype(int),
        touched,
    )


def listed(
    found: np.ndarray, same: np.ndarray, classes: np.ndarray | None, touched: np.ndarray | None = None
) -> Trials:
    """Pairs [n] that are given by their scores, and [n, 2] their classes 0..m-1 if they are known."""
    pairs = np.zeros((len(found), 2), dtype=int) if classes is None else classes
    count = int(pairs.max(initial=0)) + 1
    negative, half = np.flatnonzero(~same), halves_of(count)
    order = negative[np.argsort(-found[negative], kind="stable")]
    low, high = float(found.min()), float(found.max())
    rows = torch.from_numpy(same), *torch.from_numpy(half[pairs]).unbind(1)
    place = np.clip((found - low) * (BINS / max(high - low, 1e-30)), 0, BINS - 1).astype(int)
    bins = np.bincount(place + BINS * code(*rows).numpy(), minlength=6 * BINS).reshape(6, BINS)
    mutual = touched is not None
    if touched is None:
        touched = np.bincount(pairs[negative].ravel(), minlength=count)
    positive, label = found[same], pairs[same, 0]

    def accepted(thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = [np.bincount(label[positive > level], minlength=count) for level in thresholds]
        return np.stack(counts, axis=1).astype(float), np.bincount(label, minlength=count).astype(float)

    known = touched.astype(float) if classes is not None else np.zeros(0)
    return Trials(found[order], pairs[order], len(order), known, bins, low, high, mutual, accepted)

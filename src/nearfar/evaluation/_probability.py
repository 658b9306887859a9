"""Score -> probability that a pair is positive: isotonic or logistic, whichever predicts held-out classes better.

Both are maps from score to log-odds for equally many positive and negative pairs, as knots of a broken line.
"""

from typing import Literal

import numpy as np

Kind = Literal["isotonic", "logistic"]
KNOTS = 256  # maximum number of knots


def choose(places: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> tuple[Kind, np.ndarray]:
    """The better kind, and its knots [k, 2] (score, log-odds) from all pairs.

    Each kind is fitted to the pairs of one half of the classes and judged by its log loss on the other half; logistic
    if a half has no positive or no negative pairs. `places` are the scores in the middle of bins, `positive` and
    `negative` counts [3, bins] of pairs across the halves, in the first, and in the second half.
    """
    best: Kind = "logistic"
    if positive[1:].sum(axis=1).all() and negative[1:].sum(axis=1).all():
        losses = {
            kind: sum(
                log_loss(
                    fit(kind, places, positive[half], negative[half]), places, positive[3 - half], negative[3 - half]
                )
                for half in (1, 2)
            )
            for kind in (best, "isotonic")
        }
        best = "isotonic" if losses["isotonic"] < losses["logistic"] else "logistic"
    return best, fit(best, places, positive.sum(axis=0), negative.sum(axis=0))


def fit(kind: str, places: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Fit the knots of a kind to histograms [bins]."""
    seen = np.flatnonzero(positive + negative)
    return (_isotonic if kind == "isotonic" else _logistic)(places[seen], positive[seen], negative[seen])


def log_odds(knots: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Interpolate between knots; constant beyond them."""
    return np.asarray(np.interp(places, knots[:, 0], knots[:, 1]))


def log_loss(knots: np.ndarray, places: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> float:
    """Mean log loss of histograms [bins], positive and negative pairs with equal weight."""
    z = log_odds(knots, places)
    return (
        float((np.logaddexp(0, -z) @ positive) / positive.sum() + (np.logaddexp(0, z) @ negative) / negative.sum()) / 2
    )


def _logistic(places: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Platt's fit, with his targets just inside 0 and 1, which keep the slope finite when scores are separable."""
    from scipy.optimize import minimize

    middle, spread = places.mean(), max(np.ptp(places), 1e-12)
    x = (places - middle) / spread
    p, n = positive.sum(), negative.sum()
    up = (positive / p * (p + 1) / (p + 2) + negative / n / (n + 2)) / 2
    down = (positive / p / (p + 2) + negative / n * (n + 1) / (n + 2)) / 2

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = w[0] * x + w[1]
        pull = (up + down) / (1 + np.exp(-np.clip(z, -700, 700))) - up
        return float(np.logaddexp(0, -z) @ up + np.logaddexp(0, z) @ down), np.array([pull @ x, pull.sum()])

    w = minimize(loss, np.zeros(2), jac=True, method="BFGS").x
    ends = np.array([-0.5, 0.5]) * 3  # beyond the scores seen, by their range
    return np.stack([middle + ends * spread, w[0] * ends + w[1]], axis=1)


def _isotonic(places: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Pool adjacent violators; no odds are beyond those of half a pair of the rarer kind."""
    blocks: list[list[float]] = []  # positive, negative, sum of scores, number of pairs
    p, n = positive.sum(), negative.sum()
    for place, yes, no in zip(places.tolist(), positive.tolist(), negative.tolist(), strict=True):
        blocks.append([yes, no, place * (yes + no), yes + no])
        # a block's odds must exceed those of the one before: yes/no > yes'/no'
        while len(blocks) > 1 and blocks[-1][0] * blocks[-2][1] <= blocks[-2][0] * blocks[-1][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    found = np.array(blocks)
    with np.errstate(divide="ignore"):
        odds = np.log(found[:, 0] / p) - np.log(found[:, 1] / n)
    most = np.log(2 * min(p, n) + 1)
    knots = np.stack([found[:, 2] / found[:, 3], np.clip(odds, -most, most)], axis=1)
    return np.asarray(knots[np.unique(np.linspace(0, len(knots) - 1, KNOTS).astype(int))])

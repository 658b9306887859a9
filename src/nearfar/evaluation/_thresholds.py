"""`calibrate`: a threshold on the score of two samples, and one whose false accept rate holds on new classes.

Pairs of the same classes are accepted together, so that A accepted pairs of all N negative ones are worth fewer
independent ones. With A_c of them and N_c touching class c, they are worth, by the jackknife over classes,

    x = A² / Σ_c E_c²,    E_c = A_c - N_c A/N,    with ν = (Σ_c E_c²)² / Σ_c E_c⁴ - 1 degrees of freedom

At one threshold, the false accept rates of two equally large sets of classes are like two gamma variables of shape x.
The second exceeds F times the first with probability 1 - confidence, F the quantile of the F distribution with 2x and
2x degrees of freedom. So the guaranteed threshold accepts only far / F of the negative pairs at hand. Because x is an
estimate, it is first multiplied by (z / t_ν)², the normal over Student's quantile (Korn and Graubard 1998).

In searches, two classes that are alike take each other's queries, A_ab in all, and the jackknife counts them twice;
there, Σ_ab A_ab² is taken from Σ_c E_c² in x.
"""

import math
from typing import Any

import numpy as np
import torch

from nearfar._utils.arrays import labels_of, rows_of
from nearfar._utils.checks import check_choice
from nearfar._utils.progress import Watch
from nearfar.evaluation._bootstrap import Interval, intervals
from nearfar.evaluation._calibration import Calibration, Per
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.evaluation._probability import choose
from nearfar.evaluation._ranking_keys import METRICS, Metric
from nearfar.evaluation._retrieval import check_sides
from nearfar.evaluation._trials import HELD, NEGATIVE, POSITIVE, Trials, answers_of_queries, listed, pairs_of_rows
from nearfar.evaluation._vectors import Vectors

STEPS = 40
"""False accept rates per decade for which a guarantee is sought."""
POINTS = 200
"""Points of the curve."""


def calibrate(
    embeddings: Any,
    labels: Any = None,
    far: float = 1e-3,
    confidence: float = 0.95,
    *,
    ref_emb: Any = None,
    ref_labels: Any = None,
    per: Per = "pair",
    similarity: Metric = "cosine",
    watch: Watch | None = None,
) -> Calibration:
    """Choose a threshold on the score of two samples, and one whose false accept rate holds on new classes.

    Use classes that the network was not trained on: on those it was trained on, scores are better than on new ones.

    Args:
        embeddings: [n, d], a tensor, an array, lists or `Vectors`.
        labels: [n] integers; by default the y of `Vectors`.
        far: the false accept rate that is allowed, a share of the negative pairs.
        confidence: probability, above a half, with which the guaranteed threshold keeps to it.
        ref_emb: [m, d] a gallery; pairs are then of a query and a row of the gallery.
        ref_labels: [m] integers.
        per: "pair" for verification: a false accept is a negative pair above the threshold. "query" for search: a
            false accept is a query without its class in the gallery whose best answer is above the threshold; it holds
            for galleries of this size.
        similarity: "cosine", "dot" or "euclidean".
        watch: called as watch(what, done, total) during the work.

    Memory is that of the rows, and about 120 bytes for each negative pair that `threshold` accepts.

    >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.2, 0.9]])
    >>> found = calibrate(x, torch.tensor([0, 0, 1, 1]), far=0.25)
    >>> found.tar.value, found.guaranteed  # two classes allow no guarantee
    (1.0, inf)
    """
    _check("calibrate", far, confidence)
    check_choice("calibrate", "similarity", similarity, METRICS)
    check_choice("calibrate", "per", per, ("pair", "query"))
    given = read_inputs("calibrate", embeddings, labels, ref_emb, ref_labels)
    y = demand_classes("calibrate", given.y)
    check_sides("calibrate", given.x, y, given.ref, given.ref_y)
    if not len(y) or (given.ref is not None and not len(given.ref)):
        raise ValueError("calibrate: there are no pairs, because there are no rows; pass some.")
    if per == "query":
        trials = answers_of_queries(given.x, y, given.ref, given.ref_y, similarity, watch)
    else:
        rows = len(y) * len(y if given.ref is None else given.ref) / (2 if given.ref is None else 1)
        if far * rows > HELD:
            raise ValueError(
                f"calibrate: far={far:g} of {rows:,.0f} pairs is more than {HELD:,} pairs, which are held in memory; "
                "pass a smaller far or fewer rows."
            )
        trials = pairs_of_rows(given.x, y, given.ref, given.ref_y, similarity, far, watch)
    mark = embeddings.fingerprint if isinstance(embeddings, Vectors) else None
    return _calibration("calibrate", trials, far, confidence, per, similarity, mark)


def evaluate_pairs(
    scores: Any, same: Any, classes: Any = None, far: float = 1e-3, confidence: float = 0.95
) -> Calibration:
    """Choose a threshold from scores of pairs, such as those of a verification protocol; see `calibrate`.

    Args:
        scores: [n] a score of each pair, larger = more alike.
        same: [n] whether the two samples of a pair are of one class: truth values, or 0 and 1.
        classes: [n, 2] integers, the classes of the two samples. Without them there is no guarantee and there are no
            intervals, because pairs of one class are not independent.
        far: the false accept rate that is allowed, a share of the negative pairs.
        confidence: probability, above a half, with which the guaranteed threshold keeps to it.

    >>> evaluate_pairs([0.9, 0.8, 0.3, 0.1], [1, 1, 0, 0], far=0.5).threshold
    0.1
    """
    _check("evaluate_pairs", far, confidence)
    found = rows_of("evaluate_pairs", "scores", scores).detach().cpu().double().numpy()
    truth = np.asarray(same.detach().cpu() if isinstance(same, torch.Tensor) else same)
    if found.ndim != 1 or truth.shape != found.shape or not len(found):
        raise ValueError(
            f"evaluate_pairs: scores and same must have one entry per pair, but came with shapes {list(found.shape)} "
            f"and {list(truth.shape)}."
        )
    if not np.isfinite(found).all():
        raise ValueError(
            f"evaluate_pairs: scores must be finite, but {(~np.isfinite(found)).sum()} are NaN or infinite."
        )
    if truth.dtype.kind not in "biuf" or not np.isin(truth, (0, 1)).all():
        raise ValueError("evaluate_pairs: same must hold truth values, or 0 and 1.")
    truth, place = truth.astype(bool), None
    if classes is not None:
        pairs = labels_of("evaluate_pairs", "classes", classes).cpu().numpy()
        if pairs.shape != (len(found), 2) or ((pairs[:, 0] == pairs[:, 1]) != truth).any():
            raise ValueError(
                f"evaluate_pairs: classes must be integers [{len(found)}, 2], equal where same is true and only there, "
                f"but came with shape {list(pairs.shape)} or disagree."
            )
        place = np.unique(pairs, return_inverse=True)[1].reshape(pairs.shape)
    return _calibration("evaluate_pairs", listed(found, truth, place), far, confidence, "pair", "", None)


def _check(owner: str, far: float, confidence: float) -> None:
    if not 0 < far < 1:
        raise ValueError(f"{owner}: far must be a share between 0 and 1, such as 1e-3, but came as {far!r}.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"{owner}: confidence must lie between 0.5 and 1, but came as {confidence!r}.")


def _calibration(
    owner: str, trials: Trials, far: float, confidence: float, per: Per, similarity: str, fingerprint: str | None
) -> Calibration:
    positive, negative = trials.histogram(POSITIVE), trials.histogram(NEGATIVE)
    if not positive.sum() or not trials.negatives:
        kind = "negative" if positive.sum() else "positive"
        raise ValueError(
            f"{owner}: there are no {kind} pairs; pass at least two classes, one of them with two samples."
        )
    if math.floor(far * trials.negatives + 1e-9) < 1:
        raise ValueError(
            f"{owner}: far={far:g} is less than one of {trials.negatives:,} negative pairs; "
            f"pass {1 / trials.negatives:.2g} or more, or more samples."
        )
    known = len(trials.touched) > 0
    cut, guaranteed = _cut(trials, far), guarantee(trials, far, confidence) if known else None
    bars = _shares(*trials.accepted(np.array([cut, cut if guaranteed is None else guaranteed])), known)
    x, nu = effective(trials, far) if known else (math.nan, 1.0)
    edges = trials.edges()
    fars, tars = (1 - bins.cumsum() / bins.sum() for bins in (negative, positive))
    crossing = int(np.argmin(np.abs(fars + tars - 1)))
    places = edges - (trials.high - trials.low) / (2 * len(edges))
    kind, knots = choose(places, trials.bins[POSITIVE:], trials.bins[:POSITIVE])
    return Calibration(
        threshold=cut,
        guaranteed=guaranteed,
        far=float(far),
        confidence=float(confidence),
        rate=_rate(trials, cut, x, nu, confidence) if known else None,
        tar=bars[0],
        guaranteed_tar=bars[1] if known else None,
        eer=float(1 + fars[crossing] - tars[crossing]) / 2,
        eer_threshold=float(edges[crossing]),
        effective=x if known else None,
        positive=int(positive.sum()),
        negative=trials.negatives,
        classes=len(trials.touched),
        per=per,
        similarity=similarity,
        fingerprint=fingerprint,
        kind=kind,
        knots=tuple((float(a), float(b)) for a, b in knots),
        curve=_curve(edges, fars, tars),
    )


def _cut(trials: Trials, share: float) -> float:
    """The lowest threshold that accepts at most a share of the negative pairs, whose scores must be above it."""
    allowed = math.floor(share * trials.negatives + 1e-9)  # 0.29 * 100 is a hair below 29
    return float(trials.top[allowed])


def effective(trials: Trials, share: float) -> tuple[float, float]:
    """Effective number of accepted negative pairs at a false accept rate, and its degrees of freedom."""
    count = int(np.searchsorted(-trials.top, -_cut(trials, share), side="left"))
    if not count:
        return 0.0, 1.0
    classes = len(trials.touched)
    accepted = np.bincount(trials.classes[:count].ravel(), minlength=classes)
    square = (accepted - count / trials.negatives * trials.touched) ** 2
    total, pairs = float(square.sum()), 0.0
    if not total:
        return float(count), max(1.0, classes - 1.0)
    if trials.mutual:
        keys = np.sort(trials.classes[:count].astype(np.int64), axis=1) @ np.array([classes, 1])
        pairs = float((np.unique(keys, return_counts=True)[1] ** 2).sum())
    return count**2 / max(total - pairs, pairs), max(1.0, total**2 / float((square**2).sum()) - 1)


def _quantile(x: float, nu: float, confidence: float) -> float:
    """The factor by which the rate of new classes may exceed that of the classes at hand."""
    from scipy.special import fdtri, ndtri, stdtrit

    shape = x * (ndtri(confidence) / stdtrit(nu, confidence)) ** 2
    found = float(fdtri(2 * shape, 2 * shape, confidence)) if shape > 0.05 else math.inf  # beyond 1e20
    return found if found >= 1 else math.inf


def guarantee(trials: Trials, far: float, confidence: float) -> float:
    """The guaranteed threshold: the lowest of those for the false accept rates up to `far`.

    What is guaranteed for a smaller rate is guaranteed for `far`; so the threshold falls as `far` grows.
    """
    best, step = 0.0, math.ceil(-math.log10(far) * STEPS - 1e-6)
    while (level := 10 ** (-step / STEPS)) * trials.negatives >= 1 - 1e-9 and level > best:
        best = max(best, level / _quantile(*effective(trials, level), confidence))
        step += 1
    return _cut(trials, best) if best * trials.negatives >= 1 else math.inf


def _rate(trials: Trials, cut: float, x: float, nu: float, confidence: float) -> Interval:
    """The measured false accept rate at a threshold, and the range of that of as many new classes."""
    rate = float((trials.top > cut).sum()) / trials.negatives
    factor = _quantile(x, nu, (1 + confidence) / 2)
    return Interval(rate, rate / factor, min(1.0, rate * factor), rate * math.sqrt(2 / x) if x else math.nan)


def _shares(accepted: np.ndarray, pairs: np.ndarray, known: bool) -> list[Interval]:
    """True accept rates at each threshold, with intervals over classes if they are known."""
    keep = pairs > 0
    shares = accepted[keep] / pairs[keep, None]
    if known:
        return intervals(shares, np.arange(len(shares)), counts=pairs[keep])
    return [Interval(float(value), math.nan, math.nan, math.nan) for value in shares.mean(axis=0)]


def _curve(edges: np.ndarray, fars: np.ndarray, tars: np.ndarray) -> tuple[tuple[float, float, float], ...]:
    """Points of the curve, evenly spaced in the logarithm of the false accept rate, at most `POINTS`."""
    goals = np.geomspace(1, max(float(fars[fars > 0].min(initial=1.0)), 1e-12), POINTS)
    chosen = np.unique(np.append(np.searchsorted(-fars, -goals), len(edges) - 1).clip(0, len(edges) - 1))
    return tuple((float(edges[i]), float(fars[i]), float(tars[i])) for i in chosen)

"""`calibrate`: a threshold on the score of two samples, and one whose false accept rate holds on new classes.

Pairs of the same classes are accepted together, so that A accepted negative pairs are worth fewer independent ones. With
A_c of them touching class c, N_c negative pairs touching c, and r = A/N the false accept rate,

    x = A² / Σ_c (A_c - r N_c)²        effective number of accepted pairs

(the jackknife over classes, as in dyadic data). At one threshold, the rates of two equally large sets of classes are then
like two gamma variables of shape x, and their ratio exceeds F_{2x, 2x; confidence} with probability 1 - confidence. So
the guaranteed threshold is the one that accepts r / F of the negative pairs at hand. x is itself an estimate, from

    ν = (Σ_c E_c²)² / Σ_c E_c⁴ - 1,   E_c = A_c - r N_c        degrees of freedom

and is multiplied by (z/t_ν)², the normal over Student's quantile (Korn and Graubard 1998).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nearfar._utils.arrays import labels_of, rows_of
from nearfar._utils.checks import check_choice
from nearfar._utils.files import read_text, write_text
from nearfar._utils.progress import Watch
from nearfar.evaluation._bootstrap import Interval, intervals
from nearfar.evaluation._fingerprint import check_fingerprint, check_same_network
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.evaluation._probability import choose, log_odds
from nearfar.evaluation._ranking_keys import METRICS, Metric
from nearfar.evaluation._retrieval import check_sides
from nearfar.evaluation._trials import HELD, NEGATIVE, POSITIVE, Trials, answers_of_queries, listed, pairs_of_rows
from nearfar.evaluation._vectors import Vectors

Per = Literal["pair", "query"]
PROMISE = "holds for at least as many new classes of the same population"
STEPS = 40
"""False accept rates per decade for which a guarantee is sought."""
POINTS = 200
"""Points of the curve."""


@dataclass(frozen=True)
class Calibration:
    """Thresholds on a score: a pair is accepted if its score is above the threshold.

    Attributes:
        threshold: the lowest that accepts at most a share `far` of the negative pairs at hand.
        guaranteed: with probability `confidence`, this one accepts at most a share `far` of the negative pairs of new
            classes: as many or more, of the same population. Infinite if there are too few pairs or classes for a
            guarantee; None if the classes are not known.
        far: the wish, the false accept rate that is allowed.
        confidence: the probability of the guarantee.
        rate: the false accept rate at `threshold`: measured, and the range within which it lies on as many new classes,
            with probability `confidence`; None if the classes are not known.
        tar: true accept rate at `threshold`, with its interval over classes.
        guaranteed_tar: the same at `guaranteed`, or None.
        eer: equal error rate, where as many negative pairs are accepted as positive ones are refused.
        eer_threshold: the threshold at which it is.
        effective: number of independent accepted pairs that the accepted ones at `threshold` are worth, or None.
        positive: number of positive pairs.
        negative: number of negative pairs.
        classes: number of classes; 0 if they are not known.
        per: "pair", or "query": negative pairs are then the best wrong answers of queries, positive ones the best right.
        similarity: "cosine", "dot", "euclidean", or "" for scores that were given.
        fingerprint: the network of the vectors, or None.
        kind: "isotonic" or "logistic", how scores become probabilities.
        knots: (score, log-odds) of `probability`.
        curve: (threshold, false accept rate, true accept rate), ascending thresholds.
    """

    threshold: float
    guaranteed: float | None
    far: float
    confidence: float
    rate: Interval | None
    tar: Interval
    guaranteed_tar: Interval | None
    eer: float
    eer_threshold: float
    effective: float | None
    positive: int
    negative: int
    classes: int
    per: Per
    similarity: str
    fingerprint: str | None
    kind: str
    knots: tuple[tuple[float, float], ...]
    curve: tuple[tuple[float, float, float], ...]

    def probability(self, scores: Any, prior: float = 0.5) -> np.ndarray:
        """The probability that a pair is positive, given its score.

        Args:
            scores: any shape.
            prior: share of positive pairs among those that are asked about; 0.5 is seldom true of a search.
        """
        if not 0 < prior < 1:
            raise ValueError(f"probability: prior must lie between 0 and 1, but came as {prior!r}.")
        z = log_odds(np.array(self.knots), rows_of("probability", "scores", scores).detach().cpu().double().numpy())
        return np.asarray(0.5 * (1 + np.tanh((z + math.log(prior / (1 - prior))) / 2)))

    @property
    def usable(self) -> float:
        """The guaranteed threshold; the other one if classes are not known.

        Raises:
            ValueError: there is no guaranteed threshold.
        """
        found = self.threshold if self.guaranteed is None else self.guaranteed
        if math.isinf(found):
            raise ValueError(
                f"calibration: {self.classes} classes with {self.negative:,} negative pairs are too few to guarantee a "
                f"false accept rate of {self.far:g}; pass more classes or a larger far."
            )
        return found

    def check_index(self, similarity: str, fingerprint: str | None) -> None:
        """Require that this fits the vectors of an index, and that there is a threshold."""
        if self.similarity != similarity:
            raise ValueError(
                f"Index: the calibration is for {self.similarity or 'scores that were given'}, but the index for "
                f"{similarity}; calibrate with that similarity."
            )
        check_same_network("Index", ("the calibration", self.fingerprint), ("the vectors", fingerprint))
        _ = self.usable

    def __repr__(self) -> str:
        what = "pairs" if self.per == "pair" else "best answers of queries"
        of = f" of {self.classes:,} classes" if self.classes else ""
        lines = [f"{self.positive:,} positive and {self.negative:,} negative {what}{of}; equal error {self.eer:.2%}"]
        measured = "" if self.rate is None else f" (on as many new classes {self.rate.low:.2g} to {self.rate.high:.2g})"
        far = f"{self.far:g}{measured}"
        lines.append(f"  threshold  {self.threshold:.4f}  true accepts {_percent(self.tar)}  false accepts {far}")
        if self.guaranteed is None or self.guaranteed_tar is None:
            lines.append("  guaranteed: none, because the classes of the pairs are not known")
        elif math.isinf(self.guaranteed):
            lines.append(f"  guaranteed: none, because {self.classes} classes are too few for this far")
        else:
            tar = _percent(self.guaranteed_tar)
            lines.append(f"  guaranteed {self.guaranteed:.4f}  true accepts {tar}  false accepts at most {self.far:g}")
            lines.append(f"  The guarantee ({self.confidence:.0%}) {PROMISE}.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON can hold; infinity is the word "inf", NaN is "nan"."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: plain(each) for name, each in value.items()}
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        return {name: plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Any) -> Calibration:
        """Read what `to_dict` wrote."""
        try:
            values = dict(record)
            for name in ("rate", "tar", "guaranteed_tar"):
                values[name] = (
                    None if values[name] is None else Interval(**{k: float(v) for k, v in values[name].items()})
                )
            for name in ("knots", "curve"):
                values[name] = tuple(tuple(float(v) for v in row) for row in values[name])
            values["guaranteed"] = None if values["guaranteed"] is None else float(values["guaranteed"])
            made = cls(**values)
            numbers = [made.threshold, made.far, made.confidence, made.eer, *(v for row in made.knots for v in row)]
            if (
                not all(math.isfinite(v) for v in numbers)
                or math.isnan(made.guaranteed or 0)
                or len(made.knots[0]) != 2
            ):
                raise ValueError
            check_fingerprint("Calibration", made.fingerprint or "0")
        except (TypeError, ValueError, LookupError, AttributeError):
            raise ValueError("Calibration: this is no calibration; make one with `nearfar calibrate`.") from None
        return made

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file, completely or not at all, and return its path."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file that `save` wrote."""
        try:
            return cls.from_dict(json.loads(read_text("Calibration", Path(path))))
        except (ValueError, RecursionError) as error:
            reason = error if str(error).startswith("Calibration: ") else "Calibration: this is no JSON"
            raise ValueError(f"{str(reason).rstrip('.')} (in {path}).") from None


def _percent(bar: Interval) -> str:
    return f"{bar.value:.1%}" + ("" if math.isnan(bar.error) else f" ({bar.low:.1%} to {bar.high:.1%})")


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

    Memory is that of the rows, and 12 bytes for each negative pair that `threshold` accepts.

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
                f"evaluate_pairs: classes must be integers [{len(found)}, 2] that are equal where same is true, and only "
                f"there, but came with shape {list(pairs.shape)} or disagree."
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
            f"{owner}: far={far:g} is less than one of {trials.negatives:,} negative pairs; pass {1 / trials.negatives:.2g} "
            "or more, or more samples."
        )
    known = len(trials.touched) > 0
    cut, guaranteed = _cut(trials, far), guarantee(trials, far, confidence) if known else None
    accepted, pairs = trials.accepted(np.array([cut, cut if guaranteed is None else guaranteed]))
    bars = _shares(accepted, pairs, known)
    x, nu = effective(trials, far) if known else (math.nan, 1.0)
    edges = trials.edges()
    fars, tars = (1 - bins.cumsum() / bins.sum() for bins in (negative, positive))
    eer, at = _equal_errors(edges, fars, 1 - tars)
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
        eer=eer,
        eer_threshold=at,
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
    sums = sum(np.bincount(side[:count], minlength=classes) for side in (trials.first, trials.second))
    square = (sums - count / trials.negatives * trials.touched) ** 2
    if not square.any():
        return float(count), max(1.0, classes - 1.0)
    return count**2 / float(square.sum()), max(1.0, float(square.sum() ** 2 / (square**2).sum()) - 1)


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


def _equal_errors(edges: np.ndarray, accepts: np.ndarray, refusals: np.ndarray) -> tuple[float, float]:
    """Where the two errors cross: the equal error rate and its threshold."""
    place = int(np.argmax(refusals >= accepts))
    both = [(accepts[i], refusals[i]) for i in (max(place - 1, 0), place)]
    (a, b), (c, d) = both
    part = 1.0 if a - b == c - d else (a - b) / ((a - b) - (c - d))
    part = min(max(part, 0.0), 1.0)
    step = edges[1] - edges[0]
    return float(a + part * (c - a)), float(edges[place] - (1 - part) * step)


def _curve(edges: np.ndarray, fars: np.ndarray, tars: np.ndarray) -> tuple[tuple[float, float, float], ...]:
    """Points of the curve, evenly spaced in the logarithm of the false accept rate, at most `POINTS`."""
    goals = np.geomspace(1, max(float(fars[fars > 0].min(initial=1.0)), 1e-12), POINTS)
    chosen = np.unique(np.append(np.searchsorted(-fars, -goals), len(edges) - 1).clip(0, len(edges) - 1))
    return tuple((float(edges[i]), float(fars[i]), float(tars[i])) for i in chosen)

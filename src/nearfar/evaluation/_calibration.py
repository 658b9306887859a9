"""`Calibration`: a threshold on the score of two samples, one whose false accept rate is guaranteed, and their cost."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nearfar._utils.arrays import rows_of
from nearfar._utils.files import read_text, write_text
from nearfar.evaluation._bootstrap import Interval
from nearfar.evaluation._fingerprint import check_fingerprint, check_same_network
from nearfar.evaluation._probability import log_odds

Per = Literal["pair", "query"]
PROMISE = "holds for at least as many new classes of the same population"


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
        per: "pair", or "query": pairs are then the best wrong and the best right answers of queries.
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
        far = f"at most {self.far:g}"
        if self.rate is not None:
            low, high = self.rate.low, self.rate.high
            far = f"{self.rate.value:.2g} (on as many new classes {low:.2g} to {high:.2g})"
        lines.append(f"  threshold  {self.threshold:.4f}  true accepts {percent(self.tar)}  false accepts {far}")
        if self.guaranteed is None or self.guaranteed_tar is None:
            lines.append("  guaranteed: none, because the classes of the pairs are not known")
        elif math.isinf(self.guaranteed):
            lines.append(f"  guaranteed: none, because {self.classes} classes are too few for this far")
        else:
            tar = percent(self.guaranteed_tar)
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
    def from_dict(cls, record: Any) -> "Calibration":
        """Read what `to_dict` wrote."""
        try:
            values = dict(record)
            for name in ("rate", "tar", "guaranteed_tar"):
                if values[name] is not None or name == "tar":
                    values[name] = Interval(**{key: float(end) for key, end in values[name].items()})
            for name in ("knots", "curve"):
                values[name] = tuple(tuple(float(v) for v in row) for row in values[name])
            values["guaranteed"] = None if values["guaranteed"] is None else float(values["guaranteed"])
            made = cls(**values)
            finite = [made.threshold, made.far, made.confidence, made.eer, *(v for row in made.knots for v in row)]
            if not all(map(math.isfinite, finite)) or math.isnan(made.guaranteed or 0) or len(made.knots[0]) != 2:
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
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a file that `save` wrote."""
        try:
            return cls.from_dict(json.loads(read_text("Calibration", Path(path))))
        except (ValueError, RecursionError) as error:
            reason = error if str(error).startswith("Calibration: ") else "Calibration: this is no JSON"
            raise ValueError(f"{str(reason).rstrip('.')} (in {path}).") from None


def percent(bar: Interval) -> str:
    """A share with its interval, in percent."""
    return f"{bar.value:.1%}" + ("" if math.isnan(bar.error) else f" ({bar.low:.1%} to {bar.high:.1%})")

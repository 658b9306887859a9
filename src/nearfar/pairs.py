"""Pair losses l(s, sign): the cost of one pair from its score s; sign is +1 for positive and -1 for negative pairs.

A new pair loss is a subclass with a `forward`; nothing else is needed. `slope` (dl/ds in closed form) and `form` (the
whole loss as a few numbers, which a kernel can compute) are optional: engines that compute gradients themselves use
them, and tests compare them with autograd.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, dataclass_transform

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from nearfar._utils.keywords import suggest_names
from nearfar._utils.settings import Number, Positive, Settings, ZeroOrMore
from nearfar._utils.shortcuts import Part

__all__ = [
    "AngularMargin",
    "CircleScore",
    "Hinge",
    "Identity",
    "Linear",
    "Logistic",
    "PairForm",
    "PairLoss",
    "Sigmoid",
    "Squared",
    "smooth_hinge",
]


@dataclass(frozen=True, eq=False)
class PairForm:
    """A pair loss of one sign as numbers, from which a kernel computes it and its slope.

        z = a·s + b + k·offset
        l = c·z "line",  c·[z]₊^power "power",  c·log(1+e^z) "softplus",  c·[z]₊·(s - center) "pace", [z]₊ held constant

    Args:
        shape: "line", "power", "softplus" or "pace".
        a: factor of the score.
        b: constant.
        scale: c.
        power: exponent of "power".
        center: parameter of "pace".
        offset: a learned number, or None.
        by_offset: k; dl/doffset = (k/a)·dl/ds.
    """

    shape: Literal["line", "power", "softplus", "pace"]
    a: float
    b: float
    scale: float = 1.0
    power: float = 1.0
    center: float = 0.0
    offset: Tensor | None = None
    by_offset: float = 0.0

    def _inside(self, s: Tensor) -> Tensor:
        z = self.a * s + self.b
        return z if self.offset is None else z + self.by_offset * self.offset

    def value(self, s: Tensor) -> Tensor:
        """Losses of scores s."""
        z = self._inside(s)
        if self.shape == "line":
            return self.scale * z
        if self.shape == "softplus":
            return self.scale * softplus(z, threshold=40.0)
        if self.shape == "pace":
            return self.scale * torch.relu(z) * (s - self.center)
        return self.scale * _raised(torch.relu(z), self.power)


def are_opposite(positive: PairForm | None, negative: PairForm | None) -> bool:
    """Whether the losses are linear, and l(s, +1) = -l(s, -1) for every score: both are the same logit."""
    if positive is None or negative is None or not positive.shape == negative.shape == "line":
        return False
    lines = [(x.scale * x.a, x.scale * x.b) for x in (positive, negative)]
    plain = positive.offset is negative.offset is None and all(isinstance(x, float | int) for x in sum(lines, ()))
    return plain and lines[0] == (-lines[1][0], -lines[1][1])


def _form(shape: str, *numbers: Any, **more: Any) -> PairForm:
    """A form whose numbers may still be learned; engines/learned.py replaces these."""
    return PairForm(shape, *numbers, **more)  # type: ignore[arg-type]


def _raised(x: Tensor, power: Number) -> Tensor:
    return x if not isinstance(power, Tensor) and power == 1 else x**power


@dataclass_transform()
class PairLoss(Part, Settings, ABC):
    """An elementwise loss of one pair's score. Scores are similarities: larger = more similar.

    Its numbers may be learned: an `nn.Parameter` without dimensions in place of a number.
    """

    shortcuts = ("form",)
    exact_gradient: ClassVar[bool] = True
    """False if part of the loss is deliberately held constant, so that value and gradient do not match."""

    @abstractmethod
    def forward(self, s: Tensor, sign: int) -> Tensor:
        """Losses of scores s (any shape), all with the same sign: +1 positive, -1 negative."""

    def form(self, sign: int) -> PairForm | None:
        """The loss of one sign as numbers; None if it has no such form."""
        return None


class Hinge(PairLoss, swift=True):
    """Hinge on a score: a pair costs nothing once it is on the right side of a threshold by a margin.

        l = [m + sign·(λ - s)]₊

    Qi et al. 2020, section 3; y must be ±1, the print says 0/1. With `smooth` = μ > 0 it is μ·softplus(x/μ), the
    log-sum-exp smoothing of max(x, 0) (Jaffe 2020, eq. 9-12), which exceeds it by at most μ·log 2.

    Args:
        margin: m, how far beyond the threshold a pair must be before it costs nothing.
        threshold: λ, the score that separates positives from negatives.
        smooth: μ, the temperature of the smoothing; 0 is the plain hinge.
        learn: make the threshold a parameter (Can et al.'s margin loss).

    >>> Hinge(margin=0.2, threshold=0.5)(torch.tensor([0.9, 0.6, 0.1]), +1)
    tensor([0.0000, 0.1000, 0.6000])
    """

    learns = frozenset({"offset"})

    margin: Number = 0.2
    threshold: Number = 0.5
    _: KW_ONLY
    smooth: ZeroOrMore = 0.0
    learn: bool = False

    def _begin(self) -> None:
        # learned as an offset from the start: exact in any precision, and weight decay pulls to the start, not to 0
        self.offset = nn.Parameter(torch.zeros(())) if self.learn else None

    start: ClassVar[Number]

    def _remake(self) -> None:
        self.__dict__["start"] = self.setting("threshold")  # not registered a second time, if it is learned

    def _changed(self, name: str) -> None:
        if name == "learn":
            self._begin()
        elif name == "threshold" and self.offset is not None:
            with torch.no_grad():
                self.offset.zero_()

    def _read_threshold(self) -> Number:
        """The present threshold λ: its starting value plus what was learned."""
        return self.start if self.offset is None else self.start + self.offset

    def _excess(self, s: Tensor, sign: int) -> Tensor:
        if self.offset is None:
            return s * -sign + (self.margin + sign * self.start)
        # subtract the start first: a float32 offset must not round it under float64 scores
        return self.margin + sign * (self.start - s + self.offset)

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return smooth_hinge(self._excess(s, sign), self.smooth)

    def form(self, sign: int) -> PairForm:  # noqa: D102
        plain, b = is_zero(self.smooth), self.margin + sign * self.start
        c, shape = (1.0, "power") if plain else (self.smooth, "softplus")
        return _form(shape, -sign / c, b / c, c, offset=self.offset, by_offset=sign / c)


def is_zero(number: Number) -> bool:
    """Whether a number is 0; a learned one is not."""
    return not isinstance(number, Tensor) and number == 0


def smooth_hinge(x: Tensor, smooth: Number) -> Tensor:
    """max(x, 0), or μ·softplus(x/μ) for μ = `smooth` > 0."""
    # `threshold` only switches softplus to the identity where both agree to the last bit of float64
    return torch.relu(x) if is_zero(smooth) else smooth * softplus(x / smooth, threshold=40.0)


class Logistic(PairLoss, swift=True):
    """Binomial deviance: a smooth hinge on a score, with a slope for each sign.

        l = (2/β)·log(1+e^{-β(s-λ)}) positive,  (2/α)·log(1+e^{α(s-λ)}) negative

    Qi et al. 2020, section 4.

    Args:
        threshold: λ.
        slope_positive: β, how sharply positive pairs are judged.
        slope_negative: α, how sharply negative pairs are judged.

    >>> Logistic()(torch.tensor([0.5]), -1)  # (2/40)·log 2
    tensor([0.0347])
    """

    threshold: Number = 0.5
    slope_positive: Positive = 2.0
    slope_negative: Positive = 40.0

    def _steepness(self, sign: int) -> Number:
        return self.slope_positive if sign > 0 else self.slope_negative

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        c = self._steepness(sign)
        return (2 / c) * softplus(-sign * c * (s - self.threshold), threshold=40.0)

    def form(self, sign: int) -> PairForm:  # noqa: D102
        c = self._steepness(sign)
        return _form("softplus", -sign * c, sign * c * self.threshold, 2 / c)


class Sigmoid(PairLoss, swift=True):
    """Minus the log-probability of a pair's sign, which is the logistic function of its scaled and shifted score.

        l = log(1 + e^{-z}) positive,  log(1 + e^{z}) negative,  z = t·s + b

    Args:
        scale: t.
        bias: b.

    >>> Sigmoid(scale=2.0)(torch.tensor([0.0]), +1)  # log 2
    tensor([0.6931])
    """

    scale: Positive = 1.0
    bias: Number = 0.0

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return softplus(-sign * (self.scale * s + self.bias), threshold=40.0)

    def form(self, sign: int) -> PairForm:  # noqa: D102
        return _form("softplus", -sign * self.scale, -sign * self.bias)


class Squared(PairLoss, swift=True):
    """The contrastive loss of a distance d = -s: positives are pulled within m₊, negatives pushed beyond m₋.

        l = [d - m₊]₊^power positive,  [m₋ - d]₊^power negative

    Can et al. 2019, eq. 3.1.

    Args:
        pos_margin: m₊, the distance within which positive pairs cost nothing.
        neg_margin: m₋, the distance beyond which negative pairs cost nothing.
        power: 2 in the paper; 1 as in pytorch-metric-learning.
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    power: Positive = 2.0

    def _excess(self, s: Tensor, sign: int) -> Tensor:
        return torch.relu(-s - self.pos_margin if sign > 0 else self.neg_margin + s)

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return _raised(self._excess(s, sign), self.power)

    def form(self, sign: int) -> PairForm | None:  # noqa: D102
        if isinstance(self.power, Tensor) or self.power < 1:  # below 1 the slope is infinite where the loss begins
            return None
        return _form("power", -sign, -self.pos_margin if sign > 0 else self.neg_margin, power=self.power)


class Linear(PairLoss, swift=True):
    """A cost that is linear in the score: what log-sum-exp losses such as multi-similarity are built from.

        l = c·(m + sign·(λ - s))

    Args:
        threshold: λ.
        margin: m.
        scale: c, often an inverse temperature.
    """

    threshold: Number = 0.0
    margin: Number = 0.0
    scale: Positive = 1.0

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        # two passes over the scores instead of four (`torch.add` with alpha takes one, but torch.compile breaks it)
        return s * (-sign * self.scale) + self.scale * (self.margin + sign * self.threshold)

    def form(self, sign: int) -> PairForm:  # noqa: D102
        return _form("line", -sign * self.scale, self.scale * (self.margin + sign * self.threshold))


class Identity(PairLoss, swift=True):
    """The scaled score itself, l = c·s for both signs: the denominator of softmax losses."""

    scale: Positive = 1.0

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return self.scale * s

    def form(self, sign: int) -> PairForm:  # noqa: D102
        return _form("line", self.scale, 0.0)


class CircleScore(PairLoss, swift=True):
    """The logits of circle loss, in which pairs far from their goal get larger weights.

        l = -γ[1+m-s]₊(s-(1-m)) positive,  γ[s+m]₊(s-m) negative,  the brackets held constant

    The brackets are weights, not part of what is differentiated, so the gradient is not that of the value.

    Args:
        margin: m.
        scale: γ.
    """

    exact_gradient = False

    margin: Number = 0.4
    scale: Positive = 80.0

    def _pace(self, s: Tensor, sign: int) -> Tensor:
        s = s.detach()
        return torch.relu(1 + self.margin - s) if sign > 0 else torch.relu(s + self.margin)

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        center = 1 - self.margin if sign > 0 else self.margin
        return -sign * self.scale * self._pace(s, sign) * (s - center)

    def form(self, sign: int) -> PairForm:  # noqa: D102
        m = self.margin
        return _form("pace", -sign, 1 + m if sign > 0 else m, -sign * self.scale, center=1 - m if sign > 0 else m)


class AngularMargin(PairLoss, swift=True):
    """The logits of ArcFace: an angular margin on the positive pair, for a cosine s = cos θ.

        l = -c·cos(θ+m) positive,  c·cos θ negative

    Past θ = π - m the cosine would rise again; the line cos θ - m·sin m continues it downwards, as is usual. A margin
    below 0 forgives an angle instead of asking for one (tuplet margin).

    Args:
        margin: m, in radians.
        scale: c.
    """

    margin: Number = 0.5
    scale: Positive = 64.0

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        if sign < 0:
            return self.scale * s
        # cos(θ+m) = cos θ cos m - sin θ sin m needs no arccos, whose slope is infinite at s = ±1
        square = 1 - s * s
        edge = square <= 0
        sine = torch.where(edge, 0.0, torch.sqrt(torch.where(edge, 1.0, square)))
        m = self.margin
        cosine, turn = (torch.cos(m), torch.sin(m)) if isinstance(m, Tensor) else (math.cos(m), math.sin(m))
        turned = s * cosine - sine * turn
        if not isinstance(m, Tensor) and m < 0:  # θ + m stays below π
            return -self.scale * turned
        below = s >= -cosine if not isinstance(m, Tensor) else (s >= -cosine) | (m < 0)
        return -self.scale * torch.where(below, turned, s - m * turn)

    def form(self, sign: int) -> PairForm | None:  # noqa: D102
        return _form("line", self.scale, 0.0) if sign < 0 else None


__getattr__ = suggest_names("nearfar.pairs", __all__)

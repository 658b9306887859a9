"""PML's pair losses as recipes of nearfar's."""

from typing import Any

import torch
from pytorch_metric_learning import losses, reducers
from torch.nn.functional import softplus

from nearfar.links import HingeLink, LiftedLink, Link, Sides, SoftplusLink, Terms
from nearfar.losses import MultiSimilarity, NTXent, SupCon, TupletMargin
from nearfar.losses.factors import Pairs
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import AngularMargin, CircleScore, Linear, Squared
from nearfar.pml._native import Setup
from nearfar.pml.losses._native import Native
from nearfar.sets import KL
from nearfar.similarity import Cosine

__all__ = [
    "CircleLoss",
    "ContrastiveLoss",
    "GeneralizedLiftedStructureLoss",
    "LiftedStructureLoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SupConLoss",
    "TupletMarginLoss",
]

SAFE = 70.0  # largest difference of exponents for which no quotient underflows in float32, for any number of pairs


class ContrastiveLoss(Native, losses.ContrastiveLoss):
    """PML's ContrastiveLoss."""

    settings = ("pos_margin", "neg_margin")
    least = (192, 192)

    def recipe(self, known: Setup) -> RobustLoss:
        near, far = (-known.score(float(margin)) for margin in (self.pos_margin, self.neg_margin))
        return RobustLoss(pair=Squared(near, far, power=1), over=known.over, groups="sign", similarity=known.similarity)


class MultiSimilarityLoss(Native, losses.MultiSimilarityLoss):
    """PML's MultiSimilarityLoss."""

    settings = ("alpha", "beta", "base")
    least = (128, 96)
    once = True

    def recipe(self, known: Setup) -> RobustLoss:
        return MultiSimilarity(
            alpha=self.alpha,
            beta=self.beta,
            threshold=known.score(float(self.base)),
            miner=None,
            reduction=known.reduction,
            similarity=known.similarity,
        )


class GeneralizedLiftedStructureLoss(Native, losses.GeneralizedLiftedStructureLoss):
    """PML's GeneralizedLiftedStructureLoss."""

    settings = ("neg_margin", "pos_margin")
    least = (192, 128)
    once = True

    def recipe(self, known: Setup) -> RobustLoss:
        return _lifted(known, _shifted(known, self.pos_margin, self.neg_margin), HingeLink(both=False))


class LiftedStructureLoss(Native, losses.LiftedStructureLoss):
    """PML's LiftedStructureLoss."""

    settings = ("neg_margin", "pos_margin")
    tuples = references = False

    def recipe(self, known: Setup) -> RobustLoss:
        return _lifted(known, _shifted(known, self.pos_margin, self.neg_margin), LiftedLink())


class NTXentLoss(Native, losses.NTXentLoss):
    """PML's NTXentLoss."""

    settings = ("temperature",)
    least = (0, 48)

    def recipe(self, known: Setup) -> RobustLoss | None:
        # PML takes the logarithm of a quotient, which is accurate only if unit rows and the temperature bound it
        unit, widest = known.similarity.normalize, 4 if known.similarity.form == "squared" else 2
        if not unit or widest > SAFE * self.temperature or known.reducer is reducers.AvgNonZeroReducer:
            return None
        return NTXent(temperature=self.temperature, reduction=known.reduction, similarity=known.similarity)


class SupConLoss(Native, losses.SupConLoss):
    """PML's SupConLoss."""

    settings = ("temperature",)
    least = (192, 0)
    tuples = references = False  # nearfar's loss leaves out anchors without a negative pair

    def recipe(self, known: Setup) -> RobustLoss:
        return SupCon(temperature=self.temperature, reduction=known.reduction, similarity=known.similarity)


class TorchSoftplus(SoftplusLink, swift=True):
    """The softplus of circle loss as `torch.nn.Softplus` computes it: linear from 20 on."""

    strips = True
    reads_pairs = False

    def forward(self, sides: Sides) -> tuple[Terms, ...]:
        return self._anchor_terms(sides, softplus(sides.positive + sides.negative))


class CircleLoss(Native, losses.CircleLoss):
    """PML's CircleLoss."""

    settings = ("gamma", "op", "on", "delta_p", "delta_n", "curve")
    least = (48, 64)
    once = True

    @property
    def curve(self) -> str:
        """The function around the two logarithms; users may replace it."""
        return repr(self.soft_plus)

    def recipe(self, known: Setup) -> RobustLoss | None:
        # PML uses these numbers, which it derives from the margin once
        m = -self.on
        usual = 1 + m, 1 - m, m, repr(torch.nn.Softplus(beta=1))
        if not known.inverted or (self.op, self.delta_p, self.delta_n, self.curve) != usual:
            return None
        return _lifted(known, CircleScore(m, self.gamma), TorchSoftplus())


class TupletMarginLoss(Native, losses.TupletMarginLoss):
    """PML's TupletMarginLoss."""

    settings = ("margin", "scale")

    def recipe(self, known: Setup) -> RobustLoss | None:
        if not isinstance(known.similarity, Cosine):
            return None
        return TupletMargin(
            pair=AngularMargin(-self.margin, self.scale), reduction=known.reduction, similarity=known.similarity
        )


def _lifted(known: Setup, pair: Pairs, link: Link) -> RobustLoss:
    """A loss of the log-sum-exps of the positive and of the negative pairs of each anchor, joined by a link."""
    how: Any = {"reduction": known.reduction, "similarity": known.similarity}
    return RobustLoss(pair=pair, over=KL(1.0, normalized=False), groups="anchor_sign", link=link, **how)


def _shifted(known: Setup, pos_margin: float, neg_margin: float) -> tuple[Linear, Linear]:
    """The terms d - m₊ of positive pairs and m₋ - d of negative ones."""
    return Linear(known.score(float(pos_margin))), Linear(known.score(float(neg_margin)))

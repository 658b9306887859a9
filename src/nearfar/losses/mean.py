"""Losses that average over pairs: contrastive, margin, binomial deviance."""

from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.settings import Number, Positive
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.pairs import Hinge, Logistic, Squared
from nearfar.sets import Mean
from nearfar.similarity import NegEuclidean

__all__ = ["BinomialDeviance", "Contrastive", "Margin"]

PairMean = Literal["mean", "nonzero"]


class Contrastive(Recipe):
    """Contrastive loss: pull positive pairs within one distance, push negative pairs beyond another.

        mean over all pairs of  [d - m₊]₊² (positive),  [m₋ - d]₊² (negative)

    Can et al. 2019, eq. 3.1.

    Algebra: Squared x Mean x batch, on Euclidean distance of unit rows.

    Args:
        pos_margin: m₊, the distance within which positive pairs cost nothing.
        neg_margin: m₋, the distance beyond which negative pairs cost nothing.
        power: 2 as in the paper, 1 as in pytorch-metric-learning.
        reduction: "mean" over all pairs; "nonzero": the mean of the positive losses above zero, plus the mean of the
            negative losses above zero.
        miner: a miner; with `miners.BalancedHard` the loss is contrastive-hard of Can et al. 2019.

    Relations: power=1 with reduction="nonzero" is pytorch-metric-learning's. A feasible embedding (Can et al. 2019,
    prop. 4.1) has zero loss only if its positive distance ε₊ is within m₊; the paper says so for any ε₊
    (docs/papers/can-2019.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Contrastive()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.489'
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    power: Positive = 2.0
    reduction: PairMean = "mean"
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        nonzero = self.reduction == "nonzero"
        pair, over = Squared(self.pos_margin, self.neg_margin, self.power), Mean(zero="drop" if nonzero else "keep")
        return Factors(pair=pair, over=over, groups="sign" if nonzero else "batch", reduction="mean")


class Margin(Recipe):
    """Margin loss: one learned distance β parts positive from negative pairs, with a margin on both sides.

        mean over all pairs of  [m + d - β]₊ (positive),  [m - d + β]₊ (negative),  β learned

    Can et al. 2019, eq. 3.3.

    Algebra: Hinge(m, λ = -β) x Mean x batch, on Euclidean distance of unit rows. (Qi et al.'s "margin loss" is the same
    hinge on cosine: `RobustLoss(pair=Hinge(.2, .5), over=Mean())`.)

    Args:
        margin: m.
        beta: β, the distance that separates positive from negative pairs; its initial value if learned.
        learn: make β a parameter; pass `loss.parameters()` to an optimizer.
        reduction: "mean" over all pairs, or "nonzero": over the pairs with a loss above zero.
        miner: a miner; the original paper draws pairs with `miners.DistanceWeighted`.

    Relations: pytorch-metric-learning counts each positive pair once per negative pair of its anchor, and each negative
    pair once per positive pair. If all classes have the same size, a `Relation` with these counts as weights gives its
    value; `nearfar.pml.losses.MarginLoss` does so.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Margin()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.197'
    """

    margin: Number = 0.2
    beta: Number = 1.2
    learn: bool = True
    reduction: PairMean = "mean"
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        over = Mean(zero="drop" if self.reduction == "nonzero" else "keep")
        return Factors(pair=Hinge(self.margin, -self.setting("beta"), learn=self.learn), over=over, reduction="mean")

    def _read_beta(self) -> Tensor | float | None:
        """β as a distance (the pair loss stores the score -β); None if another pair loss was given."""
        pair = self.pair_positive
        return -pair.threshold if isinstance(pair, Hinge) else None

    def _changed(self, name: str) -> None:
        offset = getattr(self.pair_positive, "offset", None)
        if name == "beta" and self.pair is None and offset is not None:
            with torch.no_grad():
                offset.zero_()


class BinomialDeviance(Recipe):
    """Binomial deviance: a smooth contrastive loss on cosines, steeper for negative pairs.

        mean over all pairs of  (2/β)log(1+e^{-β(s-λ)}) (positive),  (2/α)log(1+e^{α(s-λ)}) (negative)

    Algebra: Logistic x Mean x batch, on cosine.

    Args:
        threshold: λ.
        slope_positive: β.
        slope_negative: α.

    Relations: `DroTopK(k, pair=Logistic())` with k at or above the number of pairs.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.BinomialDeviance()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.419'
    """

    threshold: Number = 0.5
    slope_positive: Positive = 2.0
    slope_negative: Positive = 40.0

    def factors(self) -> Factors:  # noqa: D102
        return Factors(pair=Logistic(self.threshold, self.slope_positive, self.slope_negative), over=Mean())

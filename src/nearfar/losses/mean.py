"""Losses that average over pairs: contrastive, margin, binomial deviance."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar.losses.arguments import Engine
from nearfar.losses.robust import RobustLoss
from nearfar.miners import Miner
from nearfar.pairs import Hinge, Logistic, PairLoss, Squared
from nearfar.sets import Mean
from nearfar.similarity import Cosine, NegEuclidean, Similarity

__all__ = ["BinomialDeviance", "Contrastive", "Margin"]

PairMean = Literal["mean", "nonzero"]


class Contrastive(RobustLoss):
    """Contrastive loss: pull positive pairs within one distance, push negative pairs beyond another.

        mean over all pairs of  [d - m₊]₊² (positive),  [m₋ - d]₊² (negative)

    Can et al. 2019, eq. 3.1.

    Algebra: Squared x Mean x batch, on Euclidean distance of unit rows.

    Args:
        pos_margin: m₊, the distance within which positive pairs cost nothing.
        neg_margin: m₋, the distance beyond which negative pairs cost nothing.
        power: 2 as in the paper, 1 as in pytorch-metric-learning.
        reduction: "mean" over all pairs; "nonzero": the mean of the positive losses above zero plus that of the
            negative.
        pair: another pair loss in place of `Squared`.
        similarity: `NegEuclidean` where none is given.
        miner: a miner; `miners.BalancedHard` makes it Can et al.'s contrastive-hard.
        engine: see `RobustLoss`.

    Relations: power=1 with reduction="nonzero" is pytorch-metric-learning's. A feasible embedding (Can et al. 2019,
    prop. 4.1) has zero loss only if its positive distance ε₊ is within m₊; the paper says so for any ε₊
    (docs/papers/can-2019.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Contrastive()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.489'
    """

    def __init__(
        self,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
        power: float = 2.0,
        reduction: PairMean = "mean",
        pair: PairLoss | None = None,
        similarity: Similarity | None = None,
        miner: Miner | None = None,
        engine: Engine = "auto",
    ) -> None:
        check_choice("Contrastive", "reduction", reduction, ("mean", "nonzero"))
        nonzero = reduction == "nonzero"
        super().__init__(
            pair=Squared(pos_margin, neg_margin, power) if pair is None else pair,
            over=Mean(zero="drop") if nonzero else Mean(),
            groups="sign" if nonzero else "batch",
            similarity=NegEuclidean() if similarity is None else similarity,
            miner=miner,
            engine=engine,
        )


class Margin(RobustLoss):
    """Margin loss: one learned distance β parts positive from negative pairs, with a margin on both sides.

        mean over all pairs of  [m + d - β]₊ (positive),  [m - d + β]₊ (negative),  β learned

    Can et al. 2019, eq. 3.3.

    Algebra: Hinge(m, λ = -β) x Mean x batch, on Euclidean distance of unit rows. (Qi et al.'s "margin loss" is the same
    hinge on cosine: `RobustLoss(pair=Hinge(.2, .5), over=Mean())`.)

    Args:
        margin: m.
        beta: β, the distance that parts positives from negatives; its starting value if learned.
        learn: make β a parameter (give it an optimizer: `loss.parameters()`).
        reduction: "mean" over all pairs, or "nonzero": over the pairs with a loss above zero.
        pair: another pair loss in place of `Hinge`.
        similarity: `NegEuclidean` where none is given.
        miner: a miner; the original draws pairs with `miners.DistanceWeighted`.
        engine: see `RobustLoss`.

    Relations: pytorch-metric-learning counts each positive pair once per negative pair of its anchor and the reverse;
    with equal class sizes its value is that of a Relation weighted so (`nearfar.pml.losses.MarginLoss` does it).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Margin()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.197'
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        learn: bool = True,
        reduction: PairMean = "mean",
        pair: PairLoss | None = None,
        similarity: Similarity | None = None,
        miner: Miner | None = None,
        engine: Engine = "auto",
    ) -> None:
        check_choice("Margin", "reduction", reduction, ("mean", "nonzero"))
        super().__init__(
            pair=Hinge(margin, -beta, learn=learn) if pair is None else pair,
            over=Mean(zero="drop" if reduction == "nonzero" else "keep"),
            groups="batch",
            similarity=NegEuclidean() if similarity is None else similarity,
            miner=miner,
            engine=engine,
        )

    @property
    def beta(self) -> Tensor | float | None:
        """β as a distance (the pair loss holds it as the score -β); None where another pair loss was given."""
        return -self.pair_positive.threshold if isinstance(self.pair_positive, Hinge) else None


class BinomialDeviance(RobustLoss):
    """Binomial deviance: a smooth contrastive loss on cosines, steeper for negative pairs.

        mean over all pairs of  (2/β)log(1+e^{-β(s-λ)}) (positive),  (2/α)log(1+e^{α(s-λ)}) (negative)

    Algebra: Logistic x Mean x batch, on cosine.

    Args:
        threshold: λ.
        slope_positive: β.
        slope_negative: α.
        pair: another pair loss in place of `Logistic`.
        similarity: `Cosine` where none is given.
        miner: a miner.
        engine: see `RobustLoss`.

    Relations: `DroTopK(k, pair=Logistic())` with k at or above the number of pairs.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.BinomialDeviance()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.419'
    """

    def __init__(
        self,
        *,
        threshold: float = 0.5,
        slope_positive: float = 2.0,
        slope_negative: float = 40.0,
        pair: PairLoss | None = None,
        similarity: Similarity | None = None,
        miner: Miner | None = None,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            pair=Logistic(threshold, slope_positive, slope_negative) if pair is None else pair,
            over=Mean(),
            groups="batch",
            similarity=Cosine() if similarity is None else similarity,
            miner=miner,
            engine=engine,
        )

"""Losses that weight an anchor's positive and negative pairs separately: lifted structure, multi-similarity, HAP2S."""

from __future__ import annotations

from numbers import Real
from typing import Annotated, Any, Literal

from nearfar._utils.checks import check_number, check_positive
from nearfar._utils.settings import Number, Positive
from nearfar._utils.shortcuts import check_part
from nearfar.groups._groupings import Reduction
from nearfar.links import HingeLink, LiftedLink
from nearfar.losses.factors import Factors, Sets
from nearfar.losses.recipe import Recipe
from nearfar.miners import Miner
from nearfar.miners import MultiSimilarity as MultiSimilarityMiner
from nearfar.pairs import Linear
from nearfar.sets import KL, DetachedWeights, PowerWeights
from nearfar.similarity import Cosine, NegEuclidean

__all__ = ["HAP2S", "GeneralizedLifted", "LiftedStructure", "MultiSimilarity"]


class LiftedStructure(Recipe):
    """Lifted structure: each positive pair against the negatives of both of its ends.

        mean over positive pairs of  ½ [ d_ij + log( Σ_{N_i} e^{m-d_ik} + Σ_{N_j} e^{m-d_jk} ) ]₊²

    Oh Song et al. 2016; Can et al. 2019.

    Algebra: Linear x KL(1) x anchor_sign, joined by `LiftedLink`, on Euclidean distance of unit rows. The link also
    reads the negatives of the other end of a pair, so the terms of different rows depend on each other. Qi et al. 2020
    uses this name for `GeneralizedLifted`. If the relation marks representatives, i is a representative and j is not:
    N_i contains all negative rows, N_j the negative representatives.

    Distances of unit rows are at most 2, so the nearest negative weighs at most e² = 7.4 times as much as the farthest.
    Among hundreds of negatives the hard ones then matter little, and similar classes are not separated. If so, do not
    normalize the rows (`similarity=NegEuclidean(normalize=False)`), or use a sharper softmax
    (`pair=(Linear(scale=8.0), Linear(scale=8.0, margin=1.0))`).

    Args:
        margin: m.
        reduction: over positive pairs: "mean" (1/(2|P|) of the sum over unordered pairs), "sum", "nonzero", "none".

    Relations: equals pytorch-metric-learning's default.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.LiftedStructure()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '2.517'
    """

    among_representatives = True

    margin: Number = 1.0
    reduction: Reduction = "mean"
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        pair = Linear(), Linear(margin=self.margin)
        return Factors(pair=pair, over=KL(1.0, normalized=False), groups="anchor_sign", link=LiftedLink())


class GeneralizedLifted(Recipe):
    """Generalized lifted structure: all positives of an anchor against all of its negatives.

        mean over anchors of  [ log Σ_{P_i} e^{d_ij} + log Σ_{N_i} e^{m-d_ik} ]₊

    Qi et al. 2020, eq. 3, as "LS".

    Algebra: Linear x KL(1) x anchor_sign, joined by a hinge, on Euclidean distance of unit rows.

    Args:
        margin: m.
        reduction: "mean" over anchors; "sum" as Qi et al. 2020 prints it.

    Relations: equals pytorch-metric-learning's default. Qi et al.'s form is `as_in_paper`; its λ cancels, so it has
    none. `DroKLGrouped(gamma=1)` has the same gradient under the conditions stated there.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.GeneralizedLifted()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '1.459'
    """

    listed_once = True

    margin: Number = 1.0
    reduction: Reduction = "mean"
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        pair = Linear(), Linear(margin=self.margin)
        return Factors(pair=pair, over=KL(1.0, normalized=False), groups="anchor_sign", link=HingeLink(both=False))

    @classmethod
    def as_in_paper(cls) -> GeneralizedLifted:
        """Build the form of Qi et al. 2020, eq. 3: on cosine, summed over anchors, without a margin (its λ cancels)."""
        return cls(margin=0.0, reduction="sum", similarity=Cosine())


class MultiSimilarity(Recipe):
    """Multi-similarity loss: soft maxima over the positives and over the negatives of each anchor.

        mean over anchors of  (1/α) log(1 + Σ_{P_i} e^{-α(s-λ)}) + (1/β) log(1 + Σ_{N_i} e^{β(s-λ)})

    Qi et al. 2020, eq. 2.

    Algebra: Linear x (KL(1/α), KL(1/β)) with the zero member x anchor_sign, added, on cosine, with its miner.

    Args:
        alpha: α.
        beta: β.
        threshold: λ.
        miner: ε, the slack of `miners.MultiSimilarity`; or another miner; or None for no mining.
        reduction: "mean" over anchors, including those whose pairs the miner has all removed.

    Relations: equals pytorch-metric-learning's loss with its miner (or without, for None). It is `DroKLGrouped` with an
    unhinged loss, the zero member and two temperatures; with the hinge, as Qi et al. 2020 derives it, there are two
    thresholds λ ± m (docs/papers/qi-2020.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.MultiSimilarity()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.389'
    """

    listed_once = True

    alpha: Positive = 2.0
    beta: Positive = 50.0
    threshold: Number = 0.5
    miner: float | Miner | None = 0.1  # type: ignore[assignment]
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        miner: Any = self.miner
        if isinstance(miner, Real):
            check_number("MultiSimilarity", "miner", miner)
            miner = MultiSimilarityMiner(float(miner))
        elif miner is not None:
            check_part("MultiSimilarity", "miner", miner, Miner, "nf.miners.Hard() or a number")
        over = (
            KL(1 / self.alpha, normalized=False, zero_member=True),
            KL(1 / self.beta, normalized=False, zero_member=True),
        )
        return Factors(pair=Linear(self.threshold), over=over, groups="anchor_sign", miner=miner)


class HAP2S(Recipe):
    """Hard-aware point-to-set loss: a batch-hard triplet loss with soft weights, held constant.

        mean over anchors of  [ Σ_{P_i} p_j d_ij - Σ_{N_i} p_k d_ik + m ]₊,  p held constant

    Yu et al. 2018; Qi et al. 2020, eq. 30.

    Algebra: Linear x DetachedWeights(KL(γ)) x anchor_sign, joined by a hinge, on Euclidean distance of unit rows. The
    value is not the antiderivative of the gradient (`exact_gradient` is False).

    Args:
        margin: m.
        gamma: γ of the exponential weights p ∝ e^{±d/γ}.
        weights: "exponential", or "polynomial": p ∝ (1+d)^a positive, (1+d)^{-2a} negative.
        power: a of the polynomial weights.
        reduction: "mean" over anchors.
        similarity: `NegEuclidean` by default; `Cosine` gives the form of Qi et al. 2020.

    Relations: while its hinge is active, the gradient is that of `DroKLGrouped(gamma, zero="keep")` with a linear pair
    loss on the same similarity (Qi et al. 2020 drops the hinge; docs/papers/qi-2020.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.HAP2S()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.301'
    """

    margin: Number = 0.2
    gamma: Annotated[float, check_positive] = 0.5
    weights: Literal["exponential", "polynomial"] = "exponential"
    power: float = 10.0
    reduction: Reduction = "mean"
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        over: Sets = PowerWeights(1.0, self.power), PowerWeights(-1.0, -2 * self.power)
        if self.weights == "exponential":
            over = DetachedWeights(KL(self.gamma)), DetachedWeights(KL(self.gamma))
        return Factors(pair=Linear(), over=over, groups="anchor_sign", link=HingeLink(self.margin))

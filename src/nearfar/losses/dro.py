"""Losses of Qi et al.: one pair loss, and an uncertainty set that weights the pairs of the batch."""

from __future__ import annotations

from typing import Annotated, Literal

from nearfar._utils.checks import check_positive
from nearfar._utils.settings import Positive
from nearfar.groups._groupings import Reduction
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.losses.robust import RobustLoss
from nearfar.pairs import Hinge, PairLoss
from nearfar.sets import KL, CalibratedKL, ChiSquare, Sampled, TopK, Worst
from nearfar.sets.counts import Count, check_count, check_one, scaled

__all__ = ["DroChiSquare", "DroKL", "DroKLGrouped", "DroTopK", "DroTopKPN", "DroWorst"]

Zero = Literal["keep", "drop"]
MANY = "8B"
"""Default of K."""
Effective = Annotated[float, check_positive]
"""The size of a set as e, the effective pairs a row: over a batch of B rows its weights p have 1/Σp² = e·B, where each
pair counts in both orders, as in `Explanation.effective_pairs`."""


def by_rows(effective: float | None) -> Count | None:
    """The effective entries of a group of the whole batch, given those of a row."""
    return None if effective is None else scaled("B", effective)


class DroWorst(Recipe):
    """The single worst pair loss of the batch.

        max_p Σ p_ij l_ij = max_ij l_ij,  p_ij ≥ 0,  Σ p_ij = 1

    Qi et al. 2020, section 3.1.

    Algebra: pair x Worst x batch, on cosine. A single wrong label can determine the value; `DroTopK` averages over K.

    Relations: `DroTopK(k=.5)` (one ordered pair), `DroKL(gamma→0)`, `DroChiSquare(rho≥n(n-1)/2)`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroWorst()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.700'
    """

    usual = {**Recipe.usual, "pair": Hinge}

    def factors(self) -> Factors:  # noqa: D102
        return Factors(over=Worst())


class DroTopK(Recipe):
    """Top-K: the mean of the K largest pair losses of the batch, so that easy pairs do not drown the rest.

        max_p Σ p_ij l_ij,  0 ≤ p_ij ≤ 1/K,  Σ p_ij = 1:  the mean of the K largest pair losses of the batch

    Qi et al. 2020, DRO-TopK.

    Algebra: pair x TopK(K) x batch, on cosine.

    Args:
        k: K, counted in unordered pairs as in the paper; may be fractional; above the number of pairs it means all.
            With a reference it counts entries of the n x m matrix (or pairs, if its ids are those of the rows).
            A multiple of the batch size B, such as "8B", "0.5B" or "B/2", adapts to it: B is the number n of query
            rows, ignored ones included, and under `Distributed` that of all processes. The default is "8B", because
            smaller K had a lower recall on photographs (docs/guides/which-loss.md).
        fraction: instead of k: the share of all pairs.
        effective: instead of k: e effective pairs a row (1/Σp² = e·B, in both orders), K = e·B/2 in a batch.
        zero: "keep" or "drop" pairs without loss; this matters only if K exceeds the number of pairs with loss.

    Relations: k ≥ all pairs is the mean (`BinomialDeviance` with `Logistic`); k = ½ is `DroWorst`. The paper's printed
    domain y ∈ {0, 1} gives negative pairs no gradient; ±1 is meant (docs/papers/qi-2020.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTopK(k=2)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.600'
    >>> f"{nf.losses.DroTopK(k='B/2')(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.600'
    """

    k: Count | None = None
    fraction: float | None = None
    effective: Effective | None = None
    zero: Zero = "keep"
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("k", "fraction", "effective"),)

    def factors(self) -> Factors:  # noqa: D102
        k = MANY if self.k is self.fraction is self.effective is None else self.k
        return Factors(over=TopK(k, self.fraction, by_rows(self.effective), zero=self.zero))

    @classmethod
    def as_in_paper(cls, k_code: int = 80, pair: PairLoss | None = None) -> DroTopK:
        """Build the loss with K as in the authors' code, half of the paper's K: the top 4·K_code ordered entries."""
        return cls(k=2 * k_code, pair=pair)


class DroTopKPN(Recipe):
    """Top-K per sign: the K/2 largest losses of positive pairs and the K/2 largest of negative pairs.

        (1/K) (Σ_{K/2 largest positive} l_ij + Σ_{K/2 largest negative} l_ij)

    DRO-TopK-PN of Qi et al. 2020, divided by K as text and code do.

    Algebra: pair x TopK(K/2) per sign x balanced, on cosine. If there are fewer than K/2 positive pairs, it is the mean
    of all of them and equally many of the hardest negative pairs, as in the authors' code.

    Args:
        k: K in all, counted in unordered pairs; or a multiple of the batch size such as "8B", as in `DroTopK`.
        effective: instead of k: e effective pairs a row, K = e·B/2.

    Relations: the mean of `RobustLoss(over=TopK(k/2), groups="sign")`'s two sides where both have K/2 pairs.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTopKPN(k=4)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.325'
    """

    k: Count | None = MANY
    effective: Effective | None = None
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("k", "effective"),)

    def factors(self) -> Factors:  # noqa: D102
        check_one("DroTopKPN", self, "k", "effective")
        if self.k is None:
            return Factors(over=TopK(effective=scaled("B", (self.effective or 0.0) / 2)), groups="balanced")
        check_count("DroTopKPN", "k", self.k)
        return Factors(over=TopK(scaled(self.k, 0.5)), groups="balanced")

    @classmethod
    def as_in_paper(cls, k_code: int = 80, pair: PairLoss | None = None) -> DroTopKPN:
        """Build the loss with K as in the authors' code: the top 2·K_code ordered entries of each sign."""
        return cls(k=2 * k_code, pair=pair)


class DroKL(Recipe):
    """Soft hard mining: pairs weighted by a softmax of their losses over the whole batch.

        γ log mean e^{l/γ} over the pairs with loss: p* = softmax(l/γ)

    Qi et al. 2020, DRO-KL.

    Algebra: pair x KL(γ) x batch, on cosine.

    Args:
        gamma: γ; small is near the worst pair, large near the mean. The default was the best on photographs; the paper
            has .1 (docs/guides/which-loss.md).
        effective: instead of gamma: e effective pairs a row; γ is solved for each batch, and constant in the gradient.
        samples: average the losses of this many ordered pairs, drawn from p* with replacement, which gives an unbiased
            gradient; None for all pairs.
        zero: "drop" leaves pairs without loss out, as the paper does, so that the value jumps when a pair enters;
            "keep" includes them.

    Relations: γ→0 is `DroWorst`, γ→∞ the mean.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroKL()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.520'
    """

    gamma: Positive | None = 0.3
    effective: Effective | None = None
    samples: int | None = None
    zero: Zero = "drop"
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("gamma", "effective"),)

    def factors(self) -> Factors:  # noqa: D102
        check_one("DroKL", self, "gamma", "effective")
        over = KL(self.gamma, effective=by_rows(self.effective), zero=self.zero)  # type: ignore[arg-type]
        return Factors(over=over if self.samples is None else Sampled(over, self.samples))

    @classmethod
    def as_in_paper(cls, gamma: float = 0.1, k_code: int = 80, pair: PairLoss | None = None) -> RobustLoss:
        """Build the loss of the authors' code, which differs from the softmax in the text.

        Weights p ∝ e^{l/γ} - 1 on the 4·K_code largest ordered losses; the loss is the mean of 4·K_code draws from p.
        """
        calibrated = CalibratedKL(gamma, 4 * k_code)
        return RobustLoss(pair=Hinge() if pair is None else pair, over=Sampled(calibrated, 4 * k_code))


class DroKLGrouped(Recipe):
    """Soft hard mining per anchor: the positives and the negatives of an anchor each weighted by a softmax.

        mean over anchors of  γ log mean_{P_i} e^{l/γ} + γ log mean_{N_i} e^{l/γ}

    Qi et al. 2020, eq. 7.

    Algebra: pair x KL(γ) x anchor_sign, added, on cosine.

    Args:
        gamma: γ. The default was the best on photographs; the paper has .01 (docs/guides/which-loss.md).
        effective: instead of gamma: effective pairs of an anchor and sign, as in `DroKL`.
        zero: "drop" leaves pairs without loss out, as the paper does.
        reduction: "mean" over anchors; the paper sums ("sum").

    Relations: with γ = 1 and a margin so large that every loss is positive, its gradient is `GeneralizedLifted`'s on
    cosine wherever that one's hinge is active, and F = L_LS + Σ(2m - log P_i - log N_i). Linear pairs, zero="keep" and
    the zero member make it `MultiSimilarity`. The paper's weights (7) hold only for margins above 1 + λ
    (docs/papers/qi-2020.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroKLGrouped()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.650'
    """

    gamma: Positive | None = 0.1
    effective: Effective | None = None
    zero: Zero = "drop"
    reduction: Reduction = "mean"
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("gamma", "effective"),)

    def factors(self) -> Factors:  # noqa: D102
        check_one("DroKLGrouped", self, "gamma", "effective")
        over = KL(self.gamma, effective=self.effective, zero=self.zero)  # type: ignore[arg-type] # None in turn
        return Factors(over=over, groups="anchor_sign")


class DroChiSquare(Recipe):
    """The mean pair loss plus a penalty on the variance of the losses.

        max_p Σ p_ij l_ij over the chi-square ball of radius ρ/n
        = mean(l) + √(2ρ·Var(l)/n) where that form holds

    Qi et al. 2020, section 3.1.

    Algebra: pair x ChiSquare(ρ) x batch, on cosine. Solved exactly; the printed closed form is too large beyond its
    range (docs/papers/qi-2020.md).

    Args:
        rho: ρ ≥ 0; n counts ordered pairs. A multiple of the batch size B, such as "40B", as k of `DroTopK`; that value
            was the best on photographs (docs/guides/which-loss.md).
        effective: instead of rho: e effective pairs a row, ρ = n(n/(e·B) - 1)/2.
        zero: "keep" or "drop" pairs without loss.

    Relations: ρ = 0 is the mean, ρ ≥ n(n-1)/2 is `DroWorst`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroChiSquare(rho=1.0)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.331'
    """

    rho: Count | None = "40B"
    effective: Effective | None = None
    zero: Zero = "keep"
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("rho", "effective"),)

    def factors(self) -> Factors:  # noqa: D102
        check_one("DroChiSquare", self, "rho", "effective")
        return Factors(over=ChiSquare(self.rho, by_rows(self.effective), zero=self.zero))

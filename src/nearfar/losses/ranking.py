"""Losses that maximize the average precision of a ranking: FastAP by a histogram, smooth AP by sigmoids.

Their groups (`Bins`, `Ranking`) hold every reference once per bin, or once per positive of its anchor, so they need
that many times the memory of other losses; `engine="tiled"` computes them in strips.
"""

import torch
from torch import Tensor

from nearfar._utils.settings import Positive, Whole
from nearfar._utils.shortcuts import check_part
from nearfar.groups._groupings import Reduction
from nearfar.groups._ranking import Bins, Ranking
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.pairs import PairLoss
from nearfar.sets import Mean
from nearfar.similarity import Similarity

__all__ = ["FastAP", "SmoothAP"]

RANGES = {"dot": (-1.0, 1.0), "squared": (-4.0, 0.0), "distance": (-2.0, 0.0)}
"""The smallest and largest score of unit rows, by the form of the similarity."""


class Sigmoid(PairLoss, swift=True):
    """l = 1 / (1 + e^{-s/τ}) of a difference of scores: a smooth count of whether one reference ranks before another.

    Args:
        temperature: τ.
    """

    temperature: Positive = 0.01

    def forward(self, s: Tensor, sign: int) -> Tensor:
        return torch.sigmoid(s / self.temperature)


class Triangle(PairLoss, swift=True):
    """l = [1 - |s|/w]₊ of a score minus a bin's center: the share of a pair that falls in the bin.

    Args:
        width: w, the distance of two centers.
    """

    width: Positive = 0.2

    def forward(self, s: Tensor, sign: int) -> Tensor:
        return torch.relu(1 - s.abs() / self.width)


class FastAP(Recipe):
    """FastAP: one minus the average precision, from a soft histogram of the scores of each anchor.

        mean over anchors of  1 - (1/|P_i|) Σ_b h₊(b)·H₊(b)/H(b),  h a histogram and H its running sum

    Cakir et al. 2019. A score counts in its two nearest bins, in proportion.

    Algebra: Triangle x Mean x `Bins`, on cosine: of unit rows, bins of cosines are bins of squared distances. Anchors
    without positives are left out. Engines: "dense" and "tiled"; "fused" has no kernel for it and computes in strips.

    Args:
        bins: the number of steps of the histogram between the smallest and the largest score.
        reduction: over anchors.
        similarity: `Cosine` by default; it must normalize rows, so that the range of the scores is known.

    Relations: equals pytorch-metric-learning's default, for each power of its distance. `SmoothAP` ranks without bins.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.FastAP()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.292'
    """

    bins: Whole = 10
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        low, high = _range("FastAP", self.similarity)
        return Factors(pair=Triangle((high - low) / self.bins), over=Mean(), groups=Bins(self.bins, low, high))


class SmoothAP(Recipe):
    """Smooth AP: one minus the average precision, with sigmoids in place of the step functions of a rank.

        mean over anchors of  1 - (1/|P_i|) Σ_{p ∈ P_i} (1 + Σ_{P_i∖p} σ_jp) / (1 + Σ_{P_i∖p} σ_jp + Σ_{N_i} σ_jp)
        σ_jp = 1 / (1 + e^{-(s_ij - s_ip)/τ})

    Brown et al. 2020.

    Algebra: Sigmoid(τ) of s_ij - s_ip x Mean x `Ranking`, on cosine. Anchors without positives are left out; classes
    may have any sizes. Engines: "dense" and "tiled"; "fused" has no kernel for it and computes in strips.

    Args:
        temperature: τ; as τ→0 the value approaches one minus the average precision, and the gradient vanishes.
        reduction: over anchors.
        pair: a pair loss to use instead of `Sigmoid`; its value at 0 must be ½.

    Relations: with the batch as its own reference, so that each row is a positive of itself, it equals the authors'
    code. It then equals pytorch-metric-learning's too if rows are sorted by class and there are as many classes as rows
    of each (docs/start/from-pml.md).

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.SmoothAP()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.275'
    """

    temperature: Positive = 0.01
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        return Factors(pair=Sigmoid(self.temperature), over=Mean(), groups=Ranking())


def _range(owner: str, similarity: Similarity | None) -> tuple[float, float]:
    """The smallest and largest score of unit rows."""
    check_part(owner, "similarity", similarity, Similarity, "nf.similarity.Cosine()")
    assert similarity is not None  # noqa: S101
    if not similarity.normalize or similarity.form is None:
        raise ValueError(
            f"{owner}: similarity must be Cosine, NegEuclidean, NegSquaredEuclidean or Dot of unit rows, whose scores "
            f"have a range, but came as {similarity!r}."
        )
    return RANGES[similarity.form]

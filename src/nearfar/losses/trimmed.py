"""Losses for noisy labels: the hardest pairs are left out, of both signs together or of the positive ones only."""

from typing import Annotated

from nearfar._utils.checks import number_of
from nearfar.losses.dro import Effective, Zero, by_rows
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.pairs import Hinge
from nearfar.sets import TopK, Trimmed
from nearfar.sets.counts import Count

__all__ = ["DroTrimmed", "DroTrimmedPN"]


def _check_share(owner: str, name: str, value: object) -> None:
    """Require a share in [0, 1)."""
    allowed = "the share of wrong labels, from 0 to below 1,"
    if not 0 <= number_of(owner, name, value, allowed, learned=False) < 1:
        raise ValueError(f"{owner}: {name} must be {allowed} but came as {value!r}.")


Share = Annotated[float, _check_share]


class DroTrimmed(Recipe):
    """Trimmed top-K, for noisy labels: leaves out the T hardest pairs of the batch, then takes the mean of the next K.

        (1/K) Σ_{r = T+1..T+K} l_r,  l_1 ≥ l_2 ≥ ... the pair losses of the batch

    If a share ν of the labels is wrong, so is a share 1 - (1 - ν)² of the positive pairs, and these are the hardest;
    with M samples per class and B rows their number is T = B(M - 1)/2·(1 - (1 - ν)²).

    Algebra: pair x Trimmed(T, K) x batch, on cosine. No worst case over a set: see `nf.sets.Trimmed`.

    Args:
        top: T, the pairs left out, counted as k of `DroTopK` is: a number, or a multiple of the batch size such as "B".
        k: K, likewise.
        top_fraction: instead of top: the share of all pairs, below 1.
        fraction: instead of k: the share of all pairs.
        effective: instead of k: effective pairs a row, as in `DroTopK`.
        zero: "keep" or "drop" pairs without loss.

    Relations: top = 0 is `DroTopK`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTrimmed(top=1, k=2)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.300'
    """

    top: Count | None = None
    k: Count | None = None
    top_fraction: float | None = None
    fraction: float | None = None
    effective: Effective | None = None
    zero: Zero = "keep"
    usual = {**Recipe.usual, "pair": Hinge}
    either = (("k", "fraction", "effective"), ("top", "top_fraction"))

    def factors(self) -> Factors:  # noqa: D102
        each = by_rows(self.effective)
        return Factors(over=Trimmed(self.top, self.k, self.top_fraction, self.fraction, each, zero=self.zero))


class DroTrimmedPN(Recipe):
    """Trimmed per sign, for noisy labels: positive pairs without the hardest, and the K hardest negative pairs.

        mean_P l_ij + mean_N l_ij
        P: positive pairs without the hardest share 1 - (1 - ν)²,  N: the K hardest negative

    A positive pair is wrong if one of its labels is: with a share ν of wrong labels, a share 1 - (1 - ν)² of the
    positive pairs. A wrong label makes a negative pair wrong only by chance, which is rare. So in each batch that share
    of the positive pairs is left out, and no negative pairs are.

    Algebra: pair x (Trimmed, TopK(K)) x sign, on cosine. No worst case over a set: see `nf.sets.Trimmed`.

    Args:
        wrong: ν, the share of labels that are wrong, in [0, 1); a guess will do.
        k: K of the negative pairs, counted as in `DroTopK`: a number, or a multiple of the batch size such as "2B".

    Relations: wrong = 0 is `RobustLoss(over=(Mean(), TopK(k)), groups="sign")`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTrimmedPN(wrong=0.3, k=2)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.350'
    """

    wrong: Share
    k: Count
    usual = {**Recipe.usual, "pair": Hinge}

    def factors(self) -> Factors:  # noqa: D102
        over = Trimmed(top_fraction=1 - (1 - self.wrong) ** 2, fraction=1.0), TopK(self.k)
        return Factors(over=over, groups="sign")

"""Losses for wrong labels: the hardest pairs are left out, of both signs together or of the positive ones alone."""

from __future__ import annotations

from nearfar.losses.arguments import Engine
from nearfar.losses.dro import Zero
from nearfar.losses.robust import RobustLoss
from nearfar.miners import Miner
from nearfar.pairs import Hinge, PairLoss
from nearfar.sets import TopK, Trimmed
from nearfar.sets.counts import Count
from nearfar.similarity import Similarity

__all__ = ["DroTrimmed", "DroTrimmedPN"]


class DroTrimmed(RobustLoss):
    """Trimmed top-K: leave out the T hardest pairs of the batch, then the mean of the next K, for noisy labels.

        mean of the pair losses of rank T + 1 to T + K, the largest first

    Of the pairs called positive a share 1 - (1 - ν)² is wrong where a share ν of the labels is, and these are the
    hardest; with M samples a class and B rows they are T = B(M - 1)/2·(1 - (1 - ν)²).

    Algebra: pair x Trimmed(T, K) x batch, on cosine. No worst case over a set: see `nf.sets.Trimmed`.

    Args:
        top: T, the pairs left out, counted as k of `DroTopK` is: a number, or a multiple of the batch size such as "B".
        k: K, likewise.
        top_fraction: instead of top: the share of all pairs, below 1.
        fraction: instead of k: the share of all pairs.
        zero: "keep" or "drop" pairs without loss.
        pair: `Hinge(.2, .5)` where none is given; `Logistic()` for the binomial form.
        similarity: `Cosine` where none is given.
        miner: a miner.
        engine: see `RobustLoss`.

    Relations: top = 0 is `DroTopK`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTrimmed(top=1, k=2)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.300'
    """

    def __init__(
        self,
        *,
        top: Count | None = None,
        k: Count | None = None,
        top_fraction: float | None = None,
        fraction: float | None = None,
        zero: Zero = "keep",
        pair: PairLoss | None = None,
        similarity: Similarity | None = None,
        miner: Miner | None = None,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            pair=Hinge() if pair is None else pair,
            over=Trimmed(top, k, top_fraction, fraction, zero=zero),
            similarity=similarity,
            miner=miner,
            engine=engine,
        )


class DroTrimmedPN(RobustLoss):
    """Trimmed per sign, for noisy labels: the positive pairs without the hardest, against the K hardest negative pairs.

        mean of the positive losses without the hardest share 1 - (1 - ν)²  +  mean of the K largest negative losses

    A pair is called positive in error where one of its two labels is wrong: a share 1 - (1 - ν)² of them, where a share
    ν of all labels is. A wrong label makes a negative pair wrong only by chance, and those are few among many; so
    positive pairs are trimmed, those of each batch by that share, and negative pairs are not.

    Algebra: pair x (Trimmed, TopK(K)) x sign, on cosine. No worst case over a set: see `nf.sets.Trimmed`.

    Args:
        wrong: ν, the share of labels that are wrong, in [0, 1); a guess will do.
        k: K of the negative pairs, counted as in `DroTopK`: a number, or a multiple of the batch size such as "2B".
        pair: `Hinge(.2, .5)` where none is given; `Logistic()` for the binomial form.
        similarity: `Cosine` where none is given.
        miner: a miner.
        engine: see `RobustLoss`.

    Relations: wrong = 0 is `RobustLoss(over=(Mean(), TopK(k)), groups="sign")`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.DroTrimmedPN(wrong=0.3, k=2)(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.350'
    """

    def __init__(
        self,
        *,
        wrong: float,
        k: Count,
        pair: PairLoss | None = None,
        similarity: Similarity | None = None,
        miner: Miner | None = None,
        engine: Engine = "auto",
    ) -> None:
        if isinstance(wrong, bool) or not isinstance(wrong, int | float) or not 0 <= wrong < 1:
            raise ValueError(
                f"DroTrimmedPN: wrong must be the share of wrong labels, from 0 to below 1, but came as {wrong!r}."
            )
        super().__init__(
            pair=Hinge() if pair is None else pair,
            over=(Trimmed(top_fraction=1 - (1 - wrong) ** 2, fraction=1.0), TopK(k)),
            groups="sign",
            similarity=similarity,
            miner=miner,
            engine=engine,
        )

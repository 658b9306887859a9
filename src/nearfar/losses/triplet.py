"""Losses of triplets: the triplet loss with its kinds of mining, and the angular loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from torch import Tensor

from nearfar._utils.checks import check_choice, check_whole
from nearfar._utils.settings import Number, ZeroOrMore
from nearfar.groups import AngularScore, Positive, Product, Rule, SemiHardBand, Triplets
from nearfar.groups._groupings import Reduction
from nearfar.groups._triplets import difference, nearest_difference
from nearfar.links import HingeLink
from nearfar.losses.annealing import Anneal, Annealing, advance
from nearfar.losses.explanation import Explanation
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.losses.robust import Call
from nearfar.losses.spread import barrier, check_floor
from nearfar.losses.wrapper import check_scalar
from nearfar.pairs import Hinge, Identity, Linear
from nearfar.sets import KL, Mean, Worst
from nearfar.similarity import NegEuclidean, NegSquaredEuclidean

__all__ = ["Angular", "Triplet"]

Mining = Literal["all", "semihard", "balanced", "hard", "hardest"]


class Triplet(Recipe):
    """Triplet margin loss: a positive must be nearer to its anchor than a negative, by a margin.

        mean over triplets of  [x]₊ or μ·softplus(x/μ),  x = d_ap - d_an + m

    Xu et al. 2022; Jaffe 2020, eq. 6 and 9; Can et al. 2019, eq. 3.2.

    Algebra: Hinge(m) on s_an - s_ap x Mean x triplets, on Euclidean distance of unit rows; mining="hard": Worst per
    anchor and sign, joined by a hinge; "hardest": Worst over all triplets.

    Args:
        margin: m. With m = 0 total collapse is a global minimum of value 0.
        mining: "all" triplets; "semihard": d_ap < d_an < d_ap + m; "balanced": each anchor's first positive (in the
            order of the batch) with its nearest negative, the second with the second nearest, and so on (Can et al.
            2019); "hard": each anchor's farthest positive and nearest negative; "hardest": the one worst triplet of the
            batch (Xu et al. 2022).
        smooth: μ of the log-sum-exp smoothing (Jaffe 2020); 0 is the hinge. The value exceeds the hinge's by at most
            μ·log 2.
        swap: take the distance of a negative to the nearer of anchor and positive (not with "hard", and not with
            representatives).
        reduction: "mean" over the mined triplets ("hard": over anchors), or "nonzero": over those above zero.
        anneal: with "hard": start with soft weights, and reach plain hard mining after this many calls of `step`, or
            follow an `Anneal`. Before the first step the set is KL(1) instead of Worst, which is close to the mean; the
            trainer calls `step` after each batch. This can prevent a collapse (docs/guides/doctor.md).
        floor: κ in (0, 1): add the barrier [log(κ/V)]₊ of `SpreadFloor`, which keeps hard mining from collapsing; ½
            suits most batches. None, the default, leaves it out.
        similarity: `NegEuclidean` by default; Jaffe 2020 and Can et al. 2019 use `NegSquaredEuclidean`.
        miner: selects pairs before triplets are formed.

    Relations: reduction="nonzero" is pytorch-metric-learning's, with its miner for the mining chosen. μ·softplus(x/μ)
    is the KL(μ) set over {x, 0}. "hard" never exceeds "hardest". After `anneal` has ended it equals plain hard mining.
    floor=κ is `SpreadFloor(Triplet(...), floor=κ)`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Triplet()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.149'
    """

    margin: Number = 0.05
    mining: Mining = "all"
    smooth: ZeroOrMore = 0.0
    swap: bool = False
    reduction: Reduction = "mean"
    anneal: int | Anneal | None = None
    floor: float | None = None
    usual = {"similarity": NegEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        _anneal(self.anneal, self.mining)
        if self.floor is not None:
            check_floor("Triplet", self.floor)
            check_scalar("Triplet", self)
        if self.mining == "hard":
            if self.swap:
                raise ValueError('Triplet: swap compares triplets, which mining="hard" does not form; use "all".')
            link = HingeLink(self.margin, self.smooth)
            return Factors(pair=Linear(), over=Worst(), groups="anchor_sign", link=link)
        check_choice("Triplet", "reduction", self.reduction, ("mean", "nonzero"))
        mean = Mean(zero="drop" if self.reduction == "nonzero" else "keep")
        keep = SemiHardBand(self.margin) if self.mining == "semihard" else None
        compare = nearest_difference if self.swap else difference
        rule = Rule(compare, keep, wants_reference=self.swap, balanced=self.mining == "balanced")
        return Factors(
            pair=Hinge(self.margin, 0.0, smooth=self.smooth),
            over=Worst() if self.mining == "hardest" else mean,
            groups=Triplets(rule),
            reduction="mean",
        )

    def _begin(self) -> None:
        self._changed("anneal")

    def _changed(self, name: str) -> None:
        """If the schedule is replaced, start the new one from its beginning."""
        if name == "anneal":
            plan = _anneal(self.anneal, self.mining)
            self._modules.pop("annealing", None)
            if plan is not None:
                self._modules["annealing"] = Annealing(plan)

    def _now(self, product: Product) -> Product:
        """The product with the set of the present annealing step, if any."""
        annealing = self._modules.get("annealing")
        if not isinstance(annealing, Annealing):
            return product
        return replace(product, over_positive=annealing.over, over_negative=annealing.over)

    @property
    def spread_floor(self) -> tuple[float, float] | None:
        """Floor and weight of the barrier, if there is one."""
        return None if self.floor is None else (self.floor, 1.0)

    def _value(self, call: Call) -> Tensor:
        value = super()._value(call)
        return value if self.floor is None else value + barrier(call.embeddings, self.floor)

    def _explanation(self, call: Call) -> Explanation:
        """The explanation of the triplets, with the barrier included in the value."""
        found = super()._explanation(call)
        if self.floor is None:
            return found
        return replace(found, value=found.value + barrier(call.embeddings, self.floor).detach())

    def step(self) -> None:
        """Count a training step, for `anneal`; does nothing without it."""
        advance(self)

    @classmethod
    def as_in_paper(cls, margin: float = 0.1, smooth: float = 0.0) -> Triplet:
        """Build the form of Jaffe 2020 and Can et al. 2019, with squared distances of unit rows."""
        return cls(margin=margin, smooth=smooth, similarity=NegSquaredEuclidean())


def _anneal(given: int | Anneal | None, mining: Mining) -> Anneal | None:
    if given is None:
        return None
    if mining != "hard":
        raise ValueError(
            f'Triplet: anneal ends in hard mining, so mining must be "hard", but came as {mining!r}; leave anneal out.'
        )
    if isinstance(given, Anneal):
        return given
    check_whole("Triplet", "anneal", given)
    return Anneal(given)


class Angular(Recipe):
    """Angular loss: limits the angle at the negative of each triplet.

        mean over positive pairs of  log( 1 + Σ_{N_a} e^{ 4t⟨x_a+x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩ } ),  t = tan²α

    Algebra: Identity x KL(1) with the zero member x positive, on cosine. The score of a triplet needs ⟨x_p, x_n⟩ as
    well. Under a relation with representatives the anchors are the other rows, and p and n are representatives.

    Args:
        degrees: α, in degrees.
        reduction: over positive pairs.

    Relations: equals pytorch-metric-learning's default on unit rows; there the negatives are not normalized.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Angular()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.919'
    """

    anchors = "others"

    degrees: float = 40.0
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        if not 0 < self.degrees < 90:
            raise ValueError(f"Angular: degrees must lie between 0 and 90, but came as {self.degrees!r}.")
        groups = Positive(Rule(AngularScore(math.tan(math.radians(self.degrees)) ** 2), wants_reference=True))
        return Factors(pair=Identity(), over=KL(1.0, normalized=False, zero_member=True), groups=groups)

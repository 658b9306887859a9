"""PML's triplet losses as recipes of nearfar's."""

import torch
from pytorch_metric_learning import losses, reducers
from torch import Tensor, nn

from nearfar.groups._triplets import Rule, Triplets, difference, nearest_difference
from nearfar.losses.robust import RobustLoss
from nearfar.miners import Miner, ScoredPairs
from nearfar.pairs import Hinge, PairLoss
from nearfar.pml._native import Setup
from nearfar.pml.losses._native import Native

__all__ = ["MarginLoss", "TripletMarginLoss"]


class TripletMarginLoss(Native, losses.TripletMarginLoss):
    """PML's TripletMarginLoss."""

    settings = ("margin", "swap", "smooth_loss", "triplets_per_anchor")
    least = (64, 96)

    @property
    def references(self) -> bool:  # type: ignore[override]
        """False with swap: PML then looks up s_pn between batch and reference, not within the reference."""
        return not self.swap

    def recipe(self, known: Setup) -> RobustLoss | None:
        if self.triplets_per_anchor != "all":
            return None
        compare = nearest_difference if self.swap else difference
        return RobustLoss(
            pair=Hinge(self.margin, 0.0, smooth=1.0 if self.smooth_loss else 0.0),
            over=known.over,
            groups=Triplets(Rule(compare, wants_reference=bool(self.swap))),
            similarity=known.similarity,
        )


class Boundary(PairLoss):
    """A hinge l = [m + sign·(λ - s)]₊ around the boundary λ of a `MarginLoss`, which it shares."""

    def __init__(self, margin: float, beta: Tensor | float, known: Setup) -> None:
        super().__init__()
        self.margin, self.inverted = margin, known.inverted
        if isinstance(beta, Tensor) and not isinstance(beta, nn.Parameter):
            self.register_buffer("beta", beta)
        else:
            self.beta = beta

    def forward(self, s: Tensor, sign: int) -> Tensor:
        beta = self.beta.to(s) if isinstance(self.beta, Tensor) else self.beta
        return torch.relu(self.margin + sign * ((beta if self.inverted else -beta) - s))


class PerTriplet(Miner):
    """Weight each pair by the number of triplets that contain it."""

    both = True

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:
        dtype = pairs.scores.dtype
        positive, negative = (side.sum(dim=1, keepdim=True).to(dtype) for side in (pairs.positive, pairs.negative))
        return pairs.keep(positive=negative, negative=positive)


class MarginLoss(Native, losses.MarginLoss):
    """PML's MarginLoss."""

    settings = ("margin", "nu", "triplets_per_anchor", "learn_beta", "boundaries", "boundary")
    reads = ("boundaries", "boundary")
    least = (64, 0)
    tuples = False

    @property
    def boundaries(self) -> int:
        """Number of boundaries: 1, or one per class."""
        return len(self.beta)

    @property
    def boundary(self) -> float:
        """The boundary, or which tensor holds it if it is learned or on a GPU; users may replace or change it."""
        fixed = not self.learn_beta and self.boundaries == 1 and self.beta.device.type == "cpu"
        return float(self.beta) if fixed else id(self.beta)

    def recipe(self, known: Setup) -> RobustLoss | None:
        priced = self.learn_beta and self.nu
        if priced or self.boundaries != 1 or self.triplets_per_anchor != "all":
            return None
        if known.reducer is reducers.AvgNonZeroReducer:  # over triplets, which are not formed here
            return None
        return RobustLoss(
            pair=Boundary(self.margin, self.boundary if isinstance(self.boundary, float) else self.beta, known),
            over=known.over,
            groups="batch" if known.reducer is reducers.DivisorReducer else "sign",
            similarity=known.similarity,
            miner=PerTriplet(),
        )

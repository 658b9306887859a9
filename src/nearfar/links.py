"""Links combine the positive and the negative value of an anchor; without a link they are added."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from nearfar._utils.checks import check_number, check_positive
from nearfar._utils.settings import Number
from nearfar._utils.shortcuts import Part
from nearfar._utils.tensors import mask_of
from nearfar.pairs import smooth_hinge

__all__ = ["Add", "HingeLink", "LiftedLink", "Link", "PerPositive", "ShareLink", "Sides", "SoftplusLink", "Terms"]


@dataclass(frozen=True, eq=False)
class Sides:
    """The values, losses and masks of n anchors that a link combines.

    Args:
        positive: [n] value of each anchor's positive group, 0 where empty.
        negative: [n] value of each anchor's negative group, 0 where empty.
        has_positive: [n] the positive group is not empty.
        has_negative: [n] the negative group is not empty.
        anchors: [n] rows that count.
        losses: [n, m] losses of the positive pairs; read only where `measure` is above zero.
        measure: [n, m] base measure of the positive pairs.
        columns: [m] value of each reference's negative group, if the link asks for it, else None; or [n, m], if
            each anchor has m references of its own.
        has_columns: that group is not empty.
    """

    positive: Tensor
    negative: Tensor
    has_positive: Tensor
    has_negative: Tensor
    anchors: Tensor
    losses: Tensor
    measure: Tensor
    columns: Tensor | None = None
    has_columns: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Terms:
    """Values [n] or [n, m], and the weight of each in the reduction (same shape; 0 leaves it out)."""

    values: Tensor
    measure: Tensor


class Link(Part, nn.Module, ABC):
    """Combines the positive and the negative value of each anchor; plain autograd, so a link may hold parameters."""

    shortcuts = ("strips", "reads_pairs", "symmetric", "homogeneous")
    strips: bool = False
    """Whether the terms of an anchor only depend on its own values (and the columns), so that strips work."""
    reads_pairs: bool = True
    """Whether the link reads losses of single positive pairs, or their measure, and not only group values."""
    both: bool = True
    """Whether an anchor needs both sides to contribute; False if one side alone already pulls or pushes."""
    apart: bool = False
    """Whether the link gives several terms, which are reduced one by one."""
    wants_columns: bool = False
    """Whether the link also reads the negative value of each reference (it mixes rows)."""
    homogeneous: bool = False
    """Whether scaling values and losses by c > 0 scales the terms by c."""
    symmetric: bool = False
    """Whether a pair's term stays the same if its two ends, and their values, are exchanged."""

    @abstractmethod
    def forward(self, sides: Sides) -> tuple[Terms, ...]:
        """The terms to reduce; several are reduced separately and added."""

    def _anchor_terms(self, sides: Sides, values: Tensor) -> tuple[Terms, ...]:
        if self.both:
            values = torch.where(sides.has_positive & sides.has_negative, values, 0.0)
        return (Terms(values, sides.anchors),)


class Add(Link, swift=True):
    """Add the two values of an anchor, v = positive + negative, with options.

    Args:
        both: anchors with one side only count 0 instead of that side.
        apart: reduce the two sides apart, the positive one over anchors that have positive pairs (proxy-anchor).
    """

    strips = True
    reads_pairs = False
    homogeneous = True

    def __init__(self, *, both: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.both = both
        self.apart = apart

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        if self.apart:
            return Terms(sides.positive, sides.anchors & sides.has_positive), Terms(sides.negative, sides.anchors)
        return self._anchor_terms(sides, sides.positive + sides.negative)


class HingeLink(Link, swift=True):
    """A hinge on the sum, v = [positive + negative + m]₊ (batch-hard, HAP2S, generalized lifted); or a softplus."""

    strips = True
    reads_pairs = False
    learns = frozenset({"margin", "smooth"})

    def __init__(self, margin: Number = 0.0, smooth: Number = 0.0, *, both: bool = True) -> None:
        super().__init__()
        check_number("HingeLink", "margin", margin, learned=True)
        check_positive("HingeLink", "smooth", smooth, zero=True, learned=True)
        self.margin = margin
        self.smooth = smooth
        self.both = both

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        return self._anchor_terms(sides, smooth_hinge(sides.positive + sides.negative + self.margin, self.smooth))


class SoftplusLink(Link, swift=True):
    """A softplus of the sum, v = log(1 + e^{positive + negative}) (circle loss)."""

    strips = True
    reads_pairs = False

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        return self._anchor_terms(sides, softplus(sides.positive + sides.negative, threshold=40.0))


class ShareLink(Link, swift=True):
    """Minus the log of the positive side's softmax share: v = log(1 + e^{negative - positive}) (NCA).

    Both sides are log-sum-exps of scores, so that v = -log(Σ₊ eˢ / Σ eˢ) over all pairs of the anchor. Anchors without
    positive pairs do not count.
    """

    strips = True
    reads_pairs = False

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        values = softplus(sides.negative - sides.positive, threshold=40.0)
        both = sides.has_positive & sides.has_negative
        return (Terms(torch.where(both, values, 0.0), sides.anchors & sides.has_positive),)


class PerPositive(Link, swift=True):
    """One term per positive pair: v_ij = log(1 + e^{negative_i + l_ij}) (NT-Xent, N-pair, proxy-NCA, ArcFace).

    Args:
        columns: the mean of this term and that of the column, log(1 + e^{negative_j + l_ij}) (CLIP).
    """

    strips = True

    def __init__(self, *, columns: bool = False) -> None:
        super().__init__()
        self.wants_columns = columns

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        values = self._values(sides, sides.negative[:, None], sides.has_negative[:, None])
        if sides.columns is not None and sides.has_columns is not None:
            values = 0.5 * (values + self._values(sides, sides.columns, sides.has_columns))
        return (Terms(values, sides.measure),)

    def _values(self, sides: Sides, negative: Tensor, has_negative: Tensor) -> Tensor:
        values = softplus(negative + sides.losses, threshold=40.0)
        return torch.where(mask_of(sides.measure) & has_negative, values, 0.0)


class LiftedLink(Link, swift=True):
    """One term per positive pair: v_ij = ½ [log(e^{negative_i} + e^{negative_j}) + l_ij]₊² (lifted structure).

    It reads the negative value of both ends, so it mixes rows; with a reference, j's is that of its column.
    """

    wants_columns = True
    strips = True
    symmetric = True

    def forward(self, sides: Sides) -> tuple[Terms, ...]:  # noqa: D102
        assert sides.columns is not None  # noqa: S101 - wants_columns
        assert sides.has_columns is not None  # noqa: S101
        # an end without negative pairs adds e^{-inf}; -1e30 keeps the gradient finite where -inf gives NaN
        row = torch.where(sides.has_negative, sides.negative, -1e30)[:, None]
        col = torch.where(sides.has_columns, sides.columns, -1e30)
        values = torch.relu(torch.logaddexp(row, col) + sides.losses) ** 2 / 2
        present = mask_of(sides.measure) & (sides.has_negative[:, None] | sides.has_columns)
        return (Terms(torch.where(present, values, 0.0), sides.measure),)

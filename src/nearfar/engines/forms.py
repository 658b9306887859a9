"""In-place kernels of the fast paths: scores, losses and slopes written into buffers, and gradients of scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfar.pairs import PairLoss
from nearfar.similarity import Similarity

__all__ = [
    "Distance",
    "Form",
    "Plain",
    "SquaredDistance",
    "corner",
    "form_of",
    "plain_hinge",
    "slope_at_zero",
    "write_losses",
    "write_slopes",
]


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """Base class: in-place scores and gradients of a similarity, a function of the inner product ⟨x, y⟩.

    Args:
        cols: [m, d] prepared columns.
    """

    cols: Tensor

    spends = False
    """Whether `descend_` overwrites the scores."""

    @abstractmethod
    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:
        """Write the scores [t, m - first] of rows [t, d] and the columns from `first` on into `out`."""

    @abstractmethod
    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:
        """Turn dF/ds into dF/d⟨x, y⟩, in place; overwrites the scores if `spends`."""

    def pull_(self, total: Tensor, slope: Tensor, mine: Tensor, others: Tensor) -> None:
        """Back-propagate dF/d⟨x, y⟩ [t, u] of `mine` [t, d] and `others` [u, d] to `mine`, added to `total` [t, d]."""
        total.addmm_(slope, others)

    def directions(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ⟨x, y⟩ in rows [t, d] and in P columns of each, cols [t, P, d]; broadcastable to [t, P, d]."""
        return cols, rows[:, None, :]

    def pull_few_(
        self, totals: tuple[Tensor | None, Tensor | None], slope: Tensor, rows: Tensor, place: Tensor
    ) -> None:
        """Back-propagate dF/d⟨x, y⟩ [t, P] of few pairs.

        Args:
            totals: gradients of the rows [t, d] and of all columns [m, d], to be added to; None if not needed.
            slope: [t, P].
            rows: [t, d].
            place: [t, P] the columns of the pairs.
        """
        by_row, by_col = self.directions(rows, self.cols[place])
        if totals[0] is not None:
            totals[0].add_(torch.bmm(slope[:, None, :], by_row)[:, 0])
        if totals[1] is not None:
            parts = slope[:, :, None] * by_col
            totals[1].index_add_(0, place.reshape(-1), parts.reshape(-1, parts.shape[-1]))


class Plain(Form):
    """Inner product: s = ⟨x, y⟩ (also the cosine of unit rows)."""

    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:  # noqa: D102
        return torch.mm(rows, self.cols[first:].T, out=out)

    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:  # noqa: D102
        return slope


@dataclass(frozen=True, eq=False)
class SquaredDistance(Form):
    """Negative squared distance: s = -|x - y|² of unit rows, possibly translated.

    Gradients are taken along y - x instead of y, which is independent of the origin.
    """

    longer: Tensor = field(init=False)
    """[m, d+2] extended columns (2y, -1, -|y|²), whose product with rows (x, |x|², 1) is the score."""

    def __post_init__(self) -> None:
        y = self.cols
        one = torch.ones_like(y[:, :1])
        object.__setattr__(self, "longer", torch.cat([2 * y, -one, -(y * y).sum(dim=1, keepdim=True)], dim=1))

    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:  # noqa: D102
        longer = torch.cat([rows, (rows * rows).sum(dim=1, keepdim=True), torch.ones_like(rows[:, :1])], dim=1)
        return torch.mm(longer, self.longer[first:].T, out=out)

    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:  # noqa: D102
        return slope.mul_(2.0)

    def pull_(self, total: Tensor, slope: Tensor, mine: Tensor, others: Tensor) -> None:  # noqa: D102
        total.addmm_(slope, others).addcmul_(mine, slope.sum(dim=1, keepdim=True), value=-1)

    def directions(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        away = cols - rows[:, None, :]
        return away, -away


@dataclass(frozen=True, eq=False)
class Distance(SquaredDistance):
    """Negative distance: s = -|x - y| of unit rows; ds/d⟨x, y⟩ = 1/|x - y|, and 0 at distance 0."""

    spends = True
    signs: list[Tensor] = field(default_factory=list)
    """A buffer for the signs of the scores, allocated on first use."""

    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:  # noqa: D102
        return super().scores(rows, out, first).clamp_max_(0.0).neg_().sqrt_().neg_()

    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:  # noqa: D102
        # 1/|s| = sign(s)/s; at s = 0 the sign is 0, and the clamp keeps the quotient finite
        if not self.signs or self.signs[0].numel() < scores.numel():
            self.signs[:] = [torch.empty_like(scores).reshape(-1)]
        slope.mul_(torch.sign(scores, out=self.signs[0][: scores.numel()].view(scores.shape)))
        return slope.div_(scores.clamp_max_(-1e-30))


FORMS: dict[str, type[Form]] = {"dot": Plain, "distance": Distance, "squared": SquaredDistance}


def form_of(similarity: Similarity) -> type[Form] | None:
    """The form of a similarity, or None if it has none."""
    form = None if similarity.form is None else FORMS[similarity.form]
    return form if form is Plain or similarity.normalize else None


def corner(pair: PairLoss) -> tuple[Tensor | float, float] | None:
    """Offset c and power p of a negative pair loss [s + c]₊^p with p = 1 or 2, else None."""
    form = pair.form(-1)
    if form is None or form.shape != "power" or form.power not in (1, 2) or (form.a, form.scale) != (1, 1):
        return None
    # in float64: a float32 offset must not round the start under float64 scores
    learned = 0.0 if form.offset is None else form.by_offset * form.offset.detach().double()
    return form.b + learned, float(form.power)


def plain_hinge(pair: PairLoss) -> bool:
    """Whether a negative pair loss is a hinge [s + c]₊ without smoothing."""
    found = corner(pair)
    return found is not None and found[1] == 1


def slope_at_zero(pair: PairLoss, sign: int) -> tuple[Tensor | float | None, Tensor]:
    """What `PairLoss.slope` says of one score of 0, and that score [1, 1], on the device of the pair's parameters."""
    device = next((p.device for p in pair.parameters()), torch.device("cpu"))
    zero = torch.zeros(1, 1, dtype=torch.float64, device=device)
    return pair.slope(zero, sign), zero


def write_losses(pair: PairLoss, scores: Tensor, out: Tensor) -> Tensor:
    """Write the losses of negative pairs into `out`."""
    found = corner(pair)
    if found is None:
        return out.copy_(pair(scores, -1))
    _excess(scores, found[0], out)
    return out.mul_(out) if found[1] == 2 else out


def write_slopes(pair: PairLoss, scores: Tensor, losses: Tensor, out: Tensor) -> Tensor:
    """Slopes dl/ds of negative pairs, written into `out` if the loss is [s + c]₊^p."""
    found = corner(pair)
    if found is None:
        slope = pair.slope(scores, -1)
        assert isinstance(slope, Tensor)  # noqa: S101 - linear losses are excluded by the callers
        return slope
    if found[1] == 1:
        return torch.sign(losses, out=out).clamp_min_(0.0)
    return _excess(scores, found[0], out).mul_(2.0)


def _excess(scores: Tensor, start: Tensor | float, out: Tensor) -> Tensor:
    """Write [s + c]₊ into `out`, with c = `start`."""
    start = start.to(out.dtype) if isinstance(start, Tensor) else start
    return torch.add(scores, start, out=out).relu_()

"""Scores written into a buffer, and slopes brought back from scores to products in place: what a strip costs least."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfar._utils.shortcuts import exactly
from nearfar.pairs import Hinge, PairLoss, Squared
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = [
    "Distance",
    "Form",
    "Plain",
    "SquaredDistance",
    "corner",
    "form_of",
    "plain_hinge",
    "write_losses",
    "write_slopes",
]


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A similarity of prepared rows against the prepared columns `cols` [m, d]."""

    cols: Tensor

    spends = False
    """`descend_` uses the scores up."""

    @abstractmethod
    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:
        """Scores [t, m] of rows [t, d] against the columns from `first` on, written into `out`."""

    @abstractmethod
    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:
        """dF/ds becomes dF/d⟨x, y⟩, in place; the scores are used up where the form says so."""

    def pull_(self, total: Tensor, slope: Tensor, mine: Tensor, others: Tensor) -> None:
        """Add what slopes dF/d⟨x, y⟩ [t, u] mean for rows `mine` [t, d], met by `others` [u, d]."""
        total.addmm_(slope, others)

    def directions(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Where a slope pulls rows [t, d] and single columns cols [t, P, d] of theirs, [t, P, d] each."""
        return cols, rows[:, None, :]


class Plain(Form):
    """s = ⟨x, y⟩."""

    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:  # noqa: D102
        return torch.mm(rows, self.cols[first:].T, out=out)

    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:  # noqa: D102
        return slope


@dataclass(frozen=True, eq=False)
class SquaredDistance(Form):
    """s = -|x - y|² of unit rows, wherever their origin was put: a slope pulls a row toward a column, not along it."""

    longer: Tensor = field(init=False)
    """[m, d+2] columns (2y, -1, -|y|²), whose product with rows (x, |x|², 1) is the score."""

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
    """s = -|x - y| of unit rows; ds/d⟨x, y⟩ = 1/|x - y|, and 0 at distance 0."""

    spends = True
    signs: list[Tensor] = field(default_factory=list)
    """A buffer as large as the first strip."""

    def scores(self, rows: Tensor, out: Tensor, first: int = 0) -> Tensor:  # noqa: D102
        return super().scores(rows, out, first).clamp_max_(0.0).neg_().sqrt_().neg_()

    def descend_(self, slope: Tensor, scores: Tensor) -> Tensor:  # noqa: D102
        # sign(s)/s = 1/|s|; where s is 0 the sign is, and a small number in its place keeps the quotient finite
        if not self.signs or self.signs[0].numel() < scores.numel():
            self.signs[:] = [torch.empty_like(scores).reshape(-1)]
        slope.mul_(torch.sign(scores, out=self.signs[0][: scores.numel()].view(scores.shape)))
        return slope.div_(scores.clamp_max_(-1e-30))


FORMS: dict[type[Similarity], type[Form]] = {
    Cosine: Plain,
    Dot: Plain,
    NegEuclidean: Distance,
    NegSquaredEuclidean: SquaredDistance,
}


def form_of(similarity: Similarity) -> type[Form] | None:
    """The form of a similarity, where there is one."""
    form = FORMS.get(type(similarity))
    return form if form is Plain or similarity.normalize else None


def corner(pair: PairLoss) -> tuple[Tensor | float, float] | None:
    """Start c and power p of a negative pair loss [s + c]₊^p with p 1 or 2, else None."""
    if exactly(pair, Hinge) and not pair.smooth:
        start = pair.margin - pair.start
        # in float64: a float32 offset must not round the start under float64 scores
        return start if pair.offset is None else start - pair.offset.detach().double(), 1.0
    if exactly(pair, Squared) and pair.power in (1, 2):
        return pair.neg_margin, float(pair.power)
    return None


def plain_hinge(pair: PairLoss) -> bool:
    """Whether a negative pair loss is a hinge with its corner."""
    found = corner(pair)
    return found is not None and found[1] == 1


def write_losses(pair: PairLoss, scores: Tensor, out: Tensor) -> Tensor:
    """Losses of negative pairs, written into `out`."""
    found = corner(pair)
    if found is None:
        return out.copy_(pair(scores, -1))
    _excess(scores, found[0], out)
    return out.mul_(out) if found[1] == 2 else out


def write_slopes(pair: PairLoss, scores: Tensor, losses: Tensor, out: Tensor) -> Tensor:
    """dl/ds of negative pairs, written into `out`."""
    found = corner(pair)
    if found is None:
        slope = pair.slope(scores, -1)
        assert isinstance(slope, Tensor)  # noqa: S101 - lines are not written here
        return slope
    if found[1] == 1:
        return torch.sign(losses, out=out).clamp_min_(0.0)
    return _excess(scores, found[0], out).mul_(2.0)


def _excess(scores: Tensor, start: Tensor | float, out: Tensor) -> Tensor:
    start = start.to(out.dtype) if isinstance(start, Tensor) else start
    return torch.add(scores, start, out=out).relu_()

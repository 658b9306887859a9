"""The margin loss: a hinge around a boundary β that may be learned, one for all or one per class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.tensors import over
from nearfar.losses.degenerate import Had
from nearfar.losses.robust import Call as Checked
from nearfar.losses.robust import RobustLoss
from nearfar.miners import Miner, ScoredPairs
from nearfar.pairs import PairLoss
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml._tuples import check_classes
from nearfar.pml.losses.base import Call, Loss, LossDict, nothing, number, part
from nearfar.pml.losses.triplets import PerAnchor, checked_per_anchor, with_drawn
from nearfar.pml.reducers import BaseReducer, DivisorReducer, MeanReducer, SumReducer
from nearfar.relations.index_tuples import as_pairs

__all__ = ["AnchorHinge", "MarginLoss", "PerTriplet"]


class PerTriplet(Miner):
    """Weight each pair by the number of triplets that contain it."""

    both = True

    def forward(self, pairs: ScoredPairs) -> ScoredPairs:  # noqa: D102
        dtype = pairs.scores.dtype
        positive, negative = (side.sum(dim=1, keepdim=True).to(dtype) for side in (pairs.positive, pairs.negative))
        return pairs.keep(positive=negative, negative=positive)


class AnchorHinge(PairLoss):
    """A hinge l = [m + sign·(λ - s)]₊ with a threshold λ that each call sets, [1] or [n, 1]."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin
        self._threshold: tuple[Tensor | float] = (0.0,)  # in a tuple: a parameter would be taken for one of its own

    @contextmanager
    def at(self, threshold: Tensor) -> Iterator[None]:
        """Set the threshold within the block."""
        self._threshold = (threshold,)
        try:
            yield
        finally:
            self._threshold = (0.0,)

    def forward(self, s: Tensor, sign: int) -> Tensor:  # noqa: D102
        return torch.relu(self.margin + sign * (self._threshold[0] - s))


class MarginLoss(Loss):
    """Σ over triplets of ([m + d_ap - β]₊ + [m - d_an + β]₊), over the number of brackets above zero.

    Args:
        margin: m.
        nu: weight of the regularizer ν·β, if β is learned.
        beta: β, or its initial value.
        triplets_per_anchor: "all", or how many to draw at random.
        learn_beta: make `beta` a parameter.
        num_classes: one β per class of the anchor.
        settings: see `Settings`; defaults `LpDistance()`, `DivisorReducer()`. Other reducers reduce over triplets.

    Attributes:
        beta: [1] or [num_classes].
    """

    names = ("margin_loss", "beta_reg_loss")
    native = (DivisorReducer, MeanReducer, SumReducer)
    reads_tuple = True
    beta: Tensor

    def __init__(
        self,
        margin: float = 0.2,
        nu: float = 0,
        beta: float = 1.2,
        triplets_per_anchor: PerAnchor = "all",
        learn_beta: bool = False,
        num_classes: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        self.margin = margin
        self.nu = nu
        self.triplets_per_anchor = checked_per_anchor("MarginLoss", triplets_per_anchor)
        self.learn_beta = learn_beta
        start = torch.full((num_classes or 1,), float(beta))
        if learn_beta:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start, persistent=False)
        self.hinge = AnchorHinge(margin)
        self._make(record=["margin", "nu", "beta"])

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return DivisorReducer()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        self._kind = reducer.kind
        return RobustLoss(
            pair=self.hinge,
            over=reducer.over,
            groups="batch" if reducer.kind is DivisorReducer else "sign",
            similarity=self.similarity,
            miner=PerTriplet(),
        )

    def _value(self, call: Call) -> Tensor:
        call = with_drawn(call, self.triplets_per_anchor)
        if call.indices is None and (not isinstance(call.labels, Tensor) or 0 in (len(call.embeddings), call.columns)):
            return self._by_recipe(call)
        wide = torch.promote_types(call.embeddings.dtype, torch.float32)
        with torch.autocast(device_type=call.embeddings.device.type, enabled=False):
            call = replace(call, embeddings=call.embeddings.to(wide), ref_emb=_wide(call.ref_emb, wide))
            return self._of_labels(call) if call.indices is None else self._of_tuple(call)

    def _by_recipe(self, call: Call) -> Tensor:
        beta = self._boundary(call)
        with self.hinge.at(self.score(beta)):
            value = call.into(self.robust)
            if not self.learn_beta or not self.nu:
                return value
            # the dual of a mean is its denominator
            return value + self._price(call, beta, call.explained(self.robust).dual.sum())

    def _of_labels(self, call: Call) -> Tensor:
        """The loss of all triplets by the labels, which is linear in the scores of the pairs above zero."""
        relation = call.relation()
        tile = relation.dense()
        positive, negative = tile.positive, tile.negative
        s, beta = call.scores(self.similarity), self._boundary(call)
        line = self.score(beta)
        many = [side.sum(dim=1, keepdim=True).to(s.dtype) for side in (positive, negative)]
        checked = Checked(call.owner, call.embeddings, call.labels)
        self.robust._warn(checked, relation, self.robust.product, Had(many[0][:, 0] > 0, many[1][:, 0] > 0))
        with torch.no_grad():
            gap = s - line
            slope = (negative & (gap > -self.margin)).to(s.dtype).mul_(many[0])
            slope.sub_((positive & (gap < self.margin)).to(s.dtype).mul_(many[1]))
        above = slope.abs().sum()  # each pair above zero, as often as triplets hold it
        total = (slope * s).sum() - (slope.sum(dim=1, keepdim=True) * line).sum() + self.margin * above
        return self._divided(call, total, (many[0] * many[1]).sum(), beta, above)

    def _divided(self, call: Call, total: Tensor, triplets: Tensor, beta: Tensor, above: Tensor) -> Tensor:
        """The sum over triplets by the reducer's denominator, with the price of the boundary."""
        value = total
        if self._kind is MeanReducer:
            value = over(total, triplets.to(total.dtype))
        elif self._kind is DivisorReducer:
            value = over(total, above.to(total.dtype))
        return value + self._price(call, beta, above) if self.learn_beta and self.nu else value

    def _of_tuple(self, call: Call) -> Tensor:
        """The loss of an index tuple, from its list of pairs: each counts as often as triplets of the list hold it."""
        a, p, b, n = as_pairs(call.indices or ())
        s, beta, count = call.entries(self.similarity), self._boundary(call), len(call.embeddings)
        line = self.score(beta if beta.ndim == 1 else beta[:, 0])
        near, far = (line if beta.ndim == 1 else line[rows] for rows in (a, b))
        near, far = torch.relu(near - s[a, p] + self.margin), torch.relu(s[b, n] - far + self.margin)
        weight_near, weight_far = torch.ones_like(near), torch.ones_like(far)
        if len(call.indices or ()) == 4:
            weight_near, weight_far = torch.bincount(b, minlength=count)[a], torch.bincount(a, minlength=count)[b]
        total = (weight_near * near).sum() + (weight_far * far).sum()
        above = (weight_near * (near > 0)).sum() + (weight_far * (far > 0)).sum()
        return self._divided(call, total, weight_near.sum(), beta, above)

    def _boundary(self, call: Call) -> Tensor:
        """The boundary β [1], or that of the class of each row [n, 1]."""
        beta = self.beta.to(call.embeddings.device, torch.promote_types(call.embeddings.dtype, self.beta.dtype))
        if len(beta) == 1:
            return beta
        labels = call.own_labels()
        check_classes(call.owner, labels, len(beta))
        return beta[labels][:, None]

    def _elements(self, call: Call) -> LossDict:
        a, p, n = with_drawn(call, self.triplets_per_anchor).triplets()
        s, beta = call.entries(self.similarity), self._boundary(call)
        beta = beta if beta.ndim == 1 else beta[a, 0]
        line = self.score(beta)
        near, far = torch.relu(line - s[a, p] + self.margin), torch.relu(s[a, n] - line + self.margin)
        divisor = (near > 0).sum() + (far > 0).sum()
        price = nothing()
        if self.learn_beta and len(a):
            price = number(beta * self.nu) if len(beta) == 1 else part(beta * self.nu, a, "element", divisor)
        return {"margin_loss": part(near + far, (a, p, n), "triplet", divisor), "beta_reg_loss": price}

    def _price(self, call: Call, beta: Tensor, above: Tensor) -> Tensor:
        """The regularizer ν·β; with one β per class, over triplets and reduced like their losses.

        Args:
            call: the arguments.
            beta: [1], or [n, 1].
            above: how many brackets are above zero.
        """
        triplets = _triplets_per_anchor(call)
        if beta.ndim == 1:
            return torch.where(triplets.sum() > 0, self.nu * beta[0], torch.zeros_like(beta[0]))
        total = self.nu * (triplets * beta[:, 0]).sum()
        if self._kind is SumReducer:
            return total
        if self._kind is MeanReducer:
            return over(total, triplets.sum().to(total.dtype))
        return over(total, above.to(total.dtype))


def _wide(rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if rows is None else rows.to(dtype)


def _triplets_per_anchor(call: Call) -> Tensor:
    """The number of triplets of each anchor, [n]."""
    if call.indices is None:
        positive, negative = call.relation().counts()
        return positive * negative
    first, *_ = counts = [torch.bincount(part.long(), minlength=len(call.embeddings)) for part in call.indices[::2]]
    return first if len(call.indices) == 3 else first * counts[1]

"""The fused engine: products whose tiles go straight into the reduction, on a GPU with Triton; never n x m in memory.

    fold      kernel: scores -> pair losses -> one number t of each row's many pairs (negative, or all)
    finish    plain autograd on [n] and [n, P]: the few positive pairs, set, link, reduction
    weigh     kernel, in the backward pass of t: dF/dt -> weight x slope of each pair -> gradients of the rows

The positive pairs of a row are gathered in float32; where their number is not known (`torch.compile`) or large, they
are folded as the others are. This module says which losses can go this way, and folds; fused_finish.py finishes.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import RECENT, capturing
from nearfar._utils.shortcuts import swift, touched
from nearfar.engines.launch import LOW, REACH, SIDES, SIMILARITIES, Spec
from nearfar.engines.pair_vectors import POSITION_THEN_ID, Narrow, PairVectors, pair_vectors
from nearfar.engines.windows import window_of
from nearfar.groups.groupings import Product
from nearfar.groups.triplets import difference
from nearfar.miners import Miner
from nearfar.pairs import PairForm, PairLoss
from nearfar.relations.relation import Relation
from nearfar.sets.base import Fold, UncertaintySet

__all__ = ["Fused", "Rows", "bounds", "fused_way", "has_triton", "plain_parts", "unfused"]

MOST = 2**20
"""Largest K of the hardest pairs."""
GATHERED = 2**26
"""Most entries n·P of gathered positive pairs."""
SCORES = (-1.01, 1.01), (-4.1, 0.1), (-2.1, 0.1)
"""Between these lie the scores of unit rows, by similarity, in half precision too."""


INSTALLED = RECENT and importlib.util.find_spec("triton") is not None
"""Whether the kernels are there: they need Triton, and a PyTorch that brings a recent one."""


def has_triton(device: torch.device) -> bool:
    """Whether the kernels can run on a device: CUDA with Triton, or a CPU under Triton's interpreter."""
    if not INSTALLED:
        return False
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def fused_way(product: Product, relation: Relation) -> bool:
    """Whether the kernels can compute a loss of this relation; asks the parts for their forms."""
    return unfused(product, relation) is None


def plain_parts(product: Product) -> bool:
    """Whether all parts allow shortcuts, and nothing was changed on their objects."""
    return swift(product.parts) and touched(product.parts) is None


def unfused(product: Product, relation: Relation, plain: bool | None = None) -> str | None:
    """Why the kernels cannot compute a loss of this relation, or None if they can.

    Args:
        product: the factors of the loss.
        relation: which pairs are positive and which are negative.
        plain: the answer of `plain_parts`, where it is known (`torch.compile` cannot trace the question).
    """
    if product.draws or not (plain_parts(product) if plain is None else plain):
        return "a part allows no shortcut"
    if product.similarity.form is None or product.negative.form(-1) is None:
        return "the similarity or the pair loss has no form"
    vectors = pair_vectors(relation, coded=False)
    if vectors is None:
        return "pairs are given by a matrix"
    if product.groups.per_anchor and product.reduction == "none":
        return "values are not reduced"
    return _ungrouped(product, vectors)


def _ungrouped(product: Product, vectors: PairVectors) -> str | None:
    """Why groups, sets or miner cannot be folded, or None."""
    scope, wide = product.groups.scope, product.over_wide
    fold = wide.fold()
    if scope not in ("batch", "sign", "balanced", "anchor", "anchor_sign", "triplets", "positive"):
        return f"groups are {scope}"
    if fold is None or (fold.kind == "top" and fold.most is None):
        return f"{type(wide).__name__} has no fold"
    if fold.kind == "top" and (product.groups.per_anchor or product.miner is not None or vectors.weights is not None):
        return "the top K are of the batch, and neither mined nor weighted"
    if fold.kind == "top" and (fold.most or 0) > MOST:
        return f"K is above {MOST}"
    if fold.held and (scope != "anchor_sign" or wide.zero_member or fold.kind != "exp"):
        return "weights are held constant"
    if not _windowed(product):
        return "the miner keeps no open interval of scores"
    if product.wants_columns and scope == "anchor_sign":
        turns = vectors.square or vectors.itself != POSITION_THEN_ID
        return None if fold.kind != "max" and product.miner is None and turns else "columns cannot be folded"
    if scope == "positive":
        return None if _angular(product, vectors, fold) else "values of positive pairs are not those of angles"
    if scope == "triplets":
        rule: Any = getattr(product.groups, "rule", None)
        plain = rule is not None and rule.compare is difference and not rule.balanced
        plain = plain and (rule.keep is None or rule.band is not None)
        return None if plain and fold.kind == "sum" else "triplets are chosen, or not averaged"
    return None


def _angular(product: Product, vectors: PairVectors, fold: Fold) -> bool:
    """Whether each positive pair has one value, of the angles of all its negatives, of equal weight."""
    rule: Any = getattr(product.groups, "rule", None)
    form = product.negative.form(-1)
    angles = rule is not None and rule.angle is not None and rule.keep is None and not rule.balanced
    plain = product.similarity.form == "dot" and form is not None and form.shape == "line" and form.offset is None
    every = product.miner is None and product.over_negative.zero != "drop"
    alone = vectors.weights is None and vectors.itself != POSITION_THEN_ID
    return angles and plain and every and alone and fold.kind == "exp" and not fold.held


def _windowed(product: Product) -> bool:
    """Whether the miner, if there is one, keeps negative pairs between two scores that are not their own."""
    if product.miner is None:
        return True
    window = window_of(product.miner)
    plain = window is not None and window.most is None and not window.closed
    return plain and not product.everyone and product.groups.scope != "triplets"


def bounds(form: PairForm, least: float, most: float) -> tuple[float, float]:
    """The least and the largest loss of scores between these two, without an offset."""
    places = [least, most]
    if form.shape == "pace":  # the others are monotone; this one has a corner and a vertex
        corner = -form.b / form.a
        places += [s for s in (corner, 0.5 * (form.center + corner)) if least <= s <= most]
    losses = [_number(form, s) for s in places]
    return min(losses), max(losses)


def _number(form: PairForm, s: float) -> float:
    """`PairForm.value` of one score, without an offset; a number, which `torch.compile` can know."""
    z = form.a * s + form.b
    if form.shape == "line":
        return form.scale * z
    if form.shape == "softplus":
        return form.scale * (max(z, 0.0) + math.log1p(math.exp(-abs(z))))
    if form.shape == "pace":
        return form.scale * max(z, 0.0) * (s - form.center)
    return float(form.scale * max(z, 0.0) ** form.power)


@dataclass(frozen=True, eq=False)
class Rows:
    """What a fold says of each row: t (see fused_ops), Σ w, the number of members, and Σ p·l where it was asked for."""

    t: Tensor
    size: Tensor
    seen: Tensor
    held: Tensor


class Fused:
    """One call: prepared rows [n, d] and columns [m, d], the factors of the loss, and the vectors of its relation.

    Args:
        product: the factors of the loss.
        relation: which pairs are positive and which are negative.
        rows: [n, d] prepared queries, float32, or float64 where distances of near rows need it.
        cols: [m, d] prepared references; the rows themselves where the relation is square.
        low: type that products are taken in.
    """

    def __init__(
        self, product: Product, relation: Relation, rows: Tensor, cols: Tensor, low: torch.dtype = torch.float32
    ) -> None:
        vectors = pair_vectors(relation)
        assert vectors is not None  # noqa: S101 - checked by `fused_way`
        self.product, self.vectors, self.wide = product, vectors, (rows, cols)
        self.rows = rows.float()
        self.cols = self.rows if vectors.square else cols.float()
        both = [(rows, self.rows), (cols, self.cols)][: 1 if vectors.square else 2]
        self.rest = [(wide - x).detach().float() for wide, x in both if wide.dtype == torch.float64]
        """What float32 rows and columns lack of the float64 ones; empty where these did not come."""
        self.orders = relation.orders
        self.similarity = SIMILARITIES.index(product.similarity.form or "dot")
        self.dtype = LOW.index(low)
        self.narrow = self._narrow()
        self.measure = None if self.narrow is None else self.narrow.measure
        self._near: Tensor | None = None
        self.floor: Tensor | None = None
        self.high = math.inf
        self.had_negative: Tensor | None = None
        """Known before the fold where there is a miner."""
        if product.miner is not None and self.narrow is not None:
            self._mine(product.miner)

    # ------------------------------------------------------------------------------------ pairs

    def _narrow(self) -> Narrow | None:
        """The positive pairs of each row, gathered; None where they are to be folded."""
        runs, own = self.vectors.runs(), int(self.vectors.itself in (1, 3))
        if self.vectors.width is not None:
            width = min(self.vectors.width + own, len(self.cols))
        elif torch.compiler.is_compiling() or capturing():
            return None
        else:
            width = int((runs[2] - runs[1]).amax())
        if len(self.rows) * width > GATHERED and self.foldable:
            return None
        return self.vectors.narrow(runs, width)

    @property
    def foldable(self) -> bool:
        """Whether the positive pairs can be folded as the negative ones are: nobody reads their single losses."""
        product = self.product
        fold, scope = product.over_positive.fold(), product.groups.scope
        if (
            product.positive.form(+1) is None
            or fold is None
            or fold.kind in ("top", "max")
            or product.miner is not None
        ):
            return False
        if fold.held and scope != "anchor_sign":
            return False
        link = product.link
        return scope in ("batch", "sign", "anchor") or (
            scope == "anchor_sign" and (link is None or not link.reads_pairs)
        )

    def _mine(self, miner: Miner) -> None:
        """Keep the positive pairs that the miner keeps, and note between which scores it keeps negative ones."""
        assert self.measure is not None  # noqa: S101
        score, self.had_negative = self.hardest("negative", PairForm("line", 1.0, 0.0))
        near = self.near.detach()
        top = torch.where(self.had_negative, score.detach()[:, 0], -torch.inf)
        window = miner.window(near, self.measure, top)
        assert window is not None  # noqa: S101 - checked by `fused_way`
        kept = window.positive | torch.isnan(near)  # NaN is kept and shows
        self.measure = self.measure & kept if self.measure.dtype == torch.bool else self.measure * kept
        low = -math.inf if window.low is None else window.low
        self.floor = low if isinstance(low, Tensor) else torch.full_like(top, low)
        self.high = math.inf if window.high is None else window.high

    @property
    def had_positive(self) -> Tensor:
        """Which rows [n] had a positive pair before any mining."""
        assert self.narrow is not None  # noqa: S101
        return (self.narrow.measure > 0).any(dim=1)

    def scores(self, place: Tensor) -> Tensor:
        """Scores [n, P] of each row with the columns `place` [n, P], with their gradient.

        Distances are made of differences of rows; of near rows, they are float64.
        """
        from nearfar.engines.fused_ops import near

        far = self.product.similarity.form != "dot"
        found: Tensor = near(self.rows, None if self.vectors.square else self.cols, place, self.rest, far)
        if not far:
            return found
        found = found.double() if self.rest else found  # a margin less a small distance keeps it
        zero = found.new_zeros(())
        return self.product.similarity.finish(zero, found, zero)

    @property
    def near(self) -> Tensor:
        """Scores [n, P] of the positive pairs."""
        assert self.narrow is not None  # noqa: S101
        if self._near is None:  # not `cached_property`: before Python 3.12 it has a lock, which cannot be compiled
            self._near = self.scores(self.narrow.place)
        return self._near

    def around_classes(self) -> tuple[Tensor, Tensor | None]:
        """Rows and columns less a column of their own label, float32: positive pairs keep their distance.

        The column is that nearest to the mean of its label, so that a few distant ones do not matter. Of a label with
        several distant groups, the distances within the others are those of float32 products.
        """
        (rows, cols), (row, col) = self.wide, (x.long() for x in self.vectors.labels)
        with torch.no_grad():
            count = cols.new_zeros(len(row) + len(col))
            mean = count.new_zeros(len(count), cols.shape[1]).index_add_(0, col, cols)
            mean = mean / count.index_add(0, col, torch.ones_like(cols[:, 0])).clamp_min(1)[:, None]
            far = (cols - mean[col]).square().sum(dim=1)
            least = torch.full_like(count, torch.inf).scatter_reduce(0, col, far, "amin")
            place = torch.arange(len(col), device=col.device)
            place = torch.where(far <= least[col], place, len(col) - 1)
            first = torch.full_like(count, len(col) - 1, dtype=torch.int64).scatter_reduce(0, col, place, "amin")
            start = cols[first]
        around = (rows - start[row]).float()
        return around, None if self.vectors.square else (cols - start[col]).float()

    # ------------------------------------------------------------------------------------ folds

    def _spec(self, pair: PairLoss, side: str, *, sign: int = 0, **more: Any) -> tuple[Spec, PairForm]:
        form = pair.form(sign or (+1 if side == "positive" else -1))
        assert form is not None  # noqa: S101 - checked by `fused_way`
        told = {name: getattr(self.vectors, name) for name in ("itself", "given")}
        told |= {"similarity": self.similarity, "dtype": self.dtype}
        return Spec.of(form, side=SIDES.index(side), **told, **more), form

    def fold(self, side: str, of: UncertaintySet, fold: Fold, *, turned: bool = False, sign: int = 0) -> Rows:
        """Fold one side of each row (`turned`: of each column), by the pair loss of a sign if it is not that side's."""
        from nearfar.engines.fused_ops import fold as folded

        sign = sign or (+1 if side == "positive" else -1)
        spec, form = self._spec(
            self.product.positive if sign > 0 else self.product.negative,
            side,
            sign=sign,
            high=self.high,
            gamma=fold.gamma,
            drop=int(of.zero == "drop"),
            held=int(fold.held),
            half=int(self.vectors.symmetric),
        )
        if fold.kind == "exp":
            spec = replace(spec, **self._level(form, fold))
        rows, cols, pairs = self.rows, None if self.vectors.square else self.cols, self.vectors.tensors()
        if side == "positive" and self.rest:
            rows, cols = self.around_classes()
        if turned:
            rows, cols, pairs = self.cols, self.rows, self.vectors.turned().tensors()
        t, size, seen, _, _, held = folded(rows, cols, pairs, self.floor, form.offset, *spec.said())
        return Rows(t, size, seen, held)

    def _level(self, form: PairForm, fold: Fold) -> dict[str, Any]:
        """Around which level exponentials are taken: the middle of all losses that there can be, if they fit around it.

        Sums of e^z - 1 are needed only where all z may be near 0: γ is larger than what losses differ by, or values
        are compared with 0, and must not be a rounding off it.
        """
        compared = self.product.reduction == "nonzero"
        if form.offset is not None or not self.product.similarity.normalize or compared:
            return {"exp": 2, "flat": int(fold.normalized)}
        least, most = bounds(form, *SCORES[self.similarity])
        if most - least > 2 * REACH * fold.gamma:
            return {"exp": 2, "flat": 0}
        return {"exp": 1, "level": 0.5 * (least + most), "flat": int(fold.normalized and most - least < fold.gamma)}

    def hardest(self, side: str, pair: PairForm | None = None) -> tuple[Tensor, Tensor]:
        """Scores [n, 1] of the member with the largest loss of each row, and which rows [n] have one."""
        from nearfar.engines.fused_ops import hardest

        half = int(self.vectors.symmetric)
        spec, form = self._spec(self.product.negative, side, high=self.high, half=half)
        if pair is not None:
            kept = {name: getattr(spec, name) for name in ("side", "similarity", "itself", "given", "dtype", "half")}
            spec, form = Spec.of(pair, **kept), pair
        rows, cols = self.rows.detach(), None if self.vectors.square else self.cols.detach()
        offset = None if form.offset is None else form.offset.detach()
        place, there = hardest(rows, cols, self.vectors.tensors(), self.floor, offset, *spec.said())
        return self.scores(place[:, None]), there

"""`OperatorCall`: runs the operators on `Rows` with the parameters of the pair losses; and values of folded groups."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines import operators
from nearfar.engines.lists import ListedScores
from nearfar.engines.rows import Gather, RefusalError, Rows
from nearfar.engines.spec import AROUND, BELOW_TOP, REACH, SIDES, Spec
from nearfar.miners import Miner
from nearfar.pairs import PairForm, PairLoss
from nearfar.relations.layout import POSITION_THEN_ID
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.entropic import KL

__all__ = ["SCORES", "OperatorCall", "bounds", "fold_of", "group_value", "kind_of"]

SCORES = (-1.01, 1.01), (-4.1, 0.1), (-2.1, 0.1)
"""Ranges of the scores of unit rows, by similarity, with room for half-precision rounding."""
HELD = 2**20  # maximum number of losses that strips hold for a top-K set: 24 MB with their positions


class OperatorCall(Rows):
    """The operators applied to the rows and columns of one call; arguments as in `finish`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.measure = None if self.gathered is None else self.gathered.measure
        self._near: Tensor | None = None
        self.floor: Tensor | None = None
        self.high, self.full = math.inf, 0
        self.stored: list[Tensor] = []
        """Scores of all tiles that the search for the hardest pairs stored for the fold, if they are few."""
        self.had = {} if self.gathered is None else {"positive": (self.gathered.measure > 0).any(dim=1)}
        """Which rows [n] had a positive and a negative pair before mining."""
        miner = self.product.miner
        if miner is not None and not self.product.draws and self.gathered is not None:
            self._mine(miner)

    def _mine(self, miner: Miner) -> None:
        """Keep the positive pairs that the miner keeps, and store the score window in which it keeps negative ones."""
        assert self.measure is not None  # noqa: S101
        line, probe = PairForm("line", 1.0, 0.0), miner.window(torch.ones(1, 1), torch.ones(1, 1) > 0, torch.ones(1))
        assert probe is not None  # noqa: S101 - see plan.py
        # the same tiles as in the fold: products of other shapes may round a score to the other side of its own limit
        self.full = int(probe.closed or probe.most is not None)
        near = self.near.detach()
        if probe.most is not None:
            if self.given & 4:
                raise RefusalError  # mined positives are counted by their weights
            spec, _ = self.spec(self.product.negative, "negative", form=line, half=0)
            ranked, _ = self.work(spec).largest(near.shape[1])
            top = ranked[:, 0]
        else:
            top = self.hardest("negative", line, values=True)[0]
        had = self.had["negative"] = top > -torch.inf
        window = miner.window(near, self.measure, top.to(near.dtype))
        assert window is not None  # noqa: S101 - see plan.py
        kept = window.positive | torch.isnan(near)  # NaN is kept, so that it shows in the loss
        self.measure = self.measure & kept if self.measure.dtype == torch.bool else self.measure * kept
        low = -math.inf if window.low is None else window.low
        if window.most is not None:
            last = (window.most.ceil().long() - 1).clamp(0, ranked.shape[1] - 1)
            low = torch.where(window.most > 0, ranked.gather(1, last[:, None])[:, 0], torch.inf)
        floor = low if isinstance(low, Tensor) else torch.full_like(top, low)
        floor = torch.where(had, floor, torch.inf) if window.closed else floor
        self.floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf)) if window.closed else floor
        self.high = math.inf if window.high is None else window.high

    @property
    def learns(self) -> bool:
        """Whether a gradient of rows or columns is needed."""
        return torch.is_grad_enabled() and (self.rows.requires_grad or self.cols.requires_grad)

    def scores(self, place: Tensor) -> Tensor:
        """Scores [n, P] of each row and its columns `place` [n, P], with gradient."""
        spec, _ = self.spec(self.product.negative, "negative", form=PairForm("line", 1.0, 0.0), given=0)
        vectors = [*self.pairs[:2], place, *self.rest]
        found: Tensor = operators.near(spec, self.rows, self._columns, None, None, None, vectors)
        if self.strips or not self.similarity:
            return found
        found = found.double() if self.rest else found  # keeps the digits of a margin minus a small distance
        zero = found.new_zeros(())
        return self.product.similarity.finish(zero, found, zero)

    @property
    def near(self) -> Tensor:
        """Scores [n, P] of the positive pairs, computed once."""
        if self._near is None:  # not `cached_property`: before Python 3.12 it has a lock, which cannot be compiled
            self._near = self.scores(self.positives.place)
        return self._near

    def spec(
        self, pair: PairLoss, side: str, *, sign: int = 0, form: PairForm | None = None, **more: Any
    ) -> tuple[Spec, PairForm]:
        """The numeric arguments of an operator that handles one side of the rows."""
        form = form or pair.form(sign or (+1 if side == "positive" else -1))
        assert form is not None  # noqa: S101 - see plan.py
        given = {"itself": self.itself, "given": self.given, "half": int(self.symmetric and not self.full)}
        given |= {"tile": self.tile, "full": self.full} if self.strips else {"dtype": self.dtype}
        return Spec.of(form, **{"side": SIDES.index(side), "similarity": self.similarity, **given, **more}), form

    def fold(
        self, side: str, of: UncertaintySet, fold: Fold, *, turned: bool = False, sign: int = 0, **more: Any
    ) -> list[Tensor]:
        """Fold the side "negative", "positive" or "all" of each row, or, if `turned`, of each column, over a set.

        With `sign`, by the pair loss of this sign instead of the side's own; `more` are further fields of the `Spec`.
        Returns t, Σ w, number of members, level, norm and Σ p·l; see `operators.fold`.
        """
        sign = sign or (+1 if side == "positive" else -1)
        pair = self.product.positive if sign > 0 else self.product.negative
        drop, held = int(of.zero == "drop"), int(fold.held)
        more |= {"high": self.high, "gamma": fold.gamma, "base": fold.base, "raised": fold.raised}
        spec, form = self.spec(pair, side, sign=sign, drop=drop, held=held, **more)
        if fold.kind == "exp":
            spec = replace(spec, **self._level(form, fold))
            if self.strips and spec.sums == BELOW_TOP:
                spec = replace(spec, half=0, full=1)
        one_group = more.get("one_group", not self.product.groups.per_anchor)
        one_group = one_group and self.strips and spec.sums != BELOW_TOP and self.ranks.world == 1
        keep = not one_group and self.learns and not torch.compiler.is_compiling()
        spec = replace(spec, one_group=int(one_group and self.learns), keep=int(keep))
        rows, cols, pairs = self.rows, self._columns, self.pairs
        if self.stored and not turned and (spec.half, spec.full) == (int(self.symmetric), 0) and side != "positive":
            pairs = [*pairs, *self.stored]
        if side == "positive" and self.rest:
            rows, cols = self._around_classes()
        if turned:
            rows, cols, pairs, given = self._turn()
            spec = replace(spec, given=given)
        found = list(operators.fold(spec, rows, cols, form.offset, None, self.floor, pairs)[:6])
        if not turned:
            self.had.setdefault("positive" if side == "positive" else "negative", found[2] > 0)
        return found

    def work(self, spec: Spec, offset: Tensor | None = None) -> Any:
        """The tiles of an operator call without gradients."""
        columns = None if self.square else self.cols.detach()
        return operators.work_of(spec, self.rows.detach(), columns, offset, None, None, self.pairs)

    def _turn(self) -> tuple[Tensor, Tensor, list[Tensor], int]:
        """Transpose: columns as rows, rows as columns, and the vectors of these pairs."""
        if (self.layout.itself == POSITION_THEN_ID and not self.square) or self.layout.listed is not None:
            raise RefusalError  # samples are identified by their position among the columns
        found = self.layout.turn()
        if not self.strips:
            return self.cols, self.rows, found.tensors(), found.given
        turned = found.sort()
        return self.cols, self.rows, turned.tensors(), turned.given

    def _level(self, form: PairForm, fold: Fold) -> dict[str, Any]:
        """The shift for exp: the midpoint of the loss range if the dtype holds it, else the largest loss of each row.

        Sums of e^z - 1 are only needed if all z may be near 0, because γ exceeds the range of the losses. If values are
        compared with 0, a row of zeros must give exactly 0: the shift is then 0, or else the largest loss of the row.
        """
        compared = self.product.reduction == "nonzero"
        unbounded = form.offset is not None and not self.strips
        if unbounded or not self.product.similarity.normalize or (compared and not self.strips):
            return {"sums": BELOW_TOP, "flat": int(fold.normalized)}
        least, most = bounds(form, *SCORES[self.similarity])
        if form.offset is not None:
            shift = abs(float(form.by_offset * form.offset.detach())) * form.scale
            least, most = least - shift, most + shift
        if fold.base:
            ends = 1 + least / fold.base, 1 + most / fold.base
            if min(ends) <= 0:
                return {"sums": BELOW_TOP}
            least, most = sorted(fold.raised * math.log(x) for x in ends)
        reach = REACH * fold.gamma
        flat = int(fold.normalized and most - least < fold.gamma)
        if compared and max(-least, most) <= reach and not self.given & 4:
            return {"sums": AROUND, "level": 0.0, "flat": flat}
        if compared or most - least > 2 * reach:
            return {"sums": BELOW_TOP, "flat": int(compared and fold.normalized)}
        return {"sums": AROUND, "level": 0.5 * (least + most), "flat": flat}

    def hardest(self, side: str, pair: PairForm | None = None, *, values: bool = False) -> tuple[Tensor, Tensor]:
        """Scores [n, 1] of each row's member with the largest loss, and which rows [n] have one.

        With `values`, only the largest losses [n], -inf for a row without members.
        """
        pair = pair or _order(self.product.negative)
        keep = int(values and self.strips)
        spec, form = self.spec(self.product.negative, side, form=pair, high=self.high, keep=keep)
        offset = None if form.offset is None else form.offset.detach()
        columns = None if self.square else self.cols.detach()
        top, place, ties = operators.hardest(spec, self.rows.detach(), columns, offset, None, self.floor, self.pairs)
        if values and self.strips:
            self.stored = [place] if place.is_floating_point() else []
            return top, top > -torch.inf
        if self.strips:  # only the plain definition splits the weight between ties
            self.refuse_if((ties > 1).any())
        self.hardest_place = place
        scores = self.scores(place[:, None])
        there = top > -torch.inf
        if "negative" not in self.had:
            self.had["negative"] = there if side == "negative" else self.has_negative()
        return (torch.where(there, scores.detach()[:, 0], -torch.inf), there) if values else (scores, there)

    def top(self, fold: Fold, members: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [1, c] of the hardest negative pairs (all that can carry weight), and which are not padding.

        The fold limits how many members of the group, whose measure is `members`, can carry weight.
        """
        if torch.compiler.is_compiling() or self.given & 4:
            raise RefusalError  # reads values; K counts weights
        once, m = int(self.symmetric), len(self.cols)
        spec, form = self.spec(self.product.negative, "negative", form=_order(self.product.negative), half=2 * once)
        k = fold.most * float(self.orders) + fold.fraction * (float(members) if fold.fraction else 0.0)
        if not self.strips and not once:
            k = 2 * fold.most  # avoids reading `orders` from the device
        count = max(1, min(math.ceil(k / (1 + once)), len(self.rows) * m))
        if self.strips:  # a radix search needs less memory
            self.refuse_if(count > HELD)
        place = self.work(spec, form.offset).candidates(count)
        if not len(place) and not self.strips:
            raise RefusalError  # too many losses are nearly tied
        scores = ListedScores(self.product.similarity, self.rows, self.cols)[place // m, place % m]
        losses = self.product.negative(scores, -1)[None].repeat(1, 1 + once)
        there = torch.ones_like(losses, dtype=torch.bool)
        if self.ranks.world == 1:
            return losses, there
        most = int(self.ranks.largest(torch.tensor(losses.shape[1], device=losses.device)))
        wider = (0, most - losses.shape[1])
        share = slice(self.ranks.rank * most, (self.ranks.rank + 1) * most)
        both = (torch.nn.functional.pad(x[0], wider) for x in (losses, there.to(losses.dtype)))
        losses, there = (Gather.apply(x, self.ranks, share, most * self.ranks.world)[None] for x in both)  # type: ignore[no-untyped-call]
        return losses, there > 0


def _order(pair: PairLoss) -> PairForm | None:
    """A form that ranks negative pairs by their losses: the score itself if the loss increases with it; else None.

    Losses of 0 under a hinge are tied although their scores are not.
    """
    form = pair.form(-1)
    rises = form is not None and form.shape != "pace" and form.a * form.scale > 0
    return PairForm("line", 1.0, 0.0) if rises else None


def bounds(form: PairForm, least: float, most: float) -> tuple[float, float]:
    """The smallest and largest loss for scores in this range, without an offset."""
    places = [least, most]
    if form.shape == "pace":  # the other shapes are monotone; this one has a corner and a vertex
        corner = -form.b / form.a
        places += [s for s in (corner, 0.5 * (form.center + corner)) if least <= s <= most]
    losses = [_number(form, s) for s in places]
    return min(losses), max(losses)


def _number(form: PairForm, s: float) -> float:
    """`PairForm.value` of one score, without an offset, as a float that `torch.compile` can treat as constant."""
    z = form.a * s + form.b
    if form.shape == "line":
        return form.scale * z
    if form.shape == "softplus":
        return form.scale * (max(z, 0.0) + math.log1p(math.exp(-abs(z))))
    if form.shape == "pace":
        return form.scale * max(z, 0.0) * (s - form.center)
    return float(form.scale * max(z, 0.0) ** form.power)


def group_value(
    of: UncertaintySet, fold: Fold, losses: Tensor | None, measure: Tensor | None, t: Tensor, size: Tensor
) -> Tensor:
    """Values [g] of groups of single members [g, k] and folded members (t and Σ w, [g, v]); float64.

    An exponential fold is treated as one member with loss t and weight Σ w. `KL` then gives exactly 0
    if all losses are 0, so that `reduction="nonzero"` leaves the group out.
    """
    l, w = [over(t, size) if fold.kind == "sum" else t], [size]
    if losses is not None and measure is not None:
        weight = measure.to(t.dtype)
        weight = weight * ~(losses.detach() <= 0) if of.zero == "drop" else weight
        l, w = [*l, torch.where(weight > 0, losses.to(t.dtype), 0.0)], [*w, weight]
    if of.zero_member:
        l, w = [*l, torch.zeros_like(t[:, :1])], [*w, torch.ones_like(t[:, :1])]
    members, weights = torch.cat(l, dim=1), torch.cat(w, dim=1)
    if fold.kind == "sum":
        return over((weights * members).sum(dim=1), weights.sum(dim=1))
    return KL(fold.gamma, normalized=fold.normalized).value(members, weights)


def fold_of(of: UncertaintySet) -> Fold:
    """The fold of a set that is known to have one."""
    fold = of.fold()
    assert fold is not None  # noqa: S101 - see plan.py
    return fold


def kind_of(of: UncertaintySet) -> str | None:
    """The kind of a set's fold; None if it has none."""
    fold = of.fold()
    return None if fold is None else fold.kind

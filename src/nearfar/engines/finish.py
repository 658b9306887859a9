"""From folded rows and gathered positive pairs to the loss, in plain autograd: the same for every device.

`Call` prepares one call: the layout's vectors, the positive pairs, the operators with their numbers. One function for
each scope of groups finishes it. With several processes each folds its own rows; numbers of a row that a group over the
batch needs are put together by `Call.whole`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from nearfar._utils.checks import capturing
from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import over
from nearfar.engines import operators
from nearfar.engines.dense import dense_value
from nearfar.engines.listed_scores import ListedScores
from nearfar.engines.spec import LOW, REACH, SIDES, SIMILARITIES, Spec
from nearfar.groups.groupings import Problem, Product, tally
from nearfar.links import Sides, Terms
from nearfar.miners import Miner, ScoredPairs
from nearfar.pairs import PairForm, PairLoss
from nearfar.relations.layout import ID, NOWHERE, POSITION_THEN_ID, Layout, Narrow
from nearfar.sets.base import Fold, UncertaintySet
from nearfar.sets.entropic import KL

__all__ = ["Call", "Found", "finish"]

GATHERED = 2**26, 2**22
"""Most entries n·P of gathered positive pairs: by kernels, and in strips."""
SCORES = (-1.01, 1.01), (-4.1, 0.1), (-2.1, 0.1)
"""Between these lie the scores of unit rows, by similarity, in half precision too."""
HELD = 2**20
"""Most losses that a set of the largest ones holds in strips: 24 MB with their places."""
FAR = 1e30
"""A loss that no pair reaches."""
SUMS = 2**29
"""Most numbers of the rows x_a + x_p that the angular loss makes."""
Found = tuple[Tensor, Tensor, Tensor]
"""The loss, and which rows [n] had a positive and a negative pair."""


class RefusalError(Exception):
    """This batch cannot be computed here: pairs are too many, or several are equally hard."""


def finish(
    product: Product,
    layout: Layout,
    rows: Tensor,
    cols: Tensor,
    *,
    low: torch.dtype | None = None,
    tile: int | None = None,
    ranks: ProcessGroup = ALONE,
    dual: Callable[[Tensor], Tensor] | None = None,
) -> Found | None:
    """The loss by the operators; None where another engine must serve.

    Args:
        product: the factors of the loss.
        layout: which pairs are positive and which are negative.
        rows: [n, d] prepared queries, float64 where distances of near rows need it.
        cols: [m, d] prepared references; the rows themselves where the layout is square.
        low: type that kernels take products in; None for strips in PyTorch.
        tile: rows of a strip; None for a height that suits the device.
        ranks: the processes that share the rows.
        dual: replaces the folded number t [n] of each row by another one, such as one that is kept between batches
            (`Layout.groups` says whose it is); weights are then e^{(l - t)/γ} of that one.
    """
    try:
        call = Call(product, layout, rows, cols, low, tile, ranks, dual)
        value, had_positive, had_negative = _finisher(product)(call)
    except RefusalError:
        return None
    dtype = rows.dtype
    return call.restore(value).to(dtype), call.mark(had_positive), call.mark(had_negative)


def _finisher(product: Product) -> Callable[[Call], Found]:
    if product.draws:
        return _drawn
    rule: Any = getattr(product.groups, "rule", None)
    if product.groups.scope == "triplets" and (rule.balanced or _kind(product.over_negative) == "max"):
        return _balanced_triplets if rule.balanced else _hardest_triplet
    return FINISH[product.groups.scope or ""]


class Call:
    """One call: rows and columns in the order of the operators, the factors of the loss, and the layout's vectors.

    Args: see `finish`.
    """

    def __init__(
        self,
        product: Product,
        layout: Layout,
        rows: Tensor,
        cols: Tensor,
        low: torch.dtype | None,
        tile: int | None,
        ranks: ProcessGroup,
        dual: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.dual = dual
        self.product, self.strips, self.tile, self.ranks = product, low is None, tile or 0, ranks
        self.similarity = SIMILARITIES.index(product.similarity.form or "dot")
        self.orders, self.size = layout.orders, len(rows)
        self.at: Tensor | None = None
        """Which rows these are, in their order; None for all."""
        self.share = slice(0, len(rows))
        """Which of the rows this process folds."""
        self.rest: list[Tensor] = []
        """What float32 rows and columns lack of float64 ones; empty where these did not come."""
        if low is None:
            self._sort(layout, rows, cols)
        else:
            self._narrow_type(layout, rows, cols, low)
        if self.narrow is None and not self.foldable:
            raise RefusalError  # too many positive pairs to read each
        hard = product.over_negative.fold()
        single = hard is None or hard.kind == "max" or hard.held
        if self.rest and product.everyone and (product.wants_columns or single):
            raise RefusalError  # the near pairs of a row cannot be taken out of all of its pairs
        self.measure = None if self.narrow is None else self.narrow.measure
        self._near: Tensor | None = None
        self.floor: Tensor | None = None
        self.high, self.full = math.inf, 0
        self.had_negative: Tensor | None = None
        """Known before the fold where there is a miner."""
        if product.miner is not None and not product.draws and self.narrow is not None:
            self._mine(product.miner)

    def _sort(self, layout: Layout, rows: Tensor, cols: Tensor) -> None:
        """Bring rows and columns in the order of strips; with several processes, take this one's rows."""
        found = layout.sort(by_label=not self.product.draws)
        self.at, self.symmetric = found.rows, found.symmetric
        x = rows if found.rows is None else rows.index_select(0, found.rows)
        square = found.symmetric and self.ranks.world == 1
        y = x if square else cols if found.cols is None else cols.index_select(0, found.cols)
        if not len(x) or not len(y):
            raise RefusalError  # no row, or no column, forms a pair
        self.layout, self.total = layout, len(x)
        # of all rows, so that every process has a matrix of the same width, or none
        narrow = found.narrow(GATHERED[1] if self.foldable else GATHERED[0])
        if self.ranks.world > 1:
            ends = [len(x) * rank // self.ranks.world for rank in (self.ranks.rank, self.ranks.rank + 1)]
            self.share = slice(*ends)
            x, found = x[self.share], found.take(self.share)
            narrow = None if narrow is None else Narrow(*(part[self.share] for part in narrow))
            self.symmetric = False
        else:
            self.share = slice(0, len(x))
        self.rows, self.cols, self.square = x, y, square
        self.sorted, self.pairs, self.given, self.itself = found, found.tensors(), found.given, NOWHERE
        self.narrow = self._gathered(narrow)

    def _narrow_type(self, layout: Layout, rows: Tensor, cols: Tensor, low: torch.dtype) -> None:
        """Take float32 rows, and keep what they lack."""
        layout = self.layout = layout.code()
        self.symmetric, self.square, self.wide = layout.symmetric, layout.square, (rows, cols)
        self.rows = rows.float()
        self.cols = self.rows if layout.square else cols.float()
        both = [(rows, self.rows), (cols, self.cols)][: 1 if layout.square else 2]
        self.rest = [(wide - x).detach().float() for wide, x in both if wide.dtype == torch.float64]
        self.dtype, self.total = LOW.index(low), len(rows)
        self.pairs, self.given, self.itself = layout.tensors(), layout.given, layout.itself
        self.narrow = self._gathered(self._gather(layout))

    def _gather(self, layout: Layout) -> Narrow | None:
        """The positive pairs of each row, gathered for kernels; None where they are to be folded."""
        runs, own = layout.runs(), int(layout.itself in (1, 3))
        if layout.width is not None:
            width = min(layout.width + own, len(self.cols))
        elif torch.compiler.is_compiling() or capturing():
            return None
        else:
            width = int((runs[2] - runs[1]).amax())
        if len(self.rows) * width > GATHERED[0] and self.foldable:
            return None
        return layout.narrow(runs, width)

    def _gathered(self, found: Narrow | None) -> Narrow | None:
        """Positive pairs with weights in the type of the rows, as the dense engine has them."""
        if found is None or found.measure.dtype == torch.bool:
            return found
        return Narrow(found.place, found.measure.to(self.rows.dtype))

    @property
    def foldable(self) -> bool:
        """Whether the positive pairs can be folded as the negative ones are: their single losses are not read."""
        product = self.product
        fold, scope = product.over_positive.fold(), product.groups.scope
        plain = product.positive.form(+1) is not None and product.miner is None
        if not plain or fold is None or fold.kind in ("top", "max", "moments"):
            return False
        if fold.held and scope != "anchor_sign":
            return False
        link = product.link
        return scope in ("batch", "sign", "anchor") or (
            scope == "anchor_sign" and (link is None or not link.reads_pairs)
        )

    # ------------------------------------------------------------------------------------ rows of all processes

    def whole(self, x: Tensor) -> Tensor:
        """Numbers [n, ...] of the rows of all processes, from those of this one's, with their gradient."""
        if self.ranks.world == 1:
            return x
        found: Tensor = _Whole.apply(x, self.ranks, self.share, self.total)  # type: ignore[no-untyped-call]
        return found

    def reduce(self, *terms: Terms) -> Tensor:
        """The loss from the terms of this process's rows, see `groupings.reduce`."""
        how, values = self.product.reduction, []
        for term in terms:
            top, bottom = tally(term, how)
            if self.ranks.world > 1 and how != "none":
                top = self.ranks.sum(top.detach()) + (top - top.detach())
                bottom = bottom if how == "sum" else self.ranks.sum(bottom)
            values.append(over(top, bottom))
        value = values[0] if len(values) == 1 else torch.stack(values).sum(dim=0)
        return self.whole(value) if how == "none" else value

    def restore(self, value: Tensor) -> Tensor:
        """Unreduced values [n] in the order of the batch; a number as it is."""
        if value.ndim == 0 or self.at is None:
            return value
        return value.new_zeros(self.size).index_copy(0, self.at, value)

    def mark(self, mask: Tensor) -> Tensor:
        """A mask [n] of the batch's rows, from one of this process's rows in their order."""
        if self.ranks.world > 1:
            every = torch.zeros(self.total, dtype=torch.bool, device=mask.device)
            every[self.share] = mask
            mask = self.ranks.any(every)
        if self.at is None:
            return mask
        return torch.zeros(self.size, dtype=torch.bool, device=mask.device).index_copy_(0, self.at, mask)

    # ------------------------------------------------------------------------------------ pairs

    def _mine(self, miner: Miner) -> None:
        """Keep the positive pairs that the miner keeps, and note between which scores it keeps negative ones."""
        assert self.measure is not None  # noqa: S101
        line, probe = PairForm("line", 1.0, 0.0), miner.window(torch.ones(1, 1), torch.ones(1, 1) > 0, torch.ones(1))
        assert probe is not None  # noqa: S101 - see plan.py
        self.full = int(probe.most is not None)
        near = self.near.detach()
        if probe.most is not None:
            if self.given & 4:
                raise RefusalError  # they are counted by their weights
            spec, _ = self.spec(self.product.negative, "negative", form=line, half=0)
            ranked, _ = operators.rank(self.rows, self._columns, self.pairs, *spec.lists(), near.shape[1])
            top = ranked[:, 0]
        else:
            top = self.hardest("negative", line, values=True)[0]
        self.had_negative = top > -torch.inf
        window = miner.window(near, self.measure, top.to(near.dtype))
        assert window is not None  # noqa: S101 - see plan.py
        kept = window.positive | torch.isnan(near)  # NaN is kept and shows
        self.measure = self.measure & kept if self.measure.dtype == torch.bool else self.measure * kept
        low = -math.inf if window.low is None else window.low
        if window.most is not None:
            last = (window.most.ceil().long() - 1).clamp(0, ranked.shape[1] - 1)
            low = torch.where(window.most > 0, ranked.gather(1, last[:, None])[:, 0], torch.inf)
        floor = low if isinstance(low, Tensor) else torch.full_like(top, low)
        floor = torch.where(self.had_negative, floor, torch.inf) if window.closed else floor
        self.floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf)) if window.closed else floor
        self.high = math.inf if window.high is None else window.high

    @property
    def had_positive(self) -> Tensor:
        """Which rows [n] had a positive pair before any mining."""
        assert self.narrow is not None  # noqa: S101
        return (self.narrow.measure > 0).any(dim=1)

    @property
    def learns(self) -> bool:
        """Whether a gradient of rows or columns is asked for."""
        return torch.is_grad_enabled() and (self.rows.requires_grad or self.cols.requires_grad)

    @property
    def _columns(self) -> Tensor | None:
        return None if self.square else self.cols

    def scores(self, place: Tensor) -> Tensor:
        """Scores [n, P] of each row with the columns `place` [n, P], with their gradient."""
        spec, _ = self.spec(self.product.negative, "negative", form=PairForm("line", 1.0, 0.0), given=0)
        found: Tensor = operators.near(self.rows, self._columns, place, self.rest, *spec.lists())
        if self.strips or not self.similarity:
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

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative column."""
        if not self.strips:
            return self.layout.has_negative()
        return self.sorted.end - self.sorted.start < self.sorted.size

    def _around_classes(self) -> tuple[Tensor, Tensor | None]:
        """Rows and columns less a column of their own label, float32: positive pairs keep their distance.

        The column is that nearest to the mean of its label, so that a few distant ones do not matter. Of a label with
        several distant groups, the distances within the others are those of float32 products.
        """
        (rows, cols), (row, col) = self.wide, (x.long() for x in self.layout.labels)
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
        return around, None if self.square else (cols - start[col]).float()

    # ------------------------------------------------------------------------------------ operators

    def spec(
        self, pair: PairLoss, side: str, *, sign: int = 0, form: PairForm | None = None, **more: Any
    ) -> tuple[Spec, PairForm]:
        """The numbers of an operator call on one side of the rows."""
        form = form or pair.form(sign or (+1 if side == "positive" else -1))
        assert form is not None  # noqa: S101 - see plan.py
        given = {"itself": self.itself, "given": self.given, "half": int(self.symmetric and not self.full)}
        given |= {"strips": 1, "tile": self.tile, "full": self.full} if self.strips else {"dtype": self.dtype}
        return Spec.of(form, **{"side": SIDES.index(side), "similarity": self.similarity, **given, **more}), form

    def fold(
        self,
        side: str,
        of: UncertaintySet,
        fold: Fold,
        *,
        turned: bool = False,
        sign: int = 0,
        whole: bool = False,
        **more: Any,
    ) -> list[Tensor]:
        """Fold one side of each row (`turned`: of each column), by the pair loss of a sign if it is not that side's.

        Args:
            side: "negative", "positive" or "all".
            of: the set.
            fold: its fold.
            turned: fold columns in place of rows.
            sign: of the pair loss.
            whole: all rows are one group.
            more: further numbers of the `Spec`.

        Returns: see `operators.fold`; t, Σ w, number of members, level, norm, Σ p·l.
        """
        sign = sign or (+1 if side == "positive" else -1)
        pair = self.product.positive if sign > 0 else self.product.negative
        drop, held = int(of.zero == "drop"), int(fold.held)
        spec, form = self.spec(pair, side, sign=sign, high=self.high, gamma=fold.gamma, drop=drop, held=held, **more)
        if fold.kind == "exp":
            spec = replace(spec, **self._level(form, fold))
            if self.strips and spec.exp == 2:
                spec = replace(spec, half=0, full=1)
        whole = whole and self.strips and spec.exp != 2 and self.ranks.world == 1
        spec = replace(spec, whole=int(whole and self.learns), keep=int(self.strips and not whole and self.learns))
        rows, cols, pairs = self.rows, self._columns, self.pairs
        if side == "positive" and self.rest:
            rows, cols = self._around_classes()
        if turned:
            rows, cols, pairs, given = self._turn()
            spec = replace(spec, given=given)
        found = operators.fold(rows, cols, pairs, self.floor, form.offset, *spec.lists())
        return list(found[:6])

    def _turn(self) -> tuple[Tensor, Tensor, list[Tensor], int]:
        """Columns as rows, rows as columns, and the vectors of these pairs."""
        if (self.layout.itself == POSITION_THEN_ID and not self.square) or self.layout.near is not None:
            raise RefusalError  # a sample is known by its position among the columns
        found = self.layout.turn()
        if not self.strips:
            return self.cols, self.rows, found.tensors(), found.given
        turned = found.sort()
        return self.cols, self.rows, turned.tensors(), turned.given

    def _level(self, form: PairForm, fold: Fold) -> dict[str, Any]:
        """The shift for exp: the midpoint of the loss range if the type holds it, else the largest loss of each row.

        Sums of e^z - 1 are needed only where all z may be near 0, because γ is larger than what losses differ by. Where
        values are compared with 0, a row of zeros must give exactly 0: its exponentials are then 1 around 0.
        """
        compared = self.product.reduction == "nonzero" and (self.product.link is None or not self.strips)
        unbounded = form.offset is not None and not self.strips
        if unbounded or not self.product.similarity.normalize or (compared and not self.strips):
            return {"exp": 2, "flat": int(fold.normalized)}
        least, most = bounds(form, *SCORES[self.similarity])
        if form.offset is not None:
            shift = abs(float(form.by_offset * form.offset.detach())) * form.scale
            least, most = least - shift, most + shift
        reach = REACH * fold.gamma
        if compared and max(-least, most) <= reach and not self.given & 4:
            return {"exp": 1, "level": 0.0, "flat": int(fold.normalized and most - least < fold.gamma)}
        if compared or most - least > 2 * reach:
            return {"exp": 2, "flat": int(compared and fold.normalized)}
        return {"exp": 1, "level": 0.5 * (least + most), "flat": int(fold.normalized and most - least < fold.gamma)}

    def hardest(self, side: str, pair: PairForm | None = None, *, values: bool = False) -> tuple[Tensor, Tensor]:
        """Scores [n, 1] of the member with the largest loss of each row, and which rows [n] have one.

        With `values`, the largest losses [n] alone, -inf where a row has none.
        """
        pair = pair or _order(self.product.negative)
        spec, form = self.spec(self.product.negative, side, form=pair, high=self.high, whole=int(values))
        offset = None if form.offset is None else form.offset.detach()
        columns = None if self.square else self.cols.detach()
        top, place, ties = operators.hardest(self.rows.detach(), columns, self.pairs, self.floor, offset, *spec.lists())
        if values and self.strips:
            return top, top > -torch.inf
        if self.strips and bool((ties > 1).any()):
            raise RefusalError  # they share the weight, which the plain definition knows how to do
        scores = self.scores(place[:, None])
        there = top > -torch.inf
        return (torch.where(there, scores.detach()[:, 0], -torch.inf), there) if values else (scores, there)

    def top(self, fold: Fold, members: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [1, c] of the hardest negative pairs of the batch, at least all that may count, and which are real.

        Args:
            fold: says how many of the group's members may carry weight.
            members: measure of the group.
        """
        if torch.compiler.is_compiling() or self.given & 4:
            raise RefusalError  # values are read; K counts weights
        once, m = int(self.symmetric), len(self.cols)
        spec, form = self.spec(self.product.negative, "negative", form=_order(self.product.negative), half=2 * once)
        k = fold.most * float(self.orders) + fold.fraction * (float(members) if fold.fraction else 0.0)
        if not self.strips and not once:
            k = 2 * fold.most  # without reading `orders`
        count = max(1, min(math.ceil(k / (1 + once)), len(self.rows) * m))
        if self.strips and count > HELD:
            raise RefusalError  # a radix search needs no memory
        offset = None if form.offset is None else form.offset.detach()
        columns = None if self.square else self.cols.detach()
        place = operators.top(self.rows.detach(), columns, self.pairs, offset, *spec.lists(), count)
        if not len(place) and not self.strips:
            raise RefusalError  # too many lie close together
        scores = ListedScores(self.product.similarity, self.rows, self.cols, "rows")[place // m, place % m]
        losses = self.product.negative(scores, -1)[None].repeat(1, 1 + once)
        there = torch.ones_like(losses, dtype=torch.bool)
        if self.ranks.world == 1:
            return losses, there
        most = int(self.ranks.largest(torch.tensor(losses.shape[1], device=losses.device)))
        wider = (0, most - losses.shape[1])
        share = slice(self.ranks.rank * most, (self.ranks.rank + 1) * most)
        both = (torch.nn.functional.pad(x[0], wider) for x in (losses, there.to(losses.dtype)))
        losses, there = (_Whole.apply(x, self.ranks, share, most * self.ranks.world)[None] for x in both)  # type: ignore[no-untyped-call]
        return losses, there > 0


class _Whole(torch.autograd.Function):
    """Numbers of all processes from those of one; each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ProcessGroup, share: slice, total: int) -> Tensor:
        ctx.share = share
        every = x.new_zeros(total, *x.shape[1:])
        every[share] = x
        return ranks.sum(every)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        return grad_output[0][ctx.share], None, None, None


# ---------------------------------------------------------------- values of groups


def _order(pair: PairLoss) -> PairForm | None:
    """What ranks negative pairs as their losses do: the score itself, where a loss never falls with it; else None.

    Losses of 0 under a hinge are tied, and their scores are not.
    """
    form = pair.form(-1)
    rises = form is not None and form.shape != "pace" and form.a * form.scale > 0
    return PairForm("line", 1.0, 0.0) if rises else None


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


def group_value(
    of: UncertaintySet, fold: Fold, losses: Tensor | None, measure: Tensor | None, t: Tensor, size: Tensor
) -> Tensor:
    """Values [g] of groups made of single members [g, k] and of folded ones: t and Σ w [g, v]; float64.

    Folded members of an exponential fold are one member of the loss t and the weight Σ w. `KL` then gives exactly 0
    where all losses are 0, so that `reduction="nonzero"` leaves such a group out.
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


def _fold_of(of: UncertaintySet) -> Fold:
    fold = of.fold()
    assert fold is not None  # noqa: S101 - see plan.py
    return fold


def _kind(of: UncertaintySet) -> str | None:
    fold = of.fold()
    return None if fold is None else fold.kind


def _any(measure: Tensor) -> Tensor:
    return (measure > 0).any(dim=1)


# ---------------------------------------------------------------- groups of a row


def _anchor_sign(call: Call) -> Found:
    """Two values of each row, joined by the link."""
    product, measure, side = call.product, call.measure, "all" if call.product.everyone else "negative"
    if measure is None:
        positive, has_positive = _fold_side(call, "positive", product.over_positive)
        had_positive = has_positive
        losses = positive.new_zeros(len(positive), 0)
        measure = torch.zeros_like(losses, dtype=torch.bool)
    else:
        losses, had_positive, has_positive = product.positive(call.near, +1), call.had_positive, _any(measure)
        positive = product.over_positive.value(losses, measure)
    if _kind(product.over_negative) == "max":
        score, there = call.hardest(side)
        has_negative = there if side == "negative" else call.has_negative()
        there = has_negative | (had_positive & product.everyone)
        negative = product.over_negative.value(product.negative(score, -1), there[:, None])
    else:
        negative, has_negative = _fold_side(call, side, product.over_negative)
    had_negative = has_negative if call.had_negative is None else call.had_negative
    columns, has_columns = _columns(call, negative, has_negative) if product.wants_columns else (None, None)
    anchors = had_positive | had_negative
    sides = Sides(positive, negative, has_positive, has_negative, anchors, losses, measure, columns, has_columns)
    return call.reduce(*product.joined(sides)), had_positive, had_negative


def _fold_side(call: Call, side: str, of: UncertaintySet, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Value [n] of one side of each row, and which rows have a member."""
    fold = _fold_of(of)
    apart = call.rest or (call.strips and call.similarity and call.rows.dtype == torch.float64)
    if side == "all" and apart and not (turned or fold.held or call.product.wants_columns):
        return _fold_apart(call, of, fold)
    t, size, seen, _, _, held = call.fold(side, of, fold, turned=turned)
    value = group_value(of, fold, None, None, t[:, None], size[:, None])
    if call.dual is not None and side != "positive" and fold.kind == "exp":
        kept = call.dual(value.detach())
        value = kept + fold.gamma * torch.expm1((value - kept) / fold.gamma)
    if fold.held:
        value = value + (held - value).detach()
    return value.to(call.rows.dtype), seen > 0


def _fold_apart(call: Call, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor]:
    """Like `_fold_side` for all pairs of each row, some of them near: the negative pairs alone are folded."""
    t, size, seen, *_ = call.fold("negative", of, fold)
    t, size, losses = t[:, None], size[:, None], None
    if call.measure is None:
        more, sizes, *_ = call.fold("positive", of, fold, sign=-1)
        t, size = torch.cat([t, more[:, None]], dim=1), torch.cat([size, sizes[:, None]], dim=1)
    else:
        losses = call.product.negative(call.near, -1)
    return group_value(of, fold, losses, call.measure, t, size).to(call.rows.dtype), seen > 0


def _columns(call: Call, negative: Tensor, has_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Negative values [n, P] of the columns of the positive pairs, and which have any."""
    assert call.narrow is not None  # noqa: S101 - such links read pairs
    everyone = call.product.everyone
    if not call.symmetric:
        if call.ranks.world > 1:
            raise RefusalError  # a process has the pairs of its own rows alone
        side = "all" if everyone else "negative"
        negative, has_negative = _fold_side(call, side, call.product.over_negative, turned=True)
    # of all pairs of a column, the positive pair itself is one
    return negative[call.narrow.place], has_negative[call.narrow.place] | everyone


def _anchor(call: Call) -> Found:
    """One value of all pairs of each row."""
    product, of = call.product, call.product.over_positive
    fold = _fold_of(of)
    if fold.kind == "max":
        losses, there, had_positive, had_negative = _with_hardest(call)
        values = of.value(losses, there)
    else:
        t, size, seen, *_ = call.fold("negative", of, fold)
        had_negative = seen > 0 if call.had_negative is None else call.had_negative
        if call.measure is None:
            more, sizes, others, *_ = call.fold("positive", of, fold)
            t, size = torch.stack([t, more], dim=1), torch.stack([size, sizes], dim=1)
            values, had_positive = group_value(of, fold, None, None, t, size), others > 0
        else:
            losses, had_positive = product.positive(call.near, +1), call.had_positive
            values = group_value(of, fold, losses, call.measure, t[:, None], size[:, None])
    return call.reduce(Terms(values, had_positive | had_negative)), had_positive, had_negative


def _with_hardest(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and mask [n, P+1] of the positive pairs and the hardest negative one of each row; rows that had either."""
    assert call.measure is not None  # noqa: S101 - a maximum is not folded for positive pairs
    negative, has_negative, had_negative = _hardest(call)
    losses = torch.cat([call.product.positive(call.near, +1), negative], dim=1)
    there = torch.cat([call.measure > 0, has_negative[:, None]], dim=1)
    return losses, there, call.had_positive, had_negative


def _hardest(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n, 1] of the hardest negative pair of each row, which rows have one, and which had one before mining."""
    score, there = call.hardest("negative")
    return call.product.negative(score, -1), there, there if call.had_negative is None else call.had_negative


# ---------------------------------------------------------------- groups of the batch


def _fold_whole(call: Call, side: str, of: UncertaintySet, fold: Fold) -> tuple[Tensor, Tensor, Tensor]:
    """Folded numbers t and Σ w [1, n] of all pairs of one side, and which rows had one before any mining."""
    t, size, seen, *_ = call.fold(side, of, fold, whole=True)
    return call.whole(t)[None], call.whole(size)[None], seen > 0 if call.had_negative is None else call.had_negative


def _near_whole(call: Call, sign: int = +1) -> tuple[Tensor, Tensor]:
    """Losses and measure [1, n·P] of the positive pairs of all rows."""
    assert call.measure is not None  # noqa: S101 - they are not folded
    measure = call.measure
    if call.ranks.world > 1:
        measure = call.whole(measure.to(call.rows.dtype))
        measure = measure > 0 if call.measure.dtype == torch.bool else measure
    pair = call.product.positive if sign > 0 else call.product.negative
    return call.whole(pair(call.near, sign)).reshape(1, -1), measure.reshape(1, -1)


def _batch(call: Call) -> Found:
    """One value of all pairs."""
    product, of = call.product, call.product.over_positive
    fold = _fold_of(of)
    if fold.kind == "max" and (call.floor is not None or not call.strips or call.given & 4):
        losses, there, had_positive, had_negative = _with_hardest(call)
        there = call.whole(there.to(losses.dtype)) > 0
        value = of.value(call.whole(losses).reshape(1, -1), there.reshape(1, -1))
        return product.groups.merge((value,), ()), had_positive, had_negative
    if fold.kind in ("top", "max"):
        return _top(call, of, replace(fold, most=max(fold.most, 1.0)))
    if fold.kind == "moments":
        value, had_negative = _moments(call, "negative", of, *_near_whole(call))
        return product.groups.merge((value,), ()), call.had_positive, had_negative
    t, size, had_negative = _fold_whole(call, "negative", of, fold)
    if call.measure is None:
        more, sizes, had_positive = _fold_whole(call, "positive", of, fold)
        value = group_value(of, fold, None, None, torch.cat([t, more], dim=1), torch.cat([size, sizes], dim=1))
    else:
        had_positive = call.had_positive
        value = group_value(of, fold, *_near_whole(call), t, size)
    return product.groups.merge((value,), ()), had_positive, had_negative


def _sign(call: Call) -> Found:
    """One value of all positive pairs, and one of all negative pairs."""
    product = call.product
    fold, first = product.over_negative.fold(), product.over_positive.fold()
    assert fold is not None  # noqa: S101 - see plan.py
    if fold.kind == "top":
        return _top_apart(call)
    if call.measure is not None:
        had_positive = call.had_positive
        positive = product.over_positive.value(*_near_whole(call), orders=call.orders)
    else:
        assert first is not None  # noqa: S101 - `foldable`
        t, size, had_positive = _fold_whole(call, "positive", product.over_positive, first)
        positive = group_value(product.over_positive, first, None, None, t, size)
    if fold.kind == "max":
        losses, there, had_negative = _hardest(call)
        there = call.whole(there.to(losses.dtype)) > 0
        negative = product.over_negative.value(call.whole(losses).T, there[None])
    elif fold.kind == "moments":
        none = call.rows.new_zeros(1, 0)
        negative, had_negative = _moments(call, "negative", product.over_negative, none, none > 0)
    else:
        t, size, had_negative = _fold_whole(call, "negative", product.over_negative, fold)
        negative = group_value(product.over_negative, fold, None, None, t, size)
    return product.groups.merge((positive, negative), ()), had_positive, had_negative


def _negatives(call: Call) -> tuple[Tensor, Tensor]:
    """The number of negative pairs of all rows, and which rows [n] have one."""
    if not call.strips:
        return call.layout.count(2).sum(), call.has_negative()
    number = (call.sorted.size - (call.sorted.end - call.sorted.start)).double()
    return call.whole(number).sum(), number > 0


def _top(call: Call, of: UncertaintySet, fold: Fold) -> Found:
    """One value of the K hardest pairs, positive and negative."""
    near, measure = _near_whole(call)
    number, has_negative = _negatives(call)
    losses, there = call.top(fold, number + measure.sum())
    losses, measure = torch.cat([near, losses], dim=1), torch.cat([measure, there], dim=1)
    value = _top_problem(call, of, losses, measure, number + measure[:, : near.shape[1]].sum()).value()
    return call.product.groups.merge((value,), ()), call.had_positive, has_negative


def _top_apart(call: Call) -> Found:
    """Two values of the K hardest pairs, of the positive and of the negative ones."""
    product, fold = call.product, _fold_of(call.product.over_negative)
    number, has_negative = _negatives(call)
    near, measure = _near_whole(call)
    first = _top_problem(call, product.over_positive, near, measure, measure.sum())
    cap = first.taken() if product.groups.scope == "balanced" else None
    second = _top_problem(call, product.over_negative, *call.top(fold, number), number, cap)
    value = product.groups.merge((first.value(), second.value()), (first, second))
    return value, call.had_positive, has_negative


def _top_problem(
    call: Call, of: UncertaintySet, losses: Tensor, there: Tensor, members: Tensor, cap: Tensor | None = None
) -> Problem:
    """The problem of one group whose largest members [1, c] came, of so many in all."""
    if _fold_of(of).fraction:  # the others are one member of a loss below all
        rest = (members - there.sum()).clamp_min(0.0).reshape(1, 1)
        losses = torch.cat([losses, losses.new_full((1, 1), -FAR)], dim=1)
        there = torch.cat([there.to(rest.dtype), rest], dim=1).to(losses.dtype)
    return Problem(of, losses, there, tuple(losses.shape), call.orders, cap)


def _moments(call: Call, side: str, of: UncertaintySet, losses: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
    """Value [1] of a set whose weights rise linearly above a level, of folded and of single members [1, k].

    Each sweep gives measure, mean and energy of the members above the level, which the set turns into a higher one,
    until no member has a negative weight.
    """
    fold, every = _fold_of(of), losses.detach().double()
    weight = measure.double() * ~(every <= 0) if of.zero == "drop" else measure.double()
    level, about, centered, whole = 0.0 if of.zero == "drop" else -math.inf, 0.0, False, None
    more: Any = of
    with torch.no_grad():
        while True:
            found = call.fold(side, of, fold, exp=3, level=max(level, -1e30), about=about)
            total, size, second = (call.whole(found[place]).sum() for place in (4, 1, 5))
            least = call.ranks.largest(-found[3].amin()).neg()
            inside = weight * (every > level)
            gap = torch.where(inside > 0, every - about, 0.0)
            total, second = total + (inside * gap).sum(), second + (inside * gap * gap).sum()
            size = size + inside.sum()
            least = torch.minimum(least, torch.where(inside > 0, every, torch.inf).amin() if every.numel() else least)
            shift = over(total, size)
            energy = (second - total * shift).clamp_min(0.0)
            whole = size if whole is None else whole
            if not centered and float(energy) < 1e-3 * float(second):
                about, centered = about + float(shift), True  # sums of squares would cancel
                continue
            mean = about + shift
            grain = 16 * torch.finfo(call.rows.dtype).eps * torch.maximum(shift.abs(), (mean - least).abs())
            energy = torch.where(energy <= size * grain**2, 0.0, energy)
            numbers = (size, whole, torch.zeros_like(mean), energy, least - mean)
            value, eta, slope = (x[0] for x in more.solve_moments(*(x[None] for x in numbers)))
            if not float(eta) > float(least - mean):
                break
            level, about, centered = float(mean + eta), float(mean), False
    value, tilt = mean + value, float(slope)
    first = float(over(torch.ones_like(size), size) + slope * (about - mean))
    weights: dict[str, Any] = {"exp": 3, "level": max(level, -1e30), "about": about, "first": first, "second": tilt}
    t = call.whole(call.fold(side, of, fold, whole=True, **weights)[0])
    p = (inside * (first + tilt * gap)).to(losses.dtype)
    through = t.sum() + (p * torch.where(measure > 0, losses, 0.0)).sum().to(t.dtype)
    had_negative = found[2] > 0 if call.had_negative is None else call.had_negative
    return (value + (through - through.detach()))[None], had_negative


# ---------------------------------------------------------------- triplets


def _triplets(call: Call) -> Found:
    """The mean over all triplets."""
    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    of, rule = call.product.over_negative, _rule(call)
    band = {} if rule.keep is None else {"band": 1, "low": -rule.keep.margin, "high": 0.0}
    if call.strips:
        band |= {"half": 0, "full": 1, "whole": int(call.learns)}
    spec, form = call.spec(call.product.negative, "negative", drop=int(of.zero == "drop"), **band)
    measure = call.narrow.measure.to(call.rows.dtype)
    total, size, seen, *_ = operators.triplets(
        call.rows, call._columns, call.pairs, form.offset, call.near, call.narrow.place, measure, *spec.lists()
    )
    value = over(call.whole(total).sum(), call.whole(size).sum() + float(of.zero_member))
    return value, call.had_positive, seen > 0


def _rule(call: Call) -> Any:
    """How triplets are scored and chosen; a grouping of these scopes has one."""
    return call.product.groups.rule  # type: ignore[attr-defined]


def _balanced_triplets(call: Call) -> Found:
    """The mean over triplets of each positive pair with the negative of its own rank."""
    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    of, positive, width = call.product.over_negative, call.narrow.measure > 0, call.narrow.place.shape[1]
    values, place = _ranked(call, width + 1)
    if bool(((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any()):
        raise RefusalError  # equally hard ones are ranked by their order in the batch
    rank = (positive.cumsum(dim=1) - 1).clamp(0, place.shape[1] - 1)
    real = positive & (positive.cumsum(dim=1) <= place.shape[1]) & (values.gather(1, rank) > -torch.inf)
    losses = call.product.negative(call.scores(place.gather(1, rank)) - call.near, -1)
    weight = call.narrow.measure.double() * real
    weight = weight * ~(losses.detach() <= 0) if of.zero == "drop" else weight
    top = torch.where(weight > 0, losses * weight, 0.0).sum(dim=1)
    value = over(call.whole(top).sum(), call.whole(weight.sum(dim=1)).sum())
    return value, call.had_positive, call.has_negative()


def _hardest_triplet(call: Call) -> Found:
    """The one worst triplet: the largest s_an less the least s_ap of its anchor, over all anchors."""
    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    values, place = _ranked(call, 2)
    if call.given & 4:
        raise RefusalError  # ties share the weight by their measure
    least = torch.where(call.narrow.measure > 0, call.near, torch.inf)
    pair = least.detach().sort(dim=1)
    score = call.whole(values[:, 0] - pair.values[:, 0])
    best, row = score.max(dim=0)
    empty = bool(best == -torch.inf)
    twice = (values[:, -1] == values[:, 0]) & (values.shape[1] > 1)
    twice |= (pair.values[:, min(1, least.shape[1] - 1)] == pair.values[:, 0]) & (least.shape[1] > 1)
    tied = bool(call.whole(twice.to(score.dtype))[row] > 0) or int((score == best).sum()) > 1
    form = call.product.negative.form(-1)
    idle = form is not None and form.shape == "power" and float(call.product.negative(best, -1)) == 0
    if tied and not empty and not idle:
        raise RefusalError  # they share the weight
    mine = call.scores(place[:, :1])[:, 0] - least.gather(1, pair.indices[:, :1])[:, 0]
    there = torch.isfinite(mine.detach()) & (values[:, 0] > -torch.inf)
    losses = call.product.negative(torch.where(there, mine, 0.0), -1)
    value = call.whole(torch.where(there, losses, 0.0))[row]
    return value * float(not empty), call.had_positive, call.has_negative()


def _ranked(call: Call, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores [n, count] of the negatives of each row, and their columns."""
    form = PairForm("line", 1.0, 0.0)
    spec, _ = call.spec(call.product.negative, "negative", form=form, half=0, full=1)
    return operators.rank(call.rows, call._columns, call.pairs, *spec.lists(), min(count, len(call.cols)))


def _angles(call: Call) -> Found:
    """The angular loss: a positive pair (a, p) is one row x_a + x_p, whose negatives are folded.

    l_n = slope·(4t⟨x_a + x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩) + zero            n·P rows of m products
    """
    assert call.narrow is not None  # noqa: S101 - each positive pair is read
    place, measure = call.narrow.place, call.narrow.measure
    alone = call.strips or not (call.itself == POSITION_THEN_ID or call.given & 4)
    if not alone or place.numel() * call.rows.shape[1] > SUMS:
        raise RefusalError
    of, tan2, form = call.product.over_negative, _rule(call).angle, call.product.negative.form(-1)
    fold = _fold_of(of)
    assert form is not None  # noqa: S101 - see plan.py
    row = torch.arange(len(place), device=place.device).repeat_interleave(place.shape[1])
    col, real = place.flatten(), measure.flatten()
    if call.strips:  # padding costs a row of products
        row, col, real = row[real > 0], col[real > 0], real[real > 0]
    rows = call.rows[row] + call.cols[col]
    more: dict[str, Any] = {"exp": 2, "flat": int(fold.normalized)}
    sums = replace(form, a=4 * tan2 * form.a, b=0.0)
    if call.strips:
        pairs = call.sorted.take(row).tensors()
        least, most = bounds(sums, *(2 * s for s in SCORES[0]))
        if call.product.similarity.normalize and most - least <= 2 * REACH * fold.gamma:
            more = {"exp": 1, "level": 0.5 * (least + most), "flat": int(fold.normalized)}
        else:
            more |= {"full": 1}
    else:
        more |= {"itself": ID if call.itself == ID else NOWHERE}
        pairs = [x if at % 2 else x[row] for at, x in enumerate(call.pairs)]
    spec, _ = call.spec(call.product.negative, "negative", form=sums, gamma=fold.gamma, half=0, **more)
    t, size, seen, *_ = operators.fold(rows, call.cols, pairs, None, None, *spec.lists())
    near = call.near.flatten()[measure.flatten() > 0] if call.strips else call.near.flatten()
    shift = form.scale * (form.b - 2 * (1 + tan2) * form.a * near)
    t = torch.where(size > 0, t + shift, t)
    values = group_value(of, fold, None, None, t[:, None], size[:, None])
    had_negative = torch.zeros(len(place), dtype=torch.bool, device=place.device)
    had_negative = had_negative.index_fill(0, row[seen > 0], True) | call.has_negative()
    if call.product.reduction == "none":
        raise RefusalError  # a row's values are put together by the plain definition
    return call.reduce(Terms(values, real)), call.had_positive, had_negative


# ---------------------------------------------------------------- pairs that are drawn


def _drawn(call: Call) -> Found:
    """A miner that draws as many negative pairs as an anchor has positive ones: their narrow matrix [n, P + K]."""
    product, miner, narrow = call.product, call.product.miner, call.narrow
    if narrow is None or miner is None or call.ranks.world > 1 or product.reduction == "none":
        raise RefusalError
    wanted = narrow.measure.to(call.rows.dtype).sum(dim=1, keepdim=True)
    most = min(len(call.layout.labels[1]), max(1, math.ceil(float(wanted.amax()))))
    # one draw for every row of the batch, as the dense engine draws
    spots = torch.rand(call.size, most, dtype=torch.float64, device=call.rows.device)
    spots = spots if call.at is None else spots[call.at]

    def chance(scores: Tensor) -> Tensor:
        found = miner.log_odds(product.similarity.distance(scores), call.rows.shape[1])
        assert found is not None  # noqa: S101 - see plan.py
        return found

    spec, _ = call.spec(product.negative, "negative", form=PairForm("line", 1.0, 0.0), half=0, full=1)
    columns = None if call.square else call.cols.detach()
    place, has = operators.draw(call.rows.detach(), columns, call.pairs, *spec.lists(), chance, spots)
    counted = (torch.arange(most, device=spots.device) < wanted) & has[:, None]
    scores = call.scores(torch.cat([narrow.place, place], dim=1))
    measure = torch.cat([narrow.measure, torch.zeros_like(counted, dtype=narrow.measure.dtype)], dim=1)
    drawn = torch.cat([torch.zeros_like(call.near), counted.to(scores.dtype)], dim=1)
    had, relation = (call.had_positive, call.has_negative()), cast(Any, SimpleNamespace(orders=call.orders))
    pairs = ScoredPairs(
        scores, measure, drawn, *had, relation, product.similarity, call.rows, call.cols, strip=True, mined=True
    )  # fmt: skip
    return dense_value(product, pairs), *had


FINISH: dict[str, Callable[[Call], Found]] = {
    "batch": _batch,
    "sign": _sign,
    "balanced": _top_apart,
    "anchor": _anchor,
    "anchor_sign": _anchor_sign,
    "triplets": _triplets,
    "positive": _angles,
}
"""How each scope is finished."""

"""`Rows`: the rows and columns of one call in the order of the operators, and the vectors that describe their pairs.

With several processes, each folds its own rows; `Rows.gather` concatenates per-row numbers for groups that span the
batch.
"""

from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import capturing
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import over
from nearfar.engines.spec import LOW, SIMILARITIES
from nearfar.groups._groupings import Product, tally
from nearfar.links import Terms
from nearfar.relations.layout import NOWHERE, Layout, Positives

__all__ = ["Found", "Gather", "RefusalError", "Rows"]

GATHERED = 2**26, 2**22  # maximum entries n·P of gathered positive pairs, for kernels and for strips


class RefusalError(Exception):
    """This batch cannot be computed here: it has too many pairs, or several are equally hard."""


Found = tuple[Tensor, Tensor, Tensor]
"""The loss, and which rows [n] had a positive and a negative pair."""


class Rows:
    """Rows and columns in the order of the operators, the factors of the loss, the layout's vectors; see `finish`."""

    def __init__(
        self,
        product: Product,
        layout: Layout,
        rows: Tensor,
        cols: Tensor,
        low: torch.dtype | None,
        tile: int | None,
        ranks: ProcessGroup,
    ) -> None:
        self.product, self.strips, self.tile, self.ranks = product, low is None, tile or 0, ranks
        self.similarity = SIMILARITIES.index(product.similarity.form or "dot")
        self.orders, self.size = layout.orders, len(rows)
        self.at: Tensor | None = None
        """Indices of these rows, in their order; None for all."""
        self.share = slice(0, len(rows))
        """The slice of rows that this process folds."""
        self.rest: list[Tensor] = []
        """The differences between float64 rows and columns and their float32 copies; empty if they came in float32."""
        if low is None:
            self._sort(layout, rows, cols)
        else:
            self._narrow_type(layout, rows, cols, low)
        if self.gathered is None and not self.foldable:
            raise RefusalError  # too many positive pairs to read each of them
        hard = product.over_negative.fold()
        single = hard is None or hard.kind == "max" or hard.held
        if self.rest and product.everyone and (product.wants_columns or single):
            raise RefusalError  # near pairs of a row cannot be excluded from a fold of all its pairs

    def _sort(self, layout: Layout, rows: Tensor, cols: Tensor) -> None:
        """Sort rows and columns as strips need them; with several processes, select the rows of this one."""
        found = layout.sort(by_label=not self.product.draws)
        self.at, self.symmetric = found.rows, found.symmetric
        x = rows if found.rows is None else rows.index_select(0, found.rows)
        square = found.symmetric and self.ranks.world == 1
        y = x if square else cols if found.cols is None else cols.index_select(0, found.cols)
        if len(x) < self.ranks.world or not len(y):
            raise RefusalError  # no column forms a pair, or no row of a process does
        self.layout, self.total = layout, len(x)
        # computed for all rows, so that all processes use the same width, or none
        positives = found.positives(GATHERED[1] if self.foldable else GATHERED[0])
        if self.ranks.world > 1:
            ends = [len(x) * rank // self.ranks.world for rank in (self.ranks.rank, self.ranks.rank + 1)]
            self.share = slice(*ends)
            x, found = x[self.share], found.take(self.share)
            positives = None if positives is None else Positives(*(part[self.share] for part in positives))
            self.symmetric = False
        else:
            self.share = slice(0, len(x))
        self.rows, self.cols, self.square = x, y, square
        self.sorted, self.pairs, self.given, self.itself = found, found.tensors(), found.given, NOWHERE
        self.gathered = self._weigh(positives)

    def _narrow_type(self, layout: Layout, rows: Tensor, cols: Tensor, low: torch.dtype) -> None:
        """Take float32 rows, and keep their difference from float64 ones."""
        layout = self.layout = layout.code()
        self.symmetric, self.square, self.wide = layout.symmetric, layout.square, (rows, cols)
        self.rows = rows.float()
        self.cols = self.rows if layout.square else cols.float()
        both = [(rows, self.rows), (cols, self.cols)][: 1 if layout.square else 2]
        self.rest = [(wide - x).detach().float() for wide, x in both if wide.dtype == torch.float64]
        self.dtype, self.total = LOW.index(low), len(rows)
        self.pairs, self.given, self.itself = layout.tensors(), layout.given, layout.itself
        self.gathered = self._weigh(self._gather(layout))

    def _gather(self, layout: Layout) -> Positives | None:
        """Gather the positive pairs of each row for kernels; None if they are folded."""
        runs, own = layout.runs(), int(layout.itself in (1, 3))
        if layout.width is not None:
            width = min(layout.width + own, len(self.cols))
        elif torch.compiler.is_compiling() or capturing():
            return None
        else:
            width = int((runs[2] - runs[1]).amax())
        if len(self.rows) * width > GATHERED[0] and self.foldable:
            return None
        return layout.positives(runs, width)

    def _weigh(self, found: Positives | None) -> Positives | None:
        """Give positive pairs weights in the dtype of the rows, as in the dense engine."""
        if found is None or found.measure.dtype == torch.bool:
            return found
        return Positives(found.place, found.measure.to(self.rows.dtype))

    @property
    def positives(self) -> Positives:
        """The positive pairs of each row, where they are gathered and not folded."""
        assert self.gathered is not None  # noqa: S101 - each of them is read
        return self.gathered

    @property
    def foldable(self) -> bool:
        """Whether positive pairs can be folded like negative ones, because their single losses are not needed."""
        product = self.product
        fold, scope = product.over_positive.fold(), product.groups.scope
        negative = product.over_negative.fold()
        plain = product.positive.form(+1) is not None and product.miner is None
        plain = plain and (negative is None or negative.kind != "top")
        if not plain or fold is None or fold.kind in ("top", "max", "moments"):
            return False
        if fold.held and scope != "anchor_sign":
            return False
        link = product.link
        return scope in ("batch", "sign", "anchor") or (
            scope == "anchor_sign" and (link is None or not link.reads_pairs)
        )

    # ------------------------------------------------------------------------------------ rows of all processes

    def grouped(self, x: Tensor) -> Tensor:
        """Numbers [g, k] of the groups (a row, or the batch), from those [n, k] or [n] of this process's rows."""
        if self.product.groups.per_anchor:
            return x if x.ndim > 1 else x[:, None]
        if self.ranks.world > 1 and x.dtype == torch.bool:
            return self.gather(x.to(self.rows.dtype)).reshape(1, -1) > 0
        return self.gather(x).reshape(1, -1)

    def gather(self, x: Tensor) -> Tensor:
        """Numbers [n, ...] of the rows of all processes, from those of this process; differentiable."""
        if self.ranks.world == 1:
            return x
        found: Tensor = Gather.apply(x, self.ranks, self.share, self.total)  # type: ignore[no-untyped-call]
        return found

    def refuse_if(self, condition: Tensor | bool) -> None:
        """Raise RefusalError on all processes if one of them has a reason; a part of them would wait for the others."""
        if bool(condition if self.ranks.world == 1 else self.ranks.any(torch.as_tensor(condition))):
            raise RefusalError

    def reduce(self, *terms: Terms) -> Tensor:
        """The loss from the terms of this process's rows; see `groupings.reduce`."""
        how, values = self.product.reduction, []
        for term in terms:
            top, bottom = tally(term, how)
            if self.ranks.world > 1 and how != "none":
                top = self.ranks.sum(top.detach()) + (top - top.detach())
                bottom = bottom if how == "sum" else self.ranks.sum(bottom)
            values.append(over(top, bottom))
        value = values[0] if len(values) == 1 else torch.stack(values).sum(dim=0)
        return self.gather(value) if how == "none" else value

    def restore(self, value: Tensor) -> Tensor:
        """Reorder unreduced values [n] to the order of the batch; leaves a single number as it is."""
        if value.ndim == 0 or self.at is None:
            return value
        return value.new_zeros(self.size).index_copy(0, self.at, value)

    def mark(self, mask: Tensor) -> Tensor:
        """A mask [n] over the batch, from a mask over this process's rows in their sorted order."""
        if self.ranks.world > 1:
            every = torch.zeros(self.total, dtype=torch.bool, device=mask.device)
            every[self.share] = mask
            mask = self.ranks.any(every)
        if self.at is None:
            return mask
        return torch.zeros(self.size, dtype=torch.bool, device=mask.device).index_copy_(0, self.at, mask)

    @property
    def _columns(self) -> Tensor | None:
        return None if self.square else self.cols

    @property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """Weights of the rows and columns; None if each counts once."""
        return self.sorted.weights if self.strips else self.layout.weights

    def has_negative(self) -> Tensor:
        """Which rows [n] have a negative pair."""
        if not self.strips:
            return self.layout.has_negative()
        return self.sorted.end - self.sorted.start < self.sorted.size

    def _around_classes(self) -> tuple[Tensor, Tensor | None]:
        """Rows and columns minus a column of the same label, in float32, to preserve distances of positive pairs.

        The column is the one nearest to the mean of its label, so that a few outliers do not matter. If a label has
        several distant clusters, distances within the other clusters have the accuracy of float32 products.
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


class Gather(torch.autograd.Function):
    """Concatenate numbers of all processes; in backward, each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ProcessGroup, share: slice, total: int) -> Tensor:  # noqa: D102
        ctx.share = share
        every = x.new_zeros(total, *x.shape[1:])
        every[share] = x
        return ranks.sum(every)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:  # noqa: D102
        return grad_output[0][ctx.share], None, None, None

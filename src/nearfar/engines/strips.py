"""Strips: the score matrix in blocks of whole rows, with their pairs, and gradients summed over blocks.

A strip contains all pairs of its anchors, so that miners and per-anchor groups work on one strip; larger groups use
streams (nearfar.sets.stream). The memory is that of one strip: O(m · tall).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup, cuts
from nearfar._utils.rng import State, set_states, states
from nearfar.engines.dense import kept, scored
from nearfar.engines.forms import Form, form_of
from nearfar.groups.groupings import Product
from nearfar.miners import ScoredPairs
from nearfar.relations.layout import Layout
from nearfar.relations.relation import EVERYTHING, Relation

__all__ = ["ENTRIES", "LEAN", "Slopes", "Strips", "cut", "gradient", "height"]

ENTRIES = 2**18
"""Entries of a strip if operations allocate: 1 MB of float32, of which about forty exist at a time."""
LEAN = 2**21
"""Entries of a strip if operations work in place."""
WIDER = 2**4
"""Factor by which strips are larger on a GPU, where launching kernels would otherwise take most of the time."""


def height(columns: int, tile: int | None, entries: int, device: torch.device) -> int:
    """Number of rows in a strip: `tile` if given, else what fits `entries`, but at least 16 (64 on a GPU)."""
    if tile is not None:
        return tile
    if device.type == "cuda":
        return min(4096, max(64, entries * WIDER // max(1, columns)))
    return min(512, max(16, entries // max(1, columns)))


class Strips:
    """The rows of one call of a loss in strips; iterating over it is one sweep.

    Attributes:
        rows: [n, d] prepared queries, detached.
        cols: [m, d] prepared references, detached.
        ranks: the processes that share this call; each sweeps its own strips only.
        layout: the relation as vectors, of these very rows and columns; None where a fast path does not ask.
        had_positive: [n] whether a row had a positive pair before mining; known after the first sweep.
        had_negative: [n] likewise for negative pairs.
    """

    def __init__(
        self,
        product: Product,
        rows: Tensor,
        cols: Tensor,
        relation: Relation,
        tile: int | None = None,
        entries: int = ENTRIES,
        ranks: ProcessGroup = ALONE,
        layout: Layout | None = None,
    ) -> None:
        self.product = product
        self.layout = layout
        self.ranks = ranks
        self.rows = rows.detach()
        self.cols = cols.detach()
        self.relation = relation
        self.given = tile is not None
        self.wanted = height(len(cols), tile, entries, rows.device)
        self.cuts = cuts(len(rows), self.wanted, ranks)
        self.tall = max(here.stop - here.start for here in self.cuts)
        self.most = self.tall * len(cols)
        self.had_positive = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        self.had_negative = torch.zeros_like(self.had_positive)
        self._state: State | None = None

    def __iter__(self) -> Iterator[slice]:
        """The row slices of one sweep; resets the random state, so that a miner draws the same in every sweep."""
        if self.product.miner is not None:
            self._state = self._state or states(self.rows.device)
            set_states(self._state, self.rows.device)
        return iter(self.cuts)

    def swept(self, place: Tensor) -> Tensor:
        """Map positions in a sweep to flat indices i·m + j."""
        if self.ranks.world == 1:
            return place
        swept_rows = torch.cat([torch.arange(here.start, here.stop, device=place.device) for here in self.cuts])
        return swept_rows[place // len(self.cols)] * len(self.cols) + place % len(self.cols)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Assemble values [n] of all rows, from those of this process's strips."""
        if self.ranks.world == 1:
            return torch.cat(parts)
        found = parts[0].new_zeros(len(self.rows))
        for here, part in zip(self.cuts, parts, strict=True):
            found[here] = part
        return self.ranks.sum(found)

    def pairs(self, here: slice, rows: Tensor, cols: Tensor) -> ScoredPairs:
        """Scores [t, m] of the strip `here`, whose embeddings are `rows` [t, d], and its pairs after mining."""
        pairs = scored(self.product, rows, cols, self.relation, self.relation.tile(here, EVERYTHING), strip=True)
        self.had_positive[here], self.had_negative[here] = pairs.had_positive, pairs.had_negative
        return kept(self.product, pairs)

    def plain(self, here: slice) -> ScoredPairs:
        """The pairs of a strip, without an autograd graph."""
        return self.pairs(here, self.rows[here], self.cols)


class Slopes:
    """Gradient of a scalar in the rows [n, d], columns [m, d] and parameters, summed over strips.

    Args:
        strips: the strips of the call.
        params: learned parameters of the loss.
        wants: which gradients are needed: of the rows, of the columns, and of each parameter.
    """

    def __init__(self, strips: Strips, params: tuple[Tensor, ...], wants: tuple[bool, ...]) -> None:
        self.strips = strips
        self.params = params
        self.wants = wants
        inputs = (strips.rows, strips.cols, *params)
        self._slope: Tensor | None = None
        self.sums = [torch.zeros_like(x) if wanted else None for x, wanted in zip(inputs, wants, strict=True)]

    @cached_property
    def _form(self) -> Form | None:
        """In-place scores and gradients of the similarity; None if it has no such form."""
        form = form_of(self.strips.product.similarity)
        return None if form is None else form(self.strips.cols)

    def pairs(self, here: slice) -> ScoredPairs:
        """The pairs of a strip, with rows and columns as leaves of the autograd graph.

        The scores belong to the graph only if the similarity has no form; else `through` differentiates them in place.
        """
        rows, cols = self.strips.rows[here].detach(), self.strips.cols.detach()
        rows, cols = rows.requires_grad_(self.wants[0]), cols.requires_grad_(self.wants[1])
        if self._form is None:
            return self.strips.pairs(here, rows, cols)
        with torch.no_grad():
            plain = self.strips.plain(here)
        return replace(plain, rows=rows, cols=cols)

    @property
    def any(self) -> bool:
        """Whether any gradient is needed."""
        return any(self.wants)

    def add(self, where: tuple[slice | Tensor, slice | Tensor], found: tuple[Tensor | None, ...]) -> None:
        """Add partial gradients `found` of the rows and columns at `where`, and of the parameters."""
        for place, (total, part) in enumerate(zip(self.sums, found, strict=True)):
            if total is None or part is None:
                continue
            if place > 1:
                total += part
                continue
            there = where[place]
            if isinstance(there, Tensor):
                total.index_add_(0, there, part)
            else:
                total[there] += part

    def note(self, value: Tensor, leaf: ScoredPairs) -> None:
        """Accumulate d value / d scores of `leaf` for `through`, and add the gradients in columns and parameters."""
        slope, *rest = gradient(value, (leaf.scores, leaf.cols, *self.params), retain=True)
        if slope is not None:
            self._slope = slope if self._slope is None else self._slope + slope
        self.add((EVERYTHING, EVERYTHING), (None, *rest))

    def through(self, here: slice, pairs: ScoredPairs) -> None:
        """Back-propagate this strip's dF/dscore [t, m] to the rows, columns and parameters of the similarity."""
        slope, self._slope = self._slope, None
        if slope is None:
            return
        if self._form is None:
            found = gradient(pairs.scores, (pairs.rows, pairs.cols, *self.params), slope, retain=True)
            self.add((here, EVERYTHING), found)
            return
        # contiguous: the slope may be an expanded scalar; clone: another `Slopes` may need the scores
        scores = pairs.scores.clone() if self._form.spends else pairs.scores
        slope = self._form.descend_(slope.contiguous(), scores)
        if self.sums[0] is not None:
            self._form.pull_(self.sums[0][here], slope, self.strips.rows[here], self.strips.cols)
        if self.sums[1] is not None:
            self._form.pull_(self.sums[1], slope.T, self.strips.cols, self.strips.rows[here])

    def scaled(self, by: Tensor) -> list[Tensor | None]:
        """The accumulated gradients times a scalar."""
        return [None if x is None else x * by.to(x.dtype) for x in self.sums]


def gradient(
    value: Tensor, inputs: tuple[Tensor, ...], cotangent: Tensor | None = None, *, retain: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradient of `value` in the inputs that require one; None for the others."""
    leaves = [x for x in inputs if x.requires_grad]
    if not leaves or not value.requires_grad:
        return (None,) * len(inputs)
    found = iter(torch.autograd.grad(value, leaves, cotangent, retain_graph=retain, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def cut(pairs: ScoredPairs) -> ScoredPairs:
    """The same pairs with detached scores that require a gradient, so that back-propagation stops there."""
    return replace(pairs, scores=pairs.scores.detach().requires_grad_())

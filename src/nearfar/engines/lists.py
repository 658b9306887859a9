"""Losses of an index tuple: the listed pairs are scored and solved as lists, so that no n x m matrix is made.

The distinct pairs of the tuple are sorted by anchor into a narrow matrix [n, w], where w is the largest number of pairs
of an anchor; empty places have measure 0. Groups, sets, links and reductions treat it like the matrix of all pairs
(custom parts without `swift` get that one, from the dense engine). An explicit list of triplets is scored triplet by
triplet.

A tuple that lists a large part of all pairs would be larger than the matrix, and goes to the dense engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from nearfar._utils.shortcuts import swift, touched
from nearfar.engines.dense import dense_value, keep
from nearfar.groups._groupings import Problem, Product, halves, reduce, sides_of
from nearfar.miners import ScoredPairs, present
from nearfar.relations.index_tuples import Listing, check_apart, listed_pairs, spread
from nearfar.relations.layout import NEGATIVE, NOWHERE, POSITION, POSITIVE
from nearfar.relations.relation import Relation
from nearfar.similarity import Similarity, root

__all__ = ["ListedScores", "listed_value", "takes_lists"]

MOST = 3  # if more than one in `MOST` of all pairs is listed, the matrix is used, because it is no larger
SMALL = 2**16
"""Smaller matrices take so little time that only lists scored by rows pay, which must be half as long as otherwise."""
DEAR = 16  # cost of scoring a pair by itself, relative to a pair in a matrix product (measured: 16 to 26)
CHUNK = 2**16  # entries of rows [t, d] gathered at a time: the system takes larger temporary memory back each time
CHUNK_ON_GPU = 2**24  # the same on a GPU, where shorter chunks would wait for kernel launches
GPU_PAIRS = 2**24
"""Number of all pairs from which lists are used on other devices: they read numbers from the device, dense does not."""


def takes_lists(product: Product, indices: tuple[Tensor, ...], relation: Relation, *, asked: bool) -> bool:
    """Whether a call with an index tuple is evaluated as lists; else it is dense.

    Each factor must allow pairs in any order without the absent ones, and rows of few pairs. With `asked` the user
    requested an engine without an n x m matrix.
    """
    pairs = relation.shape[0] * relation.shape[1]
    if torch.compiler.is_compiling() or product.draws:
        return False
    if relation.device.type != "cpu" and pairs < GPU_PAIRS and not asked:
        return False
    direct, scope = len(indices) == 3 and product.groups.takes_triplets, product.groups.scope
    listed = len(indices[1]) + len(indices[-1])
    if not fits_rows(listed, pairs) and (direct or pairs < SMALL or MOST * listed >= pairs) and not (direct and asked):
        return False  # the list would be larger than the matrix, or triplets slower
    if (direct and scope != "triplets") or (product.wants_columns and scope != "anchor_sign"):
        return False
    strips = product.groups.strips and (product.link is None or product.link.strips)
    return strips and swift(product.parts) and touched(product.parts) is None


def fits_rows(pairs: int, all_pairs: int) -> bool:
    """Whether `pairs` of all pairs are cheaper to score one by one than by a matrix product."""
    return (2 * DEAR if all_pairs < SMALL else DEAR) * pairs <= all_pairs


def listed_value(
    product: Product,
    x: Tensor,
    y: Tensor | None,
    relation: Relation,
    indices: tuple[Tensor, ...],
    *,
    once: bool,
    apart: str | None = None,
) -> Tensor:
    """The loss of the pairs or triplets that a tuple lists.

    Rows x and references y are raw; the relation determines which rows have pairs before mining. With `once` a pair
    counts once even if it is listed several times; `apart` is the name of a loss that refuses pairs listed both as
    positive and as negative, or None.
    """
    direct = len(indices) == 3 and product.groups.takes_triplets
    by_rows = fits_rows(len(indices[1]) + len(indices[-1]), relation.shape[0] * relation.shape[1])
    scores = ListedScores.of(product.similarity, x, y, by_rows=by_rows)
    more: Any = {"relation": relation, "similarity": scores.similarity, "rows": scores.rows, "cols": scores.cols}
    more |= {"strip": True, "mined": True}
    if direct:
        none = (torch.zeros(0, dtype=torch.bool, device=relation.device),) * 4
        more |= {"triplets": (indices[0], indices[1], indices[2])}
        return dense_value(product, ListedTriplets(cast(Tensor, scores), *none, **more))
    listing = listed_pairs(indices, relation.shape, once=once)
    if apart is not None:
        check_apart(apart, listing.positive, listing.negative)
    entries, columns = scores[listing.rows, listing.cols], listing.padded(listing.cols)
    sides = (x if x.dtype == torch.bool else x.to(entries.dtype) for x in (listing.positive, listing.negative))
    positive, negative = (listing.padded(x) for x in sides)
    found = ListedPairs(listing.padded(entries), positive, negative, *valid_rows(relation), **more, columns=columns)
    kept = keep(product, found)
    return _with_columns(product, kept, listing) if product.wants_columns else dense_value(product, kept)


def valid_rows(relation: Relation) -> tuple[Tensor, Tensor]:
    """Which rows [n] have a positive and which have a negative pair by the relation; without an n x m matrix."""
    layout = relation.layout()
    if layout is None or layout.itself not in (NOWHERE, POSITION):
        positive, negative = relation.counts()
    else:
        positive, negative = (layout.ranked().count(bit, own=layout.itself == POSITION) for bit in (POSITIVE, NEGATIVE))
    return positive > 0, negative > 0


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True, eq=False)
class ListedPairs(ScoredPairs):
    """Listed pairs as a matrix [n, w]; each row has columns of its own."""

    columns: Tensor = field(kw_only=True)  # [n, w] the reference of each pair; 0 in empty places

    def scores_from(self, place: Tensor) -> Tensor:
        """Scores [n, p, w] of the references `place` [n, p] of each anchor with all references listed for it."""
        there = self.cols[self.columns]
        here = self.cols[self.columns.gather(1, place)]
        if self.similarity.shifts:  # take the first reference as origin: rounding would lose distances of near ones
            here, there = here - there[:, :1], there - there[:, :1]
        dots = here @ there.transpose(1, 2)
        if not self.similarity.norms:
            return dots
        rows, cols = ((z * z).sum(dim=2) for z in (here, there))
        return self.similarity.finish(dots, rows[:, :, None], cols[:, None, :])


def _with_columns(product: Product, pairs: ScoredPairs, listing: Listing) -> Tensor:
    """The loss of a link that also reads the negative value of each listed reference, over the anchors that list it."""
    positive, wide = halves(product, pairs)
    order = listing.cols.argsort(stable=True)
    names = listing.cols.index_select(0, order)
    place, width = spread(names, pairs.relation.shape[1])
    member = listing.place.index_select(0, order)

    def turned(x: Tensor) -> Tensor:
        """Transpose listed entries [n, w] to [m, width], with one row per reference."""
        flat = x.new_zeros(pairs.relation.shape[1] * width)
        return flat.index_copy(0, place, x.reshape(-1).index_select(0, member)).reshape(-1, width)

    down = Problem(wide.over, turned(wide.losses), turned(wide.measure), (pairs.relation.shape[1], width))
    columns = listing.padded(down.value().index_select(0, listing.cols))
    has_columns = listing.padded(present(down.measure).index_select(0, listing.cols))
    sides = sides_of(pairs, positive, (positive.value(), wide.value(), columns), has_columns)
    parts = [reduce(terms, product.reduction) for terms in product.joined(sides)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


# ---------------------------------------------------------------- triplets


@dataclass(frozen=True, eq=False)
class ListedTriplets(ScoredPairs):
    """An explicit list of triplets, in the form that `Rule.listed` takes."""

    def reference_scores(self) -> Tensor:
        """Scores among the references, computed when needed."""
        if self.relation.square:
            return self.scores
        return cast(Tensor, ListedScores(self.similarity, self.cols, self.cols))


# ---------------------------------------------------------------- scores


@dataclass(frozen=True, eq=False)
class ListedScores:
    """A lazy matrix of scores [n, m]: `scores[rows, cols]` computes only these entries."""

    similarity: Similarity  # computes the scores
    rows: Tensor  # [n, d] prepared queries
    cols: Tensor  # [m, d] prepared references
    by_rows: bool = True  # compute each entry from its own two rows, else take it from the matrix product

    @classmethod
    def of(cls, similarity: Similarity, x: Tensor, y: Tensor | None, *, by_rows: bool) -> "ListedScores":
        """The scores of raw rows x [n, d] and references y [m, d]."""
        if not by_rows or (similarity.shifts and similarity.form is None):
            return cls(similarity, *similarity.prepared(x, y), by_rows)
        rows = similarity.prepare(x)  # differences of rows need no common origin
        return cls(similarity, rows, rows if y is None else similarity.prepare(y))

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        """Scores [t] of rows and columns given by their indices [t]."""
        (a, j), form = at, self.similarity.form
        found: Tensor
        if self.by_rows:
            apart = form in ("distance", "squared")
            found = _PairProducts.apply(self.rows, self.cols, a, j, apart)  # type: ignore[no-untyped-call]
            if apart:
                return -root(found) if form == "distance" else -found
        else:
            found = self._product.index_select(0, a * len(self.cols) + j)
        if not self.similarity.norms:
            return found
        rows, refs = ((z * z).sum(dim=1) for z in (self.rows, self.cols))
        return self.similarity.finish(found, rows.index_select(0, a), refs.index_select(0, j))

    @cached_property
    def _product(self) -> Tensor:
        return (self.rows @ self.cols.T).reshape(-1)


class _PairProducts(torch.autograd.Function):
    """Products ⟨x[a], y[j]⟩, or with `apart` squared distances, [t], a few pairs at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, j: Tensor, apart: bool) -> Tensor:
        ctx.save_for_backward(x, y, a, j)
        ctx.apart = apart
        both = ((x.index_select(0, a), y.index_select(0, j)) for a, j in _chunks(x.shape[1], a, j))
        found = [((r - c).square_() if apart else r * c).sum(dim=1) for r, c in both]
        return found[0] if len(found) == 1 else torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Any, ...]:
        x, y, a, j = ctx.saved_tensors
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        slope = grad_output[0][:, None] * (2 if ctx.apart else 1)
        for here, there, by in _chunks(x.shape[1], a, j, slope):
            r, c = x.index_select(0, here), y.index_select(0, there)
            dr, dc = ((r - c) * by,) * 2 if ctx.apart else (c * by, r * by)
            dx.index_add_(0, here, dr)
            dy.index_add_(0, there, dc, alpha=-1 if ctx.apart else 1)
        return dx, dy, None, None, None


def _chunks(d: int, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split lists [t] into parts whose rows [t, d] have about CHUNK entries."""
    chunk = CHUNK if lists[0].device.type == "cpu" else CHUNK_ON_GPU
    return zip(*(torch.split(x, max(1, chunk // max(1, d))) for x in lists), strict=True)

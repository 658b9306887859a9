"""Losses of an index tuple: the listed pairs are scored and solved as lists, so that no n x m matrix is made.

The distinct pairs of the tuple are sorted by anchor into a narrow matrix [n, w], where w is the largest number of pairs
of an anchor; empty places have measure 0. Groups, sets, links and reductions treat it like the matrix of all pairs
(custom parts without `swift` get that one, from the dense engine). An explicit list of triplets is scored triplet by
triplet.

A tuple that lists a large part of all pairs would be larger than the matrix, and goes to the dense engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from nearfar._utils.shortcuts import swift, touched
from nearfar._utils.tensors import over
from nearfar.engines.dense import dense_value, keep
from nearfar.engines.listed_scores import ListedScores, cheapest
from nearfar.groups._groupings import Problem, Product, halves, reduce, sides_of, tally
from nearfar.miners import ScoredPairs, present
from nearfar.relations.index_tuples import Listing, check_apart, listed_pairs, spread
from nearfar.relations.relation import Relation

__all__ = ["listed_value", "takes_lists", "valid_rows"]

WASTE, LARGE = 4, 2**18
"""Matrices with more than LARGE places and more than WASTE places per pair are split by pairs per anchor."""
GPU_PAIRS = 2**24
"""Number of all pairs from which lists are used on other devices: they read numbers from the device, dense does not."""


def takes_lists(product: Product, indices: tuple[Tensor, ...], relation: Relation, *, asked: bool) -> bool:
    """Whether a call with an index tuple is evaluated as lists; else it is dense.

    Args:
        product: the factors of the loss. Each must allow pairs in any order without the absent ones, and rows of
            few pairs.
        indices: the tuple.
        relation: of the rows and columns.
        asked: the user requested an engine without an n x m matrix.
    """
    pairs = relation.shape[0] * relation.shape[1]
    if torch.compiler.is_compiling() or product.draws:
        return False
    if relation.device.type != "cpu" and pairs < GPU_PAIRS and not asked:
        return False
    direct = len(indices) == 3 and product.groups.takes_triplets
    if not direct and cheapest(len(indices[1]) + len(indices[-1]), pairs) == "matrix":
        return False  # the list would be larger than the matrix
    scope = product.groups.scope
    if (direct and scope != "triplets") or (product.wants_columns and scope != "anchor_sign"):
        return False
    strips = product.groups.strips and (product.link is None or product.link.strips)
    return strips and swift(product.parts) and touched(product.parts) is None


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

    Args:
        product: the factors of the loss.
        x: [n, d] raw rows.
        y: [m, d] raw references; None for the rows themselves.
        relation: determines which rows have pairs before mining.
        indices: the tuple.
        once: count a pair once even if it is listed several times.
        apart: name of a loss that refuses pairs listed both as positive and as negative, or None.
    """
    if len(indices) == 3 and product.groups.takes_triplets:
        how = cheapest(2 * len(indices[0]), relation.shape[0] * relation.shape[1], triplets=True)
        scores = ListedScores.of(product.similarity, x, y, how)
        return dense_value(product, _triplets(scores, relation, (indices[0], indices[1], indices[2])))
    listing = listed_pairs(indices, relation.shape, once=once)
    if apart is not None:
        check_apart(apart, listing.positive, listing.negative)
    how = cheapest(len(indices[1]) + len(indices[-1]), relation.shape[0] * relation.shape[1])
    scores = ListedScores.of(product.similarity, x, y, how)
    whole = _narrow(scores, relation, listing)
    if product.wants_columns:
        return _with_columns(product, keep(product, whole()), listing)
    if listing.shape[0] * listing.shape[1] > max(LARGE, WASTE * (len(listing.rows) + listing.shape[0])):
        value = _by_size(product, listing, whole)
        if value is not None:
            return value
    return dense_value(product, keep(product, whole()))


def valid_rows(relation: Relation) -> tuple[Tensor, Tensor]:
    """Which rows [n] have a positive and which have a negative pair by the relation; without an n x m matrix."""
    plain = relation.plain_labels()
    if plain is None:
        positive, negative = relation.counts()
        return positive > 0, negative > 0
    rows, cols = plain
    if relation.square:
        _, which, counts = torch.unique(rows, return_inverse=True, return_counts=True)
        equal = counts.index_select(0, which)
        return equal > 1, equal < len(rows)
    ranked = cols.sort().values
    equal = torch.searchsorted(ranked, rows, right=True) - torch.searchsorted(ranked, rows)
    itself = relation.reference_starts_with_batch
    positive = equal - (rows == cols[: len(rows)]).to(equal.dtype) if itself else equal
    return positive > 0, positive < len(cols) - int(itself)


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True, eq=False)
class ListedPairs(ScoredPairs):
    """Listed pairs as a matrix [n, w]; each row has columns of its own.

    Args:
        columns: [n, w] the reference of each pair; 0 in empty places.
    """

    columns: Tensor = field(kw_only=True)

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


Narrow = Callable[..., ListedPairs]


def _narrow(scores: ListedScores, relation: Relation, listing: Listing) -> Narrow:
    """A function that returns the scores and measures [n, w] of all listed pairs, or of some anchors."""
    dtype, had = scores.rows.dtype, valid_rows(relation)
    entries = scores[listing.rows, listing.cols]

    def pairs(part: Part | None = None) -> ListedPairs:
        here, found, rows, (had_positive, had_negative) = listing, entries, scores.rows, had
        if part is not None:
            here, found = part.listing, entries.index_select(0, part.members)
            rows, had_positive, had_negative = (z.index_select(0, part.anchors) for z in (rows, *had))
        positive, negative = (
            here.padded(z if z.dtype == torch.bool else z.to(dtype)) for z in (here.positive, here.negative)
        )
        return ListedPairs(
            here.padded(found),
            positive,
            negative,
            had_positive,
            had_negative,
            relation,
            scores.similarity,
            rows,
            scores.cols,
            strip=True,
            mined=True,
            columns=here.padded(here.cols),
        )

    return pairs


@dataclass(frozen=True, eq=False)
class Part:
    """Anchors with about equally many listed pairs.

    Args:
        anchors: [b] their row indices.
        members: [v] indices of their listed pairs.
        listing: these pairs, with anchors renumbered from 0 to b - 1.
    """

    anchors: Tensor
    members: Tensor
    listing: Listing


def _parts(listing: Listing) -> Iterator[Part]:
    """Group anchors by up to 1, 4, 16, ... pairs, so that at most three in four places of a matrix are empty."""
    counts = torch.bincount(listing.rows, minlength=listing.shape[0])
    size = (counts.clamp_min(1).double().log2() / 2).ceil().long()
    for each in sorted(set(size.tolist())):
        (anchors,) = torch.nonzero(size == each, as_tuple=True)
        (members,) = torch.nonzero(size.index_select(0, listing.rows) == each, as_tuple=True)
        rows = torch.searchsorted(anchors, listing.rows.index_select(0, members))
        place, width = spread(rows, len(anchors))
        cols, positive, negative = (
            z.index_select(0, members) for z in (listing.cols, listing.positive, listing.negative)
        )
        yield Part(anchors, members, Listing(rows, cols, positive, negative, place, (len(anchors), width)))


def _by_size(product: Product, listing: Listing, whole: Narrow) -> Tensor | None:
    """Compute anchors of similar size together, then merge; None if their groups cannot be merged."""
    groups, parts = product.groups, list(_parts(listing))
    pairs = [keep(product, whole(part)) for part in parts]
    problems = [groups.split(product, each) for each in pairs]
    if not groups.per_anchor:
        if any(problem.cap is not None for problem in problems[0]):
            return None  # the limit depends on the whole batch
        joined = tuple(_joined(each) for each in zip(*problems, strict=True))
        return groups.merge(tuple(problem.value() for problem in joined), joined)
    terms = (
        groups.terms(product, each, solved, tuple(problem.value() for problem in solved))
        for each, solved in zip(pairs, problems, strict=True)
    )
    values = list[Tensor]()
    for same in zip(*terms, strict=True):
        tops, bottoms = zip(*(tally(term, product.reduction) for term in same), strict=True)
        if product.reduction == "none":
            order = torch.cat([part.anchors for part in parts]).argsort()
            values.append(over(torch.cat(tops), torch.cat(bottoms)).index_select(0, order))
        else:
            bottom = torch.stack(bottoms)
            values.append(over(torch.stack(tops).sum(), bottom[0] if product.reduction == "sum" else bottom.sum()))
    return values[0] if len(values) == 1 else torch.stack(values).sum(dim=0)


def _joined(problems: tuple[Problem, ...]) -> Problem:
    """Concatenate the members of several problems of one group."""
    losses, measure = (torch.cat(z, dim=1) for z in zip(*((p.losses, p.measure) for p in problems), strict=True))
    return Problem(problems[0].over, losses, measure, tuple(losses.shape), problems[0].orders)


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
    """An explicit list of triplets; scores are computed when needed, pairs never."""

    def reference_scores(self) -> Tensor:
        """Lazy scores among the references."""
        return cast(Tensor, cast(ListedScores, self.scores).of_references())


def _triplets(scores: ListedScores, relation: Relation, triplets: tuple[Tensor, Tensor, Tensor]) -> ListedTriplets:
    """The triplets in the form that `Rule.listed` takes."""
    none = torch.zeros(0, dtype=torch.bool, device=relation.device)
    return ListedTriplets(
        cast(Tensor, scores),
        none,
        none,
        none,
        none,
        relation,
        scores.similarity,
        scores.rows,
        scores.cols,
        triplets,
        strip=True,
        mined=True,
    )

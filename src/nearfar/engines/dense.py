"""The dense engine: the whole score matrix and autograd; the reference for all other engines.

No step synchronizes with the device, branches on data or has a data-dependent shape, so that `torch.compile` gives one
graph. Double backward works.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import readable
from nearfar.engines.distances import Raw, distance_rows
from nearfar.groups._groupings import Product
from nearfar.miners import ScoredPairs, present
from nearfar.relations.index_tuples import indexed
from nearfar.relations.relation import Relation, Tile

__all__ = ["dense_pairs", "dense_value", "keep", "score"]


def dense_pairs(
    product: Product,
    rows: Tensor,
    cols: Tensor,
    relation: Relation,
    indices: tuple[Tensor, ...] | None,
    *,
    once: bool = False,
    raw: Raw | None = None,
    ranks: ProcessGroup | None = None,
) -> ScoredPairs:
    """Score all pairs [n, m], and give the measures of the pairs that count after mining.

    Args:
        product: the factors of the loss.
        rows: [n, d] prepared queries.
        cols: [m, d] prepared references.
        relation: which pairs are positive and which are negative.
        indices: explicit index tuple of a miner, or None.
        once: count a pair once even if `indices` lists it several times.
        raw: rows and references before preparation. Distances of near rows are computed from them in float64 (see
            distances.py), as are all pairs then; if that is not known in advance, the scores are rounded to float32.
        ranks: processes that hold the same pairs.
    """
    dtype, look = rows.dtype, readable(rows)
    if raw is not None and product.similarity.shifts:
        rows, cols = distance_rows(product.similarity, relation, raw, (rows, cols), look=look, ranks=ranks)
        dtype = rows.dtype if look else dtype
    pairs = score(product, rows, cols, relation, relation.dense(), dtype=dtype)
    if indices is not None:
        positive, negative = (
            x if x.dtype == torch.bool else x.to(dtype) for x in indexed(indices, relation.shape, once=once)
        )
        direct = len(indices) == 3 and product.groups.takes_triplets
        triplets = (indices[0], indices[1], indices[2]) if direct else None
        pairs = replace(pairs, positive=positive, negative=negative, triplets=triplets, mined=True)
    return keep(product, pairs)


def score(
    product: Product,
    rows: Tensor,
    cols: Tensor,
    relation: Relation,
    tile: Tile,
    *,
    strip: bool = False,
    dtype: torch.dtype | None = None,
) -> ScoredPairs:
    """Scores [t, m] of rows [t, d] and columns [m, d], and all their pairs by the tile of the relation."""
    scores = product.similarity.scores(rows, cols)
    scores = scores if dtype is None else scores.to(dtype)
    positive, negative = _measures(tile, scores)
    had, similarity = (present(positive), present(negative)), product.similarity
    return ScoredPairs(scores, positive, negative, *had, relation, similarity, rows, cols, strip=strip)


def _measures(tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
    """Base measures of the positive and negative pairs: masks, or weights in the dtype of `like`."""
    if tile.weight is None:
        return tile.same & tile.valid, ~tile.same if tile.own_only else ~tile.same & tile.valid
    return tile.positive.to(like.dtype), tile.negative.to(like.dtype)


def keep(product: Product, pairs: ScoredPairs) -> ScoredPairs:
    """Apply the miner of the loss; pairs with NaN scores are always kept."""
    if product.miner is None:
        return pairs
    with torch.no_grad():
        found: ScoredPairs = product.miner(pairs)
        # comparisons with NaN are false: a miner would drop the pair, but NaN must propagate
        broken = torch.isnan(pairs.scores)
        positive, negative = (
            torch.where(broken, pairs.positive, found.positive),
            torch.where(broken, pairs.negative, found.negative),
        )
    return replace(pairs, positive=positive, negative=negative, mined=True)


def dense_value(product: Product, pairs: ScoredPairs) -> Tensor:
    """The loss of scored pairs: split them into problems, solve each, join the values."""
    problems = product.groups.split(product, pairs)
    return product.groups.join(product, pairs, problems, tuple(problem.value() for problem in problems))

"""The dense engine: every score at once, plain autograd. The reference for all others.

No step reads data back to the host, branches on it or has a shape that depends on it, so it compiles into one graph
and never stalls a GPU. Double backward works.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nearfar.groups.groupings import Product
from nearfar.miners import ScoredPairs, present
from nearfar.relations.index_tuples import indexed
from nearfar.relations.relation import Relation, Tile

__all__ = ["dense_pairs", "dense_value", "kept", "measures"]


def dense_pairs(
    product: Product,
    rows: Tensor,
    cols: Tensor,
    relation: Relation,
    indices: tuple[Tensor, ...] | None,
    *,
    once: bool = False,
) -> ScoredPairs:
    """All scores [n, m] of prepared rows [n, d] and cols [m, d], with the pairs that count after mining.

    `once`: a pair that `indices` list several times counts once.
    """
    positive, negative = measures(relation.dense(), rows)
    triplets = None
    had_positive, had_negative = present(positive), present(negative)
    if indices is not None:
        listed_positive, listed_negative = indexed(indices, relation.shape, once=once)
        positive, negative = listed_positive.to(rows.dtype), listed_negative.to(rows.dtype)
        if len(indices) == 3 and product.groups.takes_triplets:
            triplets = (indices[0], indices[1], indices[2])
    scores = product.similarity.scores(rows, cols)
    return kept(
        product,
        ScoredPairs(
            scores,
            positive,
            negative,
            had_positive,
            had_negative,
            relation,
            product.similarity,
            rows,
            cols,
            triplets,
            mined=indices is not None,
        ),
    )


def measures(tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
    """The base measures of the positive and of the negative pairs; weights come in the type of the embeddings."""
    positive, negative = tile.positive, tile.negative
    return (positive, negative) if positive.dtype == torch.bool else (positive.to(like.dtype), negative.to(like.dtype))


def kept(product: Product, pairs: ScoredPairs) -> ScoredPairs:
    """What the product's miner keeps of these pairs."""
    if product.miner is None:
        return pairs
    with torch.no_grad():
        kept: ScoredPairs = product.miner(pairs)
        # every comparison with NaN is false, so a miner drops it; it must stay in and show
        broken = torch.isnan(pairs.scores)
        positive, negative = (
            torch.where(broken, pairs.positive, kept.positive),
            torch.where(broken, pairs.negative, kept.negative),
        )
    return replace(pairs, positive=positive, negative=negative, mined=True)


def dense_value(product: Product, pairs: ScoredPairs) -> Tensor:
    """The loss of these pairs: split into problems, solve each, join."""
    problems = product.groups.split(product, pairs)
    return product.groups.join(product, pairs, problems, tuple(problem.value() for problem in problems))

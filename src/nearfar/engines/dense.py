"""The dense engine: every score at once, plain autograd. The reference for all others.

No step reads data back to the host, branches on it or has a shape that depends on it, so it compiles into one graph
and never stalls a GPU. Double backward works.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nearfar.groups import Product
from nearfar.indices import indexed
from nearfar.pairing import Pairs, present
from nearfar.relations import Relation, Tile


def dense_pairs(
    product: Product,
    rows: Tensor,
    cols: Tensor,
    relation: Relation,
    indices: tuple[Tensor, ...] | None,
    *,
    once: bool = False,
) -> Pairs:
    """All scores [n, m] of prepared rows [n, d] and cols [m, d], with the pairs that count after mining.

    `once`: a pair that `indices` list several times counts once.
    """
    alike, unlike = measures(relation.dense(), rows)
    triplets = None
    had_alike, had_unlike = present(alike), present(unlike)
    if indices is not None:
        listed_alike, listed_unlike = indexed(indices, relation.shape, once=once)
        alike, unlike = listed_alike.to(rows.dtype), listed_unlike.to(rows.dtype)
        if len(indices) == 3 and product.groups.takes_triplets:
            triplets = (indices[0], indices[1], indices[2])
    scores = product.similarity.scores(rows, cols)
    return kept(
        product,
        Pairs(
            scores,
            alike,
            unlike,
            had_alike,
            had_unlike,
            relation,
            product.similarity,
            rows,
            cols,
            triplets,
            mined=indices is not None,
        ),
    )


def measures(tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
    """The base measures of the alike and of the unlike pairs; weights come in the type of the embeddings."""
    alike, unlike = tile.alike, tile.unlike
    return (alike, unlike) if alike.dtype == torch.bool else (alike.to(like.dtype), unlike.to(like.dtype))


def kept(product: Product, pairs: Pairs) -> Pairs:
    """What the product's miner keeps of these pairs."""
    if product.filter is None:
        return pairs
    with torch.no_grad():
        kept: Pairs = product.filter(pairs)
        # every comparison with NaN is false, so a filter drops it; it must stay in and show
        broken = torch.isnan(pairs.scores)
        alike, unlike = torch.where(broken, pairs.alike, kept.alike), torch.where(broken, pairs.unlike, kept.unlike)
    return replace(pairs, alike=alike, unlike=unlike, mined=True)


def dense_value(product: Product, pairs: Pairs) -> Tensor:
    """The loss of these pairs: split into problems, solve each, join."""
    problems = product.groups.split(product, pairs)
    return product.groups.join(product, pairs, problems, tuple(problem.value() for problem in problems))

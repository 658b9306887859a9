"""Relations by double loops, and checks of the masks and counts of a relation against them."""

from __future__ import annotations

import numpy as np
import torch


def looped(positive, n, m, *, ids=None, ref_ids=None, square=False, counts=lambda i, j: True):
    """(same, valid) by a double loop over a rule positive(i, j)."""
    same, valid = np.zeros((n, m), dtype=bool), np.zeros((n, m), dtype=bool)
    for i in range(n):
        for j in range(m):
            itself = i == j if square else ids is not None and ids[i] == ref_ids[j]
            same[i, j], valid[i, j] = positive(i, j), counts(i, j) and not itself
    return same, valid


def check(relation, same, valid, weight=None):
    n, m = same.shape
    tile = relation.dense()
    assert relation.shape == (n, m)
    np.testing.assert_array_equal(tile.valid.numpy(), valid)
    np.testing.assert_array_equal(tile.same.numpy()[valid], same[valid])
    one = np.ones((n, m)) if weight is None else weight
    assert (tile.weight is None) == (weight is None)
    assert tile.positive.dtype == (torch.bool if weight is None else torch.float64)
    np.testing.assert_array_equal(tile.positive.double().numpy(), one * (same & valid))
    np.testing.assert_array_equal(tile.negative.double().numpy(), one * (~same & valid))
    positives, negatives = relation.counts()
    np.testing.assert_allclose(positives.double().numpy(), (one * (same & valid)).sum(axis=1))
    np.testing.assert_allclose(negatives.double().numpy(), (one * (~same & valid)).sum(axis=1))
    assert relation.width(tile.positive) == ((one * (same & valid) > 0).sum(axis=1).max() if n * m else m)
    check_tiles(relation)


def check_tiles(relation, sizes=((1, 1), (3, 5), (4, 100), (7, 2))):
    n, m = relation.shape
    whole = relation.dense()
    for tall, wide in sizes:
        for i in range(0, n, tall):
            for j in range(0, m, wide):
                tile = relation.tile(slice(i, i + tall), slice(j, j + wide))
                for name in ("same", "valid", "weight", "positive", "negative"):
                    part, all_of_it = getattr(tile, name), getattr(whole, name)
                    if all_of_it is None:
                        assert part is None
                    else:
                        assert torch.equal(part, all_of_it[i : i + tall, j : j + wide])

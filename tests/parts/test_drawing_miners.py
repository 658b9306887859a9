"""A miner that samples draws the same pairs on every engine from the same seed."""

from __future__ import annotations

import pytest
import torch
from engine_cases import measured, on
from ways import takes_operators

import nearfar as nf
from tests.relations.test_layout import cases

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.sets
anyway = pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
Y = torch.tensor([0, 2, 1, 0, 3, 1, 2, 0, 4, 1, 0, 2])
MAKES = {
    "margin": lambda miner: L.Margin(miner=miner),
    "contrastive": lambda miner: L.Contrastive(miner=miner),
    "multi-similarity": lambda miner: L.MultiSimilarity(miner=miner),
    "softmax": lambda miner: L.SupCon(miner=miner),
    "top-k": lambda miner: L.DroTopKPN(k=4, miner=miner),
    "kl": lambda miner: L.DroKL(miner=miner),
    "anchor": lambda miner: nf.RobustLoss(pair=P.Logistic(), over=S.Worst(), groups="anchor", miner=miner),
    "squared": lambda miner: L.Contrastive(miner=miner, similarity=nf.similarity.NegSquaredEuclidean()),
}


def rows(count, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(make, engine, x, labels, tile=5, **more):
    torch.manual_seed(5)
    loss = on(make(M.DistanceWeighted(0.3, 1.9)).double(), engine, tile)
    return *measured(loss, x, labels, **more), torch.rand(3)  # the generator too


def check_drawn(make, x, labels, tile=5, **more):
    for a, b in zip(*(drawn(make, engine, x, labels, tile, **more) for engine in ("dense", "tiled")), strict=True):
        torch.testing.assert_close(b, a, atol=1e-10, rtol=1e-10)


@anyway
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", cases())
def test_every_engine_draws_the_same(make, name):
    relation = cases()[name]
    n, m = relation.shape
    check_drawn(MAKES[make], rows(n), relation, **({} if relation.square else {"ref_emb": rows(m, 1)}))


@pytest.mark.parametrize("make", MAKES)
def test_a_miner_that_draws_takes_the_fast_path(make):
    relation = nf.Relation.from_labels(Y)
    assert takes_operators(MAKES[make](M.DistanceWeighted()).product, relation)
    assert not takes_operators(MAKES[make](M.DistanceWeighted(sample=False)).product, relation)


@anyway
@pytest.mark.parametrize("x", [torch.ones(12, 6).double(), torch.eye(6).double()[Y]])
def test_rows_with_nothing_to_draw_equal_dense(x):
    check_drawn(MAKES["margin"], x, Y)


def test_large_classes_and_many_rows_equal_dense():
    for classes in (2, 60):
        check_drawn(MAKES["margin"], rows(200), torch.arange(200) % classes, tile=None)


def test_a_drawing_miner_of_ones_own_is_not_taken_for_another():
    class Mine(M.DistanceWeighted):
        def probabilities(self, pairs):
            return super().probabilities(pairs).flip(1) * pairs.negative

    assert not takes_operators(L.Margin(miner=Mine()).product, nf.Relation.from_labels(Y))

"""A miner's window of scores selects the same pairs as its masks."""

from __future__ import annotations

import pytest
import torch
from engine_cases import MINERS, measured, on

import nearfar as nf
from nearfar._utils.process_group import ALONE
from nearfar.engines.operator_call import OperatorCall
from nearfar.engines.rows import RefusalError
from nearfar.engines.strips import Strips
from nearfar.miners import ScoredPairs, Window, present
from nearfar.similarity import Cosine

Y = torch.tensor([3, 0, 1, 0, 2, 1, 0, 1, 1, 4, 2])


def scored(seed, measure=None):
    generator = torch.Generator().manual_seed(seed)
    x = Cosine().prepare(torch.randn(len(Y), 5, generator=generator, dtype=torch.float64))
    relation = nf.Relation.from_labels(Y, weights=measure)
    tile = relation.dense()
    pairs = ScoredPairs(
        x @ x.T, tile.positive, tile.negative, present(tile.positive), present(tile.negative), relation, Cosine(), x, x
    )
    return relation, pairs


def windowed(miner, relation, pairs):
    """The measures [n, m] of positive and negative pairs that the operators keep by a miner's window."""
    product = nf.losses.Contrastive(miner=miner, similarity=pairs.similarity).product
    call = OperatorCall(product, relation.sorted_layout(), pairs.rows, pairs.rows, None, 4, ALONE)
    spec, _ = call.spec(product.negative, "negative", high=call.high)
    work, kept = Strips(spec, call.rows, None, None, None, call.floor, call.pairs), torch.zeros_like(pairs.scores)
    for tile in work.tiles():
        mine, theirs = work.keep(work.scores(tile), tile)
        kept[tile.rows, tile.cols] = mine
        if tile.mirrored:
            kept[tile.cols, tile.rows] = theirs.T
    weight = torch.ones_like(kept) if work.weights is None else torch.outer(*work.weights)
    positive = torch.zeros_like(kept).scatter_add_(1, call.positives.place, call.measure.to(kept.dtype))
    back = call.at.argsort()
    return positive[back][:, back], (kept * weight)[back][:, back]


@pytest.mark.parametrize("name", [name for name in MINERS if name != "expected"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_keeps_what_the_miner_keeps(name, weighted, seed):
    miner = MINERS[name]
    relation, pairs = scored(seed, torch.arange(1.0, 12.0, dtype=torch.float64) / 4 if weighted else None)
    if weighted and miner.window(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1)).most is not None:
        with pytest.raises(RefusalError):  # hardest pairs are counted, not their weights: strips serve
            windowed(miner, relation, pairs)
        return
    wanted = miner(pairs)
    positive, negative = windowed(miner, relation, pairs)
    torch.testing.assert_close(positive, wanted.positive.double())
    torch.testing.assert_close(negative, wanted.negative.double())


def test_every_miner_but_the_one_without_an_interval_takes_the_operators():
    """Unless all pairs share a group, or columns are read: operators do not fold the pairs of these that are kept."""
    L = nf.losses
    for make in (L.MultiSimilarity, L.SupCon, L.Contrastive, L.Margin, L.LiftedStructure):
        for name, miner in MINERS.items():
            loss = make(miner=miner)
            refused = name == "expected" or loss.product.everyone or (loss.product.wants_columns and miner is not None)
            assert (loss.plan.refused is not None) == refused, (make, name)


@pytest.mark.parametrize("mining", ["all", "semihard", "balanced", "hard", "hardest"])
@pytest.mark.parametrize("kind", ["in general position", "repeated", "all equal"])
def test_triplets_of_every_mining_take_the_operators_and_equal_dense(mining, kind):
    """Repeated rows are equally hard, and are ranked by their order in the batch."""
    assert nf.losses.Triplet(mining=mining).plan.refused is None
    x = torch.randn(len(Y), 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    x = {"in general position": x, "repeated": torch.eye(5, dtype=torch.float64)[torch.arange(11) % 4],
         "all equal": torch.ones_like(x)}[kind]  # fmt: skip
    wanted = measured(on(nf.losses.Triplet(mining=mining, margin=0.3), "dense"), x, Y)
    for tile in (1, 4, 20):
        found = measured(on(nf.losses.Triplet(mining=mining, margin=0.3), "tiled", tile), x, Y)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


class Near(nf.miners.Miner, swift=True):
    """A miner of one's own: the positive pairs below a score, and all negative ones."""

    def forward(self, pairs):
        return pairs.keep(positive=pairs.scores < 0.2)

    def window(self, near, measure, top):
        return Window((measure > 0) & (near < 0.2))


@pytest.mark.parametrize("make", [nf.losses.MultiSimilarity, nf.losses.SupCon, nf.losses.Contrastive])
def test_a_window_of_ones_own_may_leave_all_negative_pairs(make):
    assert (make(miner=Near()).plan.refused is None) is (make is not nf.losses.SupCon)
    x = torch.randn(len(Y), 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    wanted, found = (measured(on(make(miner=Near()), engine, 4), x, Y) for engine in ("dense", "tiled"))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("make", [nf.losses.DroKL, nf.losses.DroKLGrouped])
def test_pairs_without_loss_are_left_out_of_the_weights_too(make):
    """Nine rows in a heap, whose negative pairs all cost, and three of little weight elsewhere, whose pairs do not."""
    y = torch.arange(12) % 3
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3:] = x[3:] / 10 + torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    relation = nf.Relation.from_labels(y, weights=torch.where(torch.arange(12) < 3, 0.05, 1.0).double())
    pair = nf.pairs.Hinge(1.0, 0.5)
    wanted, found = (
        measured(on(make(gamma=2.0, zero="drop", pair=pair), engine, 4), x, relation) for engine in ("dense", "tiled")
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)

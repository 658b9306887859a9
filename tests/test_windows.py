"""What a miner says as a window is what it does with masks, and what a set solves in place is what it says in words."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from test_tiled import MINERS, SETS, measured, on

import nearfar as nf
from nearfar.engines.runs import columns
from nearfar.engines.tiled import lean_way
from nearfar.engines.windows import fence
from nearfar.miners import ScoredPairs, Window, present
from nearfar.similarity import Cosine

SETS = SETS | {"kl-large": nf.sets.KL(1e3), "kl-large-zero_member": nf.sets.KL(1e3, zero_member=True)}
SETS = SETS | {"kl-large-drop": nf.sets.KL(1e3, zero="drop"), "mean-drop": nf.sets.Mean(zero="drop")}
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
    """The measures [n, m] of positive and negative pairs that a miner's window keeps."""
    layout = relation.layout()
    runs = columns(layout, torch.float64)
    narrow = runs.narrow(slice(0, len(Y)))
    scores = pairs.scores[:, runs.order].clone()
    near = scores.gather(1, narrow.place)
    given = narrow.positive if narrow.weight is None else narrow.weight
    ring, window = fence(miner, scores, near, narrow, given, torch.empty_like(scores))
    assert torch.equal(scores, pairs.scores[:, runs.order])  # written to, and restored
    back = runs.order.argsort()
    weight = torch.ones_like(scores) if runs.weights is None else torch.outer(*runs.weights)
    positive = torch.zeros_like(scores).scatter_add_(1, narrow.place, (given * window.positive).to(scores.dtype))
    return positive[:, back], ((ring == 0) * weight)[:, back]


@pytest.mark.parametrize("name", [name for name in MINERS if name != "expected"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_keeps_what_the_miner_keeps(name, weighted, seed):
    miner = MINERS[name]
    relation, pairs = scored(seed, torch.arange(1.0, 12.0, dtype=torch.float64) / 4 if weighted else None)
    if weighted and miner.window(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1)).most is not None:
        assert lean_way(nf.losses.MultiSimilarity(miner=miner).product, relation) is None
        return
    wanted = miner(pairs)
    positive, negative = windowed(miner, relation, pairs)
    torch.testing.assert_close(positive, wanted.positive.double())
    torch.testing.assert_close(negative, wanted.negative.double())


def test_every_miner_but_the_one_that_draws_takes_the_fast_path():
    relation, L = nf.Relation.from_labels(Y), nf.losses
    for make in (L.MultiSimilarity, L.SupCon, L.Contrastive, L.Margin, L.LiftedStructure):
        for name, miner in MINERS.items():
            way = lean_way(make(miner=miner).product, relation)
            assert (way is None) == (name == "expected"), (make, name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_set_solved_in_place_has_its_value_and_weights(name, weighted):
    """Groups of many, of one and of no members, with losses of both signs and a tie at the top."""
    over = SETS[name]
    generator = torch.Generator().manual_seed(3)
    l = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    l[1, 4] = l[1, 7] = 3.0
    there = torch.rand(7, 12, generator=generator) < 0.7
    there[1, [4, 7]], there[5], there[6] = True, False, torch.arange(12) == 2
    w = torch.rand(7, 12, generator=generator, dtype=torch.float64) + 0.2 if weighted else torch.ones_like(l)
    measure = there * w if weighted else there
    if name == "power":
        l = l.abs()
    wanted, weights = over.value(l, measure), over.weights(l, measure)
    raw = torch.where(there, l, -math.inf)
    solved = over.solved_(raw, measure.double().sum(dim=1), measure if weighted else None)
    torch.testing.assert_close(solved.value, wanted, atol=1e-10, rtol=1e-10)
    if solved.place is not None:
        raw = torch.zeros_like(raw).scatter_(1, solved.place[:, None], 1.0)
    found = raw * solved.scale[:, None]
    torch.testing.assert_close(torch.where(there, found, 0.0), weights, atol=1e-10, rtol=1e-10)


KINDS = {
    "positive": lambda l: l.relu(),
    "few values": lambda l: l.round(),
    "near": lambda l: 5 + 1e-3 * l,
    "far": lambda l: torch.exp(3 * l),
    "equal": lambda l: 0 * l + 0.3,
    "two heaps": lambda l: (l > 0.8) + 1e-3 * l,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", ["keep", "drop"])
def test_sets_solved_in_blocks_have_their_value_and_weights(kind, zero, monkeypatch):
    """Radii from the mean to the worst case, also more members asked for than there are, on losses of every shape."""
    monkeypatch.setattr("nearfar.sets.base.BLOCK", 64)
    s, generator = nf.sets, torch.Generator().manual_seed(5)
    sets = [
        of(k, zero=zero) for of, some in ((s.ChiSquare, (0.01, 1, 10, 1e4)), (s.KLBall, (0.01, 1, 5))) for k in some
    ]
    sets += [s.TopK(k, zero=zero) for k in (1, 2.5, 100)] + [s.TopK(fraction=k, zero=zero) for k in (0.1, 1.0)]
    l = KINDS[kind](torch.randn(9, 30, generator=generator, dtype=torch.float64))
    there = torch.rand(9, 30, generator=generator) < torch.linspace(0, 1, 9)[:, None]
    w = torch.where(there, torch.rand(9, 30, generator=generator, dtype=torch.float64) + 0.01, 0.0)
    for over, weights in product(sets, (None, w)):
        measure = there if weights is None else w
        raw = torch.where(there, l, -math.inf)
        solved = over.solve_(raw, measure.double().sum(dim=1), weights)
        torch.testing.assert_close(solved.value, over.value(l, measure), atol=1e-9, rtol=1e-9)
        found = torch.where(there, raw * solved.scale[:, None], 0.0)
        torch.testing.assert_close(found, over.weights(l, measure), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("mining", ["all", "semihard", "balanced", "hard", "hardest"])
@pytest.mark.parametrize("kind", ["in general position", "repeated", "all equal"])
def test_triplets_of_every_mining_take_a_fast_path_and_equal_dense(mining, kind):
    """Repeated rows are equally hard, and are ranked by their order in the batch."""
    relation = nf.Relation.from_labels(Y)
    assert lean_way(nf.losses.Triplet(mining=mining).product, relation) is not None
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
    assert lean_way(make(miner=Near()).product, nf.Relation.from_labels(Y)) is not None
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

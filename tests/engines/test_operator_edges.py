"""Batches at the borders of the operators: many positives, ties, weights, rows without negatives, few rows a rank."""

from __future__ import annotations

import pytest
import torch
from gathered_cases import Share, measured
from processes import together
from torch.testing import assert_close

import nearfar as nf
from nearfar.engines import auto, tiles
from nearfar.relations import layout

L, S, P, R = nf.losses, nf.sets, nf.pairs, nf.Relation
pytestmark = pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")


def rows(count, width=8, seed=0, dtype=torch.float64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def equal_dense(make, x, labels, close=1e-9, **more):
    """Value and gradient of strips and of "auto" are those of the dense engine."""
    found = {}
    for engine in ("dense", "tiled", "auto"):
        loss, leaf = make().to(x.dtype), x.clone().requires_grad_()
        loss.engine = engine
        value = loss(leaf, labels, **more)
        found[engine] = value.detach(), torch.autograd.grad(value.sum(), leaf)[0]
    for engine in ("tiled", "auto"):
        for a, b in zip(found[engine], found["dense"], strict=True):
            assert_close(a, b, atol=close, rtol=close)


def test_angular_with_more_pairs_than_are_listed(monkeypatch):
    monkeypatch.setattr(tiles, "LISTED", 0)
    equal_dense(L.Angular, rows(48), torch.arange(48) % 4)
    equal_dense(L.Angular, rows(6), torch.arange(6), ref_emb=rows(5, seed=1), ref_labels=torch.arange(6, 11))


def test_chi_square_where_the_hardest_pairs_tie():
    x = rows(2, 4, seed=10, dtype=torch.float32)[torch.arange(12) % 2]
    equal_dense(L.DroChiSquare, x, torch.arange(12) % 3, close=1e-4)
    x = torch.randint(-2, 3, (10, 3), generator=torch.Generator().manual_seed(2)).float()
    make = lambda: L.DroChiSquare(rho=1e3, similarity=nf.similarity.Dot())  # noqa: E731
    equal_dense(make, x, torch.arange(10) % 3, close=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_weights_of_rows_without_negatives(seed):
    weights = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    relation = R.from_labels(torch.zeros(7, dtype=torch.int64), weights=weights)
    equal_dense(lambda: L.DroKLGrouped(zero="keep"), rows(7), relation)
    assert not relation.layout().count(layout.NEGATIVE, weighed=True).any()


def test_weights_of_balanced_triplets_and_of_ties():
    relation = R.from_labels(torch.arange(12) % 3, weights=torch.linspace(0.5, 2, 12, dtype=torch.float64))
    equal_dense(lambda: L.Triplet(mining="balanced"), rows(12), relation)
    worst = lambda: nf.RobustLoss(pair=P.Hinge(), over=S.Worst(), groups="anchor")  # noqa: E731
    tied = R.from_labels(torch.zeros(4, dtype=torch.int64), weights=torch.arange(1.0, 5.0, dtype=torch.float64))
    equal_dense(worst, torch.eye(4, dtype=torch.float64), tied)


def test_top_k_of_negatives_beside_positives_that_are_too_many_to_gather(monkeypatch):
    monkeypatch.setattr("nearfar.engines.rows.GATHERED", (0, 0))
    over = (S.Mean(), S.TopK(5))
    equal_dense(lambda: nf.RobustLoss(pair=P.Hinge(), over=over, groups="sign"), rows(20), torch.arange(20) % 2)


def test_a_hook_that_is_removed_is_forgotten():
    loss, wanted = L.FastAP(engine="tiled"), L.FastAP()(rows(12), torch.arange(12) % 3)
    hook = loss.product.positive.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="cannot serve this loss"):
        loss(rows(12), torch.arange(12) % 3)
    hook.remove()
    assert_close(loss(rows(12), torch.arange(12) % 3), wanted)


RANKED = {
    "hard": lambda: L.Triplet(mining="hard"),
    "balanced": lambda: L.Triplet(mining="balanced"),
    "chi-square": lambda: L.DroChiSquare(rho=1.0),
    "angular": L.Angular,
}


def of_rank(share: Share):
    """A picture that comes twice, on one rank alone; and fewer rows that count than ranks."""
    found = {}
    for name, make in RANKED.items():
        x = rows(8)
        x[7] = x[6]
        loss = make().double()
        loss.engine = "tiled"
        found[name] = measured(share, loss, x, share(torch.arange(8) % 4))
    return found


def on_ranks(rank: int, world: int):
    return of_rank(Share(rank, world))


def test_ranks_refuse_together(tmp_path):
    """Otherwise one of them would wait for the others."""
    wanted = of_rank(Share())
    for rank in together("tests.engines.test_operator_edges", "on_ranks", 2, tmp_path):
        for name in RANKED:
            assert_close(rank[name]["value"], wanted[name]["value"])


def test_chi_square_where_no_negative_pair_has_a_loss():
    x = torch.tensor([[-0.26, 0.08, 0.31, -0.37], [-0.34, -0.16, -0.17, -0.03], [0.33, 0.07, 0.2, -0.03]]).double()
    over = S.ChiSquare(2.0, zero="drop")
    dot = nf.similarity.Dot()
    make = lambda: nf.RobustLoss(pair=P.CircleScore(scale=4.0), over=over, groups="sign", similarity=dot)  # noqa: E731
    equal_dense(make, x, torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("link", [nf.links.Add(apart=True), None])
def test_values_that_are_zero_stay_exactly_zero_under_nonzero(link):
    """Hinges that cost nothing, of rows at Euclidean distances; exponentials around another level leave 1e-17."""
    over, pair = S.KL(0.5), P.Hinge(0.03, -0.3)
    distance = nf.similarity.NegEuclidean()
    make = lambda: nf.RobustLoss(  # noqa: E731
        pair=pair, over=over, groups="anchor_sign", link=link, reduction="nonzero", similarity=distance
    )
    labels = torch.randint(0, 5, (14,), generator=torch.Generator().manual_seed(3))
    equal_dense(make, rows(14, 6, seed=3), labels)


def test_a_fraction_of_the_pairs_with_a_loss():
    over = S.TopK(fraction=0.27, zero="drop")
    equal_dense(lambda: nf.RobustLoss(pair=P.Hinge(0.9), over=over, groups="sign"), rows(20), torch.arange(20) % 4)


@pytest.mark.parametrize("tile", [3, 5, 7, 9, 11])
def test_the_hardest_pair_is_the_hardest_in_tiles_of_every_height(tile):
    """Products of other shapes round differently, and a miner compares scores with the largest of them."""
    for seed in range(8):
        x, labels = rows(20, 5, seed), torch.arange(20) % 6
        make = lambda: nf.RobustLoss(  # noqa: E731
            pair=P.Hinge(), over=S.KL(1.0), groups="anchor", miner=nf.miners.Hard(), similarity=nf.similarity.Dot()
        )
        tiled, dense = make(), make()
        tiled.engine, tiled.tile, dense.engine = "tiled", tile, "dense"
        assert_close(tiled(x, labels), dense(x, labels), atol=1e-10, rtol=1e-10)


def test_triplets_of_rows_without_a_gradient_teach_their_margin():
    """Only the threshold of the pair loss requires a gradient."""
    slopes = []
    for engine in ("dense", "tiled"):
        pair = P.Hinge(learn=True).double()
        loss = nf.RobustLoss(pair=pair, over=S.Mean(), groups="triplets", engine=engine)
        loss(rows(12), torch.arange(12) % 3).backward()
        slopes.append([x.grad for x in loss.parameters()])
    for a, b in zip(*slopes, strict=True):
        assert_close(a, b)


def test_triplets_with_representatives_take_the_operators(monkeypatch):
    """Only a rule that compares a positive with a negative needs scores that such a relation does not have."""
    monkeypatch.setattr("nearfar.engines.generic.evaluate", None)
    marks = torch.arange(12) < 4
    relation = R.from_labels(torch.arange(12) % 4, representatives=marks)
    equal_dense(lambda: L.Triplet(mining="all"), rows(12), relation)


def test_columns_of_references_need_no_generic_strips(monkeypatch):
    """The values of columns are folds of the transposed pairs."""

    def refuse(*given):
        raise AssertionError("the operators refused")

    monkeypatch.setattr(auto.generic, "evaluate", refuse)
    y = torch.arange(40) % 7
    more = {"ref_emb": rows(30, seed=1), "ref_labels": y[:30]}
    dense, tiled = (L.LiftedStructure(engine=engine)(rows(40), y, **more) for engine in ("dense", "tiled"))
    assert_close(tiled, dense)


@pytest.mark.parametrize("over", [S.Mean(), S.KL(0.3)])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_a_row_without_any_pair_teaches_nothing(over, engine):
    loss = nf.RobustLoss(pair=P.Hinge(), over=over, groups="anchor", engine=engine)
    with pytest.warns(nf.DegenerateBatchWarning, match="nothing to learn from"):
        assert loss(rows(1), torch.zeros(1, dtype=torch.int64)) == 0

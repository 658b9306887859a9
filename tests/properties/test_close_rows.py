"""Rows that lie close together: Euclidean losses keep their float32 gradient down to a spread of a millionth.

A distance made of products, |x|² + |y|² - 2⟨x, y⟩, loses what |x|² has in digits before |x - y|². `Similarity.prepared`
puts the origin among such rows first. The bounds are those of the table in docs/guides/precision.md.
"""

from __future__ import annotations

import pytest
import torch
from collapsed import EUCLIDEAN, crowd, off, slope, stated

import nearfar as nf
from nearfar.similarity import NegEuclidean, NegSquaredEuclidean, origin

SPREADS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
KINDS = (NegEuclidean, NegSquaredEuclidean)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("row", EUCLIDEAN, ids=lambda row: row.id)
def test_the_gradient_stays_that_of_float64(row, engine):
    bounds = stated()
    assert tuple(bounds) == SPREADS
    for spread, bound in bounds.items():
        rows, labels = crowd(spread)
        loss, exact = row.make(), row.make()
        loss.engine, exact.engine = engine, "dense"
        found, wanted = slope(loss, rows, labels, torch.float32), slope(exact, rows, labels, torch.float64)
        assert off(found, wanted) < bound, spread


def test_without_an_origin_among_the_rows_it_would_be_lost(monkeypatch):
    """What was seen: length and cosine of hard triplets' gradient, far from 1."""
    rows, labels = crowd(1e-4)
    loss = nf.losses.Triplet(mining="hard")
    wanted = slope(loss, rows, labels, torch.float64)
    assert off(slope(loss, rows, labels, torch.float32), wanted) < 1e-5
    monkeypatch.setattr(NegEuclidean, "shifts", False)
    assert off(slope(loss, rows, labels, torch.float32), wanted) > 0.3


RAW = [pytest.param(kind(normalize=unit), id=f"{kind.__name__}-{unit}") for kind in KINDS for unit in (True, False)]


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("similarity", RAW)
@pytest.mark.parametrize("spread", SPREADS)
def test_references_share_the_origin(spread, similarity, engine):
    """Rows and references of one crowd, some of the references far away; with raw rows too."""
    both, labels = crowd(spread, n=48)
    rows, others, labels, theirs = both[0::2], both[1::2].clone(), labels[0::2], labels[1::2]
    others[5::10] = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    loss = nf.losses.GeneralizedLifted(similarity=similarity, engine=engine)
    exact = nf.losses.GeneralizedLifted(similarity=similarity, engine="dense")
    leaf = others.clone().requires_grad_()
    wide = others.double().requires_grad_()
    (found,) = torch.autograd.grad(loss(rows, labels, ref_emb=leaf, ref_labels=theirs), leaf)
    (wanted,) = torch.autograd.grad(exact(rows.double(), labels, ref_emb=wide, ref_labels=theirs), wide)
    assert off(found.double(), wanted) < 2e-5
    more = {"ref_emb": others, "ref_labels": theirs}
    assert (
        off(slope(loss, rows, labels, torch.float32, **more), slope(exact, rows, labels, torch.float64, **more)) < 2e-5
    )


@pytest.mark.parametrize("similarity", RAW)
def test_distances_are_those_of_the_differences(similarity):
    rows, _ = crowd(1e-5)
    raw = rows.double() if not similarity.normalize else torch.nn.functional.normalize(rows.double(), dim=1)
    wanted = torch.cdist(raw, raw, compute_mode="donot_use_mm_for_euclid_dist")
    found = similarity.distance(similarity(rows, rows)).double()
    beside = ~torch.eye(len(rows), dtype=torch.bool)
    assert float(((found - wanted).abs() / wanted)[beside].max()) < 1e-4


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_equal_rows_are_at_no_distance_and_pull_nothing(engine):
    rows = crowd(0.0)[0][:1].repeat(12, 1).requires_grad_()
    value = nf.losses.Triplet(mining="hard", margin=0.25, engine=engine)(rows, torch.arange(12) // 3)
    (found,) = torch.autograd.grad(value, rows)
    assert value.item() == 0.25
    assert float(found.abs().max()) == 0.0


def test_a_row_that_is_not_finite_spoils_no_other():
    rows, _ = crowd(1e-4)
    clean = NegEuclidean()(rows[2:], rows[2:])
    rows[0], rows[1, 3] = float("nan"), float("inf")
    scores = NegEuclidean()(rows, rows)
    assert torch.isnan(scores[:2]).all()
    assert torch.isnan(scores[2:, :2]).all()
    torch.testing.assert_close(scores[2:, 2:], clean, rtol=1e-4, atol=1e-10)


def test_rows_that_fill_the_space_keep_their_origin():
    """Nothing to gain there, and scores that are exact (ties on a grid) must stay so."""
    rng = torch.Generator().manual_seed(0)
    for rows in (torch.randn(30, 4, generator=rng), torch.eye(5).repeat(4, 1), torch.zeros(3, 2)):
        assert not origin(rows.double()).any()
    rows = crowd(1e-3)[0].double()
    assert (rows == origin(rows)).all(dim=1).any()


def test_a_similarity_of_ones_own_is_not_shifted():
    class Grown(NegEuclidean):
        def finish(self, dot, rows, cols):
            return dot - rows

    rows, _ = crowd(1e-3)
    assert not Grown().shifts
    found = Grown(normalize=False)(rows, rows)
    torch.testing.assert_close(found, rows @ rows.T - (rows * rows).sum(dim=1)[:, None])


def test_second_derivatives_do_not_see_the_origin():
    rows, labels = crowd(1e-2, n=8)
    loss = nf.losses.Contrastive(engine="dense")
    found = []
    for shifts in (True, False):
        loss.similarity.shifts = shifts
        leaf = rows.double().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * torch.linspace(0, 1, first.numel()).reshape(first.shape)).sum(), leaf)
        found.append(second)
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)

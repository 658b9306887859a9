"""Triplet separation, its repair, two maps of the same samples, and thickness."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from geometry_cases import TOY, TOY_LABELS, drawn, moved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import geometry as oracle

import nearfar.geometry as G
from nearfar.geometry.collapse import sample
from nearfar.geometry.spaces import SPACES
from nearfar.similarity import unit

separation = sys.modules["nearfar.geometry.separation"]
flat = sys.modules["nearfar.geometry.thickness"]


def test_toy_hardness_and_its_triplet():
    found = G.hardest_triplet(TOY, TOY_LABELS)
    assert found.value == pytest.approx(1.146290, abs=1e-6)
    assert (found.anchor, found.positive, found.negative) == (3, 4, 1)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.3]), classes=st.integers(1, 5))
def test_hardness_is_the_definition(seed, margin, classes):
    x, y = drawn(seed, classes=classes)
    assert G.hardness(x, y, margin=margin) == pytest.approx(oracle.hardness(x.numpy(), y.numpy(), margin), abs=1e-12)


@pytest.mark.parametrize("classes", [2, 40, 380])
def test_many_rows_give_the_same_triplet(monkeypatch, classes):
    x, _ = drawn(3, rows=400, width=6)
    x = x * torch.rand(400, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 20
    y = torch.randint(0, classes, (400,), generator=torch.Generator().manual_seed(2))
    wanted = G.hardest_triplet(x, y)
    monkeypatch.setattr(separation, "DIRECT", 128)
    monkeypatch.setattr(separation, "TILE", (48, 70))
    monkeypatch.setattr(separation, "AGAIN", 5)
    assert G.hardest_triplet(x, y) == wanted


def test_many_rows_that_nearly_coincide_are_told_apart(monkeypatch):
    """Products in float32 cannot tell these distances; the bound on their rounding keeps every anchor in."""
    x, y = drawn(4, rows=300, width=4)
    x = x * 1e-6 + (torch.arange(300) % 2)[:, None]
    wanted = G.hardness(x, y)
    monkeypatch.setattr(separation, "DIRECT", 128)
    monkeypatch.setattr(separation, "AGAIN", 1)
    assert G.hardness(x, y) == wanted


def test_what_an_anchor_can_be_at_most_is_a_close_bound(monkeypatch):
    x, y = drawn(5, rows=200, width=6, classes=60)
    y[-1] = 99  # a lone row
    y, order = y.sort(stable=True)
    x = x[order] - x.mean(dim=0)
    flat = SPACES["euclidean"]
    *_, gap = separation._gaps(x, y, torch.arange(200), flat)
    monkeypatch.setattr(separation, "TILE", (48, 70))
    most = separation._gap_bounds(x, y, flat)
    assert bool((most >= gap).all())
    assert float((most - gap)[y != 99].max()) < 1e-3
    assert float(most[y == 99]) == -math.inf


@pytest.mark.parametrize("labels", [torch.arange(8), torch.zeros(8, dtype=torch.long)])
def test_no_triplets_no_hardness(labels):
    assert G.hardest_triplet(torch.randn(8, 2), labels) is None
    assert G.hardness(torch.randn(8, 2), labels, margin=1.0) == 0


def test_constant_and_class_collapsed_maps_are_separated():
    x, y = drawn(0)
    means = torch.randn(3, 3, dtype=torch.float64)
    assert G.is_triplet_separated(torch.ones(9, 3), y)
    assert G.is_triplet_separated(means[y], y)
    assert not G.is_triplet_separated(x, y)


def test_with_a_margin_total_collapse_costs_the_margin():
    y = torch.arange(9) % 3
    assert G.hardness(torch.ones(9, 3), y) == 0
    assert G.hardness(torch.ones(9, 3), y, margin=0.2) == pytest.approx(0.2)
    assert not G.is_triplet_separated(torch.ones(9, 3), y, margin=0.2)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_hardness_and_shrink_under_rigid_motion_and_scale(seed, scale):
    x, y = drawn(seed)
    other = moved(x, seed, scale)
    assert G.hardness(other, y) == pytest.approx(scale * G.hardness(x, y), rel=1e-9)
    assert G.repair(other, y).shrink == pytest.approx(G.repair(x, y).shrink, abs=1e-9)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.5, 3.0]))
def test_repair_separates_and_is_the_smallest(seed, margin):
    x, y = drawn(seed)
    fixed = G.repair(x, y, margin=margin)
    assert G.hardness(fixed.map, y, margin=margin) <= 1e-9
    assert fixed.moved == pytest.approx(float((fixed.map - x).norm(dim=1).max()), abs=1e-12)
    if margin == 0 and fixed.shrink > 1e-3:
        means = torch.stack([x[y == k].mean(dim=0) for k in range(3)])[y]
        less = x + (fixed.shrink - 1e-4) * (means - x)
        assert G.hardness(less, y) > 0


def test_repair_leaves_a_separated_map_alone():
    x = torch.tensor([[0.0, 0], [0.1, 0], [5, 0], [5.1, 0]])
    assert G.repair(x, torch.tensor([0, 0, 1, 1])).shrink == 0
    assert torch.allclose(G.repair(x, torch.tensor([0, 0, 1, 1])).map, x.double())


def test_a_margin_parts_classes_that_coincide():
    y = torch.tensor([0, 0, 1, 1])
    assert G.hardness(G.repair(torch.zeros(4, 2), y, margin=0.5).map, y, margin=0.5) <= 1e-9


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_two_maps_are_compared_as_defined(seed):
    f, y = drawn(seed)
    g, _ = drawn(seed + 1)
    assert G.isometric_error_between(f, g) == pytest.approx(oracle.isometric_error_between(f.numpy(), g.numpy()))
    wanted = oracle.hausdorff_between(f.numpy(), g.numpy(), y.numpy())
    assert G.hausdorff_between(f, g, y) == pytest.approx(wanted)
    assert G.hausdorff_between(f, g, y) <= float((f - g).norm(dim=1).max()) + 1e-12
    assert G.isometric_error_between(f, g) <= 2 * float((f - g).norm(dim=1).max()) + 1e-12


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rigid_motion_is_found_again(seed):
    f, _ = drawn(seed)
    g = moved(f, seed + 2)
    found = G.near_isometry(f, g)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.largest == pytest.approx(0, abs=1e-10)
    assert torch.allclose(found.move(f), g)
    assert torch.allclose(found.rotation @ found.rotation.T, torch.eye(3, dtype=torch.float64))


def test_no_other_motion_is_nearer_in_least_squares():
    f, _ = drawn(5)
    g, _ = drawn(6)
    found = G.near_isometry(f, g)
    for seed in range(50):
        other = moved(f, seed)
        other = other - other.mean(dim=0) + g.mean(dim=0)
        assert float(((other - g) ** 2).sum(dim=1).mean().sqrt()) >= found.rms - 1e-12


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_thickness_three_ways(width, seed):
    x = drawn(seed, rows=12, width=width)[0]
    found = G.thickness(x)
    assert found.lower == found.upper
    rows = (x - x.mean(dim=0)).numpy()
    differences = flat._least_facet(rows)
    axes = np.linalg.eigh(rows.T @ rows)[1].T[:3]
    random = np.random.default_rng(0).normal(size=(20, width))
    programs = min(flat._reduce_width(rows, e / np.linalg.norm(e)) for e in (*axes, *random))
    assert found.upper == pytest.approx(differences, rel=1e-9)
    assert found.upper == pytest.approx(programs, rel=1e-7)
    assert oracle.thickness(rows) >= found.lower - 1e-12
    if width == 2:
        assert oracle.thickness(rows) == pytest.approx(found.upper, rel=1e-3)


def test_thickness_above_five_dimensions_is_bounded():
    x = drawn(0, rows=60, width=8)[0]
    found = G.thickness(x, starts=4)
    assert 0 < found.lower <= found.upper
    assert found.upper <= oracle.thickness(x.numpy(), 2000)
    assert G.thickness(3 * moved(x, 1), starts=4).lower == pytest.approx(3 * found.lower)


@pytest.mark.parametrize(("rows", "width"), [(3, 3), (2, 8), (1, 1)])
def test_few_rows_have_no_thickness(rows, width):
    assert G.thickness(torch.randn(rows, width)) == G.Thickness(0.0, 0.0, "rank")


def test_flat_rows_have_no_thickness():
    x = torch.randn(20, 3)
    x[:, 2] = x[:, 0] - x[:, 1]
    assert G.thickness(x.double()).upper <= 1e-6
    assert G.thickness(torch.tensor([[0.0], [3.0], [1.0]])).upper == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: G.hardness(torch.ones(3), torch.zeros(3).long()), r"hardness: embeddings must have shape \[n, d\]"),
        (lambda: G.hardness(torch.ones(3, 2), torch.zeros(2).long()), "hardness: labels must have one entry per row"),
        (
            lambda: G.hardness(torch.ones(3, 2), torch.zeros(3).long(), margin=-1),
            "margin must be a number zero or more",
        ),
        (lambda: G.near_isometry(torch.ones(3, 2), torch.ones(3, 3)), "must be equally wide, but are 2 and 3"),
        (lambda: G.isometric_error_between(torch.ones(3, 2), torch.ones(2, 2)), "have 3 and 2"),
        (lambda: G.collapse(torch.ones(3, 2), torch.zeros(3).long(), metric="cosin"), "did you mean 'cosine'"),
    ],
)
def test_errors_are_one_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.4]))
def test_active_triplets_and_nc1_are_the_definitions(seed, margin):
    x, y = drawn(seed, rows=12)
    assert G.active_triplets(x, y, margin=margin) == pytest.approx(oracle.active(x.numpy(), y.numpy(), margin))
    found = G.collapse(x, y, metric="euclidean", shrink=False)
    assert found.nc1 == pytest.approx(oracle.nc1(x.numpy(), y.numpy()), rel=1e-6)


def test_collapse_measures_of_known_spaces():
    y = torch.arange(40) % 4
    corners = torch.eye(4, dtype=torch.float64) - 0.25  # a simplex
    found = G.collapse(corners[y], y, metric="euclidean")
    assert (found.within, found.nc1, found.shrink) == (pytest.approx(0, abs=1e-7), pytest.approx(0, abs=1e-12), 0.0)
    assert found.nc2 == pytest.approx(0, abs=1e-12)
    assert found.effective_rank == pytest.approx(3)
    assert found.alignment == pytest.approx(0, abs=1e-12)
    point = G.collapse(torch.ones(40, 4), y)
    assert (point.total, point.effective_rank, point.uniformity) == (pytest.approx(0, abs=1e-12), 0.0, 0.0)


def test_ratios_against_the_start():
    x, y = drawn(0, rows=30)
    first = G.collapse(x, y, metric="euclidean")
    now = G.collapse(0.1 * x, y, metric="euclidean")
    assert now.against(first) == {"total": pytest.approx(0.1), "within": pytest.approx(0.1)}


def test_a_sample_is_of_whole_classes():
    y = torch.arange(1000) // 10
    chosen = sample(y, 200)
    assert len(chosen) == 200
    assert len(chosen.unique()) == 200
    assert set(torch.unique(y[chosen], return_counts=True)[1].tolist()) == {10}


def test_pull_shares_the_gradient_out():
    from nearfar.losses import DroWorst, Triplet

    x, y = drawn(0, rows=24, width=4)
    worst = G.pull(x, y, DroWorst())
    assert worst.hardest == pytest.approx(1)
    assert sum(worst.shares) == pytest.approx(1)
    spread = G.pull(x, y, Triplet(margin=0.2))
    assert spread.hardest < 0.1
    assert 0 < spread.positive < 1
    assert G.pull(unit(torch.eye(4)[y % 2].double()), y % 2, Triplet(margin=0.1)).active == 0


def test_uniformity_of_two_opposite_points():
    x = torch.tensor([[1.0, 0], [-1, 0]])
    assert G.collapse(x, torch.tensor([0, 1])).uniformity == pytest.approx(-8)
    assert math.isclose(G.collapse(x, torch.tensor([0, 0])).alignment, 4)

"""Ordered relevance and the sphere: the same measures, the same certainties."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from geometry_cases import TOY, TOY_LABELS, drawn, moved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import geometry as oracle

import nearfar.geometry as G
from nearfar.geometry.constraints import Program, splits
from nearfar.geometry.spaces import SPACES
from nearfar.similarity import unit

separation = sys.modules["nearfar.geometry.separation"]
rungs = sys.modules["nearfar.geometry.ladder"]
METRICS = {"euclidean": oracle.length, "angle": oracle.angle}
metrics = pytest.mark.parametrize("metric", METRICS)
COARSE, FINE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def graded(seed, rows=7, levels=3):
    """A relevance that is not nested, nor symmetric."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, levels, (rows, rows), generator=noise)


def near(seed, rows=6):
    """A symmetric relevance of grades that is not nested: near in a hidden plane."""
    h = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(4 * torch.cdist(h, h)).floor(), h


def certified(x, relevance, found, metric, kind):
    """The map is separated, costs what is said, and lies between the bounds."""
    gap = oracle.ladder_hardness(found.map.numpy(), relevance.numpy(), apart=METRICS[metric])
    assert gap <= 1e-9
    assert found.lower <= found.upper + 1e-9
    if kind == "iso":
        cost = G.isometric_error_between(x, found.map, metric=metric)
    else:
        cost = max(float(METRICS[metric](a, b)) for a, b in zip(x.numpy(), found.map.numpy(), strict=True))
    assert cost == pytest.approx(found.upper, abs=1e-7)


@metrics
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.3]), levels=st.integers(1, 5))
def test_hardness_of_a_ladder_is_the_definition(metric, seed, margin, levels):
    x, _ = drawn(seed, rows=7)
    relevance = graded(seed, levels=levels)
    wanted = oracle.ladder_hardness(x.numpy(), relevance.numpy(), margin, METRICS[metric])
    assert G.hardness(x, relevance, margin=margin, metric=metric) == pytest.approx(wanted, abs=1e-12)


@metrics
def test_the_hardest_step_names_its_rows(metric, monkeypatch):
    x, _ = drawn(3, rows=12)
    relevance = graded(3, rows=12)
    found = G.hardest_triplet(x, relevance, metric=metric)
    a, j, k = found.anchor, found.positive, found.negative
    assert relevance[a, j] > relevance[a, k]
    gap = METRICS[metric](x[a].numpy(), x[j].numpy()) - METRICS[metric](x[a].numpy(), x[k].numpy())
    assert found.value == pytest.approx(float(gap))
    monkeypatch.setattr(rungs, "CELLS", 24)  # two rows a strip
    assert G.hardest_triplet(x, relevance, metric=metric) == found


@metrics
def test_two_rungs_are_classes(metric):
    x, y = drawn(2)
    relevance = G.ladder(y)
    assert G.hardness(x, relevance, metric=metric) == pytest.approx(G.hardness(x, y, metric=metric), abs=1e-15)
    assert G.repair(x, relevance, metric=metric).shrink == pytest.approx(G.repair(x, y, metric=metric).shrink)
    a = G.isometric_error(x, relevance, metric=metric, starts=2)
    b = G.isometric_error(x, y, metric=metric, starts=2)
    assert a.upper == pytest.approx(b.upper, abs=1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), margin=st.sampled_from([0.0, 0.2]))
def test_hardness_on_the_sphere_is_the_definition(seed, margin):
    x, y = drawn(seed)
    wanted = oracle.ladder_hardness(x.numpy(), G.ladder(y).numpy(), margin, oracle.angle)
    assert G.hardness(x, y, margin=margin, metric="angle") == pytest.approx(wanted, abs=1e-12)


def test_many_rows_on_the_sphere_give_the_same_triplet(monkeypatch):
    x, _ = drawn(3, rows=400, width=6)
    y = torch.randint(0, 40, (400,), generator=torch.Generator().manual_seed(2))
    wanted = G.hardest_triplet(x, y, metric="angle")
    monkeypatch.setattr(separation, "DIRECT", 128)
    monkeypatch.setattr(separation, "TILE", (48, 70))
    monkeypatch.setattr(separation, "AGAIN", 5)
    assert G.hardest_triplet(x, y, metric="angle") == wanted


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_chords_and_angles_separate_the_same_and_no_chord_violation_is_larger(seed):
    x, y = drawn(seed)
    x = unit(x)
    assert G.hardness(x, y) <= G.hardness(x, y, metric="angle") + 1e-12
    fixed = G.repair(x, y, metric="angle").map
    assert G.hardness(fixed, y, metric="angle") <= 1e-12
    assert G.hardness(fixed, y) <= 1e-12
    assert torch.allclose(fixed.norm(dim=1), torch.ones(9, dtype=torch.float64))


def test_angles_do_not_feel_lengths_or_rotations():
    x, y = drawn(4)
    lengths = torch.rand(9, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    assert G.hardness((x * lengths) @ turn, y, metric="angle") == pytest.approx(G.hardness(x, y, metric="angle"))


@metrics
@pytest.mark.parametrize("seed", range(3))
def test_a_nested_ladder_is_repaired(metric, seed):
    x, _ = drawn(seed, rows=8)
    relevance = G.ladder(COARSE, FINE)
    fixed = G.repair(x, relevance, metric=metric)
    assert 0 < fixed.shrink < 1
    assert oracle.ladder_hardness(fixed.map.numpy(), relevance.numpy(), apart=METRICS[metric]) <= 1e-9
    # coarse groups sent to points are separated, whatever lies within them
    points = unit(torch.randn(2, 3, dtype=torch.float64))[COARSE]
    assert G.is_triplet_separated(points, relevance, metric=metric)
    assert G.is_triplet_separated(torch.ones(8, 3), graded(seed, rows=8), metric=metric)


@metrics
@pytest.mark.parametrize("kind", ["iso", "haus"])
def test_distances_of_a_nested_ladder(metric, kind):
    x, _ = drawn(1, rows=8, width=3)
    relevance = G.ladder(COARSE, FINE)
    call = G.isometric_error if kind == "iso" else G.hausdorff_distance
    found = call(x, relevance, metric=metric, starts=3)
    certified(x, relevance, found, metric, kind)
    cheap = call(x, relevance, metric=metric, solve=False)
    certified(x, relevance, cheap, metric, kind)
    assert found.upper < cheap.upper
    assert found.lower == pytest.approx(found.hardness / (2 if kind == "iso" else 4))


@metrics
@pytest.mark.parametrize("kind", ["iso", "haus"])
def test_distances_of_a_relevance_that_is_not_nested(metric, kind):
    relevance, h = near(1)
    x = torch.cat([h, torch.zeros(6, 1, dtype=torch.float64)], dim=1) + 0.3 * drawn(5, rows=6, width=3)[0]
    call = G.isometric_error if kind == "iso" else G.hausdorff_distance
    found = call(x, relevance, metric=metric, starts=2)
    certified(x, relevance, found, metric, kind)
    # one point for all is the only map that is certain; the solver must do better
    assert found.upper < 0.9 * call(x, relevance, metric=metric, solve=False).upper
    assert G.repair(x, relevance, metric=metric).shrink == 1


@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_the_inequalities_hold_on_the_sphere(seed):
    x, y = drawn(seed, rows=6, classes=2)
    hard = G.hardness(x, y, metric="angle")
    iso = G.isometric_error(x, y, metric="angle", starts=2)
    haus = G.hausdorff_distance(x, y, metric="angle", starts=2)
    certified(x, G.ladder(y), iso, "angle", "iso")
    certified(x, G.ladder(y), haus, "angle", "haus")
    assert hard / 2 <= iso.upper + 1e-9
    assert hard / 4 <= haus.upper + 1e-9
    assert G.isometric_error_between(x, haus.map, metric="angle") <= 2 * haus.upper + 1e-9
    assert G.hausdorff_between(x, haus.map, y, metric="angle") <= haus.upper + 1e-9


def test_on_a_line_a_ladder_is_exact():
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    relevance = G.ladder(torch.tensor([0, 1, 0]))
    found = G.hausdorff_distance(x, relevance, starts=2)
    assert found.exact
    assert found.upper == pytest.approx(G.hausdorff_distance(x, torch.tensor([0, 1, 0]), starts=2).upper, abs=1e-6)
    three = torch.tensor([[2, 0, 1], [0, 2, 1], [1, 0, 2]])  # row 0: row 2 before row 1, and so on
    found = G.isometric_error(x, three, starts=2)
    assert found.exact
    assert oracle.ladder_hardness(found.map.numpy(), three.numpy()) <= 1e-9


@pytest.mark.parametrize("kind", ["iso", "haus"])
@metrics
def test_the_slopes_of_the_programme(kind, metric):
    x, _ = drawn(0, rows=5, width=3)
    f = unit(x).numpy() if metric == "angle" else x.numpy()
    program = Program(kind, f, graded(1, rows=5).numpy(), 0.1, SPACES[metric])
    z = program.start(x.numpy() + 0.1)
    step = 1e-6
    for k in range(len(z)):
        up, down = z.copy(), z.copy()
        up[k], down[k] = up[k] + step, down[k] - step
        slope = (program.constraints(up) - program.constraints(down)) / (2 * step)
        assert program.jacobian(z)[:, k] == pytest.approx(slope, abs=1e-6)


def test_each_pair_is_bounded_by_its_two_neighboring_radii():
    parts = splits(torch.tensor([[9, 2, 1, 0]] * 4).numpy())
    # row 0 has three steps below it: two radii; its middle row is bounded on both sides
    first = [c for c in range(len(parts["pairs"])) if parts["radius"][c] < 2]
    assert sorted(zip(parts["pairs"][first], parts["radius"][first], parts["sign"][first], strict=True)) == [
        (0, 0, -1.0),
        (1, 0, 1.0),
        (1, 1, -1.0),
        (2, 1, 1.0),
    ]


def test_a_margin_on_a_ladder_stretches_and_on_the_sphere_may_be_refused():
    x, y = drawn(0, rows=8)
    relevance = G.ladder(COARSE, FINE)
    fixed = G.repair(x, relevance, margin=0.3)
    assert oracle.ladder_hardness(fixed.map.numpy(), relevance.numpy(), 0.3) <= 1e-9
    found = G.isometric_error(x, y, margin=0.2, metric="angle", starts=2)
    assert G.hardness(found.map, y, margin=0.2, metric="angle") <= 1e-9
    with pytest.raises(ValueError, match=r"^repair: no map that keeps a margin of 4 .*\.$"):
        G.isometric_error(x, y, margin=4.0, metric="angle")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: G.hardness(torch.randn(3, 2), torch.zeros(3, 2)), "hardness: labels of two dimensions"),
        (lambda: G.hardness(torch.randn(2, 2), torch.full((2, 2), math.nan)), "relevance must be finite"),
        (lambda: G.hardness(torch.zeros(3, 2), torch.arange(3), metric="angle"), "needs a direction"),
        (lambda: G.hardness(torch.randn(3, 2), torch.arange(3), metric="angel"), "did you mean 'angle'"),
        (lambda: G.ladder(), "ladder: labels are missing"),
        (lambda: G.ladder(torch.arange(3), torch.arange(4)), "one entry per row"),
    ],
)
def test_errors_are_one_sentence(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_constants_of_the_toy_set():
    found = G.constants(TOY, TOY_LABELS)
    assert found.observed == pytest.approx(1.129, abs=1e-3)
    assert found.ratio == pytest.approx(2.24, abs=5e-3)
    assert G.constants(moved(TOY, 1, 100.0), TOY_LABELS, starts=1).ratio == pytest.approx(found.ratio)
    thin = G.constants(torch.eye(3)[:, :3].double(), torch.tensor([0, 0, 1]), starts=1)
    assert thin.ratio == math.inf  # N <= n: theorem 2 says nothing

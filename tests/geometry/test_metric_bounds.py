"""Theorem 3 of Xu et al. 2022 with other constants: the formula against a linear program, and the proofs' objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from geometry_cases import TOY, TOY_LABELS, drawn, moved
from hypothesis import example, given, settings
from hypothesis import strategies as st
from metric_program import metric_error, separated, within_bounds

from nearfar import geometry as G
from nearfar.batches import violations
from nearfar.losses import Triplet
from nearfar.losses.spread import SpreadFloor, spread

THIRDS = torch.tensor([[-1.0], [0.0], [1.0], [0.0]]), torch.tensor([0, 0, 0, 1])
"""d_iso = 2/3 H: the middle of a class coincides with a row of another one."""
RUNGS = torch.tensor([[-1.0], [1.0], [0.0], [0.0]]), G.ladder(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2]))
"""d_iso = H with three rungs."""


@st.composite
def sets_of_rows(draw, rows=7):
    """Few rows with random classes: on a grid, where distances coincide, or anywhere."""
    count, width = draw(st.integers(2, rows)), draw(st.integers(1, 3))
    noise = np.random.default_rng(draw(st.integers(0, 10**6)))
    on_grid = draw(st.booleans())
    x = noise.integers(-1, 2, (count, width)) if on_grid else noise.normal(size=(count, width))
    labels = noise.integers(0, draw(st.integers(1, 3)), count)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(labels)


def apart(x):
    return torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")


def same(y):
    return (y[:, None] == y[None, :]).long()


def check_metric(found, x, relevance, margin, value):
    """Symmetric, 0 on the diagonal, triangle inequalities, separated, and as near as was said."""
    n = len(x)
    assert torch.equal(found, found.T)
    assert not found.diagonal().any()
    assert bool((found[:, None, :] <= found[:, :, None] + found[None] + 1e-8).all())
    more = relevance[:, :, None] > relevance[:, None, :]
    more[range(n), range(n), :] = more[range(n), :, range(n)] = False
    gap = found[:, :, None] + margin - found[:, None, :]
    assert float(torch.where(more, gap, 0.0).max()) <= 1e-7
    assert float((found - apart(x)).abs().max()) <= value + 1e-7


@settings(deadline=None, max_examples=60)
@given(sets_of_rows(), st.sampled_from([0.0, 0.3, 2.0]))
@example(THIRDS, 0.0)
@example(THIRDS, 0.1)
def test_the_formula_is_the_value_of_the_linear_program(case, margin):
    x, y = case
    value = G.isometric_bound(x, y, margin=margin)
    assert value == pytest.approx(metric_error(apart(x), separated(same(y), margin)), abs=1e-7)
    check_metric(G.separated_metric(x, y, margin=margin), x, same(y), margin, value)


@settings(deadline=None, max_examples=60)
@given(sets_of_rows(), st.integers(0, 99), st.sampled_from([0.0, 0.3]), st.booleans())
def test_the_program_of_ladders_is_that_of_the_oracle(case, seed, margin, nested):
    x, y = case
    noise = torch.Generator().manual_seed(seed)
    coarse = torch.randint(2, (len(y),), generator=noise)
    relevance = G.ladder(coarse, y) if nested else torch.randint(3, (len(y), len(y)), generator=noise)
    expected = metric_error(apart(x), separated(relevance, margin))
    if np.isnan(expected):
        with pytest.raises(ValueError, match="no metric keeps this margin for this relevance"):
            G.isometric_bound(x, relevance, margin=margin)
        return
    value = G.isometric_bound(x, relevance, margin=margin)
    assert value == pytest.approx(expected, abs=1e-6)
    check_metric(G.separated_metric(x, relevance, margin=margin), x, relevance, margin, value)
    if nested and not margin:
        assert G.hardness(x, relevance) / 2 - 1e-6 <= value <= G.hardness(x, relevance) + 1e-6


@settings(deadline=None, max_examples=60)
@given(sets_of_rows(rows=12))
def test_between_a_half_and_two_thirds_of_h(case):
    x, y = case
    h, value = G.hardness(x, y), G.isometric_bound(x, y)
    assert h / 2 - 1e-12 <= value <= 2 * h / 3 + 1e-12


def test_both_constants_are_reached():
    assert G.isometric_bound(TOY, TOY_LABELS) == pytest.approx(G.hardness(TOY, TOY_LABELS) / 2)
    assert (G.hardness(*THIRDS), G.isometric_bound(*THIRDS)) == (1.0, pytest.approx(2 / 3))
    assert (G.hardness(*RUNGS), G.isometric_bound(*RUNGS)) == (1.0, pytest.approx(1))  # 2/3 is for classes


@pytest.mark.parametrize("links", [2, 4, 6])
def test_no_multiple_of_h_bounds_a_relevance_that_is_not_nested(links):
    """Anchor k + 1 wants row k nearer than row k + 2, but the distances along the chain fall by H = 1 each time."""
    count = links + 2
    d = 100.0 * (1 - torch.eye(count, dtype=torch.float64))
    relevance = torch.ones(count, count)
    for k in range(links + 1):
        d[k, k + 1] = d[k + 1, k] = 100.0 + links - k
        relevance[k, k + 1] = 0
    relevance[0, 1] = 1
    middle = torch.eye(count, dtype=torch.float64) - 1 / count
    values, vectors = torch.linalg.eigh(-middle @ d.square() @ middle / 2)
    x = vectors * values.clamp(min=0).sqrt()  # rows with these distances
    torch.testing.assert_close(apart(x), d, atol=1e-9, rtol=0)
    assert G.hardness(x, relevance) == pytest.approx(1)
    assert G.isometric_bound(x, relevance) == pytest.approx(links / 2, abs=1e-5)


@pytest.mark.parametrize("rows", [30, 60])
def test_formula_and_program_agree_on_larger_sets(rows):
    x, y = drawn(rows, rows=rows, width=4, classes=5)
    x[::7] = x[0]
    x[[5, 10, 15, 1]] = torch.tensor([-3.0, 0, 3.0, 0], dtype=torch.float64)[:, None] * torch.ones(4)
    assert G.isometric_bound(x, same(y)) == pytest.approx(G.isometric_bound(x, y), abs=1e-6)


@pytest.mark.parametrize(("x", "y"), [THIRDS, (TOY, TOY_LABELS), drawn(3, rows=6, width=2, classes=2)])
def test_it_is_below_every_euclidean_map(x, y):
    found = G.isometric_error(x, y, starts=4)
    assert G.isometric_bound(x, y) <= found.lower + 1e-12 <= found.upper + 1e-9
    assert G.hausdorff_distance(x, y, starts=4).lower >= G.isometric_bound(x, y) / 2 - 1e-12


def test_euclidean_maps_need_more_than_two_thirds_of_h():
    """The page proves d_iso ≥ √3 - 1 for these rows in every Euclidean space; this map attains it."""
    x, y = THIRDS
    t = 3**0.5 - 1
    s = 2 - t
    ideal = torch.tensor([[-s / 2, 0.0], [0.0, t / 2], [s / 2, 0.0], [0.0, 3**0.5 / 2 * s]], dtype=torch.float64)
    assert G.hardness(ideal, y) < 1e-12
    assert G.isometric_error_between(x, ideal) == pytest.approx(t)
    found = G.isometric_error(torch.nn.functional.pad(x, (0, 2)), y, starts=8)
    assert found.upper == pytest.approx(t, abs=1e-6)  # and no nearer one is found


def test_angles():
    x, y = drawn(1, rows=8, width=3, classes=3)
    unit = torch.nn.functional.normalize(x)
    angles = torch.arccos((unit @ unit.T).clamp(-1, 1)).fill_diagonal_(0)
    value = G.isometric_bound(x, y, metric="angle")
    assert value == pytest.approx(metric_error(angles, separated(same(y))), abs=1e-7)
    assert value <= G.isometric_error(x, y, metric="angle", solve=False).lower + 1e-12


def test_scale_and_rigid_motion():
    x, y = drawn(4)
    assert G.isometric_bound(moved(x, scale=100.0), y) == pytest.approx(100 * G.isometric_bound(x, y))


def test_sets_without_triplets():
    for x, y in ((torch.randn(4, 2), torch.zeros(4)), (torch.randn(4, 2), torch.arange(4)), (torch.empty(0, 2), [])):
        labels = torch.as_tensor(y, dtype=torch.int64)
        assert G.isometric_bound(x, labels) == 0
        assert torch.equal(G.separated_metric(x, labels), apart(x))
        assert G.lift(x, labels)[:, : x.shape[1]].equal(x.double())
    with pytest.raises(ValueError, match="the linear program takes at most 60 rows, but 61 came"):
        G.isometric_bound(torch.randn(61, 2), torch.zeros(61, 61))
    with pytest.raises(ValueError, match="isometric_bound: embeddings"):
        G.isometric_bound(torch.tensor([[float("nan")], [0.0]]), torch.tensor([0, 1]))


# ---------------------------------------------------------------- the lift


@settings(deadline=None, max_examples=60)
@given(sets_of_rows(rows=12))
def test_the_lift_is_separated_and_as_near_as_is_proved(case):
    x, y = case
    lifted = G.lift(x, y)
    h, error = G.hardness(x, y), G.isometric_error_between(x, lifted)
    assert G.hardness(lifted, y) <= 1e-9
    inside, d = same(y) > 0, apart(x)
    assert float((apart(lifted) - d)[inside].abs().max()) <= 1e-9
    delta = float((lifted[:, x.shape[1] :]).norm(dim=1).max()) * 2**0.5
    widest = float(d[inside].max())
    assert error <= delta + 1e-9
    assert delta**2 <= h * (2 * widest - h) + 1e-9 <= 2 * h * float(d.max()) + 1e-8
    if not bool(inside.all()):
        nearest = float(d[~inside].min())
        assert error == pytest.approx((nearest**2 + delta**2) ** 0.5 - nearest, abs=1e-9)
    assert G.isometric_bound(x, y) <= error + 1e-9


def test_the_lift_fits_into_one_dimension_less_than_there_are_rows():
    x, y = drawn(0, rows=6, width=5, classes=2)
    lifted = G.lift(x, y)
    lifted = lifted - lifted.mean(dim=0)
    narrow = lifted @ torch.linalg.svd(lifted, full_matrices=False).Vh[:5].T
    assert float((apart(narrow) - apart(lifted)).abs().max()) < 1e-9


# ---------------------------------------------------------------- the set of Can et al.


@settings(deadline=None, max_examples=60)
@given(sets_of_rows(), st.floats(0, 2), st.floats(0, 2))
def test_the_largest_violation_is_a_distance(case, near, far):
    """V of `violations` is the value of the linear program for the metrics with d₊ ≤ ε₊ and d₋ ≥ ε₋."""
    x, y = case
    x = torch.nn.functional.normalize(x + 0.01)
    found = violations(x, y, max_positive_distance=near, min_negative_distance=far)
    expected = metric_error(apart(x), within_bounds(same(y), near, far))
    assert found.largest == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- maps that are not collapsed


def test_a_floor_of_the_spread_is_a_second_bound():
    """V moves by at most the sine of the largest change of an angle; H is 0 at a point, and the bound is not."""
    noise = torch.Generator().manual_seed(0)
    for trial in range(40):
        count, width, size = 8, 1 + trial % 5 + 1, (0.01, 0.3, 2.0)[trial % 3]
        x = torch.randn(count, width, generator=noise, dtype=torch.float64)
        g = x + size * torch.randn(count, width, generator=noise, dtype=torch.float64)
        error = G.isometric_error_between(x, g, metric="angle")
        assert float(spread(g) - spread(x)) <= np.sin(min(error, np.pi / 2)) + 1e-12
        one_class = torch.zeros(count, dtype=torch.int64)
        floor = float(spread(g))
        assert G.isometric_bound(x, one_class, metric="angle", floor=floor) <= error + 1e-9
    point, y = torch.ones(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    assert G.hardness(point, y, metric="angle") == 0
    assert G.isometric_bound(point, y, metric="angle", floor=0.5) == pytest.approx(np.pi / 6)
    assert G.isometric_bound(torch.eye(6), y, metric="angle", floor=0.5) == 0  # separated, V = 1
    heaps = torch.eye(2)[torch.tensor([0, 0, 0, 1, 1, 1])]  # two heaps at right angles: V = 3/5 is allowed
    assert G.isometric_bound(heaps, torch.tensor([0, 0, 0, 1, 1, 1]), metric="angle", floor=0.6) < 1e-6
    for options in ({"floor": 0.5}, {"floor": 1.5, "metric": "angle"}, {"floor": -0.1, "metric": "angle"}):
        with pytest.raises(ValueError, match="floor must be a spread from 0 to 1 of unit rows"):
            G.isometric_bound(point, y, **options)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_rows_of_a_value_have_the_spread_that_it_guarantees(weight):
    """Classes as points on their way to one point cost nothing but the barrier: there the guarantee is tight."""
    x, y = drawn(5, rows=24, width=3, classes=8)
    loss = SpreadFloor(Triplet(mining="hard"), floor=0.5, weight=weight)
    first = 0.9
    bound, kept = G.least_spread(first, floor=0.5, weight=weight), []
    for share in torch.linspace(1, 0, 2000, dtype=torch.float64):
        rows = torch.nn.functional.normalize((share * x + (1 - share) * torch.ones(3))[y])
        if float(loss(rows, y)) <= first:
            kept.append(float(spread(rows)))
    assert bound <= min(kept) < 1.05 * bound
    with pytest.raises(ValueError, match="weight must be a number above zero"):
        G.least_spread(0.5, weight=0)

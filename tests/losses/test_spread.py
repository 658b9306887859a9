"""`SpreadFloor`: the spread of known spaces, where the barrier acts, and that a space stays open under it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles import oracle_of
from oracles.gradient import gradient
from table import BATCHES, random_batch, tensors

import nearfar as nf
from nearfar.losses.annealing import Anneal
from nearfar.losses.spread import barrier, spread, spread_bound

L = nf.losses
SpreadFloor = L.SpreadFloor


def heaps(directions, each=4):
    return torch.tensor(directions, dtype=torch.float64).repeat_interleave(each, dim=0)


def simplex(classes):
    return torch.eye(classes, dtype=torch.float64) - 1 / classes


SPACES = {
    "one heap": (heaps([[1.0, 2.0]]), 0.0),
    "two opposite heaps": (heaps([[1.0, 2.0], [-1.0, -2.0]]), 0.0),
    "rows at right angles": (3 * torch.eye(5, dtype=torch.float64), 1.0),
    "a simplex": (simplex(4), 1 - 1 / 9),
    "two rows at 60 degrees": (torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64), 0.75),
    "one row": (torch.ones(1, 3, dtype=torch.float64), 1.0),
    "rows without length": (torch.zeros(4, 3, dtype=torch.float64), 1.0),
}


@pytest.mark.parametrize("name", SPACES)
def test_spread_of_known_spaces(name):
    rows, wanted = SPACES[name]
    assert spread(rows).item() == pytest.approx(wanted, abs=1e-12)


def test_spread_is_the_mean_over_pairs():
    rows = tensors(*random_batch())[0].detach()
    pairs = [(i, j) for i in range(10) for j in range(10) if i != j]
    sines = [1 - torch.cosine_similarity(rows[i], rows[j], dim=0) ** 2 for i, j in pairs]
    assert spread(rows).item() == pytest.approx((sum(sines) / 90).item(), abs=1e-12)


def test_heaps_at_right_angles_and_large_batches():
    """h heaps: 1 - 1/h, but for the pairs of a row with itself."""
    for h in (2, 3, 8):
        rows = torch.eye(h, dtype=torch.float64).repeat(500, 1)
        assert spread(rows).item() == pytest.approx(1 - 1 / h, abs=1e-3)


def measured(loss, rows, labels):
    leaf = rows.detach().clone().requires_grad_()
    value = loss(leaf, labels)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("kind", BATCHES)
def test_value_and_gradient_equal_the_oracle(kind):
    E, y = BATCHES[kind]()
    hyper = {"inner": "SupCon", "floor": 0.99, "weight": 0.7}
    value, slope = measured(SpreadFloor(L.SupCon(), floor=0.99, weight=0.7), *tensors(E, y))
    exact = E.astype(np.longdouble)
    assert value.item() == pytest.approx(float(oracle_of("SpreadFloor")(exact, y, **hyper)), abs=1e-9)
    if kind == "random":
        wanted = gradient(lambda x: oracle_of("SpreadFloor")(x, y, **hyper), exact)
        np.testing.assert_allclose(slope.numpy(), wanted, rtol=0, atol=1e-9)


def test_above_the_floor_it_is_the_loss_exactly():
    rows, labels = tensors(*random_batch())
    inner = L.Triplet(mining="hard", margin=0.3)
    assert spread(rows) > 0.5
    for a, b in zip(measured(SpreadFloor(inner), rows, labels), measured(inner, rows, labels), strict=True):
        assert torch.equal(a, b)


def test_below_it_the_barrier_is_added():
    rows, labels = tensors(*random_batch())
    loss = SpreadFloor(L.Triplet(mining="hard"), floor=0.99, weight=0.7)
    wanted = loss.loss(rows, labels) + 0.7 * torch.log(0.99 / (spread(rows) + 1e-6))
    torch.testing.assert_close(loss(rows, labels), wanted)
    assert torch.equal(loss.explain(rows, labels).value, loss(rows, labels).detach())
    loss.weight = 0.0001
    torch.testing.assert_close(loss(rows, labels), loss.loss(rows, labels), atol=1e-4, rtol=0)
    assert torch.autograd.gradcheck(loss.barrier, rows)


def test_its_gradient_grows_as_rows_fall_together():
    """One over the distance, where that of the hinge of distances stays as it is."""
    loss = SpreadFloor(L.Triplet(mining="hard"))
    one, other = (heap(size).requires_grad_() for size in (1e-1, 1e-2))
    slopes = [torch.autograd.grad(loss.barrier(rows), rows)[0].norm() for rows in (one, other)]
    assert 8 < slopes[1] / slopes[0] < 12


def heap(size):
    rng = torch.Generator().manual_seed(0)
    return torch.eye(4, dtype=torch.float64)[:1] + size * torch.randn(12, 4, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_that_are_all_equal_give_finite_numbers(kind):
    rows = torch.ones(6, 4, dtype=kind)
    value, slope = measured(SpreadFloor(L.Contrastive()), rows, torch.arange(6) // 2)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    assert value > L.Contrastive()(rows, torch.arange(6) // 2)


def test_rows_that_are_all_equal_have_a_spread_of_a_millionth():
    found = SpreadFloor(L.Contrastive(), floor=0.3, weight=2.0).barrier(torch.ones(6, 4, dtype=torch.float64))
    torch.testing.assert_close(float(found), 2 * math.log(0.3 / 1e-6), atol=1e-8, rtol=0)


def test_a_linear_map_stays_open_under_hard_mining():
    """Labels that say nothing: the hardest triplets are mended best by one heap, and the floor forbids it."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.cat([torch.ones(24, 1), torch.randn(24, 5, generator=rng)], dim=1).double()
    labels = torch.arange(24) % 6
    ends = []
    for make in (lambda loss: loss, SpreadFloor):
        weights = torch.nn.Parameter(torch.eye(6, dtype=torch.float64))
        loss, steps = make(L.Triplet(mining="hard", margin=0.2)), torch.optim.SGD([weights], lr=0.3)
        for _ in range(150):
            steps.zero_grad()
            loss(inputs @ weights, labels).backward()
            steps.step()
        ends.append(spread(inputs @ weights).item())
    assert ends[0] < 0.1
    assert ends[1] > 0.4


@pytest.mark.parametrize("mining", ["hard", "hardest", "semihard", "all"])
@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
def test_the_floor_of_triplets_is_the_same_term(mining, engine):
    E, y = random_batch()
    more = {"mining": mining, "margin": 0.3}
    wanted = oracle_of("SpreadFloor")(E.astype(np.longdouble), y, "Triplet", floor=0.99, **more)
    loss = L.Triplet(**more, floor=0.99, engine=engine).double()
    value, slope = measured(loss, *tensors(E, y))
    assert value.item() == pytest.approx(float(wanted), abs=1e-9)
    around = SpreadFloor(L.Triplet(**more, engine=engine), floor=0.99)
    torch.testing.assert_close(slope, measured(around, *tensors(E, y))[1], atol=1e-12, rtol=0)
    assert torch.equal(loss.explain(*tensors(E, y)).value, around.explain(*tensors(E, y)).value)
    assert loss.spread_floor == around.spread_floor == nf.Distributed(around).spread_floor == (0.99, 1.0)
    loss.floor = None
    assert torch.equal(loss(*tensors(E, y)), around.loss(*tensors(E, y)))
    assert loss.spread_floor is None


def test_a_floor_survives_the_recording_of_small_batches():
    """From the fourth call on a CPU replays the loss; other rows and a new floor must count."""
    loss, plain = L.Triplet(mining="hard", floor=0.9), L.Triplet(mining="hard", engine="dense")
    labels = torch.arange(24) // 4
    for seed in range(12):
        rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(seed)) * (0.1 + seed % 3) + 1
        loss.floor = 0.9 if seed < 9 else 0.6
        wanted = SpreadFloor(plain, floor=loss.floor)
        for found, known in zip(measured(loss, rows, labels), measured(wanted, rows, labels), strict=True):
            torch.testing.assert_close(found, known, atol=1e-5, rtol=1e-5)


def test_the_bound_of_a_value_is_never_above_the_spread():
    """V ≥ κ·exp(-F/w) - 10⁻⁶ for every batch, open or collapsed, and for small weights."""
    for seed, (weight, size) in enumerate((w, s) for w in (0.1, 1.0, 3.0) for s in (0.0, 1e-3, 1e-2, 0.1, 1.0)):
        rows = torch.eye(4, dtype=torch.float64)[:1] + size * torch.randn(
            12, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        value = SpreadFloor(L.Triplet(mining="hard", margin=0.2), weight=weight)(rows, torch.arange(12) // 3)
        assert spread(rows) >= spread_bound(value, 0.5, weight) - 1e-12
    assert spread_bound(torch.tensor(40.0), 0.5) == 0


def test_a_batch_of_chance_stays_on_the_safe_side():
    """Jensen: the barrier of the mean spread is at most the mean barrier; uniform batches have the spread of all."""
    rows = torch.eye(5, dtype=torch.float64)[:1] + 0.2 * torch.randn(
        200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    draws = torch.Generator().manual_seed(1)
    batches = [rows[torch.randperm(200, generator=draws)[:10]] for _ in range(4000)]
    spreads, barriers = torch.stack([spread(x) for x in batches]), torch.stack([barrier(x, 0.5) for x in batches])
    assert abs(spreads.mean() - spread(rows)) < 4 * spreads.std() / 4000**0.5
    assert barriers.mean() >= barrier(rows, 0.5) - 4 * barriers.std() / 4000**0.5
    assert barriers.mean() >= torch.log(0.5 / (spreads.mean() + 1e-6))


def test_batches_of_classes_have_the_spread_of_their_share_of_pairs():
    """E V = q V+ + (1 - q) V-, q = (M - 1) / (n - 1): below that of all rows where classes are near."""
    draws = torch.Generator().manual_seed(2)
    classes = torch.arange(60) // 6
    rows = torch.randn(10, 4, generator=draws, dtype=torch.float64)[classes]
    rows = rows + 0.3 * torch.randn(60, 4, generator=draws, dtype=torch.float64)
    unit = torch.nn.functional.normalize(rows)
    sines, same = 1 - (unit @ unit.T) ** 2, (classes[:, None] == classes[None, :])
    within, between = sines[same & ~torch.eye(60, dtype=torch.bool)].mean(), sines[~same].mean()
    found = []
    for _ in range(3000):
        chosen = torch.randperm(10, generator=draws)[:3]
        found.append(spread(torch.cat([rows[6 * c + torch.randperm(6, generator=draws)[:4]] for c in chosen])))
    share = 3 / 11
    mean, error = torch.stack(found).mean(), torch.stack(found).std() / 3000**0.5
    assert abs(mean - (share * within + (1 - share) * between)) < 4 * error
    assert mean < spread(rows)


def test_it_passes_steps_on_and_can_be_wrapped():
    loss = SpreadFloor(L.Triplet(mining="hard", anneal=Anneal(2)))
    loss.step()
    assert loss.loss.annealing.done == 1
    rows, labels = tensors(*random_batch())
    memory = nf.CrossBatchMemory(SpreadFloor(L.DroTopK(k="B")), size=20)
    assert torch.isfinite(memory(rows, labels) + memory(rows, labels))
    assert "floor=0.5, weight=1.0" in repr(loss)
    assert nf.Distributed(loss)(rows, labels) == loss(rows, labels)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SpreadFloor(L.Triplet(), floor=1.0), r"^SpreadFloor: floor must lie between 0 and 1, .* 1\.0\.$"),
        (lambda: SpreadFloor(L.Triplet(), floor=0), r"^SpreadFloor: floor must lie between 0 and 1"),
        (lambda: SpreadFloor(L.Triplet(), weight=-1), r"^SpreadFloor: weight must be a number above zero"),
        (lambda: L.Triplet(floor=1.5), r"^Triplet: floor must lie between 0 and 1, but came as 1\.5\.$"),
        (lambda: L.Triplet(mining="hard", floor=0.5, reduction="none"), r"^Triplet: the loss must be one number"),
        (lambda: SpreadFloor(L.SupCon(reduction="none")), r"^SpreadFloor: the loss must be one number"),
    ],
)
def test_wrong_arguments_are_one_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_only_a_loss_can_be_wrapped():
    with pytest.raises(TypeError, match=r"^SpreadFloor: loss must be a Loss, such as nf\.losses\.Triplet\(\)"):
        SpreadFloor(nf.pairs.Hinge())

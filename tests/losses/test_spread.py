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
from nearfar.losses.spread import spread

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
        (lambda: SpreadFloor(L.SupCon(reduction="none")), r"^SpreadFloor: the loss must be one number"),
    ],
)
def test_wrong_arguments_are_one_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_only_a_loss_can_be_wrapped():
    with pytest.raises(TypeError, match=r"^SpreadFloor: loss must be a Loss, such as nf\.losses\.Triplet\(\)"):
        SpreadFloor(nf.pairs.Hinge())

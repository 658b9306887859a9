"""CCP: its subproblem, the duality gap, monotony, how it differs from gradient descent; and the convex reference."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from linear_problems import hessian, problem, problems
from oracles import descent as oracle

from nearfar.linear import TripletObjective, ccp, descend, psd_reference, safe_step
from nearfar.linear._ccp import Subproblem, ccp_step, duality_gap, majorizer
from nearfar.linear._descent import size


@pytest.mark.parametrize(("margin", "mu"), [(0.0, 1.0), (0.5, 0.3)])
def test_the_subproblem_is_the_papers(margin, mu):
    """F + Σw|(A - A_k)v|² is g less the linearized h, touches f at A_k, and never lies below it."""
    f, anchor, u, v = problem(0, margin=margin, mu=mu)
    loops = (u.numpy(), v.numpy(), margin, mu)
    for seed in range(5):
        A = problem(seed + 20)[1]
        value, gradient = majorizer(f, A, anchor)
        assert float(value) == pytest.approx(float(oracle.subproblem(A.numpy(), anchor.numpy(), *loops)), rel=1e-10)
        leaf = A.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(majorizer(f, leaf, anchor)[0], leaf)
        assert torch.allclose(gradient, wanted, atol=1e-11)
        assert value >= f.value(A)
    assert majorizer(f, anchor, anchor)[0] == f.value(anchor)
    assert torch.equal(majorizer(f, anchor, anchor)[1], f.gradient(anchor))


def test_the_gap_is_primal_less_dual():
    """¼<G, GP⁻¹> against the dual of the paper's subproblem, written out."""
    for seed in range(10):
        margin, mu = [0.0, 0.7][seed % 2], [1.0, 0.3][seed % 2]
        f, anchor, u, v = problem(seed, n=12, m=4, margin=margin, mu=mu)
        A = anchor + 0.1 * problem(seed + 50)[1]
        q = torch.sigmoid(f.products(A)[2] / mu).numpy()
        loops = (u.numpy(), v.numpy(), margin, mu)
        primal = float(oracle.subproblem(A.numpy(), anchor.numpy(), *loops))
        wanted = primal - oracle.dual(q, anchor.numpy(), *loops)
        assert duality_gap(f, A, anchor) == pytest.approx(wanted, rel=1e-7, abs=1e-10)
        assert wanted > 0


@pytest.mark.parametrize("mu", [1.0, 0.1, 0.03])
def test_gap_below_1e_8_where_it_is_asked_for(mu):
    for kind in ("triplet", "contrastive"):
        f, A, u, v = problem(3, n=12, m=4, kind=kind, mu=mu, margin=0.5)
        step = ccp_step(f, A, gap=1e-9)
        assert 0 <= step.gap <= 1e-9
        assert step.gap * step.value < 1e-8
        # no nearby point is better by more than the gap says
        for seed in range(20):
            near = step.A + 1e-3 * problem(seed)[1]
            assert float(majorizer(f, near, A)[0]) >= step.value * (1 - 1e-9)
        if kind == "triplet" and mu > 0.05:
            q = torch.sigmoid(f.products(step.A)[2] / mu).numpy()
            bound = oracle.dual(q, A.numpy(), u.numpy(), v.numpy(), 0.5, mu)
            assert step.value - bound < 1e-8


def test_ccp_is_monotone_and_brings_its_certified_decrease():
    for kind in ("triplet", "contrastive"):
        f, A, _, _ = problem(4, n=12, m=4, d=2, kind=kind, mu=0.3)
        path = ccp(f, A, steps=12)
        assert len(path) == 12
        for before, after in zip(path.iterates, path.iterates[1:], strict=False):
            assert before.value - after.value >= after.certified - 1e-13
            assert after.certified > 0
            assert after.gap <= 1e-6
            assert after.inner > 0


def test_a_rough_solution_still_descends():
    f, A, _, _ = problem(5, n=12, mu=0.1)
    path = ccp(f, A, steps=30, inner=1)
    assert max(each.gap for each in path.iterates[1:]) > 1e-6
    assert path.values == sorted(path.values, reverse=True)
    assert path.values[-1] < 0.9 * path.values[0]


def test_ccp_is_not_gradient_descent():
    """One gradient step on the subproblem is one on f; CCP's step is neither along it nor of its size."""
    f, A, _, _ = problem(6, n=12, m=4, mu=0.3)
    gradient = f.gradient(A)
    moved = ccp_step(f, A, gap=1e-10).A - A
    cosine = -float((moved * gradient).sum()) / (size(moved) * size(gradient))
    assert 0 < cosine < 0.95
    along = A - safe_step(f, A, gradient) * gradient
    assert float(majorizer(f, A + moved, A)[0]) < float(majorizer(f, along, A)[0])
    # nor is it any point of the gradient's ray
    ray = [float(majorizer(f, A - t * gradient, A)[0]) for t in np.geomspace(1e-3, 10, 200)]
    assert float(majorizer(f, A + moved, A)[0]) < min(ray) - 1e-3
    # at its end the model is stationary, which f is not: 2(A₊ - A_k)C is left
    assert size(majorizer(f, A + moved, A)[1]) < 1e-3 * size(f.gradient(A + moved))


def test_ccp_ends_where_the_gradient_vanishes():
    f, A, _, _ = problem(7, n=20, m=3, d=3, mu=0.5, ridge=0.2)
    path = ccp(f, A, steps=400, gap=1e-10, tolerance=1e-6)
    assert path.reason == "tolerance"
    assert path.values[-1] == pytest.approx(psd_reference(f).value, rel=1e-6)
    assert float(torch.linalg.eigvalsh(hessian(f, path.A))[0]) > -1e-4
    assert ccp(f, torch.zeros_like(A), steps=3).values == [float(f.value(torch.zeros_like(A)))]


def test_a_subproblem_that_went_wrong_is_refused(monkeypatch):
    """Whatever the solver returns, f does not rise: the run ends where it was."""
    f, A, _, _ = problem(0)
    worse = Subproblem(3 * A, 0.0, 0.0, 1)  # it claims a low value of the model, but f is larger there
    assert float(f.value(worse.A)) > float(f.value(A))
    monkeypatch.setattr(sys.modules["nearfar.linear._ccp"], "ccp_step", lambda *_, **__: worse)
    path = ccp(f, A, steps=5)
    assert path.reason == "rounding"
    assert path.values == [float(f.value(A))]
    assert torch.equal(path.A, A)


def test_at_the_bottom_nothing_rises():
    for seed in range(4):
        f, A, _, _ = problem(seed, n=5, m=2, d=2, mu=1.0, ridge=1.0)
        path = ccp(f, A, steps=40, tolerance=0.0, inner=5)
        assert path.values == sorted(path.values, reverse=True)


def test_ccp_on_the_hinge():
    f, A, _, _ = problem(8, n=15, m=3, d=2, mu=0.0)
    path = ccp(f, A, steps=3, gap=1e-4)
    assert path.values == sorted(path.values, reverse=True)
    assert path.values[-1] < path.values[0]
    assert max(each.gap for each in path.iterates[1:]) <= 1e-4


def test_ccp_callback_and_wrong_gap():
    f, A, _, _ = problem(9)
    assert ccp(f, A, steps=5, callback=lambda t, A, iterate: t == 1).reason == "callback"
    with pytest.raises(ValueError, match="gap"):
        ccp(f, A, gap=0.0)


@pytest.mark.parametrize("how", [{"ridge": 0.1}, {"ridge": 0.0}, {"mu": 0.1, "ridge": 0.1}])
def test_the_reference_is_the_global_minimum(how):
    f, _, _, _ = problem(10, n=60, m=4, **{"mu": 0.5, **how})
    reference = psd_reference(f)
    assert float(f.value(reference.factor())) == pytest.approx(reference.value, rel=1e-10)
    for seed in range(3):
        ran = descend(f, problem(seed, d=4)[1], steps=1500, tolerance=1e-10)
        assert ran.values[-1] >= reference.value * (1 - 1e-9)
        assert ran.values[-1] == pytest.approx(reference.value, rel=1e-6)  # d ≥ m: no other minimum
    if how.get("ridge"):
        assert reference.lower <= reference.value
        assert reference.value - reference.lower < 1e-6 * reference.value
    narrow = descend(f, problem(0, d=1)[1], steps=500).values[-1]
    assert narrow > reference.value


def test_the_reference_on_a_ball_and_for_pairs():
    for kind in ("triplet", "contrastive"):
        f, A, _, _ = problem(11, n=30, m=3, d=3, kind=kind, mu=0.5)
        inside = psd_reference(f, radius=0.8)
        assert float(torch.trace(inside.matrix)) <= 0.8**2 * (1 + 1e-9)
        assert inside.value - inside.lower < 1e-6 * inside.value
        ran = descend(f, A, steps=3000, radius=0.8, tolerance=1e-9)
        assert ran.values[-1] == pytest.approx(inside.value, rel=1e-6)


def test_the_reference_of_the_hinge():
    f, _, _, _ = problem(12, n=30, m=3, mu=0.0, ridge=0.2)
    reference = psd_reference(f)
    assert reference.lower <= reference.value
    assert reference.value - reference.lower < 1e-3 * reference.value
    near = descend(f.at(mu=1e-3), reference.factor(), steps=300).values[-1]
    assert near == pytest.approx(reference.value, abs=1e-3)


def test_where_zero_is_best_the_reference_says_so():
    u = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)
    f = TripletObjective(u, 0.5 * u, margin=0.3, mu=0.7)
    reference = psd_reference(f)
    assert reference.value == pytest.approx(0.7 * math.log1p(math.exp(0.3 / 0.7)))
    assert reference.lower == pytest.approx(reference.value)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_f_never_rises_under_ccp(case):
    f, A = case
    path = ccp(f, A, steps=2, inner=20)
    assert all(after <= before for before, after in zip(path.values, path.values[1:], strict=False))
    assert torch.isfinite(path.A).all()

"""Safe steps: guaranteed decrease, the single triplet, what the paper's printed bounds do, and that f never rises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_problems import hessian, problem, problems
from oracles import descent as oracle

from nearfar.linear import TripletObjective, descend, safe_step
from nearfar.linear._descent import exact_step, single_triplet_step, size

E1, E2 = (torch.eye(2, dtype=torch.float64)[i : i + 1] for i in range(2))


def test_the_safe_step_brings_what_it_promises():
    """f₊ ≤ f - (η/2)|∇f|² in 100 random problems, with μ = .03 and |A| = 10 among them."""
    for seed in range(100):
        kind = "contrastive" if seed % 5 == 4 else "triplet"
        mu, norm = [1.0, 0.2, 0.03][seed % 3], [0.01, 1.0, 10.0][seed % 4 % 3]
        f, A, _, _ = problem(seed, n=1 + seed % 9, m=2 + seed % 4, d=1 + seed % 3, kind=kind, mu=mu)
        A = A * (norm / size(A))
        value, gradient = f.value_and_gradient(A)
        eta = safe_step(f, A, gradient)
        assert eta > 0
        assert eta * f.smoothness(size(A) + eta * size(gradient)) == pytest.approx(1, rel=1e-9)
        assert eta <= 1 / f.smoothness(size(A)) * (1 + 1e-12)
        near = safe_step(f, A, gradient, local=True)
        assert near >= eta * (1 - 1e-12)
        assert float(f.value(A - near * gradient)) <= float(value) - near / 2 * size(gradient) ** 2 + 1e-14 * float(
            value
        )
        fall = eta / 2 * size(gradient) ** 2
        assert float(f.value(A - eta * gradient)) <= float(value) - fall + 1e-14 * float(value)


def test_eta_up_to_1_over_q_lmax_descends_for_one_triplet():
    for seed in range(200):
        mu = [1.0, 0.1][seed % 2]
        f, A, _, _ = problem(seed, n=1, m=3, d=1 + seed % 3, margin=[0.0, 0.7][seed % 2], mu=mu)
        value, gradient = f.value_and_gradient(A)
        _, _, s = f.products(A)
        pace = float(torch.sigmoid(s / mu)) * float(f.extreme_eigenvalues()[1])
        if pace < 1e-30:  # q has vanished, and f with it
            continue
        longest = 1 / pace
        for share in (0.01, 0.5, 1.0):
            assert float(f.value(A - share * longest * gradient)) <= float(value) + 1e-12
            moved, drop = single_triplet_step(f, A, factor=2 * share)
            assert torch.allclose(moved, A - share * longest * gradient, atol=1e-8 * (1 + size(moved)))
            assert float(value - f.value(moved)) == pytest.approx(drop, abs=1e-10 * (1 + float(value)))
            assert drop >= -1e-12
    beyond = TripletObjective(E1, 0.1 * E2, margin=0.0)
    assert single_triplet_step(beyond, E1, factor=2.1)[1] < 0  # and past it f rises


def test_its_analogue_for_more_triplets_does_not():
    """n > 1: η = 1/λmax(S), S = Σ wqB, is no safe step; the root is."""
    rose = 0
    for seed in range(200):
        f, A, u, v = problem(seed, n=5, m=3, d=1, margin=0.0)
        value, gradient = f.value_and_gradient(A)
        q = torch.sigmoid(f.products(A)[2]) / 5
        S = u.T @ (q[:, None] * u) - v.T @ (q[:, None] * v)
        top = float(torch.linalg.eigvalsh(S)[-1])
        if top > 0:
            rose += float(f.value(A - gradient / top)) > float(value) + 1e-9
    assert rose > 20
    with pytest.raises(ValueError, match="one triplet"):
        single_triplet_step(f, A)


def test_the_printed_bounds_fail_and_the_true_one_holds():
    """Jaffe 2020, (29) at u = e₁, v = 99.5e₂, w = (-.085, .014); (23) as w → 0, where a step of 1/M_g raises f."""
    u, v, w = E1, 99.5 * E2, torch.tensor([[-0.085, 0.014]], dtype=torch.float64)
    f = TripletObjective(u, v, margin=0.0)
    norm = float(torch.linalg.eigvalsh(hessian(f, w)).abs().max())
    printed = float(oracle.printed_m_f(*(x[0].numpy() for x in (w, u, v))))
    assert norm / printed > 2900
    assert norm <= f.smoothness(size(w))
    u, v, w = E1, 0.5 * E2, torch.tensor([[0.1, 0.1]], dtype=torch.float64)
    f = TripletObjective(u, v, margin=0.0)
    value, gradient = f.value_and_gradient(w)
    step = 1 / float(oracle.printed_m_g(*(x[0].numpy() for x in (w, u, v))))
    assert float(f.value(w - step * gradient)) > float(value) + 1
    assert float(f.value(w - safe_step(f, w, gradient) * gradient)) < float(value)


def test_the_papers_step_in_its_stable_form():
    """The appendix run (seed 0, 8 features): after 5 steps f is 3.5e-24; 1/(2q·lmax) itself would soon overflow."""
    x, y, z, w = _appendix()
    f = TripletObjective(x - y, x - z, margin=0.0)
    path = descend(f, w, steps=60, rule="single", tolerance=0.0)
    assert path.values[0] == pytest.approx(0.733932, abs=1e-6)
    assert path.values[5] == pytest.approx(3.5e-24, rel=0.02)
    assert all(math.isfinite(each) for each in path.values)
    low, high = (float(e) for e in f.extreme_eigenvalues())
    bound = 1 + abs(low) / high
    for t, each in enumerate(path.iterates):
        assert each.norm <= max(1.0, bound) ** t * path.iterates[0].norm * (1 + 1e-9)


def _appendix():
    np.random.seed(0)  # noqa: NPY002 - the legacy stream is what the published run used
    return (torch.as_tensor(np.random.uniform(0, 1, (1, 8))) for _ in range(4))  # noqa: NPY002


def test_where_lmax_is_not_positive_every_step_descends():
    f = TripletObjective(E1, 2 * E1, margin=0.0)
    A = torch.tensor([[0.3, 0.2]], dtype=torch.float64)
    assert float(f.extreme_eigenvalues()[1]) == 0.0
    moved, drop = single_triplet_step(f, A)
    assert moved[0].tolist() == pytest.approx([0.6, 0.2])  # |l₋| in place of l₊: that direction doubles
    assert drop == pytest.approx(float(f.value(A) - f.value(moved)), abs=1e-14)
    assert drop > 0
    assert single_triplet_step(TripletObjective(E1, E1), A)[1] == 0.0  # B = 0


def test_exact_line_search():
    """n = 1: η* = s₂/(2q·s₃) where s₃ > 0, and it is at least (not at most, as printed) 1/(2q·lmax)."""
    seen = [0, 0]
    for seed in range(60):
        f, A, u, v = problem(seed, n=1, m=3, d=2, mu=0.8)
        value, gradient = f.value_and_gradient(A)
        q = float(torch.sigmoid(f.products(A)[2] / 0.8))
        B = torch.as_tensor(oracle.b_matrix(u[0], v[0]).astype(float))
        s2, s3 = float(((A @ B) ** 2).sum()), float(((A @ B) * (A @ B @ B)).sum())
        start = safe_step(f, A, gradient)
        eta = exact_step(f, A, gradient, start=start)
        best = s2 / (2 * q * s3) if s3 > 0 else math.inf
        if best * size(gradient) < 9 * max(size(A), 1.0):
            seen[0] += 1
            assert eta == pytest.approx(best, rel=1e-6)
            assert eta >= 1 / (2 * q * float(f.extreme_eigenvalues()[1])) * (1 - 1e-9)
        elif s3 <= 0:
            seen[1] += 1
            # capped, unless f is 0 in floating point before
            short = eta * size(gradient) < 9.99 * max(size(A), 1.0)
            assert not short or float(f.value(A - eta * gradient)) < 1e-250
        assert float(f.value(A - eta * gradient)) < float(value)
    assert min(seen) > 5


@pytest.mark.parametrize("rule", ["safe", "local", "armijo", "exact"])
@pytest.mark.parametrize("kind", ["triplet", "contrastive"])
def test_every_step_brings_its_certified_decrease(rule, kind):
    f, A, _, _ = problem(11, n=12, kind=kind, mu=0.2, ridge=0.05)
    path = descend(f, A, steps=40, rule=rule, tolerance=1e-12)
    assert len(path) == 40
    for before, after in zip(path.iterates, path.iterates[1:], strict=False):
        assert after.certified > 0
        assert after.step > 0
        assert before.value - after.value >= after.certified - 1e-13
    assert path.values[-1] == float(f.value(path.A))
    assert path.iterates[-1].norm == size(path.A)
    assert path.certified == [each.certified for each in path.iterates[1:]]


def test_longer_steps_pay():
    f, A, _, _ = problem(12, n=40, m=5, mu=0.1, ridge=0.1)
    ends = {rule: descend(f, A, steps=60, rule=rule).values[-1] for rule in ("safe", "local", "armijo", "exact")}
    assert ends["local"] < ends["safe"]
    assert ends["armijo"] < ends["safe"]
    assert ends["exact"] < ends["safe"]


def test_the_rate():
    """min |∇f|² ≤ 2(f₁ - inf f)/Ση for the safe rule, with inf f ≥ 0."""
    f, A, _, _ = problem(13, n=10, mu=0.3)
    path = descend(f, A, steps=50, rule="safe", tolerance=0.0)
    total = sum(each.step for each in path.iterates[1:])
    least = min(each.gradient for each in path.iterates[:-1]) ** 2
    assert least <= 2 * (path.values[0] - path.values[-1]) / total


def test_projected_descent_stays_in_its_ball():
    for kind in ("triplet", "contrastive"):
        for rule in ("safe", "armijo"):
            f, A, _, _ = problem(14, n=9, d=1, kind=kind, mu=0.5)
            path = descend(f, 5 * A, steps=100 if rule == "safe" else 1000, radius=1.5, rule=rule, tolerance=1e-7)
            assert max(each.norm for each in path.iterates) <= 1.5
            assert path.values == sorted(path.values, reverse=True)
            for before, after in zip(path.iterates, path.iterates[1:], strict=False):
                assert before.value - after.value >= after.certified - 1e-13
        # stationary on the ball: the gradient points inwards along A, or vanishes
        G = f.gradient(path.A)
        inward = -float((G * path.A).sum()) / size(path.A)
        assert size(G + inward * path.A / size(path.A)) < 1e-5
        assert inward >= -1e-6


def test_stochastic_descent_comes_near():
    f, A, _, _ = problem(15, n=400, m=4, mu=2.0, ridge=0.1)
    exact = descend(f, A, steps=500).values[-1]
    path = descend(f, A, steps=1200, batch=16, generator=torch.Generator().manual_seed(0), decay=0.0)
    assert len(path) == 1200
    assert all(math.isnan(each.certified) for each in path.iterates[1:])
    start = float(f.value(A))
    assert float(f.value(path.A)) - exact < 0.1 * (start - exact)
    again = descend(f, A, steps=1200, batch=16, generator=torch.Generator().manual_seed(0), decay=0.0)
    assert torch.equal(path.A, again.A)
    inside = descend(f, A, steps=50, batch=16, radius=0.5, generator=torch.Generator().manual_seed(0))
    assert max(each.norm for each in inside.iterates) <= 0.5


def test_the_hinge_descends_without_a_safe_step():
    f, A, _, _ = problem(16, n=30, mu=0.0, margin=1.0)
    for rule in ("armijo", "exact"):
        path = descend(f, A, steps=200, rule=rule)
        assert path.values == sorted(path.values, reverse=True)
        assert path.values[-1] < 0.9 * path.values[0]
    with pytest.raises(ValueError, match="Lipschitz"):
        safe_step(f, A, f.gradient(A))
    with pytest.raises(ValueError, match="hinge"):
        descend(f, A, rule="safe")
    one = TripletObjective(E1, 0.5 * E2, mu=0.0)
    assert descend(one, E1 + E2, rule="single", steps=5).values[-1] == 0.0


def test_zero_and_the_kernel_are_strict_saddles():
    """A = 0 is stationary always; its Hessian is 2D·S(0). It and ker B have a negative eigenvalue unless S, B ⪰ 0."""
    f, A, _, _ = problem(17, n=6, m=3, mu=0.7)
    zero = torch.zeros_like(A)
    assert size(f.gradient(zero)) == 0
    assert descend(f, zero, steps=5).reason == "tolerance"
    assert float(torch.linalg.eigvalsh(hessian(f, zero))[0]) < -0.1
    left = descend(f, 1e-4 * A, steps=200)
    assert left.values[-1] < float(f.value(zero)) - 0.05
    one = TripletObjective(
        torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([[0.0, 1.0, 0.0]]).double(), margin=0.0
    )
    kernel = torch.tensor([[0.0, 0.0, 3.0]], dtype=torch.float64)
    assert size(one.gradient(kernel)) == 0
    assert float(torch.linalg.eigvalsh(hessian(one, kernel))[0]) == pytest.approx(-1.0)  # 2q·lmin
    for seed in range(5):
        nudge = 1e-6 * torch.randn(1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert descend(one, kernel + nudge, steps=150).values[-1] < 0.1 < math.log(2)


def test_callback_and_wrong_choices():
    f, A, _, _ = problem(18)
    seen = []
    path = descend(f, A, steps=9, callback=lambda t, A, iterate: seen.append((t, iterate.value)) or t == 3)
    assert path.reason == "callback"
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    assert [value for _, value in seen] == path.values
    draws = descend(f, A, steps=9, batch=2, callback=lambda t, A, iterate: t == 2)
    assert (len(draws), draws.reason) == (2, "callback")
    with pytest.raises(ValueError, match="did you mean 'armijo'"):
        descend(f, A, rule="armijjo")
    with pytest.raises(ValueError, match="radius"):
        descend(f, A, rule="exact", radius=1.0)
    with pytest.raises(TypeError, match="TripletObjective"):
        descend(problem(1, kind="contrastive")[0], A, rule="single")


def test_at_the_bottom_rounding_ends_the_run_and_raises_nothing():
    ended = set()
    for seed in range(8):
        f, A, _, _ = problem(seed, n=5, m=2, d=2, mu=1.0, ridge=0.5)
        for rule in ("safe", "armijo"):
            path = descend(f, A, steps=400, tolerance=0.0, rule=rule)
            assert path.values == sorted(path.values, reverse=True)
            ended.add(path.reason)
    assert "rounding" in ended


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from(["armijo", "safe", "local", "exact", "ball"]))
def test_f_never_rises(case, rule):
    f, A = case
    radius = 2.0 if rule == "ball" else None
    rule = "armijo" if rule == "ball" or (rule in ("safe", "local") and not f.mu) else rule
    path = descend(f, A, steps=6, rule=rule, radius=radius)
    assert all(after <= before for before, after in zip(path.values, path.values[1:], strict=False))
    assert torch.isfinite(path.A).all()

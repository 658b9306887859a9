"""The linear objectives against autograd and plain loops: value, gradient, Hessian, parts, bounds, minima."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from linear_problems import hessian, problem
from oracles import descent as oracle

from nearfar.linear import ContrastiveObjective, TripletObjective

SETTINGS = [(0.0, 1.0), (0.5, 0.1), (2.0, 3.0), (1.0, 0.03)]


@pytest.mark.parametrize("kind", ["triplet", "contrastive"])
@pytest.mark.parametrize(("margin", "mu"), SETTINGS)
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_derivatives_are_autograds(kind, margin, mu, ridge):
    for seed in range(3):
        f, A, _, _ = problem(seed, kind=kind, margin=margin, mu=mu, ridge=ridge)
        D = torch.randn(A.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 9))
        A.requires_grad_()
        (gradient,) = torch.autograd.grad(f.value(A), A, create_graph=True)
        (product,) = torch.autograd.grad((gradient * D).sum(), A)
        with torch.no_grad():
            value, closed = f.value_and_gradient(A)
            assert value == f.value(A)
            scale = 1 + float(product.abs().max())
            assert torch.allclose(closed, gradient, rtol=0, atol=1e-9)
            assert torch.allclose(f.hessian_vector(A, D), product, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize(("margin", "mu"), [*SETTINGS, (0.7, 0.0)])
def test_values_are_those_of_plain_loops(margin, mu):
    w = np.array([0.1, 0.2, 0.0, 0.3, 0.1, 0.1, 0.2])
    for seed in range(3):
        f, A, u, v = problem(seed, margin=margin, mu=mu)
        loops = (A.numpy(), u.numpy(), v.numpy(), margin, mu)
        assert float(f.value(A)) == pytest.approx(float(oracle.triplet(*loops)), abs=1e-12)
        assert np.allclose(f.gradient(A).numpy(), oracle.triplet_gradient(*loops).astype(float), atol=1e-12)
        assert float(f.convex_part(A)) == pytest.approx(float(oracle.convex_part(*loops)), abs=1e-11)
        assert float(f.concave_part(A)) == pytest.approx(float(oracle.concave_part(A.numpy(), v.numpy())), abs=1e-12)
        heavy = f.reweighted(5 * torch.as_tensor(w)).at(ridge=0.3)
        assert float(heavy.value(A)) == pytest.approx(float(oracle.triplet(*loops, w, 0.3)), abs=1e-12)
        assert np.allclose(heavy.gradient(A), oracle.triplet_gradient(*loops, w, 0.3).astype(float), atol=1e-12)
        c, A, u, v = problem(seed, kind="contrastive", margin=margin, mu=mu)
        wanted = oracle.contrastive(A.numpy(), u.numpy(), v.numpy(), margin, mu)
        assert float(c.value(A)) == pytest.approx(float(wanted), abs=1e-12)


def test_the_parts_are_convex_and_their_difference_is_f():
    for kind in ("triplet", "contrastive"):
        f, A, _, _ = problem(1, kind=kind, mu=0.3)
        B = problem(2, kind=kind)[1]
        for part in (f.convex_part, f.concave_part):
            assert float(part((A + B) / 2)) <= float(part(A) + part(B)) / 2
        assert float(f.convex_part(A) - f.concave_part(A)) == pytest.approx(float(f.value(A)), abs=1e-12)
        assert float(f.value((A + B) / 2)) != pytest.approx(float(f.value(A) + f.value(B)) / 2)


def test_one_triplet_in_one_dimension_is_the_papers_function():
    """Jaffe 2020, (19), (25), (28) for α = 0, μ = 1."""
    f, A, u, v = problem(3, n=1, d=1, margin=0.0, mu=1.0)
    B, w = oracle.b_matrix(u[0], v[0]).astype(float), A.numpy()[0]
    q = 1 / (1 + math.exp(-w @ B @ w))
    assert float(f.value(A)) == pytest.approx(math.log1p(math.exp(w @ B @ w)), abs=1e-12)
    assert np.allclose(f.gradient(A), 2 * q * B @ w, atol=1e-12)
    assert np.allclose(hessian(f, A), 4 * q * (1 - q) * np.outer(B @ w, B @ w) + 2 * q * B, atol=1e-11)


def test_eigenvalues_of_b():
    f, _, u, v = problem(4, n=30, m=5)
    low, high = f.extreme_eigenvalues()
    for i in range(30):
        wanted = np.linalg.eigvalsh(oracle.b_matrix(u[i], v[i]).astype(float))
        assert (float(low[i]), float(high[i])) == pytest.approx((wanted[0], wanted[-1]), abs=1e-12)
        assert float(f.spectral_norms()[i]) == pytest.approx(np.abs(wanted).max(), abs=1e-12)
    close = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    near = TripletObjective(close, close + torch.tensor([[1e-9, 0.0]], dtype=torch.float64))
    # B ≈ -1e-9 (e₁ 1' + 1 e₁'): norm 1e-9 (1 + √2), lost if squares of lengths were subtracted
    assert float(near.spectral_norms()[0]) == pytest.approx(1e-9 * (1 + math.sqrt(2)), rel=1e-6)


@pytest.mark.parametrize("kind", ["triplet", "contrastive"])
def test_the_ball_bound_holds(kind):
    worst = 0.0
    for seed in range(60):
        mu, ridge = [1.0, 0.3, 0.03][seed % 3], 0.2 * (seed % 2)
        margin, radius = [0.0, 1.0][seed % 2], [0.01, 0.5, 3.0, 10.0][seed % 4]
        f, A, _, _ = problem(seed, n=1 + seed % 5, m=3, kind=kind, margin=margin, mu=mu, ridge=ridge)
        if kind == "triplet" and seed % 4 == 3:  # on s = 0, where the curvature of one triplet is greatest
            f = problem(seed, n=1, m=3, margin=0.0, mu=mu, ridge=ridge)[0]
            values, vectors = np.linalg.eigh(oracle.b_matrix(f.u[0], f.v[0]).astype(float))
            w = vectors[:, 0] * math.sqrt(abs(values[-1])) + vectors[:, -1] * math.sqrt(abs(values[0]))
            A = torch.as_tensor(w)[None]
        A = A * (radius / torch.linalg.vector_norm(A))
        norm = float(torch.linalg.eigvalsh(hessian(f, A)).abs().max())
        assert norm <= f.smoothness(radius) * (1 + 1e-12)
        worst = max(worst, norm / f.smoothness(radius))
    assert worst > 0.5  # a bound that is not idle


def test_the_local_bound_holds_and_is_sharper():
    for seed in range(60):
        mu, kind, far = [1.0, 0.1][seed % 2], ["triplet", "contrastive"][seed // 2 % 2], [0.0, 0.1, 3.0][seed % 3]
        f, A, _, _ = problem(seed, n=1 + seed % 5, m=5, kind=kind, mu=mu, ridge=0.1)
        least, constant, linear, square = f.local_bounds(A)
        bound = max(least, constant + linear * far + square * far**2)
        assert bound <= f.smoothness(float(torch.linalg.vector_norm(A)) + far) * (1 + 1e-12)
        E = problem(seed + 100, m=5)[1]
        E = E * (far / torch.linalg.vector_norm(E))
        assert float(torch.linalg.eigvalsh(hessian(f, A + E)).abs().max()) <= bound * (1 + 1e-12)
        if not far and kind == "triplet":
            wanted = [
                np.linalg.norm(A.numpy() @ oracle.b_matrix(u, v).astype(float)) ** 2
                for u, v in zip(f.u, f.v, strict=True)
            ]
            assert constant == pytest.approx(f.bounds()[1] + np.mean(wanted) / mu)


def test_the_hessian_oracle_agrees():
    f, A, u, v = problem(5, margin=0.3, mu=0.4)
    wanted = oracle.triplet_hessian(A.numpy(), u.numpy(), v.numpy(), 0.3, 0.4).astype(float)
    assert np.allclose(hessian(f, A), wanted, atol=1e-10)


def test_no_bound_holds_everywhere():
    """f is not globally smooth: along s = 0 the Hessian grows like |A|², so Lee et al. do not apply as they stand."""
    f = TripletObjective(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double(), margin=0.0)
    norms = [float(torch.linalg.matrix_norm(hessian(f, t * torch.ones(1, 2).double()), ord=2)) for t in (1, 10, 100)]
    assert norms[1] > 50 * norms[0] > 0
    assert norms[2] == pytest.approx(100 * norms[1], rel=0.02)


def test_the_smoothed_loss_stands_at_most_mu_log_2_above_the_hinge():
    for mu in (1.0, 0.1, 0.01):
        f, A, _, _ = problem(6, mu=mu)
        gap = float(f.value(A) - f.at(mu=0.0).value(A))
        assert 0 <= gap <= mu * math.log(2) + 1e-15


@pytest.mark.parametrize(("margin", "mu"), SETTINGS)
def test_minimum_where_b_is_psd(margin, mu):
    u = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]], dtype=torch.float64)
    f = TripletObjective(u, u * torch.tensor([[-0.5], [1.0]]), margin=margin, mu=mu)
    least = mu * math.log1p(math.exp(margin / mu)) if margin / mu < 700 else margin
    known = f.infimum()
    assert known.attained
    assert known.lower == known.upper == pytest.approx(least, rel=1e-12)
    assert float(f.value(torch.zeros(2, 3).double())) == pytest.approx(least, rel=1e-12)
    kernel = torch.linalg.svd(u)[2][-1:]
    assert float(f.value(1e3 * kernel)) == pytest.approx(least, rel=1e-9)
    for seed in range(20):
        A = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert float(f.value(A)) >= least - 1e-12


def test_infimum_zero_is_attained_by_the_hinge_alone():
    u, v = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    f = TripletObjective(u, v, margin=0.0)
    assert (f.infimum().upper, f.infimum().attained) == (0.0, False)
    path = [float(f.value(t * torch.tensor([[0.0, 1.0]]).double())) for t in (1.0, 3.0, 6.0)]
    assert path == sorted(path, reverse=True)
    assert 0 < path[-1] < 1e-10
    assert f.at(mu=0.0).infimum().attained
    assert f.at(ridge=0.1).infimum().attained
    assert TripletObjective(u, 2 * u, margin=1.0).infimum().upper == 0.0
    # u₁ < v₁ but u₂ > v₂ along every direction that serves the first: nothing is known in closed form
    both = TripletObjective(torch.cat([u, v]), torch.cat([v, u]), margin=1.0)
    assert both.infimum().attained is None
    assert ContrastiveObjective(torch.eye(2).double(), v).infimum().attained
    assert ContrastiveObjective(u, v).infimum().attained is None


def test_sampling_is_unbiased():
    for kind in ("triplet", "contrastive"):
        f, A, _, _ = problem(8, kind=kind, mu=0.5, margin=8.0)
        if kind == "triplet":
            f = f.reweighted(torch.tensor([5.0, 1, 1, 1, 1, 1, 0]))
        generator = torch.Generator().manual_seed(0)
        drawn = torch.stack([f.sample(4, generator).value(A) for _ in range(4000)])
        error = float(drawn.std()) / math.sqrt(len(drawn))
        assert abs(float(drawn.mean() - f.value(A))) < 4 * error
        assert error < 0.02 * float(f.value(A))


def test_a_bias_changes_nothing():
    """Jaffe's future work asks for a bias: it cancels in every difference, in the loss of a layer as in f."""
    x = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    f = TripletObjective(x[0] - x[1], x[0] - x[2], margin=0.4, mu=0.2)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    for bias in (0.0, 5.0):
        with torch.no_grad():
            layer.bias.fill_(bias)
        a, p, n = (layer(rows) for rows in x)
        s = (a - p).square().sum(dim=1) - (a - n).square().sum(dim=1) + 0.4
        loss = (0.2 * torch.nn.functional.softplus(s / 0.2, threshold=60.0)).mean()
        layer.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(float(f.value(layer.weight.detach())), rel=1e-12)
        assert torch.allclose(layer.weight.grad, f.gradient(layer.weight.detach()), atol=1e-12)
        assert float(layer.bias.grad.abs().max()) < 1e-12


def test_a_ray_is_f_on_a_line():
    for kind in ("triplet", "contrastive"):
        f, A, _, _ = problem(9, kind=kind, mu=0.5, ridge=0.2)
        D = problem(10, kind=kind)[1]
        ray = f.ray(A, D)
        for t in (0.0, 0.3, -1.0):
            assert ray.value(t) == pytest.approx(float(f.value(A + t * D)), rel=1e-12)
            assert ray.slope(t) == pytest.approx(float((f.gradient(A + t * D) * D).sum()), rel=1e-10)


def test_bad_input_is_refused():
    x = torch.randn(3, 2)
    for make, word in (
        (lambda: TripletObjective(x, x[:2]), "one row a triplet"),
        (lambda: TripletObjective(x, x.double()), "agree"),
        (lambda: TripletObjective(x[:0], x[:0]), "at least one row"),
        (lambda: TripletObjective(x, x, mu=-1.0), "mu"),
        (lambda: TripletObjective(x, x, margin=-1.0), "margin"),
        (lambda: TripletObjective(x, x, weights=torch.ones(2)), r"\[3\]"),
        (lambda: TripletObjective(x, x, weights=torch.tensor([1.0, -1.0, 1.0])), "not negative"),
        (lambda: TripletObjective(x * torch.nan, x), "finite"),
        (lambda: TripletObjective(x, x).value(torch.zeros(2, 3)), r"\[d, 2\]"),
    ):
        with pytest.raises(ValueError, match=word):
            make()

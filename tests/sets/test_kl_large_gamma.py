"""`KL` with any γ, from the worst case to the mean: value and gradient beside the long-double oracle, on every engine.

The error is stated beside the largest loss, because F = largest + γ·log mean e^{(l - largest)/γ}: 8 roundings of it for
the value, 64 for the gradient (beside its own largest entry). Without log1p and expm1 it grows with γ: in float32 to
the size of the value at γ = 1e6, in float64 to 1e-7 of it at 1e8.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import algebra
from oracles import sets as slow

import nearfar as nf

GAMMAS = [10.0**k for k in range(-4, 9)]
TYPES = (torch.float32, torch.float64)
LINKED = ("add", {})


def batch(dtype):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(8, 4)).astype(np.float32).astype(np.float64)
    labels = np.array([0, 0, 0, 1, 1, 1, 2, 2])
    return rows, labels, torch.tensor(rows, dtype=dtype, requires_grad=True), torch.tensor(labels)


def answer(gamma, groups, zero, rows, labels, least):
    same, other = labels[:, None] == labels[None, :], ~np.eye(len(labels), dtype=bool)
    pair, over = ("hinge", {"margin": 0.3, "threshold": 0.4}), ("kl", {"gamma": gamma, "zero": zero})
    product = algebra.Product("cosine", True, pair, pair, over, over, groups, LINKED, least=least)
    found = algebra.answer(product, rows, None, same & other, ~same & other, 2)
    return float(found.value), found.rows.astype(np.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gamma", GAMMAS[::2])
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("groups", ["batch", "sign", "anchor", "anchor_sign", "triplets", "positive"])
def test_every_engine_equals_the_oracle_at_every_gamma(groups, zero, gamma, dtype):
    eps = torch.finfo(dtype).eps
    rows, labels, E, y = batch(dtype)
    value, slope = answer(gamma, groups, zero, rows, labels, torch.finfo(dtype).smallest_normal)
    # sharp weights feel the rounding of losses: by their size over γ
    room = eps * (64 + 8 / gamma)
    for engine in ("dense", "tiled"):
        pair, over = nf.pairs.Hinge(0.3, 0.4), nf.sets.KL(gamma, zero=zero)
        loss = nf.RobustLoss(pair=pair, over=over, groups=groups, engine=engine)
        found = loss(E, y)
        (grad,) = torch.autograd.grad(found, E)
        assert abs(found.item() - value) <= 8 * eps * 1.7, (engine, found.item(), value)
        assert np.abs(grad.numpy() - slope).max() <= room * np.abs(slope).max(), engine
        if engine == "dense":
            assert loss.explain(E, y).value.item() == found.item()


def test_what_was_seen():
    """.0900, .0938 and 0.0 at γ = 1e2, 1e4 and 1e6, where the mean is near .0898."""
    rng = torch.Generator().manual_seed(0)
    losses = 0.18 * torch.rand(1, 4000, generator=rng)
    for gamma in (1e2, 1e4, 1e6, 1e8):
        assert nf.sets.KL(gamma).value(losses).item() == pytest.approx(float(slow.kl(losses[0], gamma)), rel=1e-6)
    assert nf.sets.KL(1e8).value(losses).item() == pytest.approx(losses.double().mean().item(), rel=1e-6)


def close(found, wanted, dtype, top):
    assert abs(float(found) - float(wanted)) <= 8 * torch.finfo(dtype).eps * top, (float(found), float(wanted))


def streamed(over, losses, measure, chunks):
    stream = over.stream(1, losses)
    again = True
    while again:
        for l, w in zip(losses.chunk(chunks, dim=1), measure.chunk(chunks, dim=1), strict=True):
            stream.add(l, w)
        again = stream.turn()
    return stream


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("zero_member", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_set_and_its_stream_equal_the_oracle(weighted, zero_member, gamma, dtype):
    rng = np.random.default_rng(4)
    losses = rng.normal(size=90).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], size=90) if weighted else rng.integers(0, 2, size=90)
    l, w = torch.tensor(losses[None], dtype=dtype), torch.tensor(weights[None])
    measure = w.to(dtype) if weighted else w > 0
    top = np.abs(losses).max()
    for over, wanted in (
        (nf.sets.KL(gamma, zero_member=zero_member), slow.kl(losses, gamma, weights, zero_member=zero_member)),
        (
            nf.sets.KL(gamma, zero_member=zero_member, zero="drop"),
            slow.kl(losses, gamma, weights, zero_member=zero_member, zero="drop"),
        ),
    ):
        close(over.value(l, measure), wanted, dtype, top)
        close(streamed(over, l, measure, 7).value(), wanted, dtype, top)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rho", [0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0])
def test_a_small_ball_is_near_the_mean(rho, dtype):
    """Its temperature grows as ρ^-½ does: to a million times the spread at ρ = 1e-12."""
    losses = np.random.default_rng(5).random(size=200).astype(np.float32)
    wanted, p = slow.kl_ball(losses, rho), slow.kl_ball_weights(losses, rho).astype(np.float64)
    l = torch.tensor(losses[None], dtype=dtype, requires_grad=True)
    over = nf.sets.KLBall(rho)
    value = over.value(l)
    (grad,) = torch.autograd.grad(value.sum(), l)
    close(value.detach(), wanted, dtype, 1.0)
    room = max(1e-8, 4 * torch.finfo(dtype).eps ** 0.5 if dtype == torch.float32 else 0.0)
    np.testing.assert_allclose(grad[0].numpy(), p, rtol=room)
    stream = streamed(over, l.detach(), torch.ones_like(l, dtype=torch.bool), 3)
    close(stream.value(), wanted, dtype, 1.0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_calibrated_weights_keep_their_digits(gamma, dtype):
    """p ∝ e^{l/γ} - 1, which is l/γ for a large γ."""
    losses = np.random.default_rng(6).random(size=30).astype(np.float32)
    x = losses.astype(np.longdouble) / gamma
    raw = np.exp(x - x.max()) * -np.expm1(-x)
    p = nf.sets.CalibratedKL(gamma).weights(torch.tensor(losses[None], dtype=dtype))[0]
    room = torch.finfo(dtype).eps * (16 + 4 / gamma)
    np.testing.assert_allclose(p.numpy(), (raw / raw.sum()).astype(np.float64), rtol=room, atol=room * 1e-3)


@pytest.mark.parametrize("gamma", [1.0, 1e4, 1e8])
def test_second_derivatives_stay_those_of_the_softmax(gamma):
    l = torch.tensor([[0.1, 0.4, 0.2, 0.05]], dtype=torch.float64, requires_grad=True)
    (p,) = torch.autograd.grad(nf.sets.KL(gamma).value(l).sum(), l, create_graph=True)
    (second,) = torch.autograd.grad(p[0, 1], l)
    wanted = (torch.diag(p[0]) - p[0][:, None] * p[0][None, :])[1].detach() / gamma
    torch.testing.assert_close(second[0], wanted, rtol=1e-9, atol=1e-12 / gamma)

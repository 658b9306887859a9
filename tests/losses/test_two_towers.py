"""CLIP and SigLIP over queries and documents: against loops, and against the formulas of open_clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import oracle_of
from oracles.gradient import gradient
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from ways import lower_thresholds

import nearfar as nf

L = nf.losses
LOSSES = {
    "CLIP": (lambda **more: L.CLIP(temperature=0.2, **more), {"temperature": 0.2}),
    "SigLIP": (lambda **more: L.SigLIP(scale=4.0, bias=-2.0, **more), {"scale": 4.0, "bias": -2.0}),
}
ENGINES = ("dense", "tiled", "auto")


def towers(n, m):
    """Queries and documents, with several documents of some ids, and a document that no query asks for."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 4)), np.arange(n), rng.normal(size=(m, 4)), np.arange(m) % (n + 1)


def measure(loss, x, y, more=()):
    found = loss(x[0], x[1], ref_emb=y[0], ref_labels=y[1])
    return [found.detach(), *torch.autograd.grad(found, [x[0], y[0], *more])]


def leaf(rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_oracle(name, engine, monkeypatch):
    lower_thresholds(monkeypatch, 1, 2**60)
    make, hyper = LOSSES[name]
    X, x_ids, Y, y_ids = towers(5, 9)
    loss = make(engine=engine).double()
    loss.tile = 3
    found = measure(loss, (leaf(X), torch.tensor(x_ids)), (leaf(Y), torch.tensor(y_ids)))
    exact = X.astype(np.longdouble), Y.astype(np.longdouble)

    def oracle(x, y):
        return oracle_of(name)(x, x_ids, R=y, ry=y_ids, **hyper)

    assert found[0].item() == pytest.approx(float(oracle(*exact)), abs=1e-10)
    wanted = gradient(lambda x: oracle(x, exact[1]), exact[0]), gradient(lambda y: oracle(exact[0], y), exact[1])
    for slope, other in zip(found[1:], wanted, strict=True):
        np.testing.assert_allclose(slope.numpy(), other, rtol=0, atol=1e-9)


def open_clip(x, y, log_scale):
    logits = log_scale.exp() * normalize(x, dim=1) @ normalize(y, dim=1).T
    own = torch.arange(len(x))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def open_siglip(x, y, log_scale, bias):
    logits = log_scale.exp() * normalize(x, dim=1) @ normalize(y, dim=1).T + bias
    return -logsigmoid((2 * torch.eye(len(x)) - 1) * logits).sum() / len(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_the_losses_of_open_clip_with_what_these_learn(engine, monkeypatch):
    lower_thresholds(monkeypatch, 1, 2**60)
    rng, ids = np.random.default_rng(1), torch.arange(40)
    x, y = (leaf(rng.normal(size=(40, 6))) for _ in range(2))
    scales = [leaf(np.log(start)) for start in (1 / 0.07, 10.0)]
    bias = leaf(-10.0)
    clip, siglip = L.CLIP(learn=True, engine=engine).double(), L.SigLIP(engine=engine).double()
    wanted = open_clip(x, y, scales[0]), open_siglip(x, y, scales[1], bias)
    slopes = [
        torch.autograd.grad(wanted[0], [x, y, scales[0]]),
        torch.autograd.grad(wanted[1], [x, y, scales[1], bias]),
    ]
    assert [name for name, _ in siglip.named_parameters()] == ["log_scale", "offset"]
    for loss, value, slope in zip((clip, siglip), wanted, slopes, strict=True):
        for _ in range(5):  # the last ones by a recording
            found = measure(loss, (x, ids), (y, ids), tuple(loss.parameters()))
        torch.testing.assert_close(found, [value.detach(), *slope], atol=1e-10, rtol=1e-10)


def test_what_is_learned_moves_and_is_saved():
    loss = L.SigLIP().double()
    X, x_ids, Y, y_ids = towers(5, 9)
    x, y = (leaf(X), torch.tensor(x_ids)), (leaf(Y), torch.tensor(y_ids))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    first = measure(loss, x, y)[0]
    loss(x[0], x[1], ref_emb=y[0], ref_labels=y[1]).backward()
    optimizer.step()
    assert measure(loss, x, y)[0] < first
    assert loss.scale.item() != 10
    assert loss.bias.item() != -10
    twin = L.SigLIP().double()
    twin.load_state_dict(loss.state_dict())
    assert torch.equal(measure(twin, x, y)[0], measure(loss, x, y)[0])
    assert repr(twin) == repr(loss)
    twin.scale = 5.0
    assert (twin.scale.item(), twin.log_scale.item()) == (5.0, 0.0)
    loss.learn = False
    assert not list(loss.parameters())
    assert torch.equal(measure(loss, x, y)[0], first)


def test_without_references_clip_is_nt_xent():
    rows, labels = leaf(np.random.default_rng(2).normal(size=(12, 4))), torch.arange(12) // 3
    for engine in ENGINES:
        found, wanted = L.CLIP(engine=engine)(rows, labels), L.NTXent(engine=engine)(rows, labels)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        slopes = [torch.autograd.grad(value, rows)[0] for value in (found, wanted)]
        torch.testing.assert_close(*slopes, atol=1e-12, rtol=1e-12)

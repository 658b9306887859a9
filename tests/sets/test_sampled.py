"""`Sampled`: unbiased, with replacement, seeded, and only members that are present."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nearfar as nf

S = nf.sets


def drawn(found: Any, l: torch.Tensor, w: torch.Tensor, times: int) -> torch.Tensor:
    """How the gradient, the drawn weights, came out: [times, n]."""
    leaf = l.expand(times, -1).clone().requires_grad_()
    found.value(leaf, w.expand(times, -1)).sum().backward()
    return leaf.grad


@pytest.mark.parametrize(
    "inner", [S.KL(0.3), S.TopK(2.5), S.ChiSquare(1.0), S.CalibratedKL(0.4, 3), S.KL(0.3, zero_member=True)]
)
@pytest.mark.parametrize("samples", [1, 7])
def test_sampled_is_unbiased_and_with_replacement(inner, samples):
    """The mean of 20,000 drawn weights lies within five standard errors of p*, member by member."""
    torch.manual_seed(11)
    l = torch.tensor([[0.9, 0.2, 0.0, 0.5, 5.0, 0.8, 1.1]], dtype=torch.float64)
    w = torch.tensor([[1.0, 2.0, 1.0, 0.5, 0.0, 1.0, 1.0]], dtype=torch.float64)
    found, times = S.Sampled(inner, samples), 20_000
    p, counts = found.weights(l, w)[0], drawn(found, l, w, times) * samples
    torch.testing.assert_close(p, inner.weights(l, w)[0], atol=0, rtol=0)
    torch.testing.assert_close(counts, counts.round(), atol=1e-9, rtol=0)
    assert (counts.sum(dim=1) <= samples + 1e-9).all()
    if not inner.zero_member:
        torch.testing.assert_close(counts.sum(dim=1), torch.full((times,), float(samples), dtype=l.dtype))
    assert (counts[:, p == 0] == 0).all()
    band = 5 * (p * (1 - p) / (samples * times)).sqrt()
    assert ((counts.mean(dim=0) / samples - p).abs() <= band + 1e-12).all()
    # with replacement, the count of one member is binomial; without, its variance would be smaller
    spread = (counts - samples * p).pow(2).mean(dim=0)
    torch.testing.assert_close(spread, samples * p * (1 - p), rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("spot", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("seed", range(10))
def test_sampled_never_draws_an_absent_member(spot, seed, monkeypatch):
    """Also at the very ends of the random numbers, where a rounding could step past the last member."""
    rng = np.random.default_rng(seed)
    l, w = torch.tensor(rng.random((4, 9))), torch.tensor(rng.random((4, 9)) * (rng.random((4, 9)) < 0.6))
    w[:, [0, -1]] = 0
    w[3] = 0
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, spot, dtype=kw["dtype"]))
    found = S.Sampled(S.KL(0.3), 5)
    l.requires_grad_()
    value = found.value(l, w)
    value.sum().backward()
    assert (l.grad[w == 0] == 0).all()
    torch.testing.assert_close(l.grad.sum(dim=1), (w.sum(dim=1) > 0).to(l.dtype), atol=1e-12, rtol=0)
    assert value[3] == 0


def test_sampled_follows_the_seed():
    l = torch.rand(1, 50, generator=torch.Generator().manual_seed(0))
    found = S.Sampled(S.KL(0.5), 5)
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(found.value(l).item())
    assert values[0] == values[1] != values[2]

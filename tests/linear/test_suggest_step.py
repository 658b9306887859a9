"""The suggested learning rate: a bound where it says so, the powers it scales with, and a guard that holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import nearfar as nf
from nearfar.linear._learning_rate import StepGuard, Suggestion, suggest_step


def features(seed=0, n=40, m=6):
    return torch.randn(3, n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(head, triplets, margin=1.0, mu=1.0):
    a, p, n = (head(rows) for rows in triplets)
    s = (a - p).square().sum(dim=1) - (a - n).square().sum(dim=1) + margin
    return mu * softplus(s / mu, threshold=60.0).mean()


def layer(m=6, d=3, scale=1.0, seed=0):
    head = nn.Linear(m, d, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(scale * torch.randn(d, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return head


def test_the_suggestion_is_a_bound():
    for seed in range(20):
        head, x = layer(scale=[0.01, 1.0, 5.0][seed % 3], seed=seed), features(seed)
        suggestion = suggest_step(head, x, mu=0.3)
        before = loss(head, x, mu=0.3)
        before.backward()
        assert suggestion.value == pytest.approx(before.item(), rel=1e-12)
        assert suggestion.gradient == pytest.approx(head.weight.grad.norm().item(), rel=1e-10)
        with torch.no_grad():
            head.weight -= suggestion.rate * head.weight.grad
        assert loss(head, x, mu=0.3).item() <= before.item() - suggestion.decrease + 1e-13


def test_it_scales_as_the_bound_says():
    """Inputs times 10: c⁻² while 2b leads, c⁻⁴ once |W|²b²/μ leads; with weights over 10 exactly c⁻²."""
    x = features()
    rate = lambda scale, c: suggest_step(layer(scale=scale), c * x).rate  # noqa: E731
    assert rate(1e-6, 1.0) / rate(1e-6, 10.0) == pytest.approx(1e2, rel=1e-3)
    assert rate(1e4, 1.0) / rate(1e4, 10.0) == pytest.approx(1e4, rel=1e-3)
    assert 1e2 < rate(1.0, 1.0) / rate(1.0, 10.0) < 1e4
    assert rate(1.0, 1.0) / rate(0.1, 10.0) == pytest.approx(1e2, rel=1e-9)


def test_a_weight_tensor_is_as_good_as_its_layer_and_a_bias_is_nothing():
    head, x = layer(), features()
    with_bias = suggest_step(head, x)
    with torch.no_grad():
        head.bias += 7.0
    assert suggest_step(head, x) == with_bias == suggest_step(head.weight, x)
    assert isinstance(with_bias, Suggestion)
    assert with_bias.norm == pytest.approx(head.weight.norm().item())


def glyph_triplets(count=150):
    """Pixels of a few training glyphs: anchors and positives of one class, negatives of another."""
    split = nf.data.glyphs(progress=False).train
    keep = split.labels < 40
    images, labels = split.images[keep].flatten(1).float() / 255, split.labels[keep]
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(len(labels), (count,), generator=generator)
    scores = torch.rand(count, len(labels), generator=generator)
    same = labels[anchors][:, None] == labels
    positives = scores.masked_fill(~same, -1.0).argmax(dim=1)
    negatives = scores.masked_fill(same, -1.0).argmax(dim=1)
    return tuple(images[rows] for rows in (anchors, positives, negatives))


def train(head, x, rate, guarded, steps=60):
    optimizer = torch.optim.SGD(head.parameters(), lr=rate)
    guard = StepGuard(head, optimizer)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(head, x)
        values.append(value.item())
        if not math.isfinite(values[-1]) or values[-1] > 1e6:
            break
        value.backward()
        guard.step(x) if guarded else optimizer.step()
    return values, guard


def test_on_glyphs_a_guarded_run_never_diverges_at_100_times_the_rate():
    x = glyph_triplets()
    torch.manual_seed(0)
    head = nn.Linear(1024, 16)
    start = {name: value.clone() for name, value in head.state_dict().items()}
    rate = 100 * suggest_step(head, x).rate
    values, guard = train(head, x, rate, guarded=True)
    assert guard.is_bound
    assert guard.capped == len(values) == 60
    assert all(after <= before + 1e-6 for before, after in itertools.pairwise(values))
    assert values[-1] < values[0]
    head.load_state_dict(start)
    # the bound is of the worst case: here it takes 1000 times the rate to diverge without a guard
    wild, _ = train(head, x, 100 * rate, guarded=False)
    assert wild[-1] > wild[0] or not math.isfinite(wild[-1])
    head.load_state_dict(start)
    tame, _ = train(head, x, 100 * rate, guarded=True)
    assert tame == pytest.approx(values)


def test_below_a_moving_network_it_is_a_heuristic_that_says_so():
    x = glyph_triplets(60)
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(1024, 32), nn.ReLU()), nn.Linear(32, 8)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1.0, momentum=0.5)
    guard = StepGuard(head, optimizer)
    assert not guard.is_bound
    rate = 100 * suggest_step(head, tuple(body(rows).detach() for rows in x)).rate
    optimizer.param_groups[0]["lr"] = rate
    values = []
    for _ in range(40):
        optimizer.zero_grad()
        inner = tuple(body(rows) for rows in x)
        value = loss(head, inner)
        values.append(value.item())
        value.backward()
        guard.step(tuple(rows.detach() for rows in inner))
        assert optimizer.param_groups[0]["lr"] == rate  # put back
    assert max(values) <= 2 * values[0]
    assert values[-1] < values[0]


def test_what_is_a_bound():
    head = layer()
    bound = lambda optimizer: StepGuard(head, optimizer).is_bound  # noqa: E731
    assert bound(torch.optim.SGD(head.parameters(), lr=0.1))
    assert not bound(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9))
    assert not bound(torch.optim.SGD(head.parameters(), lr=0.1, weight_decay=0.1))
    assert not bound(torch.optim.Adam(head.parameters()))
    assert not bound(torch.optim.SGD([*head.parameters(), *layer().parameters()], lr=0.1))


def test_a_rate_below_the_cap_is_left_alone():
    head, x = layer(), features()
    rate = suggest_step(head, x).rate / 2
    values, guard = train(head, x, rate, guarded=True, steps=5)
    assert guard.capped == 0
    assert values[-1] < values[0]


def test_bad_input_is_refused():
    head, x = layer(), features()
    for make, word in (
        (lambda: suggest_step(head, x[:2]), "three tensors"),
        (lambda: suggest_step(head, x, mu=0.0), "mu"),
        (lambda: suggest_step(head, (x[0], x[1], x[2][:3])), "negatives"),
        (lambda: suggest_step(head, tuple(rows[:, :2] for rows in x)), "anchors"),
        (lambda: StepGuard(head, torch.optim.SGD(head.parameters(), lr=0.1), mu=0.0), "mu"),
    ):
        with pytest.raises(ValueError, match=word):
            make()

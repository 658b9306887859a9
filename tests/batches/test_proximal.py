"""`Proximal` and `violations`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.similarity import scores
from samplers import saved

import nearfar as nf
from nearfar.batches import Proximal, violations


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()


def test_the_gradient_is_that_of_the_penalty():
    """λ(θ - θₖ): what autograd gives for loss + λ/2 |θ - θₖ|², at parameters that have moved."""
    model, x = net(), torch.randn(6, 3, dtype=torch.float64)
    start = [p.detach().clone() for p in model.parameters()]
    proximal = Proximal(model.parameters(), weight=0.03)
    statistics = {name: b.clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
    penalty = 0.015 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), start, strict=True))
    torch.testing.assert_close(proximal.penalty(), penalty.detach())
    value = model.eval()(x).square().sum()
    expected = torch.autograd.grad(value + penalty, list(model.parameters()))
    model(x).square().sum().backward()
    proximal.add_gradient()
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    assert all(torch.equal(b, statistics[name]) for name, b in model.named_buffers())
    proximal.anchor()
    assert proximal.penalty() == 0
    before = [p.grad.clone() for p in model.parameters()]
    proximal.add_gradient()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_frozen_and_unused_parameters_are_left_alone():
    model = net()
    model[0].weight.requires_grad_(False)
    proximal = Proximal(model.parameters(), weight=1.0)
    assert len(proximal.params) == 5
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    model[2](torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    plain = model[2].weight.grad.clone()
    proximal.add_gradient()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is None
    assert torch.equal(model[2].weight.grad, plain + 1)
    with pytest.raises(ValueError, match="params must hold a parameter that needs a gradient, but none came"):
        Proximal([model[0].weight])
    with pytest.raises(ValueError, match="weight must be a number zero or more"):
        Proximal(model.parameters(), weight=-1)


def test_after_a_reduction_across_ranks_it_is_added_once():
    """Two ranks average their gradients and then add the pull: the same as one process with both halves."""
    x = torch.randn(8, 3, dtype=torch.float64)
    halves, whole = [net().eval() for _ in range(2)], net().eval()
    pulls = [Proximal(model.parameters(), weight=0.1) for model in (*halves, whole)]
    for model in (*halves, whole):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
    whole(x).square().mean().backward()
    for model, part in zip(halves, x.chunk(2), strict=True):
        model(part).square().mean().backward()
    for a, b in zip(*(model.parameters() for model in halves), strict=True):
        mean = (a.grad + b.grad) / 2
        a.grad, b.grad = mean.clone(), mean.clone()
    for pull in pulls:
        pull.add_gradient()
    for a, b, c in zip(*(model.parameters() for model in (*halves, whole)), strict=True):
        torch.testing.assert_close(a.grad, c.grad)
        assert torch.equal(a.grad, b.grad)


def test_its_state_is_the_anchor():
    model = net()
    proximal = Proximal(model.parameters())
    state = saved(proximal.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    other = Proximal(model.parameters())
    assert other.penalty() == 0
    other.load_state_dict(state)
    torch.testing.assert_close(other.penalty(), proximal.penalty())
    assert other.penalty() > 0
    with pytest.raises(ValueError, match="anchors for these 2 parameters"):
        Proximal(model[0].parameters()).load_state_dict(state)


# ---------------------------------------------------------------- violations


@pytest.mark.parametrize("cells", [1, 30, 10**6])
@pytest.mark.parametrize("similarity", [None, nf.similarity.Cosine(), nf.similarity.NegEuclidean(normalize=False)])
def test_the_share_of_broken_pairs(similarity, cells, monkeypatch):
    monkeypatch.setitem(violations.__wrapped__.__globals__, "CELLS", cells)
    rng = np.random.default_rng(0)
    E, y = rng.normal(size=(13, 3)), rng.integers(0, 4, size=13)
    D = -scores(E, E, "neg_euclidean", normalize=similarity is None or similarity.normalize)
    near, far = 0.9, 1.3
    positive = [D[i, j] for i in range(13) for j in range(i) if y[i] == y[j]]
    negative = [D[i, j] for i in range(13) for j in range(i) if y[i] != y[j]]
    too_far, too_near = [d - near for d in positive if d > near], [far - d for d in negative if d < far]
    found = violations(
        torch.tensor(E), torch.tensor(y), max_positive_distance=near, min_negative_distance=far, similarity=similarity
    )
    assert (found.positive_pairs, found.negative_pairs) == (len(positive), len(negative))
    assert found.share == pytest.approx((len(too_far) + len(too_near)) / (len(positive) + len(negative)))
    assert found.positive == pytest.approx(len(too_far) / len(positive))
    assert found.negative == pytest.approx(len(too_near) / len(negative))
    assert found.positive_excess == pytest.approx(float(np.mean(too_far)))
    assert found.negative_excess == pytest.approx(float(np.mean(too_near)))


def test_the_constraints_of_one_projection():
    rng = np.random.default_rng(1)
    E, y = torch.tensor(rng.normal(size=(8, 3))), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    mask = torch.arange(8) < 4
    found = violations(
        E, nf.Relation.from_labels(y, representatives=mask), max_positive_distance=0.5, min_negative_distance=1.0
    )
    assert (found.positive_pairs, found.negative_pairs) == (4, 12)
    D = -scores(E.numpy(), E.numpy(), "neg_euclidean")[:4, 4:]
    broken = sum((D[i, j] > 0.5) if i == j else (D[i, j] < 1.0) for i in range(4) for j in range(4))
    assert found.share == pytest.approx(broken / 16)


def test_violations_of_little_and_of_nonsense():
    x, y = torch.ones(1, 2), torch.tensor([3])
    assert violations(x, y, max_positive_distance=0.5, min_negative_distance=1).share == 0
    with pytest.raises(ValueError, match="max_positive_distance must be a number zero or more"):
        violations(x, y, max_positive_distance=-1, min_negative_distance=1)
    with pytest.raises(ValueError, match="must be square and of 1 rows"):
        violations(x, nf.Relation.from_labels(torch.tensor([0, 1])), max_positive_distance=0.5, min_negative_distance=1)

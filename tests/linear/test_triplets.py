"""Triplet selection against a plain loop, its gaps and draws, and the memory of the search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nearfar.linear._neighbors import KINDS, choose, differences, sort_classes
from nearfar.linear._stochastic import Batch, anneal, triplet_weights
from nearfar.sets import KL, TopK


def problem(sizes, d=3, seed=0):
    """Rows of classes of the given sizes, shuffled, then sorted by class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    z = rng.standard_normal((len(labels), d))
    classes = sort_classes(torch.tensor(labels))
    return torch.tensor(z)[classes.order], classes


def oracle(z, labels, i, k, l, hard):
    """The k nearest (or the farthest) positive rows and the l nearest negative rows of row i, one distance at a
    time.
    """
    distance = [float(sum((a - b) ** 2 for a, b in zip(z[i], z[j], strict=True))) for j in range(len(z))]
    positive = sorted((j for j in range(len(z)) if j != i and labels[j] == labels[i]), key=lambda j: distance[j])
    negative = sorted((j for j in range(len(z)) if labels[j] != labels[i]), key=lambda j: distance[j])
    return (positive[-1:], negative[:1]) if hard else (positive[:k], negative[:l])


@pytest.mark.parametrize("kind", ["neighbors", "dro", "hard"])
@pytest.mark.parametrize("sizes", [(20, 15, 9), (1, 2, 3, 30), (4, 2)])
@pytest.mark.parametrize("tile", [50, 2**22])
def test_selection_is_the_plain_loop(kind, sizes, tile):
    z, classes = problem(sizes)
    labels, rows = classes.labels.tolist(), classes.anchors()
    found = choose(z, classes, rows, kind=kind, targets=3, impostors=7, tile=tile)
    assert found.anchors.tolist() == [i for i in range(len(z)) if labels.count(labels[i]) > 1]
    for at, i in enumerate(rows.tolist()):
        near, far = oracle(z.numpy(), labels, i, 3, 7, kind == "hard")
        there = found.measure[at] > 0
        assert found.targets[at][there.any(dim=1)].tolist() == near
        assert found.impostors[at][there.any(dim=0)].tolist() == far
        assert int(there.sum()) == len(near) * len(far)


def test_flat_lists_each_triplet_once():
    z, classes = problem((1, 2, 5, 9))
    found = choose(z, classes, classes.anchors(), targets=3, impostors=4)
    anchor, target, impostor = (x.tolist() for x in found.to_list())
    labels = classes.labels.tolist()
    triplets = list(zip(anchor, target, impostor, strict=True))
    assert len(set(triplets)) == len(triplets) == int(found.measure.sum())
    assert len(triplets) == 2 * 1 * 4 + 5 * 3 * 4 + 9 * 3 * 4
    for a, t, i in triplets:
        assert a != t
        assert labels[a] == labels[t] != labels[i]


def test_all_draws_evenly_and_never_itself():
    z, classes = problem((3, 4, 5))
    rows = classes.anchors()
    found = choose(z, classes, rows, kind="all", targets=4000, impostors=4000, generator=torch.Generator())
    labels = classes.labels
    for at, i in enumerate(rows.tolist()):
        same = labels == labels[i]
        near = torch.bincount(found.targets[at], minlength=len(z)) / 4000
        far = torch.bincount(found.impostors[at], minlength=len(z)) / 4000
        even = same.double() / (int(same.sum()) - 1)
        even[i] = 0
        assert float((near - even).abs().max()) < 0.04
        assert float((far - (~same).double() / int((~same).sum())).abs().max()) < 0.04


def test_differences_and_their_cap():
    z, classes = problem((6, 7, 8))
    found = choose(z, classes, classes.anchors(), targets=2, impostors=5)
    u, v, index = differences(z, found, 10**6)
    anchor, target, impostor = found.to_list()
    assert torch.equal(u, z[anchor] - z[target])
    assert torch.equal(v, z[anchor] - z[impostor])
    assert len(index) == 21 * 10
    few, _, some = differences(z, found, 50, torch.Generator().manual_seed(1))
    assert len(few) == len(set(some.tolist())) == 50
    assert torch.equal(few, u[some])


def test_unknown_kind_is_named():
    z, classes = problem((3, 3))
    with pytest.raises(ValueError, match="did you mean 'hard'"):
        choose(z, classes, classes.anchors(), kind="hrd")
    assert set(KINDS) == {"neighbors", "hard", "all", "dro"}


@pytest.mark.parametrize("over", [None, KL(0.5), TopK(fraction=0.3)], ids=["even", "kl", "topk"])
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_batch_gradient_is_autograd(over, mu):
    x, classes = problem((1, 2, 8, 40), d=5)
    found = choose(x, classes, classes.anchors()[:20], targets=3, impostors=4)
    A = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    anchor, target, impostor = found.to_list()
    s = ((x[anchor] - x[target]) @ A.T).square().sum(1) - ((x[anchor] - x[impostor]) @ A.T).square().sum(1) + 1.0
    losses = mu * torch.logaddexp(s / mu, torch.zeros_like(s)) if mu else s.relu()
    weights = torch.full_like(losses, 1 / len(losses)) if over is None else over.weights(losses[None].detach())[0]
    total = (weights * losses).sum()
    total.backward()
    value, gradient = Batch.of(x, found).value_and_gradient(A.detach(), 1.0, mu, over)
    assert value == pytest.approx(total.item(), rel=1e-12)
    assert torch.allclose(gradient, A.grad, rtol=1e-10, atol=1e-12)


def test_dro_weights_are_those_of_the_set():
    s = torch.tensor([[[0.5, -2.0]], [[3.0, 1.0]]])
    measure = torch.tensor([[[1.0, 1.0]], [[1.0, 0.0]]])
    losses = torch.nn.functional.softplus(s).flatten()[:3]
    weights = triplet_weights(s, measure, 1.0, KL(0.7)).flatten()
    assert torch.allclose(weights[:3], torch.softmax(losses / 0.7, dim=0))
    assert float(weights[3]) == 0
    assert torch.equal(triplet_weights(s, measure, 1.0, None).flatten(), torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3)


def test_temperature_falls_and_a_given_one_stays():
    path = [anneal(None, 2.0, share) for share in (0.0, 0.5, 1.0)]
    assert path == sorted(path, reverse=True)
    assert path[0] == 2.0
    assert anneal(0.7, 2.0, 0.5) == 0.7
    assert anneal(None, 0.0, 0.0) == 1.0


def test_memory_of_the_search_does_not_grow_with_the_square(monkeypatch):
    """No tensor made during the search is larger than a tile or a few columns of n."""
    largest = 0
    addmm = torch.addmm

    def watched(*args, **kwargs):
        nonlocal largest
        result = addmm(*args, **kwargs)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "addmm", watched)
    z, classes = problem((3000, 3000), d=2)
    choose(z, classes, classes.anchors(), targets=3, impostors=3, tile=2**16)
    assert 0 < largest <= 2**16

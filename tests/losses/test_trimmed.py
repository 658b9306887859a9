"""`Trimmed`: which properties hold of a worst case without the hardest pairs, which do not, and equality of engines."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from oracles import sets as oracle

import nearfar as nf

L, S = nf.losses, nf.sets


def some_losses(groups=4, n=12, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(0.4, 0.5, size=(groups, n)))


@pytest.mark.parametrize(("top", "k"), [(1, 2), (3, 4), (0.5, 2.2), (4, 0.7)])
def test_it_is_a_difference_of_two_top_k(top, k):
    l = some_losses()
    found = S.Trimmed(top, k)
    whole, left_out = S.TopK(top + k), S.TopK(top)
    near = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(k * found.value(l), (top + k) * whole.value(l) - top * left_out.value(l), **near)
    torch.testing.assert_close(k * found.weights(l), (top + k) * whole.weights(l) - top * left_out.weights(l), **near)


@pytest.mark.parametrize(("top", "k"), [(1, 2), (2, 3), (3, 1)])
def test_it_is_top_k_after_the_best_members_to_strike_out(top, k):
    """F = min over T members struck out of the mean of the K largest of the rest."""
    l = some_losses(1, 8)[0]
    rest = [[i for i in range(8) if i not in out] for out in combinations(range(8), top)]
    best = min(S.TopK(k).value(l[None, some]).item() for some in rest)
    assert S.Trimmed(top, k).value(l[None]).item() == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_left_out_is_top_k_exactly(kind, weighted):
    l = some_losses().to(kind)
    w = (torch.rand(l.shape, generator=torch.Generator().manual_seed(0)) + 0.3).to(kind) if weighted else None
    for top in ({"top": 0}, {"top_fraction": 0.0}):
        for k in ({"k": 3.5}, {"fraction": 0.4}):
            found, wanted = S.Trimmed(**top, **k), S.TopK(**k)
            assert torch.equal(found.value(l, w), wanted.value(l, w))
            assert torch.equal(found.weights(l, w), wanted.weights(l, w))


@pytest.mark.parametrize("loss", ["Trimmed", "TopK"])
def test_members_that_are_left_out_may_be_as_wrong_as_they_like(loss):
    """Of a worst case one member takes all; here T of them change neither value nor gradient."""
    l = some_losses()
    l[:, 3:5] = 5.0 + torch.arange(2)
    worse = l.clone()
    worse[:, 3:5] *= 1e6
    found = S.Trimmed(2, 3) if loss == "Trimmed" else S.TopK(3)
    same = torch.equal(found.value(l), found.value(worse)) and torch.equal(found.weights(l), found.weights(worse))
    assert same == (loss == "Trimmed")


def test_it_grows_with_every_loss_shifts_and_scales():
    l, found = some_losses(seed=3), S.Trimmed(2, 3.5)
    more = torch.rand(l.shape, generator=torch.Generator().manual_seed(1))
    assert (found.value(l + more) >= found.value(l)).all()
    torch.testing.assert_close(found.value(l + 2), found.value(l) + 2)
    torch.testing.assert_close(found.value(3 * l), 3 * found.value(l))


def test_it_is_no_worst_case_over_a_set():
    """A worst case is convex and at least the mean: this is neither, and another choice of weights gives more."""
    a, b = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.0]])
    found = S.Trimmed(1, 1)
    assert found.value((a + b) / 2) > (found.value(a) + found.value(b)) / 2
    assert found.value(a) < S.Mean().value(a)
    assert (found.weights(b) * a).sum() >= 0
    assert (torch.tensor([[1.0, 0.0, 0.0]]) * a).sum() > found.value(a)


@pytest.mark.parametrize("how", [{"top": 6, "k": 2}, {"top": 50, "k": 2}, {"top": 6, "fraction": 0.5}])
def test_a_group_that_is_left_out_as_a_whole_is_empty(how):
    l = some_losses(2, 6).requires_grad_()
    found = S.Trimmed(**how)
    value = found.value(l)
    value.sum().backward()
    assert (value == 0).all()
    assert (l.grad == 0).all()
    assert (found.weights(l) == 0).all()


def test_ties_share_evenly_also_where_both_edges_fall_among_them():
    l = torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(S.Trimmed(2, 2).weights(l), torch.tensor([[0, 0.25, 0.25, 0.25, 0.25, 0]]))
    torch.testing.assert_close(S.Trimmed(1, 5).weights(l), torch.tensor([[0, 0.2, 0.2, 0.2, 0.2, 0.2]]))
    torch.testing.assert_close(S.Trimmed(0.5, 1).weights(l), torch.tensor([[0.5, 0.125, 0.125, 0.125, 0.125, 0]]))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"zero": "drop"}, {"zero_member": True}], ids=str)
@pytest.mark.parametrize("how", [{"top": 3, "k": 4.5}, {"top": 0, "k": 2}, {"top_fraction": 0.2, "fraction": 0.3}])
def test_a_stream_finds_both_edges(how, options, kind):
    l = (some_losses(3, 40, seed=2) * 8).round().div(8).to(kind)  # with ties
    for w in (torch.rand(l.shape, generator=torch.Generator().manual_seed(0)) > 0.3, (l.abs() + 0.5).to(kind)):
        found = S.Trimmed(**how, **options)
        stream, again = found.stream(3, l), True
        while again:
            for here in (slice(0, 7), slice(7, 40)):
                stream.add(l[:, here], w[:, here])
            again = stream.turn()
        near = {"atol": 1e-5 if kind == torch.float32 else 1e-12, "rtol": 0}
        torch.testing.assert_close(stream.weights(l, w), found.weights(l, w), **near)
        torch.testing.assert_close(stream.held(l, w), found.value(l, w), **near)


@pytest.mark.parametrize("groups", ["batch", "sign", "anchor", "anchor_sign"])
@pytest.mark.parametrize("how", [{"top": "B/4", "k": "B/2"}, {"top": 2, "fraction": 0.2}, {"top": 200, "k": 9}])
def test_strips_equal_dense(groups, how):
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(24, 4, generator=rng, dtype=torch.float64), torch.randint(0, 6, (24,), generator=rng)
    found = []
    for engine in ("dense", "tiled"):
        loss = nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.Trimmed(**how), groups=groups, engine=engine)
        loss.tile, leaf = 7, rows.clone().requires_grad_()
        value = loss(leaf, labels)
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_the_loss_leaves_mislabeled_pairs_without_weight():
    """Two tight classes, one row of each called the other: its pairs are the hardest, and trimming frees the rest."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(20) // 10
    rows = torch.nn.functional.one_hot(y, 2) + 0.1 * torch.randn(20, 2, generator=rng)
    told = y.clone()
    told[[0, 19]] = 1 - told[[0, 19]]
    wrong = (told != y)[:, None] | (told != y)
    weights = {name: make.explain(rows, told).weights for name, make in
               (("top", L.DroTopK(k="B")), ("trimmed", L.DroTrimmed(top="2B", k="B")))}  # fmt: skip
    assert weights["top"][wrong].sum() == pytest.approx(1)
    assert weights["trimmed"][wrong].sum() < 0.1


def test_per_sign_the_positive_pairs_alone_are_trimmed():
    """A share 1 - (1 - wrong)² of them: as many as there are with a wrong label."""
    rng = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(16, 4, generator=rng), torch.arange(16) // 4
    weights = L.DroTrimmedPN(wrong=0.4, k="B").explain(rows, labels).weights
    alike = (labels[:, None] == labels) & ~torch.eye(16, dtype=torch.bool)
    positive, negative = weights[alike], weights[labels[:, None] != labels]
    assert (positive > 0).sum() == math.ceil(0.36 * 48)
    assert (negative > 0).sum() == 32
    for side in (positive, negative):
        assert side.sum().item() == pytest.approx(1)
    losses = L.DroTrimmedPN(wrong=0.4, k="B").explain(rows, labels).losses[alike]
    assert losses[positive > 0].max() <= losses[positive == 0].min()


def test_without_wrong_labels_all_positive_pairs_count():
    rng = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(16, 4, generator=rng), torch.arange(16) // 4
    plain = nf.RobustLoss(pair=nf.pairs.Hinge(), over=(S.Mean(), S.TopK(16)), groups="sign")
    torch.testing.assert_close(L.DroTrimmedPN(wrong=0, k="B")(rows, labels), plain(rows, labels))


@pytest.mark.parametrize("wrong", [1, -0.1, True, "0.4", None, float("nan")])
def test_a_share_of_labels_is_a_share(wrong):
    with pytest.raises(
        ValueError, match=r"^DroTrimmedPN: wrong must be the share of wrong labels, from 0 to below 1, "
    ):
        L.DroTrimmedPN(wrong=wrong, k=3)


@pytest.mark.parametrize(
    "how",
    [{}, {"top": 1}, {"k": 1}, {"top": 1, "top_fraction": 0.1, "k": 1}, {"top": 1, "k": 2, "fraction": 0.5},
     {"top": -1, "k": 1}, {"top": 1, "k": 0}, {"top_fraction": 1.0, "k": 1}, {"top": 1, "fraction": 0.0},
     {"top": "2K", "k": 1}, {"top": 1, "k": "0B"}, {"top_fraction": -0.1, "k": 1}],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence(how):
    with pytest.raises(ValueError, match=r"^Trimmed: .*\.$"):
        S.Trimmed(**how)


def test_the_oracle_is_the_mean_of_the_middle():
    assert oracle.trimmed([5, 4, 3, 2, 1], top=1, k=2) == 3.5
    assert oracle.trimmed([5, 4], top=2, k=2) == 0

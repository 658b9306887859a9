"""`Remembered`: the averages against a loop, the coincidence with SogCLR, state, ranks, and errors in a sentence."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from processes import together

import nearfar as nf

S, P = nf.sets, nf.pairs
OF = {
    "kl": S.KL(0.3),
    "kl-raw": S.KL(0.3, normalized=False),
    "top": S.TopK(3),
    "fraction": S.TopK(fraction=0.25),
    "chi": S.ChiSquare(3.0),
    "chi-effective": S.ChiSquare(effective=6),
}
sets = pytest.mark.parametrize("of", OF.values(), ids=OF)
scopes = pytest.mark.parametrize("groups", ["batch", "sign", "anchor", "anchor_sign"])
SAMPLES, CLASSES = 48, 6


def data():
    noise = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 5, generator=noise, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES


def steps(count, rows=16, seed=1):
    noise = torch.Generator().manual_seed(seed)
    return [torch.randperm(SAMPLES, generator=noise)[:rows] for _ in range(count)]


def make(of, groups="anchor", momentum=0.8, **more):
    over = S.Remembered(of, samples=SAMPLES, momentum=momentum)
    return nf.RobustLoss(pair=P.Hinge(0.3, 0.4), over=over, groups=groups, **more).double()


def measured(loss, x, *args, **more):
    x = x.clone().requires_grad_()
    value = loss(x, *args, **more)
    return value.detach(), torch.autograd.grad(value, x)[0]


def close(found, wanted, atol=1e-12):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@sets
@scopes
def test_without_a_past_it_is_the_set_itself(of, groups):
    """At the first batch, and with momentum 0 always."""
    x, y = data()
    plain = nf.RobustLoss(pair=P.Hinge(0.3, 0.4), over=of, groups=groups)
    first, never = make(of, groups), make(of, groups, momentum=0.0)
    for k, at in enumerate(steps(4)):
        wanted = measured(plain, x[at], y[at])
        close(measured(never, x[at], y[at], ids=at), wanted)
        if not k:
            close(measured(first, x[at], y[at], ids=at), wanted)
    if isinstance(of, S.KL):  # TopK's value is the same for every threshold with K losses above
        assert abs(float(first(x[at], y[at], ids=at).detach()) - float(wanted[0])) > 1e-9


def rank_one(l, k, rho):
    """The threshold between the K-th and the next loss; or η of the chi-square ball, by a search over η."""
    l = np.sort(l)[::-1]
    if k is not None:
        return (l[k - 1] + l[min(k, len(l) - 1)]) / 2
    factor = np.sqrt(1 + 2 * rho / len(l))
    low, high = l[0] - 1e3, l[0]
    for _ in range(200):  # the dual is convex in η
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if a + factor * np.sqrt(np.mean(np.maximum(l - a, 0) ** 2)) < b + factor * np.sqrt(
            np.mean(np.maximum(l - b, 0) ** 2)
        ):
            high = b
        else:
            low = a
    return (low + high) / 2


@pytest.mark.parametrize("name", ["kl", "top", "chi"])
def test_duals_are_averages_over_batches_and_weights_follow_them(name):
    """By a loop over anchors: u, t or (η, s²) of each sample, value and weights; with a running mean at first."""
    x, y = data()
    momentum, gamma, k, rho = 0.6, 0.3, 3, 3.0
    loss = make(OF[name], momentum=momentum)
    kept, seen = {}, dict.fromkeys(range(SAMPLES), 0)
    for at in steps(6):
        found = loss.explain(x[at], y[at], ids=at)  # before the call, which updates
        value, wanted = measured(loss, x[at], y[at], ids=at)[0], []
        slopes = np.zeros((len(at), len(at)))
        for i, sample in enumerate(at.tolist()):
            others = [j for j in range(len(at)) if j != i]
            l = found.losses[i, others].numpy()
            share = max(1 - momentum, 1 / (seen[sample] + 1))
            old = kept.get(sample, (0.0, 0.0))
            if name == "kl":
                u = (1 - share) * old[0] + share * np.mean(np.exp(l / gamma))
                kept[sample], part = (u, 0.0), np.exp(l / gamma) / (len(l) * u)
                wanted.append(gamma * np.log(u) + gamma * (np.mean(np.exp(l / gamma)) / u - 1))
            elif name == "top":
                t = (1 - share) * old[0] + share * rank_one(l, k, None)
                kept[sample], part = (t, 0.0), (l > t) / k
                wanted.append(t + np.sum(np.maximum(l - t, 0)) / k)
            else:
                eta = (1 - share) * old[0] + share * rank_one(l, None, rho)
                rest, factor = np.maximum(l - eta, 0), np.sqrt(1 + 2 * rho / len(l))
                square = (1 - share) * old[1] + share * np.mean(rest**2)
                kept[sample], part = (eta, square), factor * rest / (len(l) * np.sqrt(square))
                wanted.append(eta + factor * (np.mean(rest**2) / 2 / np.sqrt(square) + np.sqrt(square) / 2))
            seen[sample] += 1
            slopes[i, others] = part / len(at)
        assert float(value) == pytest.approx(np.mean(wanted), abs=1e-6)
        np.testing.assert_allclose(found.influence.numpy(), slopes, atol=1e-6)
    assert loss.memory_positive.seen.tolist() == list(seen.values())
    assert max(seen.values()) > 2


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_weights_of_kl_exceed_those_of_the_batch_by_a_bounded_factor(momentum):
    """Update first: batch mean / u ≤ 1/(1 - m), also if a sample's losses rise without warning."""
    x, y = data()
    loss = make(S.KL(0.01), momentum=momentum)
    near = torch.nn.functional.one_hot(y, 6)[:, :5].double() + 0.01 * x
    for at in steps(12):
        loss(near[at], y[at], ids=at)
    for at in steps(1, 32):
        sums = loss.explain(x[at], y[at], ids=at).influence.sum(dim=1) * len(at)
    assert 1.0 < float(sums.max()) <= 1 / (1 - momentum) * (1 + 1e-9)


def test_over_an_anchors_negatives_it_is_sogclr():
    """Yuan et al. 2022: u ← (1-β)u + β·mean_j e^{s_ij/τ} over negatives, weights e^{s_ij/τ}/u."""
    x, y = data()
    tau, beta = 0.2, 0.3
    over = S.Mean(), S.Remembered(S.KL(tau), samples=SAMPLES, momentum=1 - beta)
    loss = nf.RobustLoss(pair=P.Linear(), over=over, groups="anchor_sign").double()
    u, seen = torch.zeros(SAMPLES, dtype=torch.float64), torch.zeros(SAMPLES)
    for at in steps(5, 20):
        rows = x[at].clone().requires_grad_()
        unit = torch.nn.functional.normalize(rows)
        s, same = unit @ unit.T, y[at][:, None] == y[at][None, :]
        exps = (s / tau).exp() * ~same
        mean = exps.detach().sum(dim=1) / (~same).sum(dim=1)
        share = torch.maximum(torch.tensor(beta), 1 / (seen[at] + 1)).double()
        u[at] = (1 - share) * u[at] + share * mean
        seen[at] += 1
        weights = exps.detach() / u[at][:, None] / (~same).sum(dim=1, keepdim=True)
        alike = same & ~torch.eye(len(at), dtype=torch.bool)
        aim = (weights * s).sum(dim=1) - (s * alike).sum(dim=1) / alike.sum(dim=1).clamp_min(1)
        wanted = torch.autograd.grad(aim.mean(), rows)[0]
        torch.testing.assert_close(measured(loss, x[at], y[at], ids=at)[1], wanted, atol=1e-7, rtol=0)


def test_rows_of_one_sample_share_one_average():
    """Their mean, in the order of no row."""
    x, y = data()
    at, twice = torch.arange(12), torch.tensor([0, 0, *range(2, 12)])
    found = []
    for order in (torch.arange(12), torch.arange(11, -1, -1)):
        loss, alone = make(S.KL(0.3)), make(S.KL(0.3))
        relation = nf.Relation.from_labels(y[at][order], ids=twice[order])
        loss(x[at][order], relation)
        found.append(loss.memory_positive.numbers[:12, 0])
        alone(x[at], nf.Relation.from_labels(y[at], ids=twice))
        assert loss.memory_positive.seen[:3].tolist() == [1, 0, 1]
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)


def test_groups_without_members_leave_the_memory_alone():
    x = torch.randn(6, 4, dtype=torch.float64)
    for of in OF.values():
        loss = make(of, "anchor_sign")
        labels = torch.tensor([0, 0, 1, 2, 3, 4])
        value, slope = measured(loss, x, labels, ids=torch.arange(6))
        value, slope = measured(loss, x, labels, ids=torch.arange(6))
        assert torch.isfinite(value)
        assert torch.isfinite(slope).all()
        assert loss.memory_positive.seen[:6].tolist() == [2, 2, 0, 0, 0, 0]
        assert torch.isfinite(loss.memory_positive.numbers).all()
        assert loss.memory_negative.seen[:6].tolist() == [2] * 6


@scopes
def test_the_memory_is_state_and_evaluation_reads_it(groups):
    x, y = data()
    loss, (first, second, third) = make(S.KL(0.3), groups), steps(3)
    loss(x[first], y[first], ids=first)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    again = make(S.KL(0.3), groups)
    again.load_state_dict(torch.load(file))
    twin = copy.deepcopy(loss).eval()
    close(measured(again, x[second], y[second], ids=second), measured(loss, x[second], y[second], ids=second))
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    shown = twin.explain(x[second], y[second], ids=second)
    value, _ = measured(twin, x[second], y[second], ids=second)
    torch.testing.assert_close(shown.value, value)
    assert all(torch.equal(before[name], value) for name, value in twin.state_dict().items())
    loss.over = S.Remembered(S.KL(0.2), samples=SAMPLES, momentum=0.5)  # a setting changes: the memory stays
    assert int(loss.memory_positive.seen.sum()) > 0
    loss.over = S.KL(0.2)
    assert not loss.state_dict()
    loss(x[third], y[third])


def of_rank(share):
    """What a process finds that passes these rows of each batch."""
    x, y = data()
    found = []
    for groups in ("batch", "anchor_sign"):
        loss = make(S.KL(0.3), groups)
        both = nf.Distributed(loss, averaged=False)
        for at in steps(4, 20):
            mine = at[share]
            rows = x[mine].clone().requires_grad_()
            value = both(rows, y[mine], ids=mine)
            found += [value.detach(), torch.autograd.grad(value, rows)[0]]
        found += list(loss.state_dict().values())
    return found


def on_ranks(rank, world):
    return of_rank(slice(7 * rank, 7 if rank == 0 else 20))


def test_two_ranks_equal_one_process(tmp_path):
    one = of_rank(slice(0, 20))
    ranks = together(__name__, "on_ranks", 2, tmp_path)
    for place, wanted in enumerate(one):
        a, b = (found[place] for found in ranks)
        if wanted.shape == a.shape:
            close((a, b), (wanted, wanted))
        else:
            close((torch.cat([a, b]),), (wanted,))


def test_what_cannot_be_remembered_is_refused_in_a_sentence():
    x, y = data()
    loss, at = make(S.KL(0.3)), steps(1)[0]
    with pytest.raises(ValueError, match="pass ids=, the number of each row's sample, from 0 to 47"):
        loss(x[at], y[at])
    with pytest.raises(
        ValueError, match=r"ids must lie between 0 and 47, because Remembered has samples=48, but 1.* to"
    ):
        loss(x[:4], y[:4], ids=torch.tensor([1, 2, 3, 48]))
    with pytest.raises(
        ValueError, match="the checkpoint has dual variables of 48 samples, but samples=40; give as many"
    ):
        nf.RobustLoss(pair=P.Hinge(), over=S.Remembered(S.KL(0.3), samples=40), groups="anchor").load_state_dict(
            loss.state_dict()
        )
    for more, words in (
        ({"over": S.Remembered(S.KL(0.3)), "groups": "anchor"}, "it needs samples=, their number"),
        (
            {"over": S.Remembered(S.KL(0.3), samples=4), "groups": "triplets"},
            "Remembered serves groups of batch, anchor",
        ),
        (
            {"over": S.Remembered(S.KL(0.3), samples=4), "engine": "tiled"},
            'engine="tiled" cannot serve this loss, becau',
        ),
    ):
        with pytest.raises(ValueError, match=words):
            nf.RobustLoss(**({"pair": P.Hinge()} | more))
    for of in (S.Mean(), S.Worst(), S.KL(effective=3), S.KLBall(0.1), S.Trimmed(1, 2), S.ChiSquare(0.0)):
        with pytest.raises(ValueError, match=r"Remembered: .* has no dual variable that can be kept"):
            S.Remembered(of)
    with pytest.raises(ValueError, match=r"Remembered: momentum must lie in \[0, 1\), but came as 1.0"):
        S.Remembered(S.KL(0.3), momentum=1.0)


def test_a_set_alone_remembers_nothing():
    l = torch.rand(3, 7, dtype=torch.float64)
    for of in OF.values():
        kept = S.Remembered(of)
        torch.testing.assert_close(kept.value(l), of.value(l))
        torch.testing.assert_close(kept.weights(l), of.weights(l))

"""`explain`: frozen, weights that sum to one, worked cases, and the equations that tie weights, influence and pull."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from table import BATCHES, IDS, ROWS, random_batch, some, tensors

import nearfar as nf
from nearfar.groups._groupings import AnchorSign, Balanced, Batch, Sign
from nearfar.groups._ranking import Bins, Ranking
from nearfar.groups._triplets import Positive, Triplets
from nearfar.links import Add, HingeLink, LiftedLink, SoftplusLink

L = nf.losses
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)


def inside(loss):
    """The product inside a composed loss, or the loss itself."""
    return loss.product


def positive_of(row, found, labels):
    """[rows, columns] which pairs of the explanation are positives."""
    n, m = found.scores.shape
    if not row.proxies:
        return labels[:, None] == labels[None, :]
    names = torch.arange(min(n, m))
    return names[:, None] == labels[None, :] if row.make().swapped else labels[:, None] == names[None, :]


def explained(row, seed=0, kind="random"):
    embeddings, labels = tensors(*(BATCHES[kind]() if seed == 0 else random_batch(seed)))
    loss = row.loss()
    found = loss.explain(embeddings, labels)
    return loss, embeddings, labels, found, positive_of(row, found, labels)


# ---------------------------------------------------------------- the result


@rows
def test_the_result_is_frozen_and_carries_no_gradient(row):
    loss, embeddings, labels, found, _ = explained(row)
    assert isinstance(found, nf.Explanation)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.value = torch.tensor(0.0)
    for field in dataclasses.fields(found):
        thing = getattr(found, field.name)
        assert not (isinstance(thing, torch.Tensor) and thing.requires_grad), field.name
    assert embeddings.grad is None
    torch.testing.assert_close(found.value, loss(embeddings, labels).detach(), atol=1e-14, rtol=1e-14)
    assert found.losses.shape == found.weights.shape == found.influence.shape
    assert found.scores.shape == found.pull.shape
    with torch.no_grad():
        assert torch.equal(loss.explain(embeddings, labels).pull, found.pull)


def both_sides(x, positive):
    """[n, p, m] as the groups [n p, m] of positive and of negative pairs."""
    return [torch.where(side[:, None, :], x, 0.0).flatten(0, 1) for side in (positive, ~positive)]


def group_sums(loss, found, positive):
    """The weight of each group, and whether it may hold a zero member."""
    product = inside(loss)
    if isinstance(product.groups, Batch | Triplets):
        return [found.weights.sum()], product.over_positive.zero_member
    if isinstance(product.groups, Positive):
        return list(found.weights.sum(dim=2).flatten()), product.over_negative.zero_member
    if isinstance(product.groups, Ranking | Bins):
        return [x.sum() for side in both_sides(found.weights, positive) for x in side], False
    signed = [torch.where(positive, found.weights, 0.0), torch.where(positive, 0.0, found.weights)]
    if product.everyone:  # the wide side holds the positive pairs too: a row's two groups have one sum
        both = 1 + (positive.sum(dim=1) > 1)
        return list(found.weights.sum(dim=1) / both), False
    if isinstance(product.groups, Sign | Balanced):
        return [x.sum() for x in signed], False
    return [x for side in signed for x in side.sum(dim=1)], product.over_positive.zero_member


@rows
@pytest.mark.parametrize("kind", BATCHES)
def test_weights_are_not_negative_and_sum_to_one_per_group(row, kind):
    loss, _, _, found, positive = explained(row, kind=kind)
    sums, zero_member = group_sums(loss, found, positive)
    assert (found.weights >= 0).all()
    assert kind == "easy" or any(x > 0.01 for x in sums)
    for x in sums:
        if zero_member:
            assert 0 <= x <= 1 + 1e-12
        else:
            assert min(abs(x.item()), abs(x.item() - 1)) < 1e-12


@rows
def test_weights_stand_only_where_there_are_pairs(row):
    """No weight and no loss on a sample with itself."""
    _, _, _, found, _ = explained(row)
    if not row.proxies:
        assert (found.pull.diagonal() == 0).all()
        itself = torch.eye(10, dtype=torch.bool)
        if found.weights.ndim == 3:
            itself = itself[:, None, :].expand_as(found.weights)
        assert (found.weights[itself] == 0).all()
        assert (found.losses[itself] == 0).all()
    assert ((found.weights == 0) <= (found.influence == 0)).all() or isinstance(inside(row.make()).link, LiftedLink)


# ---------------------------------------------------------------- the equations


@rows
@pytest.mark.parametrize("kind", BATCHES)
def test_the_gradient_is_the_pull_on_the_scores(row, kind):
    """d(loss)/d(embeddings) = Σ pull · ds, whatever the loss (N-pair's L2 term aside)."""
    embeddings, labels = tensors(*BATCHES[kind]())
    loss = row.loss()
    if row.name == "NPair":
        loss.l2 = 0.0
    found, product = loss.explain(embeddings, labels), inside(loss)
    value = loss(embeddings, labels)
    (slope,) = torch.autograd.grad(value, embeddings)
    others = loss.proxies.detach() if row.proxies else embeddings
    sides = (others, embeddings) if row.proxies and loss.swapped else (embeddings, others)
    scores = product.similarity(*sides)
    torch.testing.assert_close(found.scores, scores.detach(), atol=0, rtol=0)
    (wanted,) = torch.autograd.grad((found.pull * scores).sum(), embeddings)
    torch.testing.assert_close(slope, wanted, atol=1e-10, rtol=1e-8)


def triplet_scores(row, loss, found, s):
    """What the negative pair loss sees of each triplet, from the equations."""
    if row.name == "FastAP":
        assert found.positives is None
        return s[:, None, :] - torch.linspace(1, -1, 11, dtype=s.dtype)[:, None]
    place = found.positives
    s_ap, s_an = s.gather(1, place)[:, :, None], s[:, None, :]
    if row.name != "Angular":
        return s_an - s_ap
    t = math.tan(math.radians(40)) ** 2
    return 4 * t * (s_an + s[place]) - 2 * (1 + t) * s_ap


@some(lambda row: row.name != "SupCon")  # its positive pairs have two losses, and `losses` shows one
@pytest.mark.parametrize("kind", BATCHES)
def test_danskin_influence_times_slope_is_the_pull(row, kind):
    """dF/ds = Σ q dl/ds: the pull is the influence on the losses times their slope, and so the gradient is Σ q dl."""
    loss, _, _, found, positive = explained(row, kind=kind)
    product, s = inside(loss), found.scores.clone().requires_grad_()
    if found.influence.ndim == 3:
        losses = product.negative(triplet_scores(row, loss, found, s), -1)
    else:
        losses = torch.where(positive, product.positive(s, 1), product.negative(s, -1))
    counted = found.influence != 0
    torch.testing.assert_close(losses[counted].detach(), found.losses[counted], atol=1e-12, rtol=1e-12)
    (wanted,) = torch.autograd.grad((found.influence * losses).sum(), s)
    torch.testing.assert_close(found.pull, wanted, atol=1e-12, rtol=1e-10)
    wide = torch.where(counted, losses.detach(), 0.0)
    assert found.weighted_loss == pytest.approx((found.influence * wide).sum().item(), abs=1e-10, rel=1e-10)


@rows
@pytest.mark.parametrize("kind", BATCHES)
def test_influence_is_the_weights_times_what_the_group_counts(row, kind):
    loss, _, _, found, positive = explained(row, kind=kind)
    product = inside(loss)
    if isinstance(product.groups, Batch | Sign | Triplets):
        # the pairs of a query, which SigLIP does not divide by; the slope of a softplus of this value
        count = {"SigLIP": 9, "CoSENT": 1 - torch.exp(-found.value)}.get(row.name, 1)
        torch.testing.assert_close(found.influence, count * found.weights, atol=1e-14, rtol=0)
        return
    if product.wants_columns:
        return  # mixes rows: a negative pair is weighed by both of its ends
    if isinstance(product.groups, Positive):
        groups = [(found.weights.flatten(0, 1), found.influence.flatten(0, 1))]
    elif isinstance(product.groups, Ranking | Bins):
        groups = list(zip(*(both_sides(x, positive) for x in (found.weights, found.influence)), strict=True))
    elif isinstance(product.groups, Balanced):
        groups = [
            tuple(torch.where(side, x, 0.0).reshape(1, -1) for x in (found.weights, found.influence))
            for side in (positive, ~positive)
        ]
    else:
        assert isinstance(product.groups, AnchorSign)
        known = isinstance(product.link, Add | HingeLink | SoftplusLink) and not product.everyone
        sides = (positive, ~positive) if known else (~positive,)  # per positive, the positive pairs have a term each
        groups = [tuple(torch.where(side, x, 0.0) for x in (found.weights, found.influence)) for side in sides]
    for weights, influence in groups:
        factor = influence.sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp_min(1e-300)
        assert (factor >= 0).all() or isinstance(product.groups, Ranking | Bins)  # positives ahead of one another help
        torch.testing.assert_close(influence, weights * factor, atol=1e-12, rtol=0)


@pytest.mark.parametrize("inner", [nf.sets.KL(0.3), nf.sets.TopK(3)])
def test_a_drawn_loss_is_explained_by_one_draw(inner):
    """Value, pull and influence must tell of the same pairs drawn."""
    embeddings, labels = tensors(*random_batch())
    loss = nf.RobustLoss(pair=nf.pairs.Logistic(), over=nf.sets.Sampled(inner, 3))
    torch.manual_seed(0)
    found = loss.explain(embeddings, labels)
    s = found.scores.clone().requires_grad_()
    losses = torch.where(labels[:, None] == labels, loss.pair_positive(s, 1), loss.pair_negative(s, -1))
    (wanted,) = torch.autograd.grad((found.influence * losses).sum(), s)
    torch.testing.assert_close(found.pull, wanted, atol=1e-12, rtol=0)
    assert found.weighted_loss == pytest.approx(found.value.item())


# ---------------------------------------------------------------- worked by hand

#   cosines: s01 = .6, s02 = 0, s03 = -1, s12 = .8, s13 = -.6, s23 = 0;  labels 0 0 1 1
#   Hinge(.2, .5): positive [.7 - s]+: l01 = .1, l23 = .7;  negative [s - .3]+: l12 = .5, the rest 0
FOUR = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
TWO = torch.tensor([0, 0, 1, 1])
LOSSES = torch.zeros(4, 4, dtype=torch.float64)
for i, j, l in ((0, 1, 0.1), (2, 3, 0.7), (1, 2, 0.5)):
    LOSSES[i, j] = LOSSES[j, i] = l


def symmetric(**entries):
    p = torch.zeros(4, 4, dtype=torch.float64)
    for name, x in entries.items():
        i, j = int(name[1]), int(name[2])
        p[i, j] = p[j, i] = x
    return p


def test_top_k_by_hand():
    for k, value, p, effective in (
        (2, 0.6, symmetric(p23=1 / 4, p12=1 / 4), 4),
        (1, 0.7, symmetric(p23=1 / 2), 2),
        (1.5, 1.9 / 3, symmetric(p23=1 / 3, p12=1 / 6), 3.6),
        (0.5, 0.7, symmetric(p23=1 / 2), 2),
    ):
        found = L.DroTopK(k=k).explain(FOUR, TWO)
        torch.testing.assert_close(found.losses, LOSSES)
        torch.testing.assert_close(found.weights, p)
        torch.testing.assert_close(found.influence, p)
        assert found.value.item() == pytest.approx(value)
        assert found.weighted_loss == pytest.approx(value)
        assert found.effective_pairs == pytest.approx(effective)
        assert (found.active_positives, found.active_negatives) == (2, 2 if k > 1 else 0)
        assert found.dual.tolist() == pytest.approx([0.5 if k > 1 else 0.7])
        torch.testing.assert_close(found.pull, p * torch.where(TWO[:, None] == TWO, -1.0, 1.0))
        assert found.positives is None


def test_kl_by_hand():
    """Pairs with loss only: .1, .7, .5 in both orders, γ = .1."""
    found = L.DroKL(gamma=0.1).explain(FOUR, TWO)
    e = {key: math.exp(x / 0.1) for key, x in (("p01", 0.1), ("p23", 0.7), ("p12", 0.5))}
    total = 2 * sum(e.values())
    p = symmetric(**{key: x / total for key, x in e.items()})
    torch.testing.assert_close(found.weights, p)
    assert found.value.item() == pytest.approx(0.1 * math.log(total / 6))
    assert found.dual.item() == pytest.approx(0.1 * math.log(total))
    assert found.weighted_loss == pytest.approx((p * LOSSES).sum().item())
    assert found.effective_pairs == pytest.approx(1 / (p**2).sum().item())
    assert (found.active_positives, found.active_negatives) == (4, 2)


def test_worst_mean_and_per_sign_by_hand():
    found = L.DroWorst().explain(FOUR, TWO)
    torch.testing.assert_close(found.weights, symmetric(p23=1 / 2))
    assert found.dual.item() == pytest.approx(0.7)
    product = nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.Mean(), groups="sign")
    found = product.explain(FOUR, TWO)
    assert found.value.item() == pytest.approx(0.4 + 0.125)
    torch.testing.assert_close(found.dual, torch.tensor([[4.0], [8.0]], dtype=torch.float64))
    assert found.effective_pairs == pytest.approx(2**2 / (4 / 16 + 8 / 64))
    assert (found.active_positives, found.active_negatives) == (4, 2)


def test_the_zero_member_takes_its_share_by_hand():
    """Anchor 1 of multi-similarity: one positive pair at .6, negative pairs at .8 and -.6, and the zero member."""
    found = L.MultiSimilarity(alpha=2, beta=10, threshold=0.5, miner=None).explain(FOUR, TWO)
    pull, push = math.exp(-2 * 0.1), [math.exp(10 * 0.3), math.exp(-10 * 1.1)]
    wanted = [pull / (1 + pull), 0, push[0] / (1 + sum(push)), push[1] / (1 + sum(push))]
    assert found.weights[1].tolist() == pytest.approx(wanted)
    torch.testing.assert_close(found.influence, found.weights / 4)


def test_triplets_by_hand():
    """Hardest: d_23 = √2 against d_21 = √.4; the triplet (2, 3, 1) alone carries the weight."""
    loss = L.Triplet(margin=0.2, mining="hardest")
    found = loss.explain(FOUR, TWO)
    assert found.value.item() == pytest.approx(math.sqrt(2) - math.sqrt(0.4) + 0.2)
    (a, p, n) = (int(x) for x in torch.nonzero(found.weights)[0])
    assert (a, int(found.positives[a, p]), n) == (2, 3, 1)
    assert found.weights.sum() == found.effective_pairs == 1
    assert (found.active_positives, found.active_negatives) == (1, 1)
    listed = loss.explain(FOUR, TWO, (torch.tensor([0, 3]), torch.tensor([1, 2]), torch.tensor([2, 0])))
    assert listed.losses.shape == listed.weights.shape == (2,)
    d = {"01": math.sqrt(0.8), "02": math.sqrt(2), "32": math.sqrt(2), "30": 2.0}
    assert listed.losses.tolist() == pytest.approx([max(d["01"] - d["02"] + 0.2, 0), max(d["32"] - d["30"] + 0.2, 0)])


def test_one_value_an_anchor():
    found = L.DroKLGrouped(reduction="none").explain(FOUR, TWO)
    assert found.value.shape == (4,)
    assert repr(found).startswith("Explanation(value=4 anchors, active_positives=4, ")
    assert found.value.sum().item() == pytest.approx(L.DroKLGrouped(reduction="sum")(FOUR, TWO).item())


def test_repr_and_a_reference():
    assert repr(L.DroTopK(k=2).explain(FOUR, TWO)) == (
        "Explanation(value=0.6, active_positives=2, active_negatives=2, effective_pairs=4.0)"
    )
    found = L.DroTopK(k=2).explain(FOUR, TWO, ref_emb=FOUR[1:], ref_labels=TWO[1:])
    assert found.losses.shape == found.weights.shape == found.pull.shape == (4, 3)
    assert found.weights.sum().item() == pytest.approx(1)

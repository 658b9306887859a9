"""The sentences under *Relations* in docstrings, as equalities: one loss recovered from another."""

from __future__ import annotations

import math

import pytest
import torch
from table import random_batch, tensors
from torch.nn.functional import cross_entropy

import nearfar as nf
from nearfar.links import Add, HingeLink
from nearfar.losses import proxies

L, P, S = nf.losses, nf.pairs, nf.sets
Dot, Cosine, NegEuclidean = nf.similarity.Dot, nf.similarity.Cosine, nf.similarity.NegEuclidean
seeds = pytest.mark.parametrize("seed", range(4))


def measured(loss, embeddings, labels, *args):
    leaf = embeddings.detach().clone().requires_grad_()
    value = loss(leaf, labels, *args)
    value.backward()
    return value.detach(), leaf.grad


def same(found, wanted, tolerance=1e-12):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def batch(seed):
    """Ten points of three classes and a singleton, and their two sides: positive and negative masks."""
    embeddings, labels = tensors(*random_batch(seed))
    positive = (labels[:, None] == labels) & ~torch.eye(10, dtype=torch.bool)
    return embeddings.detach(), labels, positive, labels[:, None] != labels


def pairs_batch(seed, classes=5, dim=4):
    """Two samples of each class: one positive an anchor."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(2)
    return torch.randn(2 * classes, dim, dtype=torch.float64, generator=generator), labels


# ---------------------------------------------------------------- batch-wide sets


@seeds
def test_the_corners_of_every_family_are_the_worst_pair(seed):
    """DroWorst = DroTopK(k=½) = DroKL(γ→0) = DroChiSquare(ρ ≥ n(n-1)/2) = hard mining of the one worst pair."""
    E, y, positive, negative = batch(seed)
    wanted = measured(L.DroWorst(), E, y)
    n = 90
    same(measured(L.DroTopK(k=0.5), E, y), wanted)
    same(measured(L.DroTopK(k=1), E, y), wanted)  # both orders of the worst pair
    same(measured(L.DroKL(gamma=1e-9), E, y), wanted, 1e-7)
    same(measured(L.DroChiSquare(rho=n * (n - 1) / 2), E, y), wanted)
    cosines = Cosine()(E, E)
    losses = torch.cat([torch.relu(0.7 - cosines[positive]), torch.relu(cosines[negative] - 0.3)])
    assert wanted[0].item() == pytest.approx(losses.max().item(), abs=1e-14)


@seeds
def test_the_centers_of_every_family_are_the_mean(seed):
    """DroTopK(k ≥ all pairs) = DroKL(γ→∞) = DroChiSquare(0) = the mean; with `Logistic` it is BinomialDeviance."""
    E, y, *_ = batch(seed)
    for pair in (P.Hinge(), P.Logistic()):
        wanted = measured(nf.RobustLoss(pair=pair, over=S.Mean()), E, y)
        for k in (45, 46, 1000):
            same(measured(L.DroTopK(k=k, pair=pair), E, y), wanted)
        same(measured(L.DroTopK(fraction=1.0, pair=pair), E, y), wanted)
        same(measured(L.DroChiSquare(rho=0.0, pair=pair), E, y), wanted)
        same(measured(L.DroKL(gamma=1e7, zero="keep", pair=pair), E, y), wanted, 1e-6)
    same(measured(L.BinomialDeviance(), E, y), measured(L.DroTopK(k=45, pair=P.Logistic()), E, y))


@seeds
def test_a_batch_wide_hinge_is_002s_margin_loss_and_004s_on_distances(seed):
    E, y, *_ = batch(seed)
    wanted = measured(nf.RobustLoss(pair=P.Hinge(0.2, -1.2), over=S.Mean(), similarity=NegEuclidean()), E, y)
    same(measured(L.Margin(margin=0.2, beta=1.2).double(), E, y), wanted)


@seeds
def test_top_k_pn_is_the_mean_of_the_two_sides(seed):
    """Where both signs have K/2 pairs: half of RobustLoss(TopK(k/2), groups="sign")."""
    E, y, *_ = batch(seed)
    for k in (3, 6.5, 18):
        value, slope = measured(nf.RobustLoss(pair=P.Hinge(), over=S.TopK(k / 2), groups="sign"), E, y)
        same(measured(L.DroTopKPN(k=k), E, y), (value / 2, slope / 2))


@seeds
def test_as_in_paper_counts_as_the_authors_code(seed):
    """K_code: the 4K largest ordered entries for TopK, the top 2K of each sign for TopK-PN."""
    E, y, positive, negative = batch(seed)
    cosines = Cosine()(E, E)
    pull, push = torch.relu(0.7 - cosines[positive]), torch.relu(cosines[negative] - 0.3)
    for code in (2, 4):
        largest = torch.cat([pull, push]).topk(4 * code).values.mean()
        torch.testing.assert_close(L.DroTopK.as_in_paper(code)(E, y), largest)
        signed = torch.cat([pull.topk(2 * code).values, push.topk(2 * code).values]).mean()
        torch.testing.assert_close(L.DroTopKPN.as_in_paper(code)(E, y), signed)


def test_as_in_paper_draws_as_the_authors_code():
    """DRO-KL in code: p ∝ e^{l/γ} - 1 on the 4K largest, 4K draws with replacement; not the text's softmax."""
    E, y, positive, negative = batch(0)
    loss = L.DroKL.as_in_paper(gamma=0.2, k_code=3)
    cosines = Cosine()(E, E)
    l = torch.where(positive, torch.relu(0.7 - cosines), torch.relu(cosines - 0.3)) * (positive | negative)
    raw = torch.where(l >= l.flatten().topk(12).values[-1], torch.expm1(l / 0.2), 0.0)
    p = raw / raw.sum()
    torch.testing.assert_close(loss.explain(E, y).weights, p)
    softmax = nf.RobustLoss(pair=P.Hinge(), over=S.KL(0.2, zero="drop")).explain(E, y).weights
    assert (softmax - p).abs().max() > 1e-3
    torch.manual_seed(0)
    values = torch.stack([loss(E, y) for _ in range(500)])
    spread = ((p * l**2).sum() - (p * l).sum() ** 2).sqrt() / math.sqrt(12 * 500)
    assert (values.mean() - (p * l).sum()).abs() < 5 * spread


# ---------------------------------------------------------------- per anchor and sign


def grouped(margin, gamma=1.0, **more):
    return L.DroKLGrouped(gamma=gamma, reduction="sum", pair=P.Hinge(margin, 0.5), **more)


@seeds
def test_grouped_kl_of_temperature_one_has_the_gradient_of_generalized_lifted(seed):
    """All losses positive (m = 2 > 1 + λ) and all outer hinges active: equal gradients; values apart by a constant.

    F = L_LS + Σ_i (2m - log P_i - log N_i), over the anchors with both sides (Qi et al. 2020, eq. 3 and 7).
    """
    E, y, positive, negative = batch(seed)
    both = positive.any(dim=1)
    E, y, positive, negative = E[both], y[both], positive[both][:, both], negative[both][:, both]
    value, slope = measured(grouped(2.0), E, y)
    lifted, wanted = measured(L.GeneralizedLifted.as_in_paper(), E, y)
    torch.testing.assert_close(slope, wanted, atol=1e-12, rtol=0)
    offset = (2 * 2.0 - positive.sum(dim=1).double().log() - negative.sum(dim=1).double().log()).sum()
    assert value.item() == pytest.approx((lifted + offset).item(), abs=1e-12)
    assert wanted.abs().max() > 0.1


@seeds
def test_a_linear_loss_and_the_zero_member_are_multi_similarity(seed):
    """γ₊ = 1/α, γ₋ = 1/β, unhinged, one zero loss in every group: equal to 1e-12, values too once log W is dropped."""
    E, y, *_ = batch(seed)
    alpha, beta = 2.0, 50.0
    over = tuple(S.KL(1 / x, normalized=False, zero_member=True) for x in (alpha, beta))
    recovered = nf.RobustLoss(pair=P.Linear(0.5), over=over, groups="anchor_sign", link=Add())
    wanted = measured(L.MultiSimilarity(alpha=alpha, beta=beta, miner=None), E, y)
    same(measured(recovered, E, y), wanted)
    normalized = tuple(S.KL(1 / x, zero_member=True) for x in (alpha, beta))
    recovered = nf.RobustLoss(pair=P.Linear(0.5), over=normalized, groups="anchor_sign")
    torch.testing.assert_close(measured(recovered, E, y)[1], wanted[1], atol=1e-12, rtol=0)


@seeds
def test_the_margin_loss_and_the_zero_member_are_multi_similarity_with_two_thresholds(seed):
    """With the hinge, m = 2: thresholds λ + m for positive and λ - m for negative pairs, not one λ."""
    E, y, positive, negative = batch(seed)
    over = (S.KL(0.5, normalized=False, zero_member=True), S.KL(0.2, normalized=False, zero_member=True))
    found = measured(nf.RobustLoss(pair=P.Hinge(2.0, 0.5), over=over, groups="anchor_sign"), E, y)
    leaf = E.clone().requires_grad_()
    s = Cosine()(leaf, leaf)
    pull = torch.log1p((torch.exp(-2 * (s - 2.5)) * positive).sum(dim=1)) / 2
    push = torch.log1p((torch.exp(5 * (s + 1.5)) * negative).sum(dim=1)) / 5
    value = (pull + push).mean()
    value.backward()
    same(found, (value.detach(), leaf.grad))
    one = measured(L.MultiSimilarity(alpha=2, beta=5, miner=None), E, y)
    assert (one[1] - found[1]).abs().max() > 1e-3


@seeds
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_hap2s_with_its_hinge_off_has_the_gradient_of_grouped_kl(seed, gamma):
    """A margin so large that every hinge is active; for γ = 1 on cosine it is then generalized lifted's, too."""
    E, y, positive, _ = batch(seed)
    both = positive.any(dim=1)
    E, y = E[both], y[both]
    _, slope = measured(L.HAP2S(margin=50.0, gamma=gamma, similarity=Cosine()), E, y)
    _, wanted = measured(L.DroKLGrouped(gamma=gamma, pair=P.Linear(), zero="keep"), E, y)
    torch.testing.assert_close(slope, wanted, atol=1e-12, rtol=0)
    _, lifted = measured(L.GeneralizedLifted.as_in_paper(), E, y)
    assert torch.allclose(slope, lifted / len(y), atol=1e-12) == (gamma == 1.0)


@seeds
def test_hard_triplets_are_the_worst_of_each_side(seed):
    """Worst per anchor and sign, joined by a hinge = batch-hard; and "hard" never exceeds "hardest"."""
    E, y, positive, negative = batch(seed)
    d = -NegEuclidean()(E, E)
    farthest = torch.where(positive, d, -torch.inf).amax(dim=1)
    nearest = torch.where(negative, d, torch.inf).amin(dim=1)
    terms = torch.relu(farthest - nearest + 0.2) * positive.any(dim=1)
    hard = L.Triplet(margin=0.2, mining="hard")(E, y)
    assert hard.item() == pytest.approx(terms.mean().item(), abs=1e-14)
    hardest = L.Triplet(margin=0.2, mining="hardest")(E, y)
    assert hardest.item() == pytest.approx(terms.max().item(), abs=1e-14)
    assert hard <= hardest
    worst = nf.RobustLoss(
        pair=P.Linear(), over=S.Worst(), groups="anchor_sign", link=HingeLink(0.2), similarity=NegEuclidean()
    )
    same(measured(worst, E, y), measured(L.Triplet(margin=0.2, mining="hard"), E, y))


# ---------------------------------------------------------------- triplets and smoothing


@seeds
@pytest.mark.parametrize("mu", [0.05, 0.5])
def test_softplus_is_the_smoothed_triplet_and_kl_over_violation_and_zero(seed, mu):
    """μ·softplus(x/μ) = max over p of p·x + μ·H(p): KL(μ) over {x, 0}; at most μ·log 2 above the hinge (Jaffe 2020,
    9-12).
    """
    E, y, positive, negative = batch(seed)
    smooth = L.Triplet.as_in_paper(margin=0.1, smooth=mu)
    d = -nf.similarity.NegSquaredEuclidean()(E, E)
    x = (d[:, :, None] - d[:, None, :] + 0.1)[positive[:, :, None] & negative[:, None, :]]
    both = torch.stack([x, torch.zeros_like(x)], dim=1)
    torch.testing.assert_close(smooth(E, y), S.KL(mu, normalized=False).value(both).mean())
    alone = x[:, None].clone()
    torch.testing.assert_close(smooth(E, y), S.KL(mu, normalized=False, zero_member=True).value(alone).mean())
    plain = L.Triplet.as_in_paper(margin=0.1)(E, y)
    assert plain <= smooth(E, y) <= plain + mu * math.log(2)
    torch.testing.assert_close(plain, torch.relu(x).mean())


# ---------------------------------------------------------------- softmax family


@seeds
def test_nt_xent_on_dot_with_one_positive_each_is_n_pair(seed):
    """Anchors: the first of each class; the rest of N-pair's rectangle are the second of each."""
    E, y = pairs_batch(seed)
    anchors, positives = E[0::2], E[1::2]
    wanted = L.NPair(l2=0.0)(E, y)
    xent = L.NTXent(similarity=Dot(), temperature=1.0)
    found = xent(anchors, y[0::2], ref_emb=positives, ref_labels=y[1::2])
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(found, cross_entropy(anchors @ positives.T, torch.arange(5)), atol=1e-12, rtol=0)
    assert xent(E, y).item() != pytest.approx(wanted.item())  # every pair, not one a class
    regular = L.NPair(l2=0.3)(E, y)
    torch.testing.assert_close(regular, wanted + 0.3 * (E**2).sum(dim=1).mean(), atol=1e-12, rtol=0)


@seeds
def test_sup_con_with_one_positive_an_anchor_is_nt_xent(seed):
    E, y = pairs_batch(seed)
    same(measured(L.SupCon(temperature=0.2), E, y), measured(L.NTXent(temperature=0.2), E, y))
    E, y, *_ = batch(seed)
    assert L.SupCon(temperature=0.2)(E, y).item() != pytest.approx(L.NTXent(temperature=0.2)(E, y).item())


@seeds
def test_proxy_losses_are_cross_entropies(seed):
    """ProxyNCA keeps its own proxy in the denominator, or leaves it out; ArcFace with margin 0 is the softmax."""
    E, y, *_ = batch(seed)
    torch.manual_seed(seed)
    nca = L.ProxyNCA(5, 4, scale=3.0).double()
    logits = 3.0 * nf.similarity.NegSquaredEuclidean()(E, nca.proxies)
    torch.testing.assert_close(nca(E, y), cross_entropy(logits, y), atol=1e-12, rtol=0)
    nca.own = False
    rest = torch.where(torch.nn.functional.one_hot(y, 5).bool(), -torch.inf, logits).logsumexp(dim=1)
    torch.testing.assert_close(nca(E, y), (rest - logits.gather(1, y[:, None])[:, 0]).mean(), atol=1e-12, rtol=0)
    face = L.ArcFace(5, 4, margin=0.0, scale=16.0).double()
    torch.testing.assert_close(face(E, y), cross_entropy(16 * Cosine()(E, face.proxies), y), atol=1e-12, rtol=0)


def test_a_small_batch_takes_one_cross_entropy_unless_a_part_is_the_users_own(monkeypatch):
    """It may rely on what is computed for the whole product, as `explain` shows it."""

    class Own(P.Linear):
        pass

    E, y, *_ = batch(0)
    plain, own, changed = (L.ArcFace(5, 4, pair=pair).double() for pair in (P.Linear(), Own(), P.Linear()))
    changed.pair.forward = lambda s, sign: P.Linear()(s, sign)
    steps = []
    monkeypatch.setattr(proxies, "cross_entropy", lambda *given: steps.append(1) or cross_entropy(*given))
    wanted = measured(plain, E, y)
    assert len(steps) == 1
    for other in (own, changed):
        same(measured(with_vectors_of(other, plain), E, y), wanted)
    assert len(steps) == 1


def with_vectors_of(loss, other):
    """A loss with the class vectors of another."""
    with torch.no_grad():
        loss.double().proxies.copy_(other.double().proxies)
    return loss


def test_losses_with_class_vectors_meet():
    E, y, *_ = batch(0)
    plain = L.NormalizedSoftmax(5, 4, temperature=1 / 16)
    wanted = measured(plain.double(), E, y)
    for loss in (L.ArcFace(5, 4, margin=0.0, scale=16.0), L.CosFace(5, 4, margin=0.0, scale=16.0)):
        same(measured(with_vectors_of(loss, plain), E, y), wanted)
    squared = L.NormalizedSoftmax(5, 4, temperature=1 / 16, similarity=nf.similarity.NegSquaredEuclidean())
    same(
        measured(with_vectors_of(squared, plain), E, y),
        measured(with_vectors_of(L.ProxyNCA(5, 4, scale=16), plain), E, y),
    )
    one = with_vectors_of(L.SubCenterArcFace(5, 4, centers=1, scale=8.0), plain)
    same(measured(one, E, y), measured(with_vectors_of(L.ArcFace(5, 4, scale=8.0), plain), E, y))
    one = with_vectors_of(L.SoftTriple(5, 4, centers=1, margin=0.2, scale=8.0), plain)
    same(measured(one, E, y), measured(with_vectors_of(L.CosFace(5, 4, margin=0.2, scale=8.0), plain), E, y))


@seeds
def test_neighborhood_components_and_tuplets_are_nt_xent_where_they_meet(seed):
    E, y = pairs_batch(seed)
    squared = nf.similarity.NegSquaredEuclidean()
    same(measured(L.NCA(scale=3), E, y), measured(L.NTXent(temperature=1 / 3, similarity=squared), E, y))
    E, y, *_ = batch(seed)
    same(measured(L.TupletMargin(margin=0, scale=5), E, y), measured(L.NTXent(temperature=1 / 5), E, y))
    proxies = L.ProxyNCA(5, 4, scale=3).double()
    found = L.NCA(scale=3)(E, y, ref_emb=proxies.proxies, ref_labels=torch.arange(5))
    torch.testing.assert_close(found, proxies(E, y), atol=1e-12, rtol=0)


@seeds
def test_smooth_ap_is_average_precision_in_the_limit_and_fast_ap_bins_of_any_score(seed):
    E, y, positive, negative = batch(seed)
    s = Cosine()(E, E)
    precisions = []
    for i in torch.nonzero(positive.any(dim=1))[:, 0]:
        others = (positive | negative)[i]
        ahead = [(s[i] >= s[i, p]) & others for p in torch.nonzero(positive[i])[:, 0]]
        precisions.append(torch.tensor([float((positive[i] & a).sum() / a.sum()) for a in ahead]).mean())
    wanted = 1 - float(torch.stack(precisions).mean())
    assert L.SmoothAP(temperature=1e-5)(E, y).item() == pytest.approx(wanted, abs=1e-6)
    for similarity in (nf.similarity.NegSquaredEuclidean(), Dot(normalize=True)):
        same(measured(L.FastAP(bins=7, similarity=similarity), E, y), measured(L.FastAP(bins=7), E, y), 1e-9)


# ---------------------------------------------------------------- chi-square on a batch


@seeds
def test_chi_square_on_a_batch_is_mean_plus_deviation_where_the_closed_form_holds(seed):
    E, y, positive, negative = batch(seed)
    l = L.DroWorst(pair=P.Logistic()).explain(E, y).losses[positive | negative]
    n, seen = len(l), set()
    for rho in (0.01, 1.0, 20.0, 400.0):
        value = L.DroChiSquare(rho=rho, pair=P.Logistic())(E, y).item()
        variance = l.var(correction=0)
        closed = (l.mean() + (2 * rho * variance / n).sqrt()).item()
        holds = bool(2 * rho * (l.mean() - l.min()) ** 2 <= n * variance)
        assert value == pytest.approx(closed, abs=1e-12) if holds else value < closed
        seen.add(holds)
    assert seen == {True, False}


@seeds
def test_lifted_structure_with_a_pair_alone_is_half_its_square(seed):
    """Two positive rows and one negative: J = d₀₁ + log(e^{m-d₀₂} + e^{m-d₁₂}), squared and halved (Can et al.
    2019).
    """
    E = batch(seed)[0][:3]
    d = -NegEuclidean()(E, E)
    J = d[0, 1] + torch.log(torch.exp(1 - d[0, 2]) + torch.exp(1 - d[1, 2]))
    value = L.LiftedStructure()(E, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(value, torch.relu(J) ** 2 / 2, atol=1e-12, rtol=0)


def test_lifted_structure_hardly_tells_negatives_apart_on_unit_rows():
    """Distances end at 2: weights of an anchor's negatives differ by e² at most; longer rows or a scale lift that."""
    rng = torch.Generator().manual_seed(0)
    rows, labels = 10 * torch.randn(24, 3, generator=rng, dtype=torch.float64), torch.arange(24) // 2
    ways = {
        "unit rows": {},
        "their own lengths": {"similarity": nf.similarity.NegEuclidean(normalize=False)},
        "scale": {"pair": (P.Linear(scale=8.0), P.Linear(scale=8.0, margin=1.0))},
    }
    negative, ratios = labels[:, None] != labels, {}
    for name, more in ways.items():
        weights = L.LiftedStructure(**more).explain(rows, labels).weights
        of_rows = [weights[i, negative[i]] for i in range(24)]
        ratios[name] = max((row.max() / row.min()).item() for row in of_rows)
    assert ratios["unit rows"] <= math.exp(2)
    assert min(ratios["their own lengths"], ratios["scale"]) > 1000

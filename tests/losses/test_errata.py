"""Errors in the papers: one test per erratum of a loss. docs/papers cites these names."""

from __future__ import annotations

import math

import pytest
import torch
from table import random_batch, tensors

import nearfar as nf

L, P, S = nf.losses, nf.pairs, nf.sets
Cosine, NegEuclidean = nf.similarity.Cosine, nf.similarity.NegEuclidean


def batch(seed=0):
    embeddings, labels = tensors(*random_batch(seed))
    positive = (labels[:, None] == labels) & ~torch.eye(10, dtype=torch.bool)
    return embeddings, labels, positive, labels[:, None] != labels


def slope_of(value, embeddings):
    return torch.autograd.grad(value, embeddings)[0]


# ---------------------------------------------------------------- Qi et al. 2020


def test_qi2020_labels_must_be_plus_and_minus_one():
    """Qi et al. 2020, preliminaries: y in {0, 1} in [m + y(λ - s)]₊ leaves negative pairs a constant m, no gradient; ±1
    is meant.
    """
    s = torch.linspace(-1, 1, 21, dtype=torch.float64, requires_grad=True)
    printed = torch.relu(0.2 + 0 * (0.5 - s))
    assert (printed == 0.2).all()
    assert (slope_of(printed.sum(), s) == 0).all()
    true = P.Hinge(0.2, 0.5)(s, -1)
    assert torch.equal(slope_of(true.sum(), s), (s > 0.3).double())


def test_qi2020_a_sample_is_no_pair_with_itself():
    """Qi et al. 2020, footnote 2: B² pairs with the diagonal; a self pair has s = 1, an easy positive. B(B-1) is
    right.
    """
    E, y, positive, negative = batch()
    s = Cosine()(E, E)
    losses = P.Logistic()(s, 1) * positive + P.Logistic()(s, -1) * negative
    with_self = losses + torch.diag(P.Logistic()(s, 1).diagonal())
    found = L.BinomialDeviance()(E, y)
    torch.testing.assert_close(found, losses.sum() / 90)
    assert abs(found.item() - with_self.sum().item() / 100) > 1e-3


def test_qi2020_top_k_beyond_the_number_of_pairs_means_all_of_them():
    """Qi et al. 2020, TopK: p <= 1/K is infeasible for K above the number of pairs; K = all pairs then. K need not be
    whole.
    """
    E, y, *_ = batch()
    assert L.DroTopK(k=400)(E, y).item() == pytest.approx(L.DroTopK(k=45)(E, y).item(), abs=1e-14)
    l = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert S.TopK(2.5).value(l).item() == pytest.approx((4 + 3 + 0.5 * 2) / 2.5)


def test_qi2020_ties_give_one_subgradient_of_many():
    """Qi et al. 2020, Lemma 1 (cites the rule for inf): at a tie any p in P* is right; we share, so order does not
    matter.
    """
    p = S.TopK(2).weights(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]))
    torch.testing.assert_close(p, torch.tensor([[0.0, 1 / 2, 1 / 6, 1 / 6, 1 / 6]]))


def test_qi2020_kl_with_and_without_its_normalizer():
    """Qi et al. 2020, KL: γ log mean e^{l/γ} or γ log Σ e^{l/γ} differ by γ log n in value and in nothing else."""
    l = torch.tensor([[0.3, 0.9, 0.1, 0.4]], dtype=torch.float64, requires_grad=True)
    normal, raw = S.KL(0.2).value(l).sum(), S.KL(0.2, normalized=False).value(l).sum()
    assert (raw - normal).item() == pytest.approx(0.2 * math.log(4))
    torch.testing.assert_close(slope_of(normal, l), slope_of(raw, l))
    torch.testing.assert_close(slope_of(S.KL(0.2).value(l).sum(), l), torch.softmax(l.detach() / 0.2, dim=1))


def test_qi2020_top_k_pn_is_an_average():
    """Qi et al. 2020, TopK-PN: printed p in {0, 1} makes a SUM of K losses; text and code take the average, 1/K of
    it.
    """
    E, y, positive, negative = batch()
    s = Cosine()(E, E)
    total = torch.relu(0.7 - s[positive]).topk(6).values.sum() + torch.relu(s[negative] - 0.3).topk(6).values.sum()
    torch.testing.assert_close(L.DroTopKPN(k=6)(E, y), total / 12)


def test_qi2020_chi_square_closed_form_has_a_range():
    """Qi et al. 2020, chi-square: mean + √(2ρVar/n) is the value iff 2ρ(mean-min)² <= nVar (biased Var), and too large
    beyond.
    """
    l = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    mean, variance, n = 0.25, 3 / 16, 4
    edge = n * variance / (2 * mean**2)  # = 6 = n(n-1)/2: a single spike is covered to the very end
    for rho in (1.0, edge):
        assert S.ChiSquare(rho).value(l).item() == pytest.approx(mean + math.sqrt(2 * rho * variance / n), abs=1e-12)
    spread = torch.tensor([[0.0, 0.8, 0.9, 1.0]], dtype=torch.float64)
    mean, variance = spread.mean().item(), spread.var(correction=0).item()
    assert 2 * 1.0 * mean**2 > n * variance
    assert S.ChiSquare(1.0).value(spread).item() < mean + math.sqrt(2 * 1.0 * variance / n) - 1e-3


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_qi2020_lambda_cancels_in_lifted_structure(margin):
    """Qi et al. 2020, eq. 3 and 8: λ is called a margin, but L_LS does not depend on it."""
    E, y, *_ = batch()
    values = [
        nf.RobustLoss(
            pair=(P.Linear(threshold), P.Linear(threshold, margin)),
            over=S.KL(1.0, normalized=False),
            groups="anchor_sign",
            link=L.GeneralizedLifted().product.link,
            reduction="sum",
        )(E[:9], y[:9].clamp(max=2))
        for threshold in (0.1, 0.9)
    ]
    assert values[0].item() == pytest.approx(values[1].item(), abs=1e-12)
    paper = L.GeneralizedLifted(margin=margin, reduction="sum", similarity=Cosine())(E[:9], y[:9].clamp(max=2))
    assert values[0].item() == pytest.approx(paper.item(), abs=1e-12)


def test_qi2020_lifted_structure_rests_where_its_hinge_rests():
    """Qi et al. 2020, eq. 5, 6, 22: the gradient is printed without the outer [.]₊; a positive at .9, a negative at
    -.9: zero.
    """
    s = math.sqrt(1 - 0.81)
    E = torch.tensor([[1.0, 0.0], [0.9, s], [-0.9, s]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 1])
    found = L.GeneralizedLifted.as_in_paper().explain(E, y)
    assert (found.pull[0] == 0).all()
    grouped = L.DroKLGrouped(gamma=1.0, reduction="sum", pair=P.Hinge(2.0, 0.5)).explain(E, y)
    assert (grouped.pull[0, 1:] != 0).all()


def test_qi2020_lifted_structure_is_always_active_with_eight_products_of_pairs():
    """On the sphere log Σ_P e^{-s} + log Σ_N e^{s} >= log(P·N) - 2, so P·N >= 8 > e² keeps the hinge active."""
    same = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(3, 2)
    away = -same[:1].expand(4, 2)
    E, y = torch.cat([same, away]).requires_grad_(), torch.tensor([0, 0, 0, 1, 2, 3, 4])
    active = L.GeneralizedLifted(margin=0.0, reduction="none", similarity=Cosine())(E, y)
    assert (active[:3] > 0).all()  # P·N = 2·4 = 8, the easiest batch there is
    fewer = L.GeneralizedLifted(margin=0.0, reduction="none", similarity=Cosine())(E[:6], y[:6])
    assert (fewer[:3] == 0).all()  # 2·3 = 6


def test_qi2020_the_weights_7_hold_only_for_large_margins():
    """Qi et al. 2020, eq. 7: p = softmax(-y s/γ) needs every l > 0, i.e. m > 1 + λ; with the paper's m = .2, λ = .5 it
    differs.
    """
    E, y, positive, negative = batch()
    s = Cosine()(E, E).detach()
    p = torch.zeros_like(s)
    for i in range(9):
        for side, sign in ((positive[i], -1), (negative[i], 1)):
            if side.any():
                p[i, side] = torch.softmax(sign * s[i, side] / 0.5, dim=0)
    real = positive.any(dim=1)

    def weights(margin, zero):
        return L.DroKLGrouped(gamma=0.5, pair=P.Hinge(margin, 0.5), zero=zero).explain(E, y).weights

    everyone = torch.arange(10) < 9
    torch.testing.assert_close(weights(2.0, "keep")[everyone & real], p[everyone & real], atol=1e-12, rtol=0)
    for zero in ("keep", "drop"):
        assert (weights(0.2, zero)[everyone] - p[everyone]).abs().max() > 0.05


def test_qi2020_the_dual_of_kl():
    """Qi et al. 2020, eq. 15-18: v* = γ log mean e^{l/γ} - γ; `dual` shows γ log Σ e^{l/γ} = v* + γ + γ log n."""
    l = torch.tensor([[0.3, 0.9, 0.1]], dtype=torch.float64)
    gamma = 0.2
    v = gamma * math.log(torch.exp(l / gamma).mean().item()) - gamma
    assert S.KL(gamma).dual(l)[0].item() == pytest.approx(v + gamma + gamma * math.log(3))
    p = torch.exp((l - v) / gamma - 1) / 3  # eq. 17
    torch.testing.assert_close(S.KL(gamma).weights(l), p)


def test_qi2020_the_margin_loss_does_not_recover_multi_similarity():
    """Qi et al. 2020, eq. 19-27: c₊ = λ+m, c₋ = λ-m gives MS with TWO thresholds, and m = 0 needs all losses
    positive.
    """
    E, y, *_ = batch()
    over = tuple(S.KL(1 / x, normalized=False, zero_member=True) for x in (2.0, 50.0))

    def slope(pair):
        return slope_of(nf.RobustLoss(pair=pair, over=over, groups="anchor_sign")(E, y), E)

    wanted = slope_of(L.MultiSimilarity(miner=None)(E, y), E)
    torch.testing.assert_close(slope(P.Linear(0.5)), wanted, atol=1e-12, rtol=0)
    assert (slope(P.Hinge(2.0, 0.5)) - wanted).abs().max() > 1e-3
    assert (slope(P.Hinge(0.0, 0.5)) - wanted).abs().max() > 1e-4


def test_qi2020_hap2s_keeps_its_hinge():
    """Qi et al. 2020, eq. 30-34 drop the hinge: with it, anchors at rest have no gradient, and grouped KL is not
    recovered.
    """
    E, y, positive, _ = batch(3)
    both = positive.any(dim=1)
    E, y = E[both].detach().requires_grad_(), y[both]
    grouped = slope_of(L.DroKLGrouped(gamma=0.5, pair=P.Linear(), zero="keep")(E, y), E)
    off = slope_of(L.HAP2S(margin=50.0, gamma=0.5, similarity=Cosine())(E, y), E)
    on = slope_of(L.HAP2S(margin=-0.8, gamma=0.5, similarity=Cosine())(E, y), E)
    torch.testing.assert_close(off, grouped, atol=1e-12, rtol=0)
    assert (on - grouped).abs().max() > 1e-3


def test_qi2020_weights_must_be_held_constant():
    """Qi et al. 2020 (HAP2S, and any Σ p* l): p* differentiated along gives another gradient than that of F."""
    E, *_ = batch()

    def losses():
        return P.Logistic()(Cosine()(E, E)[~torch.eye(10, dtype=torch.bool)], -1)

    true = slope_of(0.3 * torch.logsumexp(losses() / 0.3, dim=0), E)
    held = slope_of((torch.softmax(losses().detach() / 0.3, dim=0) * losses()).sum(), E)
    free = slope_of((torch.softmax(losses() / 0.3, dim=0) * losses()).sum(), E)
    torch.testing.assert_close(held, true, atol=1e-12, rtol=0)
    assert (free - true).abs().max() > 0.05


def test_qi2020_pair_counts_of_section_4_2_3():
    """Qi et al. 2020, 4.2.3: |N| = 198080 for B = 640 and 5 a class; 203200 unordered negative pairs is right."""
    positives, negatives = nf.Relation.from_labels(torch.arange(640) // 5).counts()
    assert int(positives.sum()) // 2 == 1280
    assert int(negatives.sum()) // 2 == 203200 == math.comb(640, 2) - 1280


def test_qi2020_the_positive_ratio_falls_as_batches_grow():
    """Qi et al. 2020, 4.2.2: "when the positive-negative ratio increases" is towards smaller batches: .053 to .006."""
    printed = {80: 0.053, 160: 0.026, 320: 0.012, 480: 0.008, 640: 0.006}
    for size, wanted in printed.items():
        positive, negative = nf.Relation.from_labels(torch.arange(size) // 5).counts()
        assert positive.sum() / negative.sum() == pytest.approx(wanted, abs=7e-4)


def test_qi2020_tables_contradict_the_text():
    """Qi et al. 2020, 4.2.1: MS beats LS "on three datasets"; 4.1: all variants lead MS at "all recall@k" of Cars."""
    ms, ls = {"CUB": 55.6, "Cars": 73.2, "In-Shop": 79.8}, {"CUB": 56.8, "Cars": 69.7, "In-Shop": 82.6}
    assert [name for name in ms if ms[name] < ls[name]] == ["CUB", "In-Shop"]
    cars = {"MS": (84.1, 90.4, 94.0, 96.5, 98.0, 98.9), "DRO-TopK_B": (85.4, 91.0, 94.2, 96.5, 98.0, 99.0)}
    assert [a > b for a, b in zip(cars["DRO-TopK_B"], cars["MS"], strict=True)].count(False) == 2


def test_qi2020_pairs_without_loss_damp_the_rest_unless_dropped():
    """Qi et al. 2020 removes them: F jumps as one enters. Ten losses of .3 among 1,000, γ = .1: .017 kept, .300
    dropped, .291.
    """
    l = torch.zeros(1, 1000, dtype=torch.float64)
    l[0, :10] = 0.3
    assert S.KL(0.1).value(l).item() == pytest.approx(0.0175, abs=5e-4)
    assert S.KL(0.1, zero="drop").value(l).item() == pytest.approx(0.3, abs=1e-12)
    l[0, 10] = 1e-9
    assert S.KL(0.1, zero="drop").value(l).item() == pytest.approx(0.291, abs=5e-4)
    # TopK: dropping matters only where K exceeds the pairs with loss
    assert S.TopK(5, zero="drop").value(l).item() == pytest.approx(S.TopK(5).value(l).item())
    assert S.TopK(100).value(l).item() == pytest.approx(0.03)
    assert S.TopK(100, zero="drop").value(l).item() == pytest.approx(3.0 / 11)


# ---------------------------------------------------------------- Can et al. 2019


def feasible(eps: float):
    """Three classes on the unit sphere: positive rows `eps` apart, negative rows nearly √2."""
    half = 2 * math.asin(eps / 2) / 2
    rows = [torch.eye(3, dtype=torch.float64)[c] for c in range(3) for _ in range(2)]
    E = torch.stack(rows)
    for c in range(3):
        other = torch.eye(3, dtype=torch.float64)[(c + 1) % 3]
        E[2 * c] = math.cos(half) * E[2 * c] + math.sin(half) * other
        E[2 * c + 1] = math.cos(half) * E[2 * c + 1] - math.sin(half) * other
    return E, torch.arange(6) // 2


def test_can2019_a_feasible_embedding_has_zero_contrastive_loss_only_for_coinciding_positives():
    """Can et al. 2019, prop. 4.1: true for ε₊ = 0 only; else the loss is Σd² > 0, unless the margin m₊ allows ε₊."""
    E, y = feasible(0.335)
    d = -NegEuclidean()(E, E)
    assert d[y[:, None] != y].min() > 1
    assert L.Contrastive()(E, y).item() == pytest.approx(6 * 0.335**2 / 30)
    assert L.Contrastive(pos_margin=0.336)(E, y).item() == 0
    E, y = feasible(0.0)
    assert L.Contrastive()(E, y).item() == pytest.approx(0, abs=1e-15)


def test_can2019_a_feasible_embedding_has_zero_triplet_and_margin_loss():
    """Can et al. 2019, prop. 4.1: right for the triplet (ε₋² = ε₊² + ε, squared) and the margin loss (ε± = β ± δ)."""
    E, y = feasible(0.335)
    d = -NegEuclidean()(E, E)
    near, far = 0.335, d[y[:, None] != y].min().item()
    assert L.Triplet.as_in_paper(margin=far**2 - near**2 - 1e-9)(E, y).item() == 0
    assert L.Triplet.as_in_paper(margin=far**2 - near**2 + 1e-3)(E, y).item() > 0
    middle, slack = (near + far) / 2, (far - near) / 2 - 1e-9
    assert L.Margin(margin=slack, beta=middle, learn=False)(E, y).item() == 0


def test_can2019_zero_triplet_loss_does_not_mean_feasible():
    """Can et al. 2019, "equivalent": positive rows 6.5 apart and negative ones 279 have zero triplet loss, whatever a
    fixed ε₊ says.
    """
    E = torch.tensor([[0.0], [6.5], [285.5], [292.0]], dtype=torch.float64)
    raw = nf.similarity.NegSquaredEuclidean(normalize=False)
    assert L.Triplet(margin=0.1, similarity=raw)(E, torch.tensor([0, 0, 1, 1])).item() == 0


def test_can2019_sums_and_means_weigh_lambda_differently():
    """Can et al. 2019, (4.6) sums losses that (3.1) to (3.3) average: λ beside the sum of n terms is λ/n beside the
    mean.
    """
    E, y, positive, negative = batch()
    d = -NegEuclidean()(E, E)
    summed = slope_of((positive * d**2).sum() + (negative * torch.relu(1 - d) ** 2).sum(), E)
    mean, pull = slope_of(L.Contrastive()(E, y), E), 1e-3 * (E.detach() - 1)  # λ(θ - θ_k) for θ_k = 1
    torch.testing.assert_close(summed + pull, 90 * (mean + pull / 90))  # 90 ordered pairs of ten rows


def test_can2019_the_second_moment_is_not_the_default():
    """Can et al. 2019, 5.2: "default moment parameters", β₂ = .99; Adam's default is .999."""
    assert torch.optim.Adam([torch.zeros(1)]).defaults["betas"] == (0.9, 0.999)


def test_can2019_hard_classes_lose_in_its_own_table():
    """Can et al. 2019, 5.5 and Table 1, Cars196: R@1 of N-pair and NMI of contrastive fall from PROFS to HNCM."""
    printed = {"N-pair, R@1": (77.8, 77.6), "contrastive, NMI": (67.8, 66.9), "contrastive, F1": (39.0, 38.1)}
    assert all(after < before for before, after in printed.values())


def test_can2019_the_largest_gains_of_its_table():
    """Can et al. 2019, 5.5: "up to 3.2, 11.7 and 9.5 points" is hard triplets on SOP, with HNCM, in its Table 1."""
    before, after = {"NMI": 88.1, "F1": 30.6, "R@1": 65.4}, {"NMI": 91.3, "F1": 42.3, "R@1": 74.9}
    gains = {name: after[name] - before[name] for name in before}
    assert gains == pytest.approx({"NMI": 3.2, "F1": 11.7, "R@1": 9.5})


# ---------------------------------------------------------------- Jaffe 2020 and Xu et al. 2022


def test_jaffe2020_zero_loss_does_not_part_classes_by_the_largest_diameter():
    """Jaffe 2020, 1.2: classes need not lie apart by the largest squared diameter of any class and α: here .5 where the
    largest squared diameter is 100.
    """
    E = torch.tensor([[0.0], [10.0], [21.0], [21.1], [21.6], [21.7]], dtype=torch.float64)
    raw = nf.similarity.NegSquaredEuclidean(normalize=False)
    assert L.Triplet(margin=0.2, similarity=raw)(E, torch.arange(6) // 2).item() == 0


@pytest.mark.parametrize(("margin", "mu"), [(0.3, 0.1), (0.0, 1.0), (0.5, 0.02)])
def test_jaffe2020_the_smoothed_triplet_of_a_collapsed_batch(margin, mu):
    """Jaffe 2020, eq. 9-12 and 21: f_μ at collapse is μ log(1 + e^{α/μ}), log 2 only for α = 0 and μ = 1."""
    E = torch.ones(6, 3, dtype=torch.float64)
    loss = L.Triplet(margin=margin, smooth=mu)
    value = loss(E, torch.arange(6) // 2).item()
    assert value == pytest.approx(mu * math.log1p(math.exp(margin / mu)))
    assert margin <= value <= margin + mu * math.log(2) + 1e-12


def test_xu2022_the_margin_is_not_negligible():
    """Xu et al. 2022: with α = 0 total collapse is a global minimum of value 0; with α > 0 it costs α."""
    E = torch.ones(6, 3, dtype=torch.float64)
    for mining in ("all", "hard", "hardest"):
        assert L.Triplet(margin=0.0, mining=mining)(E, torch.arange(6) // 2).item() == 0
        assert L.Triplet(margin=0.2, mining=mining)(E, torch.arange(6) // 2).item() == pytest.approx(0.2)

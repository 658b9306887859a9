"""Pair losses: formulas against the oracles, closed slopes against autograd, and a new one from its forward alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles import pairs as oracle
from table import random_batch, tensors

import nearfar as nf
from nearfar.engines.operator_call import bounds
from nearfar.losses.factors import GROUPS
from nearfar.pairs import PairForm, smooth_hinge

P = nf.pairs


def circle(s, sign, margin=0.4, scale=80):
    """-c [1+m-s]+ (s-(1-m)) positive, c [s+m]+ (s-m) negative (circle loss)."""
    if sign > 0:
        return -scale * np.maximum(1 + margin - s, 0) * (s - (1 - margin))
    return scale * np.maximum(s + margin, 0) * (s - margin)


def angular(s, sign, margin=0.5, scale=64):
    """-c cos(θ+m) positive while θ <= π-m, then -c (cos θ - m sin m); c cos θ negative (ArcFace)."""
    if sign < 0:
        return scale * s
    theta = np.arccos(s)
    turned = np.where(theta <= np.pi - margin, np.cos(theta + margin), s - margin * np.sin(margin))
    return -scale * turned


CASES = {
    "hinge": (P.Hinge(), oracle.hinge),
    "hinge-margins": (P.Hinge(0.35, -0.2), lambda s, y: oracle.hinge(s, y, 0.35, -0.2)),
    "hinge-smooth": (P.Hinge(0.2, 0.5, smooth=0.07), lambda s, y: oracle.hinge(s, y, smooth=0.07)),
    "hinge-learn": (P.Hinge(0.2, 0.3, learn=True).double(), lambda s, y: oracle.hinge(s, y, 0.2, 0.3)),
    "logistic": (P.Logistic(), oracle.logistic),
    "logistic-slopes": (P.Logistic(0.1, 5.0, 7.0), lambda s, y: oracle.logistic(s, y, 0.1, 5, 7)),
    "squared": (P.Squared(0.2, 0.9), lambda s, y: oracle.squared(s, y, 0.2, 0.9)),
    "squared-1": (P.Squared(0.2, 0.9, 1), lambda s, y: oracle.squared(s, y, 0.2, 0.9, 1)),
    "squared-3": (P.Squared(0.0, 1.0, 3.0), lambda s, y: oracle.squared(s, y, power=3)),
    "linear": (P.Linear(0.4, 0.1, 3.0), lambda s, y: oracle.linear(s, y, 0.4, 0.1, 3)),
    "score": (P.Identity(2.5), lambda s, y: oracle.score(s, y, 2.5)),
    "circle": (P.CircleScore(), circle),
    "angular": (P.AngularMargin(), angular),
    "angular-wide": (P.AngularMargin(1.2, 8.0), lambda s, y: angular(s, y, 1.2, 8)),
}
cases = pytest.mark.parametrize("name", CASES)
signs = pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])


def scores() -> torch.Tensor:
    """Cosines or negated distances, kinks avoided."""
    return torch.tensor(np.random.default_rng(0).uniform(-0.99, 0.99, size=(4, 7)))


@cases
@signs
def test_formula(name, sign):
    pair, formula = CASES[name]
    s = scores()
    np.testing.assert_allclose(pair(s, sign).detach().numpy(), formula(s.numpy(), sign), rtol=1e-12, atol=1e-14)


@cases
@signs
def test_form_is_the_loss(name, sign):
    pair, _ = CASES[name]
    form = pair.form(sign)
    if form is None:
        assert name.startswith("angular")
        assert sign > 0
        return
    s = scores().requires_grad_()
    value = pair(s, sign)
    (wanted,) = torch.autograd.grad(value.sum(), s, retain_graph=True)
    torch.testing.assert_close(form.value(s), value, atol=1e-13, rtol=1e-13)
    if form.shape != "pace":  # whose bracket is held constant
        (slope,) = torch.autograd.grad(form.value(s).sum(), s, retain_graph=True)
        torch.testing.assert_close(slope, wanted, atol=1e-13, rtol=1e-13)
    if form.offset is not None:
        (learned,) = torch.autograd.grad(value.sum(), form.offset)
        torch.testing.assert_close((form.by_offset / form.a * wanted).sum(), learned, atol=1e-12, rtol=1e-12)


def test_forms_are_not_inherited():
    class Twice(P.Linear):
        def forward(self, s, sign):
            return 2 * super().forward(s, sign)

    assert P.Linear().form(1) is not None
    assert Twice().form(1) is None
    assert P.Squared(power=0.5).form(1) is None  # infinite slope at 0
    assert {nf.similarity.Cosine.form, nf.similarity.Dot.form} == {"dot"}
    assert nf.similarity.NegEuclidean.form == "distance"
    assert nf.similarity.NegSquaredEuclidean.form == "squared"
    assert type("Own", (nf.similarity.Cosine,), {}).form is None
    assert {name: part.scope for name, part in GROUPS.items()} == {name: name for name in GROUPS}
    assert type("Own", (nf.groups.Batch,), {}).scope is None
    assert type("Own", (nf.sets.KL,), {})(0.1).fold() is None
    assert nf.sets.DetachedWeights(nf.sets.KL(0.1, zero="drop")).fold() is None
    assert nf.sets.DetachedWeights(nf.sets.KL(0.1)).fold().held


@cases
@signs
def test_exact_gradient_means_what_it_says(name, sign):
    pair, _ = CASES[name]
    s = scores().requires_grad_()
    check = torch.autograd.gradcheck(lambda x: pair(x, sign), s, raise_exception=False)
    assert check == pair.exact_gradient
    if pair.exact_gradient:
        assert torch.autograd.gradgradcheck(lambda x: pair(x, sign), s)


@pytest.mark.parametrize("name", [name for name in CASES if name != "score"])  # a score is blind to the sign
def test_an_positive_pair_is_drawn_together_and_an_negative_pair_pushed_apart(name):
    pair, _ = CASES[name]
    s = scores().requires_grad_()
    for sign in (1, -1):
        (slope,) = torch.autograd.grad(pair(s, sign).sum(), s)
        assert (sign * slope <= 0).all()
        assert (sign * slope < 0).any()


@cases
@signs
def test_far_scores_stay_finite_in_float32(name, sign):
    pair, _ = CASES[name]
    s = torch.tensor([-1.0, -1 + 1e-7, 0.0, 1 - 1e-7, 1.0, 1.0000001, -1.0000001] + [-2.0, -30.0] * ("ang" not in name))
    s.requires_grad_()
    value = pair.float()(s, sign)
    (slope,) = torch.autograd.grad(value.sum(), s)
    CASES[name][0].double()
    assert value.dtype == torch.float32
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0])
def test_the_smooth_hinge_exceeds_the_hinge_by_at_most_mu_log_2(mu):
    """Jaffe 2020, eq. 9-12: max(x, 0) <= μ softplus(x/μ) <= max(x, 0) + μ log 2, met at x = 0."""
    x = torch.linspace(-3, 3, 601, dtype=torch.float64)
    gap = smooth_hinge(x, mu) - smooth_hinge(x, 0.0)
    assert (gap >= -1e-15).all()
    assert (gap <= mu * math.log(2) + 1e-15).all()
    assert gap.max().item() == pytest.approx(mu * math.log(2), abs=1e-12)


def test_a_learnt_threshold_starts_exactly_and_moves():
    pair, fixed = P.Hinge(0.2, 0.3, learn=True), P.Hinge(0.2, 0.3)
    s = scores()
    assert [name for name, _ in pair.named_parameters()] == ["offset"]
    assert not list(fixed.parameters())
    # a float32 parameter must not round the start of float64 scores
    torch.testing.assert_close(pair(s, 1).detach(), fixed(s, 1), atol=1e-15, rtol=0)
    pair(s, -1).sum().backward()
    assert pair.offset.grad.item() == pytest.approx(-(fixed(s, -1) > 0).sum().item())
    with torch.no_grad():
        pair.offset.add_(0.25)
    assert float(pair.threshold.detach()) == pytest.approx(0.55)
    assert "threshold=0.55" in repr(pair)


class Cubed(P.PairLoss):
    """Three lines by a user: a forward, nothing else."""

    def forward(self, s, sign):
        return torch.relu(0.3 - sign * s) ** 3


@pytest.mark.parametrize("groups", GROUPS)
def test_a_new_pair_loss_needs_its_forward_only(groups):
    over = nf.sets.TopK(4) if groups == "balanced" else nf.sets.KL(0.5)
    loss = nf.RobustLoss(pair=Cubed(), over=over, groups=groups)
    embeddings, labels = tensors(*random_batch())
    assert Cubed().form(1) is None
    value = loss(embeddings, labels)
    value.backward()
    assert value > 0
    assert embeddings.grad.abs().sum() > 0
    assert torch.autograd.gradcheck(lambda e: loss(e, labels), tensors(*random_batch())[0])
    found = loss.explain(embeddings, labels)
    assert found.value.item() == pytest.approx(value.item())


def test_two_pair_losses_one_for_each_sign():
    embeddings, labels = tensors(*random_batch())
    apart = nf.RobustLoss(pair=(P.Linear(), P.Identity()), over=nf.sets.Mean(), groups="sign")(embeddings, labels)
    scores = nf.similarity.Cosine()(embeddings, embeddings)
    positive = (labels[:, None] == labels) & ~torch.eye(10, dtype=torch.bool)
    negative = labels[:, None] != labels
    torch.testing.assert_close(apart, scores[negative].mean() - scores[positive].mean())


def test_pair_losses_say_what_they_are():
    assert repr(P.Hinge()) == "Hinge(margin=0.2, threshold=0.5, smooth=0.0, learn=False)"
    for pair, _ in CASES.values():
        assert type(pair).__name__ in repr(pair)
        assert "=" in repr(pair)


@pytest.mark.parametrize(
    "form",
    [
        PairForm("line", -2.0, 0.5, 3.0),
        PairForm("power", 1.5, 0.2, 2.0, 3.0),
        PairForm("softplus", -9.0, 1.0, 0.3),
        PairForm("pace", 1.0, 0.25, 80.0, center=0.25),
        PairForm("pace", -1.0, 1.25, -80.0, center=0.75),
    ],
    ids=lambda form: f"{form.shape}{form.a}",
)
def test_the_bounds_of_a_form(form):
    losses = form.value(torch.linspace(-1.01, 1.01, 20001, dtype=torch.float64))
    least, most = bounds(form, -1.01, 1.01)
    assert least == pytest.approx(float(losses.min()), abs=1e-6)
    assert most == pytest.approx(float(losses.max()), abs=1e-6)

"""Uncertainty sets against their oracles: value, weights, limits, derivatives, and NaN that must stay visible."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import sets as oracle
from scipy.optimize import linprog

import nearfar as nf

S = nf.sets
TOLERANCE = 1e-9


def expected_value(weights: Callable[..., Any]) -> Callable[..., Any]:
    """Σ p l: what a set with constant weights reports."""
    return lambda l, **how: np.sum(weights(l, **how) * np.asarray(l, dtype=np.longdouble))


def power_weights(l, weights=None, zero="keep", zero_member=False, shift=1.0, power=3.0):
    """p ∝ w (1 + l/shift)^power, by the oracle's own softmax."""
    height = lambda kept, base: oracle.softmax(power * np.log1p(kept / shift), base)  # noqa: E731
    return oracle._share(height, l, weights, zero, zero_member)


def calibrated_weights(l, weights=None, zero="keep", zero_member=False, gamma=0.4, keep=3):
    """p ∝ w (e^{l/γ} - 1) on the `keep` largest losses (ties included), uniform where no loss is left."""

    def share(kept, base):
        floor = sorted(kept)[-min(keep, len(kept))]
        raw = np.where((kept >= floor) & (kept > 0), base * (np.exp(kept / gamma) - 1), 0)
        return raw / np.sum(raw) if np.sum(raw) > 0 else base / np.sum(base)

    return oracle._share(share, l, weights, zero, zero_member)


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    value: Callable[..., Any]
    weights: Callable[..., Any]
    smooth: bool = True
    floor: float = -np.inf


def case(make, value, weights=None, smooth=True, floor=-np.inf, **hyper):
    wanted = weights or getattr(oracle, value + "_weights")
    inner = {k: v for k, v in hyper.items() if k != "normalized"}

    def p(l, **how):
        return wanted(l, **inner, **how)

    F = expected_value(p) if value == "expected" else lambda l, **how: getattr(oracle, value)(l, **hyper, **how)
    return Case(make, F, p, smooth, floor)


CASES = {
    "mean": case(S.Mean, "mean"),
    "worst": case(S.Worst, "worst", smooth=False),
    "top-1": case(lambda **kw: S.TopK(1, **kw), "topk", smooth=False, k=1),
    "top-3": case(lambda **kw: S.TopK(3, **kw), "topk", smooth=False, k=3),
    "top-2.3": case(lambda **kw: S.TopK(2.3, **kw), "topk", smooth=False, k=2.3),
    "top-all": case(lambda **kw: S.TopK(1000, **kw), "topk", smooth=False, k=1000),
    "top-fraction": case(lambda **kw: S.TopK(fraction=0.37, **kw), "topk", smooth=False, fraction=0.37),
    "trimmed": case(lambda **kw: S.Trimmed(0.6, 2.5, **kw), "trimmed", smooth=False, top=0.6, k=2.5),
    "trimmed-fraction": case(
        lambda **kw: S.Trimmed(top_fraction=0.3, fraction=0.4, **kw),
        "trimmed",
        smooth=False,
        top_fraction=0.3,
        fraction=0.4,
    ),
    "trimmed-nothing": case(lambda **kw: S.Trimmed(0, 3, **kw), "topk", smooth=False, k=3),
    "kl": case(lambda **kw: S.KL(0.3, **kw), "kl", gamma=0.3),
    "kl-raw": case(lambda **kw: S.KL(0.3, False, **kw), "kl", gamma=0.3, normalized=False),
    "kl-cold": case(lambda **kw: S.KL(1e-3, **kw), "kl", gamma=1e-3),
    "ball": case(lambda **kw: S.KLBall(0.2, **kw), "kl_ball", rho=0.2),
    "ball-wide": case(lambda **kw: S.KLBall(1.2, **kw), "kl_ball", rho=1.2),
    "ball-point": case(lambda **kw: S.KLBall(0.0, **kw), "kl_ball", rho=0.0),
    "chi": case(lambda **kw: S.ChiSquare(0.4, **kw), "chi_square", rho=0.4),
    "chi-wide": case(lambda **kw: S.ChiSquare(6.0, **kw), "chi_square", rho=6.0),
    "chi-point": case(lambda **kw: S.ChiSquare(0.0, **kw), "chi_square", rho=0.0),
    "top-effective": case(lambda **kw: S.TopK(effective=2.3, **kw), "topk", smooth=False, k=2.3),
    "trimmed-effective": case(
        lambda **kw: S.Trimmed(0.6, effective=2.5, **kw), "trimmed", smooth=False, top=0.6, k=2.5
    ),
    "kl-effective": case(lambda **kw: S.KL(effective=2.3, **kw), "kl_effective", effective=2.3),
    "kl-effective-all": case(lambda **kw: S.KL(effective=1000, **kw), "mean"),
    "ball-effective": case(
        lambda **kw: S.KLBall(effective=2.3, **kw), "expected", oracle.kl_effective_weights, effective=2.3
    ),
    "chi-effective": case(lambda **kw: S.ChiSquare(effective=2.3, **kw), "chi_square_effective", effective=2.3),
    "chi-effective-all": case(lambda **kw: S.ChiSquare(effective=1000, **kw), "mean"),
    "expected": case(lambda **kw: S.DetachedWeights(S.KL(0.5), **kw), "expected", oracle.kl_weights, gamma=0.5),
    "expected-inside": case(lambda **kw: S.DetachedWeights(S.KL(0.5, **kw)), "expected", oracle.kl_weights, gamma=0.5),
    "power": case(lambda **kw: S.PowerWeights(1.0, 3.0, **kw), "expected", power_weights, floor=-0.9),
    "calibrated": case(lambda **kw: S.CalibratedKL(0.4, 3, **kw), "expected", calibrated_weights),
}
EXACT = {name: c for name, c in CASES.items() if c.make().exact_gradient}
cases = pytest.mark.parametrize("name", CASES)
exact = pytest.mark.parametrize("name", EXACT)


def groups(kind: str, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Groups of different sizes and their weights: the empty one and the single one are always among them."""
    rng = np.random.default_rng(seed)
    sizes = (6, 1, 0, 9, 4)
    draw = {
        "random": lambda n: rng.normal(0.4, 0.5, size=n),
        "tied": lambda n: rng.integers(0, 3, size=n) / 2,
        "constant": lambda n: np.full(n, 0.7),
        "zero": lambda n: np.zeros(n),
        "none-active": lambda n: -rng.random(n) * 0.5,
        "far": lambda n: 50 + 40 * rng.random(n),
    }
    weigh = {"weighted": lambda n: rng.random(n) + 0.2, "whole": lambda n: rng.integers(1, 4, size=n).astype(float)}
    data, _, how = kind.partition("+")
    return [draw[data](n) for n in sizes], [weigh.get(how, np.ones)(n) for n in sizes]


def padded(losses, weights, how: str, width: int = 11, junk: float = 123.0):
    """One row a group; absent places hold junk. Members stand at random places."""
    rng = np.random.default_rng(3)
    l, w = np.full((len(losses), width), junk), np.zeros((len(losses), width))
    places = [np.sort(rng.permutation(width)[: len(x)]) for x in losses]
    for g, place in enumerate(places):
        l[g, place], w[g, place] = losses[g], weights[g]
    measure = torch.tensor(w) if "+" in how else torch.tensor(w > 0)
    return torch.tensor(l), measure, places


KINDS = (
    "random",
    "random+weighted",
    "random+whole",
    "tied",
    "tied+whole",
    "constant+weighted",
    "zero",
    "none-active",
    "far",
)


# every kind of data as it is and with both options; one kind with each option alone too
OPTIONS = [(kind, *how) for kind in KINDS for how in (("keep", False), ("drop", True))]
OPTIONS += [("random+weighted", "keep", True), ("random+weighted", "drop", False)]


@cases
@pytest.mark.parametrize(("kind", "zero", "zero_member"), OPTIONS)
def test_value_and_weights_equal_the_oracle(name, kind, zero, zero_member):
    c = CASES[name]
    losses, weights = groups(kind)
    losses = [np.maximum(x, c.floor) for x in losses]
    l, measure, places = padded(losses, weights, kind)
    found = c.make(zero=zero, zero_member=zero_member)
    value, p = found.value(l, measure), found.weights(l, measure)
    for g, place in enumerate(places):
        how = {"weights": weights[g], "zero": zero, "zero_member": zero_member}
        assert abs(value[g].item() - float(c.value(losses[g], **how))) < TOLERANCE * max(1, np.abs(l.numpy()).max())
        wanted = np.zeros(l.shape[1])
        wanted[place] = c.weights(losses[g], **how)
        np.testing.assert_allclose(p[g].numpy(), wanted, rtol=0, atol=TOLERANCE)
    assert (p >= 0).all()
    alive = (measure > 0) & ((l > 0) if zero == "drop" else True)
    total = p.sum(dim=1)
    if zero_member:
        assert (total <= 1 + 1e-12).all()
    else:
        torch.testing.assert_close(total, alive.any(dim=1).to(total.dtype), atol=1e-12, rtol=0)


@cases
def test_without_a_measure_everyone_is_a_member(name):
    l = torch.tensor(np.random.default_rng(1).random((3, 7)))
    found = CASES[name].make()
    everyone = torch.ones_like(l)
    for measure in (everyone.bool(), everyone):
        torch.testing.assert_close(found.value(l), found.value(l, measure), atol=1e-12, rtol=0)
        torch.testing.assert_close(found.weights(l), found.weights(l, measure), atol=1e-12, rtol=0)


@cases
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["random", "random+weighted"])
def test_absent_members_may_hold_anything(name, junk, kind):
    """Neither value, weights nor gradient may see what stands in an absent place."""
    losses, weights = groups(kind)
    losses = [np.maximum(x, CASES[name].floor) for x in losses]
    found = CASES[name].make()
    clean, measure, _ = padded(losses, weights, kind)
    dirty = padded(losses, weights, kind, junk=junk)[0].requires_grad_()
    torch.testing.assert_close(found.value(dirty, measure), found.value(clean, measure), atol=0, rtol=0)
    torch.testing.assert_close(found.weights(dirty.detach(), measure), found.weights(clean, measure), atol=0, rtol=0)
    found.value(dirty, measure).sum().backward()
    assert torch.isfinite(dirty.grad).all()
    assert (dirty.grad[measure == 0] == 0).all()


@pytest.mark.parametrize("name", [*CASES, "sampled"])
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("kind", ["random", "random+weighted"])
def test_a_nan_member_is_never_hidden(name, zero, kind):
    make = CASES[name].make if name in CASES else lambda **kw: S.Sampled(S.KL(0.3), 4, **kw)
    losses, weights = groups(kind)
    l, measure, places = padded([np.abs(x) for x in losses], weights, kind)
    clean = make(zero=zero).value(l, measure)
    for g, i in [(0, 0), (0, 5), (1, 0), (3, 4)]:
        holed = l.clone()
        holed[g, places[g][i]] = torch.nan
        value = make(zero=zero).value(holed, measure)
        assert torch.isnan(value[g])
        assert torch.isfinite(value[torch.arange(len(value)) != g]).all()
    assert torch.isfinite(clean).all()


@exact
@pytest.mark.parametrize("kind", ["random", "random+weighted"])
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("zero_member", [False, True], ids=["", "zero_member"])
def test_gradient_is_the_weights(name, kind, zero, zero_member):
    """Danskin: dF/dl = p*."""
    l, measure, _ = padded(*groups(kind, seed=5), kind)
    found = EXACT[name].make(zero=zero, zero_member=zero_member)
    l.requires_grad_()
    found.value(l, measure).sum().backward()
    torch.testing.assert_close(l.grad, found.weights(l, measure), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [n for n in CASES if n not in EXACT])
def test_constant_weights_are_the_gradient_too(name):
    l = torch.tensor(np.random.default_rng(5).random((3, 7)), requires_grad=True)
    found = CASES[name].make()
    found.value(l).sum().backward()
    torch.testing.assert_close(l.grad, found.weights(l), atol=1e-12, rtol=0)


@exact
@pytest.mark.parametrize("kind", ["random", "random+weighted"])
@pytest.mark.parametrize("zero_member", [False, True], ids=["", "zero_member"])
def test_derivatives_by_finite_differences(name, kind, zero_member):
    losses, weights = groups(kind, seed=6)
    l, measure, _ = padded([losses[0][:4], losses[2]], [weights[0][:4], weights[2]], kind, width=5)
    found = EXACT[name].make(zero_member=zero_member)
    l.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: found.value(x, measure), l, atol=1e-6, rtol=1e-5)
    # of second derivatives a random projection, as torch's own tests do: all of them take far longer
    second = {"atol": 1e-5, "rtol": 1e-4, "fast_mode": True}
    assert torch.autograd.gradgradcheck(lambda x: found.value(x, measure), l, **second)


@exact
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_whole_weight_is_a_repeated_member(name, data):
    n = data.draw(st.integers(1, 6))
    l = data.draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n))
    w = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(any))
    zero_member = data.draw(st.booleans())
    found = EXACT[name].make(zero_member=zero_member)
    weighted = torch.tensor([l], dtype=torch.float64), torch.tensor([w], dtype=torch.float64)
    repeated = weighted[0].repeat_interleave(torch.tensor(w), dim=1)
    torch.testing.assert_close(found.value(*weighted), found.value(repeated), atol=1e-9, rtol=0)
    p, each = found.weights(*weighted)[0], found.weights(repeated)[0]
    member = torch.arange(n).repeat_interleave(torch.tensor(w))
    torch.testing.assert_close(p, torch.zeros(n, dtype=p.dtype).index_add(0, member, each), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "radii",
    [
        [S.TopK(k) for k in (9, 6, 3.5, 2, 1, 0.5)],
        [S.KL(g) for g in (100, 3, 1, 0.3, 0.05, 1e-3)],
        [S.KLBall(r) for r in (0, 1e-6, 0.01, 0.3, 1, 3)],
        [S.ChiSquare(r) for r in (0, 1e-6, 0.1, 1, 5, 40)],
        *([of(effective=e) for e in (100, 8, 4, 2.5, 1.5, 1)] for of in (S.TopK, S.KL, S.KLBall, S.ChiSquare)),
    ],
    ids=["top", "kl", "ball", "chi", "top-effective", "kl-effective", "ball-effective", "chi-effective"],
)
@pytest.mark.parametrize("seed", range(5))
def test_value_grows_with_the_radius_from_the_mean_to_the_maximum(radii, seed):
    rng = np.random.default_rng(seed)
    l, w = torch.tensor(rng.random((1, 9))), torch.tensor(rng.integers(0, 2, (1, 9)) == 1)
    w[0, 0] = True
    values = [found.value(l, w).item() for found in radii]
    assert values == sorted(values)
    assert values[0] == pytest.approx(S.Mean().value(l, w).item(), abs=5e-3)
    assert values[-1] == pytest.approx(S.Worst().value(l, w).item(), abs=5e-3)


@pytest.mark.parametrize("of", [S.TopK, S.KL, S.KLBall, S.ChiSquare])
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_effective_entries_are_as_many_as_asked_for_of_those_that_are_left(of, zero, dtype):
    """1/Σp², not the perplexity (a KL ball of radius log(n/E)), and with the n after zero="drop"."""
    l = torch.randn(6, 40, dtype=dtype, generator=torch.Generator().manual_seed(3)) - 0.5
    for wanted in (1, 2, 7, 30, 100):
        p = of(effective=wanted, zero=zero).weights(l)
        left = (l > 0).sum(dim=1) if zero == "drop" else torch.full((6,), 40)
        torch.testing.assert_close(1 / p.square().sum(dim=1), left.clamp(max=wanted).to(dtype), atol=0, rtol=1e-4)
    if of is S.KLBall:
        p = of(math.log(40 / 7)).weights(l)
        assert (1 / p.square().sum(dim=1) < 6.5).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("wanted", [1.0001, 2, 39.999])
def test_a_temperature_is_found_for_losses_of_any_size(scale, wanted):
    l = scale * torch.rand(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1
    p = S.KL(effective=wanted).weights(l)
    torch.testing.assert_close(1 / p.square().sum(dim=1), torch.full_like(l[:, 0], wanted), atol=0, rtol=1e-6)


def test_the_size_of_a_set_is_given_once():
    for make, words in (
        (lambda: S.TopK(3, effective=2), "TopK: give k, fraction or effective, exactly one of them"),
        (lambda: S.KL(0.3, effective=2), "KL: give gamma or effective, exactly one of them, but gamma=0.3 and eff"),
        (lambda: S.ChiSquare(0.0, 2), "ChiSquare: give rho or effective"),
        (lambda: S.KL(effective=2, normalized=False), "KL: effective needs normalized=True"),
        (lambda: S.KLBall(effective=-2), "KLBall: effective must be a number above zero"),
        (lambda: S.ChiSquare(effective="8b"), "ChiSquare: effective must be a number above zero, or a multiple of B"),
        (lambda: S.KL(effective="8B").value(torch.ones(1, 3)), "KL: effective='8B' is a multiple of the batch size"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_limits():
    l = torch.tensor(np.random.default_rng(8).random((4, 12)))
    mean, worst = S.Mean().value(l), S.Worst().value(l)
    near = {"atol": 1e-8, "rtol": 0}
    torch.testing.assert_close(S.TopK(1).value(l), worst, **near)
    torch.testing.assert_close(S.TopK(12).value(l), mean, **near)
    torch.testing.assert_close(S.TopK(fraction=1.0).value(l), mean, **near)
    torch.testing.assert_close(S.KL(1e-12).value(l), worst, **near)
    torch.testing.assert_close(S.KL(1e7).value(l), mean, **near)
    torch.testing.assert_close(S.KLBall(0.0).value(l), mean, **near)
    torch.testing.assert_close(S.KLBall(math.log(12) + 1e-9).value(l), worst, **near)
    torch.testing.assert_close(S.ChiSquare(0.0).value(l), mean, **near)
    torch.testing.assert_close(S.ChiSquare(12 * 11 / 2).value(l), worst, **near)
    assert (S.ChiSquare(12 * 11 / 2 - 1).value(l) < worst).all()


@pytest.mark.parametrize("k", [1, 2.6, 5, 7])
def test_top_k_is_a_linear_program(k):
    """max Σ p l with 0 <= p <= w/k, Σp = 1 (Qi et al. 2020, TopK)."""
    rng = np.random.default_rng(int(10 * k))
    l, w = rng.normal(size=7), rng.random(7) + 1
    program = linprog(-l, bounds=[(0, x / k) for x in w], A_eq=np.ones((1, 7)), b_eq=[1])
    value = S.TopK(k).value(torch.tensor(l[None]), torch.tensor(w[None]))
    assert value.item() == pytest.approx(-program.fun, abs=1e-12)
    p = S.TopK(k).weights(torch.tensor(l[None]), torch.tensor(w[None]))
    np.testing.assert_allclose(p[0], program.x, atol=1e-12)


def test_chi_square_is_the_closed_form_exactly_where_it_holds():
    """Erratum (Qi et al. 2020, chi-square): mean + √(2ρVar/n) holds iff 2ρ(mean-min)² <= nVar, and is too large
    otherwise.
    """
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        n = int(rng.integers(2, 12))
        l, rho = rng.random(n) ** 2, float(10 ** rng.uniform(-2, np.log10(0.49 * n * (n - 1))))
        closed = l.mean() + np.sqrt(2 * rho * l.var() / n)
        holds = 2 * rho * (l.mean() - l.min()) ** 2 <= n * l.var()
        found = S.ChiSquare(rho)
        value, p = found.value(torch.tensor(l[None])).item(), found.weights(torch.tensor(l[None]))[0].numpy()
        assert p.min() >= 0
        assert np.sum(p**2) == pytest.approx(1 / n + 2 * rho / n**2, abs=1e-12)
        if holds:
            assert value == pytest.approx(closed, abs=1e-12)
        else:
            assert value < closed - 1e-12
        seen.add(bool(holds))
    assert seen == {True, False}


def test_chi_square_weights_lie_on_the_weighted_sphere():
    rng = np.random.default_rng(4)
    for rho in (0.1, 1.0, 4.0):
        l, w = torch.tensor(rng.random((1, 9))), torch.tensor(rng.random((1, 9)) + 0.5)
        n, p = w.sum(), S.ChiSquare(rho).weights(l, w)
        assert (p**2 / w).sum().item() == pytest.approx((1 / n + 2 * rho / n**2).item(), abs=1e-12)


@pytest.mark.parametrize("rho", [0.05, 1.0])
@pytest.mark.parametrize("n", [1_000, 250_000])
def test_chi_square_keeps_its_tilt_in_float32(n, rho):
    """p - 1/n is of order √(2ρ)/n^1.5: it must not be lost in the rounding of 1/n."""
    l = torch.rand(1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    exact_p = S.ChiSquare(rho).weights(l)[0]
    rounded = S.ChiSquare(rho).weights(l.float())[0].double()
    tilt = exact_p - 1 / n
    assert (rounded - exact_p).abs().max() < 0.01 * tilt.abs().max()


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("name", ["kl", "ball", "chi"])
def test_losses_that_lie_close_together_keep_their_weights_in_float32(name, spread):
    """A collapsing batch: all losses near .7. Only differences matter, and those are exact in float32."""
    rng = np.random.default_rng(2)
    make, weights, unit = {
        "kl": (S.KL, oracle.kl_weights, spread),
        "ball": (S.KLBall, oracle.kl_ball_weights, 1.0),
        "chi": (S.ChiSquare, oracle.chi_square_weights, 50.0),
    }[name]
    for radius in (0.05 * unit, 0.5 * unit, 2.0 * unit):
        l = (0.7 + spread * rng.random(50)).astype(np.float32)
        found, wanted = make(radius), weights(l.astype(np.longdouble), radius)
        leaf = torch.tensor(l[None], requires_grad=True)
        (slope,) = torch.autograd.grad(found.value(leaf).sum(), leaf)
        for p in (found.weights(leaf), slope):
            np.testing.assert_allclose(p[0].numpy(), wanted.astype(np.float64), rtol=0, atol=1e-3 * float(wanted.max()))


@cases
def test_cold_and_large_losses_stay_finite_in_float32(name):
    l = torch.tensor([[0.0, 0.3, 1.0, 1.99, 2.0, 2.0]], dtype=torch.float32, requires_grad=True)
    cold = (
        S.KL(1e-3),
        S.KL(1e-3, zero_member=True),
        S.DetachedWeights(S.KL(1e-3)),
        S.CalibratedKL(1e-3),
        S.KLBall(1.0),
    )
    for found in (CASES[name].make(), *cold):
        value = found.value(l).sum()
        (slope,) = torch.autograd.grad(value, l)
        assert value.dtype == torch.float32
        assert torch.isfinite(value)
        assert torch.isfinite(slope).all()
        assert found.weights(l).sum().item() == pytest.approx(1, abs=1e-4)


def test_hyper_parameters_may_be_numpy_numbers():
    l = torch.tensor([[0.1, 0.5, 0.9]], dtype=torch.float64)
    half = np.float64(0.5)
    for numpy, plain in [
        (S.KL(half), S.KL(0.5)),
        (S.KLBall(half), S.KLBall(0.5)),
        (S.ChiSquare(half), S.ChiSquare(0.5)),
        (S.TopK(np.float64(1.5)), S.TopK(1.5)),
        (S.TopK(fraction=half), S.TopK(fraction=0.5)),
    ]:
        torch.testing.assert_close(numpy.value(l), plain.value(l), atol=0, rtol=0)
        torch.testing.assert_close(numpy.weights(l), plain.weights(l), atol=0, rtol=0)


@pytest.mark.parametrize("rho", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("by", [1, 2, 5, 40, 4000])
def test_near_ties_at_the_top_of_a_large_chi_square_ball(rho, by):
    """Two largest losses a few roundings apart, as a pair and its mirror image may be: weights still sum to 1."""
    rng = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        losses = 50 * torch.rand(1, 40, generator=rng, dtype=dtype)
        for top in (88.0, 61.7, 53.3):
            losses[0, 7] = top
            losses[0, 9] = losses[0, 7] * (1 - by * torch.finfo(dtype).eps / 2)
            over, there = nf.sets.ChiSquare(rho), torch.ones_like(losses, dtype=torch.bool)
            stream = over.stream(1, losses)
            again = True
            while again:
                stream.add(losses, there)
                again = stream.turn()
            found = stream.weights(losses, there)
            assert found.sum().item() == pytest.approx(1, abs=1e-3 if dtype == torch.float32 else 1e-9)
            assert stream.value().item() == pytest.approx(over.value(losses).item(), rel=1e-6)

"""Similarities: formulas against the oracles, larger = more similar, and finite numbers where formulas divide by
zero.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import similarity as oracle

import nearfar as nf
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Quantized, codes, quantize, root, unit

KINDS = {
    "cosine": (Cosine(), oracle.cosine),
    "dot": (Dot(), oracle.dot),
    "dot-unit": (Dot(normalize=True), oracle.cosine),
    "euclidean": (NegEuclidean(), oracle.neg_euclidean),
    "euclidean-raw": (NegEuclidean(normalize=False), lambda x, y: oracle.neg_euclidean(x, y, normalize=False)),
    "squared": (NegSquaredEuclidean(), oracle.neg_squared_euclidean),
    "squared-raw": (NegSquaredEuclidean(normalize=False), lambda x, y: oracle.neg_squared_euclidean(x, y, False)),
}
UNIT = {name: kind for name, (kind, _) in KINDS.items() if kind.normalize}
kinds = pytest.mark.parametrize("name", KINDS)
units = pytest.mark.parametrize("name", UNIT)


def points(n: int, seed: int, dim: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim))


@kinds
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), dim=st.integers(1, 7), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_scores_equal_the_oracle(name, seed, dim, scale):
    kind, formula = KINDS[name]
    X, Y = scale * points(4, seed, dim), scale * points(6, seed + 1, dim)
    X[1] = 0
    wanted = oracle.scores(X, Y, formula).astype(np.float64)
    found = kind(torch.tensor(X), torch.tensor(Y)).numpy()
    top = max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * top)


@kinds
def test_preparing_once_and_scoring_is_the_call(name):
    kind, _ = KINDS[name]
    X, Y = torch.tensor(points(4, 0)), torch.tensor(points(6, 1))
    x, y = kind.prepare(X), kind.prepare(Y)
    torch.testing.assert_close(kind.scores(x, y), kind(X, Y), atol=0, rtol=0)
    norms = (x * x).sum(dim=1)[:, None], (y * y).sum(dim=1)[None, :]
    torch.testing.assert_close(kind.finish(x @ y.T, *norms), kind(X, Y), atol=0, rtol=0)


@kinds
def test_larger_is_more_similar(name):
    """Along a ray away from a point, every score falls."""
    kind, _ = KINDS[name]
    angle = torch.linspace(0, torch.pi, 30, dtype=torch.float64)
    far = torch.stack([angle.cos(), angle.sin()], dim=1)
    scores = kind(torch.tensor([[1.0, 0.0]], dtype=torch.float64), far)[0]
    assert (scores[1:] < scores[:-1]).all()


@kinds
def test_derivatives_by_finite_differences(name):
    kind, _ = KINDS[name]
    X, Y = torch.tensor(points(3, 2), requires_grad=True), torch.tensor(points(4, 3), requires_grad=True)
    assert torch.autograd.gradcheck(kind, (X, Y))
    assert torch.autograd.gradgradcheck(kind, (X, Y))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_distance_zero_and_at_norm_zero(name, dtype):
    kind, _ = KINDS[name]
    X = torch.tensor(points(4, 4), dtype=dtype)
    X[1] = X[0]
    X[2] = 0
    X.requires_grad_()
    scores = kind(X, X)
    (slope,) = torch.autograd.grad(scores.sum(), X, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), X)
    for x in (scores, slope, bend):
        assert torch.isfinite(x).all()
    if kind.normalize:
        assert (slope[2] == 0).all()
        assert slope.abs().max() < 100


@units
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e38, 1e-37])
def test_huge_and_tiny_rows_are_scored_by_their_direction_alone(name, scale):
    """Squares of such float32 rows overflow or vanish; unit rows must not."""
    kind = UNIT[name]
    X = torch.tensor(points(5, 5), dtype=torch.float32)
    X = X / X.abs().max()
    Y = (X * scale).requires_grad_()
    torch.testing.assert_close(kind(Y, Y), kind(X, X), atol=1e-3, rtol=0)
    scores = kind(Y, X)
    torch.testing.assert_close(scores, kind(X, X), atol=1e-3, rtol=0)
    (slope,) = torch.autograd.grad(scores[:, 0].sum(), Y)
    assert torch.isfinite(slope).all()


@units
def test_mixed_lengths_in_one_row(name):
    kind = UNIT[name]
    row = torch.tensor([[1e30, 1e-30, 1.0]], requires_grad=True)
    other = torch.tensor([[1.0, 0.0, 0.0]])
    score = kind(row, other)
    torch.testing.assert_close(score, kind(other, other), atol=1e-6, rtol=0)
    (slope,) = torch.autograd.grad(score.sum(), row)
    assert torch.isfinite(slope).all()


@units
def test_distance_of_unit_rows(name):
    kind = UNIT[name]
    X, Y = torch.tensor(points(4, 6)), torch.tensor(points(5, 7))
    wanted = -oracle.scores(X.numpy(), Y.numpy(), "neg_euclidean").astype(np.float64)
    np.testing.assert_allclose(kind.distance(kind(X, Y)).numpy(), wanted, atol=1e-12)


def test_float32_distances_near_zero_are_off_by_no_more_than_the_root_of_the_rounding():
    """d = sqrt(2 - 2s): two unit rows 1e-2 apart keep two digits, the same row stays below 1e-3 of itself."""
    X = torch.tensor(points(200, 8, 64))
    near = X + 1e-2 * torch.tensor(points(200, 9, 64)) * X.norm(dim=1, keepdim=True) / 8
    exact = NegEuclidean()(X, near).diagonal()
    rounded = NegEuclidean()(X.float(), near.float()).diagonal().double()
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)
    assert NegEuclidean()(X.float(), X.float()).diagonal().abs().max() < 1e-3


def test_unit_and_root():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1e-20, 0.0]])
    torch.testing.assert_close(unit(x), torch.tensor([[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]))
    assert unit(torch.zeros(3, 0)).shape == (3, 0)
    assert torch.isnan(unit(torch.tensor([[1.0, torch.nan]]))).any()
    assert torch.isnan(unit(torch.tensor([[1.0, torch.inf]]))).any()
    y = torch.tensor([4.0, 0.0, -1e-9, torch.nan], requires_grad=True)
    found = root(y)
    assert found[:3].tolist() == [2.0, 0.0, 0.0]
    assert torch.isnan(found[3])
    (slope,) = torch.autograd.grad(found[:3].sum(), y)
    assert slope[:3].tolist() == [0.25, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_preparing_is_dividing_by_the_norm_with_both_derivatives(scale):
    """Rows of any length, among them one of zeros, which stays and gets no gradient."""
    x = torch.tensor([[1.0, -2.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, -4.0]], dtype=torch.float64) * scale
    g = torch.tensor([[0.3, 1.0, -2.0], [1.0, 1.0, 1.0], [0.5, -0.7, 0.2]], dtype=torch.float64)
    found, wanted = [], []
    for make, out in ((Cosine().prepare, found), (unit, wanted)):
        leaf = x.clone().requires_grad_()
        y = make(leaf)
        (once,) = torch.autograd.grad(y, leaf, g, create_graph=True)
        (plain,) = torch.autograd.grad(make(leaf), leaf, g)
        (twice,) = torch.autograd.grad((once * g).sum(), leaf)
        out += [y.detach(), once.detach() * scale, plain * scale, twice * scale * scale if 1e-99 < scale < 1e99 else y]
    assert torch.equal(found[1][1], torch.zeros(3, dtype=torch.float64))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_similarities_say_what_they_are():
    assert repr(Cosine()) == "Cosine()"
    assert repr(NegEuclidean(normalize=False)) == "NegEuclidean(normalize=False)"
    assert nf.similarity.Cosine is Cosine


def test_a_root_has_the_value_and_derivatives_of_its_definition():
    """√max(x, 0), with slope 0 at 0 and below; NaN and infinity stay."""

    def plain(x):
        zero = x <= 0
        return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))

    x = torch.tensor([0.0, -1.0, 4.0, 1e-300, torch.nan, torch.inf], dtype=torch.float64)
    slopes = []
    for of in (root, plain):
        leaf = x.clone().requires_grad_()
        slopes.append((of(leaf).detach(), *torch.autograd.grad(of(leaf).sum(), leaf)))
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-15, atol=0)
    assert torch.autograd.gradgradcheck(root, torch.tensor([0.3, 2.0]).double().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_crowded_rows_have_their_origin_moved(dtype):
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    near = nf.similarity.NegEuclidean()
    rows, cols = near.prepared(x)
    assert torch.equal(rows, near.prepare(x))
    assert cols is rows
    crowd = torch.ones(6, dtype=dtype) + x / 1000
    crowd[0] = -crowd[0]  # one distant row does not change that
    moved, _ = near.prepared(crowd)
    assert moved[1:].abs().amax() < 0.01 < 0.3 < near.prepare(crowd).abs().amin()


@pytest.mark.parametrize("dtype", ["int8", "bits"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), dim=st.integers(1, 7), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_quantized_scores_equal_the_oracle(dtype, seed, dim, scale):
    X, Y = scale * points(4, seed, dim), scale * points(6, seed + 1, dim)
    X[1] = 0
    wanted = oracle.scores(X, Y, lambda x, y: oracle.quantized(oracle.unit(x), oracle.unit(y), dtype))
    np.testing.assert_allclose(Quantized(dtype)(torch.tensor(X), torch.tensor(Y)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["int8", "bits"])
def test_quantized_rows_pass_gradients_straight_through(dtype):
    """The gradient is that of unit rows; the value has at most 255 or 2 steps, and error bounds hold."""
    x = torch.tensor(points(6, 3, 16), requires_grad=True)
    weight = torch.tensor(points(6, 4, 16))
    rows = quantize(x, dtype)
    (found,) = torch.autograd.grad((rows * weight).sum(), x)
    (wanted,) = torch.autograd.grad((unit(x) * weight).sum(), x)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(rows, unit(codes(x.detach(), dtype)), atol=1e-15, rtol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(6, dtype=x.dtype), atol=1e-12, rtol=0)
    if dtype == "int8":
        assert codes(x, dtype).abs().amax(dim=1).tolist() == [127.0] * 6
        step = x.abs().amax(dim=1, keepdim=True) / 127
        assert ((codes(x, dtype) * step - x).abs() <= step / 2 + 1e-12).all()


@pytest.mark.parametrize("dtype", ["int8", "bits"])
def test_quantized_edges(dtype):
    """Codes are the same for a row times a positive number; NaN shows; a row of zeros and no rows are rows."""
    x = torch.tensor(points(5, 5)).float()
    assert torch.equal(codes(x, dtype), codes(4 * x, dtype))
    assert quantize(torch.tensor([[1.0, torch.nan]]), dtype).isnan().any()
    assert quantize(torch.zeros(1, 4), dtype).isfinite().all()
    assert quantize(torch.zeros(0, 4), dtype).shape == (0, 4)
    with pytest.raises(ValueError, match=r"^Quantized: dtype must be one of 'int8', 'bits', but came as 'int4'"):
        Quantized("int4")


@pytest.mark.parametrize("dtype", ["int8", "bits"])
def test_a_loss_of_quantized_rows_trains(dtype):
    """Steps along the straight-through gradient reduce the loss of the codes themselves, on every engine."""
    torch.manual_seed(0)
    x, labels = torch.randn(24, 8, requires_grad=True), torch.arange(24) % 6
    loss = nf.losses.NTXent(temperature=0.2, similarity=Quantized(dtype))
    before = loss(x, labels).item()
    for _ in range(30):
        (slope,) = torch.autograd.grad(loss(x, labels), x)
        x = (x - 0.3 * slope / slope.norm() * x.norm() / 5).detach().requires_grad_()
    after = loss(x, labels)
    assert after.item() < 0.8 * before
    other = nf.losses.NTXent(temperature=0.2, similarity=Quantized(dtype), engine="auto")
    torch.testing.assert_close(other(x, labels), nf.losses.NTXent(temperature=0.2)(quantize(x, dtype), labels))
    torch.testing.assert_close(other(x, labels), after)

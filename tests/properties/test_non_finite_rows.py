"""NaN and overflow stay visible: what is not finite on the dense engine is not finite on any other."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from table import CLASSES, DIM, IDS, PRODUCTS, ROWS
from ways import lower_thresholds

import nearfar as nf

rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
N = 40


def broken(kind, width=DIM, dtype=torch.float32):
    """Rows that are NaN, or finite and so long that their products are not."""
    rng = torch.Generator().manual_seed(1)
    embeddings = torch.randn(N, width, generator=rng, dtype=torch.float64).to(dtype)
    if kind == "all NaN":
        embeddings[:] = torch.nan
    elif kind == "one NaN":
        embeddings[7] = torch.nan
    elif kind == "one infinity":
        embeddings[7, 1] = torch.inf
    elif kind == "overflow":
        embeddings *= 1e30
    elif kind == "one overflow":
        embeddings[7] *= 1e30
    return embeddings


KINDS = ("all NaN", "one NaN", "one infinity", "overflow", "one overflow")


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """As on a device whose values are not read, and with "auto" in strips from the first pair on."""
    monkeypatch.setattr("nearfar._utils.tensors.check_finite", lambda *given: None)
    lower_thresholds(monkeypatch, 1, 1)


def values(make, embeddings, labels, **more):
    """The value and whether the gradient is finite, on each engine."""
    found = {}
    for engine, tile in (("dense", None), ("tiled", 7), ("auto", 16)):
        torch.manual_seed(3)
        loss = make()
        loss.engine, loss.tile = engine, tile
        leaf = embeddings.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
            found[engine, tile] = loss(leaf, labels, **more)
    return found


def check(found):
    wanted = found.pop(("dense", None))
    for way, value in found.items():
        assert torch.isfinite(value).all() == torch.isfinite(wanted).all(), (way, value, wanted)
        if torch.isfinite(wanted).all():
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


@rows
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_broken_shows_on_every_engine(row, kind):
    check(values(row.make, broken(kind), torch.arange(N) % CLASSES if row.proxies else torch.arange(N) // 2))


UNIT = ("FastAP", "SoftTriple", "SubCenterArcFace")
"""These take unit rows only, which do not overflow."""


@pytest.mark.parametrize("kind", ["all NaN", "overflow", "one overflow"])
@pytest.mark.parametrize("name", [x for x in PRODUCTS if x not in UNIT])
def test_products_that_overflow_show_on_every_engine(name, kind):
    """On raw products, where rows of 1e30 are not made short first."""
    kinds = {
        "DroTopK": {"k": 9},
        "DroTopKPN": {"k": 6},
        "DroTrimmed": {"top": 2, "k": 6},
        "DroTrimmedPN": {"wrong": 0.2, "k": 6},
        "DroChiSquare": {"rho": 1.0},
    }
    known = inspect.signature(getattr(nf.losses, name)).parameters
    if "classes" in known:
        kinds[name] = {"classes": CLASSES, "dim": DIM}
    for similarity in (nf.similarity.Dot, lambda: nf.similarity.NegEuclidean(normalize=False)):

        def make(similarity=similarity):
            return getattr(nf.losses, name)(**kinds.get(name, {}), similarity=similarity())

        check(values(make, broken(kind), torch.arange(N) % CLASSES))


@pytest.mark.parametrize("kind", ["all NaN", "one NaN"])
def test_a_reference_that_is_broken_shows(kind):
    labels = torch.arange(N) % CLASSES
    for row in ROWS:
        if row.reference:
            check(values(row.make, broken("none"), labels, ref_emb=broken(kind), ref_labels=labels))


def drawn():
    yield lambda: nf.losses.DroKL(samples=7)
    yield lambda: nf.losses.DroKL.as_in_paper(k_code=3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_refused_by_strips_before_it_breaks(kind):
    for make in drawn():
        loss = make()
        labels = torch.arange(N) % CLASSES
        assert not torch.isfinite(loss(broken(kind), labels)) or "overflow" in kind
        with pytest.raises(ValueError, match=r'engine="tiled" cannot serve this loss, because Sampled draws members'):
            loss.engine = "tiled"


@pytest.mark.parametrize("engine", ["tiled", "auto"])
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode], ids=lambda x: x.__name__)
@rows
def test_without_gradients_the_value_is_the_same(row, quiet, engine):
    """Rows made outside, and rows made inside."""
    labels, embeddings, loss = torch.arange(N) % CLASSES, broken("none"), row.make()
    loss.engine, loss.tile = "dense", 7
    wanted = loss(embeddings.clone().requires_grad_(), labels).detach()
    loss.engine = engine
    with quiet():
        for given in (embeddings, embeddings.clone()):
            found = loss(given, labels)
            assert not found.requires_grad
            torch.testing.assert_close(found.clone(), wanted, rtol=1e-4, atol=1e-6)
